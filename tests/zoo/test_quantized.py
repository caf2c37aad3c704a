"""LoRA on frozen, quantised bases, of bitsandbytes and torchao: adapters are exact, and the base leaves nothing.

The bases multiply in float32, so errors are those of float32.

Failure modes: 12 test_outliers_that_the_batch_decides_are_refused.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from dpshard import PrivacyEngine
from dpshard.errors import UnsupportedParameterError
from dpshard.interception.refusals import refuse_shared_outliers
from dpshard.losses import sample_losses
from tests.interception.test_frozen import saved_bytes
from tests.oracle import clipped_mean, noise_free_engine, norm, per_sample_gradients, private_step, relative_error
from tests.zoo.beside import BESIDE_TORCHAO
from tests.zoo.zoo import VOCABULARY, B, tokens

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="peft, in the extra [dev], is not installed: its adapters are not tested")
bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes, in the extra [dev], is not installed")

pytestmark = [
    pytest.mark.filterwarnings("ignore:This loop feeds its own batches"),
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def saved_base(folder) -> str:
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder)
    return str(folder)


def loaded(folder: str, bits: int, **options) -> nn.Module:
    """Load a base as users do."""
    kind = {
        4: {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        8: {"load_in_8bit": True, "llm_int8_threshold": 0.0},
    }[bits]
    config = transformers.BitsAndBytesConfig(**{**kind, "bnb_4bit_compute_dtype": torch.float32, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=config, dtype=torch.float32, device_map="cpu"
        )


def adapted(base: nn.Module, *, prepare: bool = False, **options) -> nn.Module:
    """Add LoRA adapters that are no longer zero."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if prepare:
            checkpointing = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
            base = peft.prepare_model_for_kbit_training(base, **checkpointing)
        lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM", **options)
        model = peft.get_peft_model(base, lora)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    return model.train()


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


def assert_exact(model: nn.Module, modes=("auto", "ghost")) -> None:
    model, data = Logits(model), [tokens(7)]
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora" in name for name in trained)
    per_sample = per_sample_gradients(model, data)
    R = sorted(map(norm, per_sample))[B // 2] * 0.999
    expected = clipped_mean(per_sample, max_grad_norm=R, batch_size=B)
    for mode in modes:
        update = private_step(model, data, max_grad_norm=R, clipping_mode=mode, verify=mode == modes[0])
        assert relative_error(update, expected) < 2e-6


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("prepare", [False, True])
def test_adapters_of_bitsandbytes_bases_are_exact(bits, prepare, tmp_path):
    """`prepare`: prepare_model_for_kbit_training, with gradient checkpointing."""
    model = adapted(loaded(saved_base(tmp_path), bits), prepare=prepare)
    kinds = {type(module).__name__ for module in model.modules()}
    assert kinds & {"Linear4bit", "Linear8bitLt"}
    assert_exact(model)


def test_qlora_from_load_to_merge(tmp_path):
    """What docs/language-models.md shows: load, prepare, adapt, train privately, merge."""
    model = adapted(loaded(saved_base(tmp_path), 4), prepare=True)
    base = {name: x.clone() for name, x in model.state_dict().items() if "lora" not in name}
    engine = PrivacyEngine(model, batch_size=4, sample_size=40, steps=2, noise_multiplier=1.0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    data = torch.utils.data.TensorDataset(torch.randint(3, VOCABULARY, (40, 7)))
    for logical_batch in engine.batches(data, micro_batch_size=2):
        for (ids,) in logical_batch:
            sample_losses(model(input_ids=ids).logits[:, :-1], ids[:, 1:]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.step == 2
    engine.detach()
    after = model.state_dict()
    assert all(torch.equal(x, after[name]) for name, x in base.items())  # the base is as it was loaded
    model.save_pretrained(tmp_path / "adapter")
    merged = merged_without_warnings(model)  # into 4 bits, which rounds again
    assert not [name for name, _ in merged.named_parameters() if "lora" in name]
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    adapter = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter").eval()
    ids = tokens(7)
    with torch.no_grad():
        expected = adapter(input_ids=ids).logits
        found = merged_without_warnings(adapter)(input_ids=ids).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def merged_without_warnings(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.merge_and_unload()


@pytest.mark.parametrize("bits", [4, 8])
def test_nothing_of_the_base_is_kept(bits, tmp_path):
    """A private step keeps for backward what an ordinary step of the same adapters keeps."""
    model = Logits(adapted(loaded(saved_base(tmp_path), bits)))
    ids = tokens(7)
    plain = saved_bytes(model, lambda: model(ids))
    engine = noise_free_engine(model, batch_size=B, verify=False)
    model(ids).mean().backward()  # finds the samples
    model.zero_grad()
    assert saved_bytes(model, lambda: model(ids)) <= plain
    engine.detach()


def test_outliers_that_the_batch_decides_are_refused(tmp_path):
    """On a CPU, training multiplies by the whole weight: exact. Elsewhere LLM.int8() mixes samples."""
    base = loaded(saved_base(tmp_path), 8, llm_int8_threshold=6.0)
    assert_exact(adapted(copy.deepcopy(base)), modes=("auto",))

    class Linear8bitLt(nn.Linear):
        state = SimpleNamespace(threshold=6.0)

    on_gpu = nn.Sequential(Linear8bitLt(4, 4, device="meta"))
    with pytest.raises(UnsupportedParameterError, match=r"^0 \(Linear8bitLt\).*llm_int8_threshold=0\.0"):
        refuse_shared_outliers(on_gpu)
    Linear8bitLt.state.threshold = 0.0
    refuse_shared_outliers(on_gpu)


@contextmanager
def torchao_beside() -> Iterator[None]:
    sys.path.append(str(BESIDE_TORCHAO))
    try:
        yield
    finally:
        sys.path.remove(str(BESIDE_TORCHAO))


@pytest.mark.skipif(not BESIDE_TORCHAO.exists(), reason="`make venv` installs torchao")
@pytest.mark.filterwarnings("ignore")
def test_adapters_of_a_torchao_base_are_exact(tmp_path):
    with torchao_beside():
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        base = transformers.AutoModelForCausalLM.from_pretrained(saved_base(tmp_path), dtype=torch.float32)
        base.requires_grad_(False)
        kinds = {"filter_fn": lambda module, name: isinstance(module, nn.Linear) and "head" not in name}
        quantize_(base, Int8WeightOnlyConfig(), **kinds)
        model = adapted(base)
        assert type(model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight).__name__ == "Int8Tensor"
        assert_exact(model)
