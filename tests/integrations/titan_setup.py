"""torchtitan 0.3.0 beside the environment, on CPUs, with torch 2.13; for worker processes alone.

torchtitan knows no CPUs, and its 0.3.0 is made for a newer torch. What is changed for these tests, and nothing else:

- torchtitan.tools.utils finds the device "cpu", with a module of constants for its memory.
- torch.distributed.set_timeout, which torch 2.13 lacks, does nothing.
- Ring attention runs by the operator of CPUs (tests/distributed/ring.py), and adds up in the precision of its inputs.
- float64 is a precision.
- FlexAttention runs uncompiled, and on tensors that need gradients, which torch refuses on CPUs.
- Rank 0 does not wait two seconds for the others at the end of a run.
"""

import sys
import time
import types
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch._utils
import torch.distributed
import torch.nn.attention.flex_attention as flex
from datasets import Dataset
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_cp

from tests.distributed.ring import HANDLERS

BESIDE = Path(sys.prefix) / "torchtitan"
WORDS = "we train a model of the words that people write and no one of them shall be told from what it says".split()
WIDTH, HEADS, VOCABULARY = 64, 4, 264
"""Of the debug models, whose own are four to eight times as large; no check depends on them. Texts need 258 tokens."""
TEXTS = [" ".join(WORDS[i % 7 : i % 7 + 2 + i]) for i in range(16)]


class _Processor(types.ModuleType):
    """torch.cpu, and what torchtitan asks of an accelerator beside it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    get_device_name = staticmethod(lambda device=None: "cpu")
    get_device_properties = staticmethod(lambda device=None: types.SimpleNamespace(total_memory=2**30))
    reset_peak_memory_stats = staticmethod(lambda *_: None)
    empty_cache = staticmethod(lambda: None)
    memory_stats = staticmethod(lambda device=None: {})


def _on_this_machine() -> None:
    sys.path.append(str(BESIDE))
    processor = _Processor("processor")
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda _: processor
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = lambda timeout, group: None  # type: ignore[attr-defined]
    flex._validate_device = lambda *_: None
    from torchtitan import trainer
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.models.common import decoder
    from torchtitan.models.common.attention import FlexAttention

    FlexAttention._compiled_flex_attn = staticmethod(flex.flex_attention)
    decoder.create_attention_mask = flex.create_block_mask
    torch_cp.custom_ops.update(HANDLERS)
    torch_cp._cp_options.convert_to_f32 = False
    TORCH_DTYPE_MAP["float64"] = torch.float64
    clock = {name: getattr(time, name) for name in dir(time) if not name.startswith("_")}
    trainer.time = types.SimpleNamespace(**clock | {"sleep": lambda seconds: None})


_on_this_machine()

from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ConfigManager as ConfigManager  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.hf_datasets import DatasetConfig  # noqa: E402
from torchtitan.hf_datasets.text_datasets import DATASETS  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts  # noqa: E402
from torchtitan.models.deepseek_v3 import _build_dsv3_layers, model_registry  # noqa: E402
from torchtitan.models.llama3 import _build_llama3_layers  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

from dpshard.integrations.torchtitan import Privacy, PrivateTrainer, private  # noqa: E402
from dpshard.integrations.torchtitan.stages import DocumentLosses as DocumentLosses  # noqa: E402

DATASETS["notes"] = DatasetConfig(
    path="", loader=lambda _: Dataset.from_dict({"text": TEXTS}), sample_processor=lambda item: item["text"]
)
CHECKPOINTING = {"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}


class Bytes(BaseTokenizer):
    """Each byte is a token."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        unused: list[str] = field(default_factory=list)

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, text: str, add_bos: bool, add_eos: bool) -> list[int]:
        return [256] * add_bos + list(text.encode()) + [257] * add_eos

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Float8(Linear):
    """Stands for torchao's."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass


class WideExperts(GroupedExperts):
    """torchtitan's experts, which compute in bfloat16 whatever the model does, in the model's own precision."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            if x.dtype == torch.float64:  # in which torch has no such product
                return torch.cat([rows @ w[e].T for e, rows in enumerate(x.split(counts.tolist()))])
            return self._grouped_mm(A=x, B_t=w.mT, offs=counts.cumsum(0, dtype=torch.int32))

        h = torch.nn.functional.silu(product(x, self.w1_EFD)) * product(x, self.w3_EFD)
        return product(h, self.w2_EDF)


def debug_run() -> PrivateTrainer.Config:
    """The debug model with two narrow blocks, on 16 short texts; all are drawn in every step, in two micro-batches of
    each of two ranks."""
    config = private(
        llama3_debugmodel(), Privacy(noise_multiplier=0.0, target_delta=1e-3, clipping_fn="abadi", accountant="rdp")
    )
    model, training = config.model_spec.model, config.training
    rope = model.layers[0].attention.rope
    narrow(model)
    model.layers = _build_llama3_layers(
        n_layers=2, dim=WIDTH, n_heads=HEADS, hidden_dim=3 * WIDTH, rope=rope, attn_backend="flex"
    )
    training.seq_len, training.local_batch_size, training.global_batch_size, training.steps = 64, 4, 16, 1
    training.mixed_precision_param = "float32"
    config.loss.global_vocab_size = VOCABULARY
    config.optimizer.implementation = "for-loop"
    config.dataloader.dataset = "notes"
    config.tokenizer, config.debug.seed = Bytes.Config(), 0
    config.debug.enable_structured_logging = False
    return config


def narrow(model: Any) -> None:
    """Make the tables and norms around the blocks of a model's config small; the blocks are left to the caller."""
    model.dim, model.vocab_size, model.norm.normalized_shape = WIDTH, VOCABULARY, WIDTH
    model.tok_embeddings.num_embeddings, model.tok_embeddings.embedding_dim = VOCABULARY, WIDTH
    model.lm_head.in_features, model.lm_head.out_features = WIDTH, VOCABULARY


def mixture(config: PrivateTrainer.Config, wide: bool) -> None:
    """Give a run DeepSeek's debug model instead: a dense block, and one with eight experts."""
    config.model_spec = model_registry("debugmodel")
    model = config.model_spec.model
    rope = model.layers[0].attention.rope
    narrow(model)
    model.layers = _build_dsv3_layers(
        n_layers=2,
        n_dense_layers=1,
        dim=WIDTH,
        n_heads=HEADS,
        q_lora_rank=0,
        kv_lora_rank=2 * WIDTH,
        qk_nope_head_dim=32,
        qk_rope_head_dim=rope.dim,
        v_head_dim=32,
        mscale=0.70,
        dense_hidden_dim=4 * WIDTH,
        moe_hidden_dim=WIDTH,
        num_experts=8,
        num_shared_experts=2,
        router_top_k=3,
        router_score_func="softmax",
        rope=rope,
        attn_backend="flex",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
    )
    if wide:
        experts = config.model_spec.model.layers[1].moe.routed_experts
        given = {f.name: getattr(experts.inner_experts, f.name) for f in fields(experts.inner_experts)}
        experts.inner_experts = WideExperts.Config(**given)


def causal(model: Any) -> None:
    """Give the blocks of a model's config attention without masks."""
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
