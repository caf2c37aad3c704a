"""Settings of torchtitan that a private run refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.quantization.utils import has_quantization
from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import MoE, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.tools import filesystem

from dpshard.errors import ConfigurationError
from dpshard.integrations.torchtitan.documents import Documents
from dpshard.integrations.torchtitan.model import MASKED

_VERIFIED = (Llama3Model.Config, Qwen3Model.Config)
"""Models that are compared with a single process under tensor parallelism."""


def refuse_unsupported(config: Any) -> None:
    """Raise ConfigurationError, with the reason, for an unsupported setting."""
    for reason in _reasons(config):
        raise ConfigurationError(f"torchtitan: {reason}")


def _reasons(config: Any) -> Iterator[str]:
    model = None if config.model_spec is None else config.model_spec.model
    yield from _of_ranks(config.parallelism)
    yield from _of_execution(config)
    if not isinstance(model, Decoder.Config):
        yield "the model is not a decoder of text. Choose one of torchtitan's language models."
    else:
        yield from _of_experts(model, config)
        if config.parallelism.context_parallel_degree > 1:
            yield from _of_parts_of_documents(model, config)
        if config.parallelism.pipeline_parallel_degree > 1:
            yield from _of_stages(model, config)
        yield from _of_model(model, config.privacy.documents_per_row, config.parallelism.tensor_parallel_degree)
    yield from _of_training(config)


def _of_ranks(parallelism: Any) -> Iterator[str]:
    if parallelism.expert_parallel_degree > 1:
        yield "expert_parallel_degree: experts on several ranks are not supported under FSDP2. Leave it at 1."
    if (backend := parallelism.spmd_backend) != "partial_dtensor":
        yield f"spmd_backend={backend!r} hides what parameters are parts of. Set it to 'partial_dtensor'."
    if (degree := parallelism.tensor_parallel_degree) > 1 and not parallelism.enable_sequence_parallel:
        yield f"tensor_parallel_degree={degree} needs enable_sequence_parallel, to go back through a table in parts."
    if parallelism.enable_fsdp_symm_mem:
        yield "enable_fsdp_symm_mem changes reductions that the engine replaces. Leave it off."


def _compiles(config: Any) -> bool:
    return config.compile.enable and "model" in config.compile.components


def _of_execution(config: Any) -> Iterator[str]:
    if not hasattr(torch.distributed, "set_timeout"):
        yield "torchtitan calls torch.distributed.set_timeout, which this torch lacks. Install a newer torch."
    if not config.training.disable_cuda_graphs:
        yield "CUDA graphs replay a fixed number of micro-batches, but draws vary. Set training.disable_cuda_graphs."
    if _compiles(config) and config.parallelism.tensor_parallel_degree > 1:
        yield "compile of the model hides parts of parameters. Leave it out, or tensor_parallel_degree at 1."
    if isinstance(config.activation_checkpoint, MemoryBudgetAC.Config):
        yield "MemoryBudgetAC was not tested with private training. Choose FullAC or SelectiveAC."
    if (mode := config.comm.mode) != "default":
        yield f"comm.mode={mode!r} does not communicate as a training does. Leave it at 'default'."


def _of_model(model: Any, documents_per_row: int, parts: int) -> Iterator[str]:
    masked, told = isinstance(model.first_attention.inner_attention, MASKED), f"documents_per_row={documents_per_row}"
    if has_quantization(model):
        yield "float8, MXFP8 and NVFP4 have backward passes that the engine does not see. Leave the converters out."
    if parts > 1 and not isinstance(model, _VERIFIED):
        yield "tensor_parallel_degree > 1 is verified for Llama 3 and Qwen 3, and for no other model. Leave it at 1."
    if documents_per_row < 1:
        yield f"{told} must be at least 1."
    if documents_per_row > 1 and parts > 1:
        yield f"{told} does not go with tensor_parallel_degree > 1. Leave one of them at 1."
    if documents_per_row > 1 and not masked:
        yield f"{told} needs attention within documents. Choose 'flex' or 'varlen', or documents_per_row=1."


def _of_parts_of_documents(model: Any, config: Any) -> Iterator[str]:
    if not isinstance(model.first_attention.inner_attention, ScaledDotProductAttention.Config):
        yield (
            "context_parallel_degree > 1 needs the attention ScaledDotProductAttention: others make masks of all "
            "positions, and a rank has a part of these."
        )
    if not isinstance(model, Llama3Model.Config) or _compiles(config):
        yield "context_parallel_degree > 1 is verified for Llama 3 without compile of the model. Leave it at 1."


def _of_stages(model: Any, config: Any) -> Iterator[str]:
    parallelism, more = config.parallelism, "pipeline_parallel_degree > 1 does not go with"
    schedule, stages = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree
    divided = parallelism.module_fqns_per_model_part
    if schedule.lower() not in ("1f1b", "gpipe"):
        yield (
            f"pipeline_parallel_schedule={schedule!r} has several stages on a rank, or a backward in two halves. "
            f"Choose '1F1B' or 'GPipe'."
        )
    if parallelism.pipeline_parallel_schedule_csv:
        yield "pipeline_parallel_schedule_csv may call stages in an order that the engine does not know. Leave it out."
    if divided is not None and len(divided) != stages:
        yield f"module_fqns_per_model_part must divide the model into {stages} stages, one for each rank of a pipeline."
    others = ("data_parallel_replicate_degree", "tensor_parallel_degree", "context_parallel_degree")
    if any(getattr(parallelism, name) > 1 for name in others):
        yield f"{more} {' or '.join(others)} > 1: a stage may be divided by FSDP alone. Leave these at 1."
    if getattr(model, "enable_weight_tying", False):
        yield f"{more} enable_weight_tying: a tied head's gradient is a sum over two stages. Leave one out."
    if config.privacy.documents_per_row > 1:
        yield f"{more} documents_per_row > 1: a schedule does not divide packed rows by document. Leave it at 1."
    if config.validator.enable:
        yield f"{more} validation, which takes another loss. Leave validator.enable off; validate a checkpoint."
    if not isinstance(model, Llama3Model.Config):
        yield "pipeline_parallel_degree > 1 is verified for Llama 3, and for nothing else yet. Leave it at 1."


def _of_experts(model: Any, config: Any) -> Iterator[str]:
    mixtures = [mixture for _, mixture, *_ in model.traverse(MoE.Config)]
    dispatchers = {type(mixture.routed_experts.token_dispatcher) for mixture in mixtures}
    routers = [router for _, router, *_ in model.traverse(TokenChoiceTopKRouter.Config)]
    if getattr(model, "mtp_layers", None):
        yield "multi-token prediction has a loss of its own, which mixes documents. Set num_mtp_layers to 0."
    if mixtures and _compiles(config):
        yield (
            "compile of the model does not go with a mixture of experts: it would fix how many tokens an expert gets. "
            "Leave 'model' out of compile.components."
        )
    if mixtures and config.parallelism.tensor_parallel_degree > 1:
        yield "tensor_parallel_degree > 1 is not verified for mixtures of experts. Leave it at 1."
    if not dispatchers <= {AllToAllTokenDispatcher.Config, LocalTokenDispatcher.Config}:
        yield "only moe_comm_backend='standard' tells which document an expert's token belongs to. Choose it."
    if any(router._debug_force_load_balance for router in routers):
        yield "_debug_force_load_balance lets documents change each other's experts. Leave it off."


def _of_training(config: Any) -> Iterator[str]:
    saved = config.checkpoint
    remote = filesystem.is_remote(saved.folder) or filesystem.is_remote(config.dump_folder)
    if not isinstance(config.loss, CrossEntropyLoss.Config):
        yield (
            "the loss must be CrossEntropyLoss, which is taken document by document. ChunkedLossWrapper runs the head "
            "outside of the model's forward, where the engine does not see it. Use private(config)."
        )
    if not isinstance(config.dataloader, Documents.Config):
        yield "the dataloader must be Documents.Config, or of a subclass: the engine draws. Use private(config)."
    if saved.enable and (remote or not isinstance(saved, CheckpointManager.Config)):
        yield (
            "checkpoints must be CheckpointManager's, in a folder on a disk that all ranks share: a journal of "
            "releases lies beside them."
        )
    if excluded := saved.exclude_from_loading:
        yield f"exclude_from_loading={excluded} would forget spent budget, or resume elsewhere. Leave it empty."
    if saved.create_seed_checkpoint:
        yield "create_seed_checkpoint: create it with torchtitan's own Trainer. A private run can begin with it."
