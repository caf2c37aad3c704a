"""Settings of torchtitan that a private run refuses."""

from __future__ import annotations

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
    model = None if config.model_spec is None else config.model_spec.model
    refused = _of_ranks(config.parallelism) | _of_execution(config)
    if isinstance(model, Decoder.Config):
        refused |= _of_experts(model, config)
        if config.parallelism.context_parallel_degree > 1:
            refused |= _of_parts_of_documents(model, config)
        if config.parallelism.pipeline_parallel_degree > 1:
            refused |= _of_stages(model, config)
        refused |= _of_model(model, config.privacy.documents_per_row, config.parallelism.tensor_parallel_degree)
    else:
        refused["the model is not a decoder of text. Choose one of torchtitan's language models."] = True
    refused |= _of_training(config)
    for reason, holds in refused.items():
        if holds:
            raise ConfigurationError(f"torchtitan: {reason}")


def _of_ranks(parallelism: Any) -> dict[str, bool]:
    return {
        "expert_parallel_degree: experts on several ranks are not supported under FSDP2. Leave it at 1.": (
            parallelism.expert_parallel_degree > 1
        ),
        f"spmd_backend={parallelism.spmd_backend!r} hands parts of parameters to the model as plain tensors, so the "
        f"engine cannot know what they are parts of. Set parallelism.spmd_backend to 'partial_dtensor'.": (
            parallelism.spmd_backend != "partial_dtensor"
        ),
        f"tensor_parallel_degree={parallelism.tensor_parallel_degree} needs enable_sequence_parallel: without it, "
        f"torch cannot go back through a table in parts.": (
            parallelism.tensor_parallel_degree > 1 and not parallelism.enable_sequence_parallel
        ),
        "enable_fsdp_symm_mem changes reductions that the engine replaces. Leave it off.": (
            parallelism.enable_fsdp_symm_mem
        ),
    }


def _compiles(config: Any) -> bool:
    return config.compile.enable and "model" in config.compile.components


def _of_execution(config: Any) -> dict[str, bool]:
    return {
        "torchtitan calls torch.distributed.set_timeout after the first step, which this torch lacks. Install a newer "
        "torch.": not hasattr(torch.distributed, "set_timeout"),
        "CUDA graphs replay a fixed number of micro-batches, but Poisson draws vary. Set "
        "training.disable_cuda_graphs.": not config.training.disable_cuda_graphs,
        "compile of the model does not go with tensor_parallel_degree > 1, because the engine does not see parts of "
        "parameters in a compiled region. Choose one of the two.": (
            _compiles(config) and config.parallelism.tensor_parallel_degree > 1
        ),
        "MemoryBudgetAC was not tested with private training. Choose FullAC or SelectiveAC.": isinstance(
            config.activation_checkpoint, MemoryBudgetAC.Config
        ),
        f"comm.mode={config.comm.mode!r} does not communicate as a training does. Leave it at 'default'.": (
            config.comm.mode != "default"
        ),
    }


def _of_model(model: Any, documents_per_row: int, parts: int) -> dict[str, bool]:
    masked = isinstance(model.first_attention.inner_attention, MASKED)
    return {
        "float8, MXFP8 and NVFP4 have backward passes of their own, which the engine does not see. Leave the "
        "converters out.": has_quantization(model),
        "tensor_parallel_degree > 1 is verified for Llama 3 and Qwen 3, and for no other model yet. Leave it at 1.": (
            parts > 1 and not isinstance(model, _VERIFIED)
        ),
        f"documents_per_row={documents_per_row} must be at least 1.": documents_per_row < 1,
        f"documents_per_row={documents_per_row} does not go with tensor_parallel_degree > 1. Leave one of them at 1.": (
            documents_per_row > 1 and parts > 1
        ),
        f"documents_per_row={documents_per_row} needs attention that stays within a document. Choose the attention "
        f"'flex' or 'varlen', or documents_per_row=1.": documents_per_row > 1 and not masked,
    }


def _of_parts_of_documents(model: Any, config: Any) -> dict[str, bool]:
    attention = model.first_attention.inner_attention
    return {
        "context_parallel_degree > 1 needs the attention ScaledDotProductAttention: masks of the others are made of "
        "the positions in the model's forward, and a rank knows its part of these.": (
            not isinstance(attention, ScaledDotProductAttention.Config)
        ),
        "context_parallel_degree > 1 is verified for Llama 3 without compile of the model, and for nothing else yet. "
        "Leave it at 1.": not isinstance(model, Llama3Model.Config) or _compiles(config),
    }


