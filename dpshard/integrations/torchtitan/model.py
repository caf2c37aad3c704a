"""Changes to a torchtitan model before it is parallelized."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _pop_mode_temporarily
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.embedding import Embedding
from torchtitan.models.common.moe import MoE
from torchtitan.ops.scatter_add import deterministic_scatter_add
from torchtitan.protocols.module import Module
from torchtitan.tools.logging import logger

from dpshard.rules.registry import composite

MASKED = (FlexAttention.Config, VarlenAttention.Config)
"""Attention that masks other documents by positions."""


class _Table(Embedding):
    """torchtitan's token embedding, whose partial outputs DTensor sums over ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(Embedding.Config):
        """As torchtitan's."""

    def parallelize(self, parallel_dims: Any) -> None:
        """Place the table; outputs are sums over the ranks of `tp`."""
        sharding: Any = self._sharding_config
        self._sharding_config = dataclasses.replace(sharding, local_map=None, out_src_shardings=None)
        Module.parallelize(self, parallel_dims)

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of `input`."""
        return nn.Embedding.forward(self, input)


def prepared(spec: Any, losses: Callable[..., Any]) -> Any:
    """Return a ModelSpec that the engine supports, and whose schedules train with `losses`."""
    table = spec.model.tok_embeddings
    spec.model.tok_embeddings = _Table.Config(**{f.name: getattr(table, f.name) for f in dataclasses.fields(table)})
    after_optimizer = spec.post_optimizer_build_fn
    if after_optimizer is register_moe_load_balancing_hook:
        after_optimizer = None
        if any(mixture.load_balance_coeff is not None for _, mixture, *_ in spec.model.traverse(MoE.Config)):
            logger.warning(
                "The load of experts is not balanced: counts of tokens would move expert_bias_E without noise. It "
                "stays as it is loaded."
            )

    def parallelize(model: Any, **options: Any) -> Any:
        if isinstance(spec.model.first_attention.inner_attention, MASKED):
            _mask_within(model)
        for module in model.modules():
            if isinstance(module, FlexAttention):
                module.forward = _without_modes(module.forward)
            if isinstance(module, MoE):
                _leave_uncounted(module)
        return spec.parallelize_fn(model, **options)

    def pipelining(model: Any, **options: Any) -> Any:
        return spec.pipelining_fn(model, **options | {"loss_fn": losses})

    return dataclasses.replace(
        spec, parallelize_fn=parallelize, pipelining_fn=pipelining, post_optimizer_build_fn=after_optimizer
    )


def _leave_uncounted(mixture: Any) -> None:
    """Keep a mixture of experts in eval mode, because it counts tokens in training mode."""

    def train(mode: bool = True) -> Any:
        type(mixture).train(mixture, mode)
        mixture.training = False
        return mixture

    mixture.train = train
    mixture.train(mixture.training)


@composite(deterministic_scatter_add._opoverload)
def _scatter_add(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    """Replace torchtitan's operator by a function with a rule."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return out.scatter_add(0, index, src)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _mask_within(model: Any) -> None:
    """Make masks within forward, because the engine also runs forward on some of the rows."""
    forward, masks = model.forward, _without_modes(model.get_attention_masks)

    def with_masks(tokens: Tensor, positions: Tensor, attention_masks: Any = None) -> Any:
        return forward(tokens, positions, masks(positions) if attention_masks is None else attention_masks)

    model.forward = with_masks


def _without_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function outside the engine's mode: torch.compile would guard all that the mode holds."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a part of a larger region
            return function(*args, **kwargs)
        with ExitStack() as modes:
            while torch._C._len_torch_function_stack() > 0:
                modes.enter_context(_pop_mode_temporarily())
            return function(*args, **kwargs)

    return call
