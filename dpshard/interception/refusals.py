"""Errors for parameters that cannot be trained."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpshard.errors import ConfigurationError, UnsupportedParameterError


def refusal(model: nn.Module, labels: str, func: Any, reason: str, *, advise: bool = True) -> UnsupportedParameterError:
    """Return an error with parameters, module, function, reason and remedy."""
    owner = "the model"
    for name, _ in model.named_parameters():
        if re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", labels):  # `0.weight` is not part of `10.weight`
            path = name.rpartition(".")[0]
            owner = f"{path or 'the model'} ({type(model.get_submodule(path)).__name__})"
            break
    advice = (
        " Freeze the parameter with requires_grad_(False), or write the step with functions that have a rule "
        "(dpshard.rules.RULES holds them)."
    )
    name = torch.overrides.resolve_name(func) or getattr(func, "__name__", str(func))
    return UnsupportedParameterError(
        f"{labels} in {owner}, function {name}: {reason.rstrip('.')}.{advice if advise else ''}"
    )


def refuse_shared_outliers(model: nn.Module) -> None:
    """Raise UnsupportedParameterError if bitsandbytes' 8-bit layers find outliers in the whole batch.

    LLM.int8() multiplies columns with a large element in another precision (Dettmers et al. 2022, arXiv:2208.07339),
    except in training on CPUs.
    """
    for path, module in model.named_modules():
        if type(module).__name__ != "Linear8bitLt":
            continue
        threshold = getattr(getattr(module, "state", None), "threshold", 0.0)
        devices = {x.device.type for x in module.parameters(recurse=False)}
        if threshold > 0 and not devices <= {"cpu"}:
            raise UnsupportedParameterError(
                f"{path} (Linear8bitLt): with llm_int8_threshold={threshold:g}, a large activation of one sample "
                f"changes how the features of all samples are rounded. So gradients depend on the other samples. Load "
                f"the model with BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0), or in 4 bits."
            )


def refuse_compiled_autograd() -> None:
    """Raise ConfigurationError if torch compiles backwards as they run."""
    compiler = sys.modules.get("torch._dynamo")  # importing it is slow
    if compiler is not None and compiler.config.compiled_autograd:
        raise ConfigurationError(
            "torch._dynamo.config.compiled_autograd is on. It compiles the backward, and leaves out the nodes that "
            "clip gradients. Set it to False: torch.compile works without it."
        )


def refuse_batch_norm(batch_norms: Iterable[tuple[str, _BatchNorm]], model: nn.Module) -> None:
    """Raise UnsupportedParameterError if a BatchNorm that `model` still holds mixes samples: in training mode."""
    mixing = [(path, x) for path, x in batch_norms if x.training or getattr(x, "running_mean", None) is None]
    held = set(model.modules()) if mixing else ()
    for path, module in mixing:
        if module in held:
            raise UnsupportedParameterError(
                f"{path or 'the model'} ({type(module).__name__}): BatchNorm mixes the samples of a batch, so "
                f"no per-sample gradient exists. Before making the engine, replace it by GroupNorm "
                f"(dpshard.replace_unsupported(model) does). Or put it in eval mode to use its frozen statistics."
            )