def _of_stages(model: Any, config: Any) -> dict[str, bool]:
    parallelism, divided = config.parallelism, config.parallelism.module_fqns_per_model_part
    stages = parallelism.pipeline_parallel_degree
    return {
        f"pipeline_parallel_schedule={parallelism.pipeline_parallel_schedule!r} has several stages on a rank, or a "
        f"backward in two halves. Choose '1F1B' or 'GPipe'.": (
            parallelism.pipeline_parallel_schedule.lower() not in ("1f1b", "gpipe")
        ),
        "pipeline_parallel_schedule_csv may call stages in an order that the engine does not know. Leave it out.": bool(
            parallelism.pipeline_parallel_schedule_csv
        ),
        f"module_fqns_per_model_part must divide the model into {stages} stages, one for each rank of a pipeline.": (
            divided is not None and len(divided) != stages
        ),
        "pipeline_parallel_degree > 1 does not go with data_parallel_replicate_degree, tensor_parallel_degree or "
        "context_parallel_degree > 1, because a stage may be divided by FSDP alone. Leave these at 1.": (
            parallelism.data_parallel_replicate_degree > 1
            or parallelism.tensor_parallel_degree > 1
            or parallelism.context_parallel_degree > 1
        ),
        "pipeline_parallel_degree > 1 does not go with enable_weight_tying: the gradient of a tied head is a sum over "
        "two stages. Leave one of the two out.": getattr(model, "enable_weight_tying", False),
        "pipeline_parallel_degree > 1 does not go with documents_per_row > 1: a schedule does not divide packed rows "
        "by document. Set documents_per_row to 1.": config.privacy.documents_per_row > 1,
        "pipeline_parallel_degree > 1 does not go with validation, which takes another loss than the schedule. Leave "
        "validator.enable off, and validate a checkpoint.": config.validator.enable,
        "pipeline_parallel_degree > 1 is verified for Llama 3, and for nothing else yet. Leave it at 1.": (
            not isinstance(model, Llama3Model.Config)
        ),
    }


def _of_experts(model: Any, config: Any) -> dict[str, bool]:
    mixtures = [mixture for _, mixture, *_ in model.traverse(MoE.Config)]
    dispatchers = {type(mixture.routed_experts.token_dispatcher) for mixture in mixtures}
    routers = [router for _, router, *_ in model.traverse(TokenChoiceTopKRouter.Config)]
    return {
        "multi-token prediction has a loss of its own, which mixes documents. Set num_mtp_layers to 0.": bool(
            getattr(model, "mtp_layers", None)
        ),
        "compile of the model does not go with a mixture of experts: it would fix how many tokens an expert gets. "
        "Leave 'model' out of compile.components.": bool(mixtures) and _compiles(config),
        "tensor_parallel_degree > 1 is not verified for mixtures of experts. Leave it at 1.": (
            bool(mixtures) and config.parallelism.tensor_parallel_degree > 1
        ),
        "only moe_comm_backend='standard' tells which document a token of an expert belongs to. Choose it.": not (
            dispatchers <= {AllToAllTokenDispatcher.Config, LocalTokenDispatcher.Config}
        ),
        "_debug_force_load_balance gives tokens to experts by their place in the micro-batch, which depends on other "
        "documents. Leave it off.": any(router._debug_force_load_balance for router in routers),
    }


def _of_training(config: Any) -> dict[str, bool]:
    saved = config.checkpoint
    remote = filesystem.is_remote(saved.folder) or filesystem.is_remote(config.dump_folder)
    return {
        "the loss must be CrossEntropyLoss, which is taken document by document. ChunkedLossWrapper runs the head "
        "outside of the model's forward, where the engine does not see it. Use private(config).": (
            not isinstance(config.loss, CrossEntropyLoss.Config)
        ),
        "the dataloader must be Documents.Config, or of a subclass, because the engine draws documents by index. Use "
        "private(config).": not isinstance(config.dataloader, Documents.Config),
        "checkpoints must be CheckpointManager's, in a folder on a disk that all ranks share: a journal of releases "
        "lies beside them.": saved.enable and (remote or not isinstance(saved, CheckpointManager.Config)),
        f"exclude_from_loading={saved.exclude_from_loading} would forget the spent budget, or resume at another step. "
        f"Leave it empty.": bool(saved.exclude_from_loading),
        "create_seed_checkpoint: create it with torchtitan's own Trainer. A private run can begin with it.": (
            saved.create_seed_checkpoint
        ),
    }
