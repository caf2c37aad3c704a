"""Comparable runs of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from dpshard.rules import COMPOSITES
from dpshard.rules.modes import Passthrough
from dpshard.rules.torch_functions import Function

_DROPOUT = {
    **dict.fromkeys(
        (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout), "training"
    ),
    **{
        getattr(torch, name): "train"
        for kind in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
        for name in (kind, f"{kind}_")
    },
}


@dataclass(frozen=True, slots=True)
class Draws:
    """Constants in place of random draws.

    Only flags may be 0: a draw of 0 would hide noise that other samples scale. Every verification draws new constants.
    """

    uniform: float = 0.45
    """In (0, 1); other draws follow from it."""
    normal: float = 1.0
    seed: int | None = None
    """Seed of torch's generators; None keeps their states."""
    numpy_seed: int = 0

    def constant(self, name: str) -> float:
        """Return the constant that replaces the draw of a function."""
        if name in _UNIFORM:
            return self.uniform
        if name in _NORMAL:
            return self.normal
        return float(self.uniform < 0.9) if name in _FLAGS else float(np.ceil(self.waiting))

    @property
    def waiting(self) -> float:
        """Constant in place of exponential and Gamma draws."""
        return -math.log1p(-self.uniform)

    @classmethod
    def fresh(cls, random: np.random.Generator) -> Draws:
        """Return newly drawn constants."""
        uniform, normal = float(random.uniform(0.01, 0.99)), float(random.normal())
        seed, numpy_seed = (int(x) for x in random.integers(2**32, size=2))
        return cls(uniform, normal if abs(normal) > 0.1 else 0.1, seed, numpy_seed)


AS_DRAWN = Draws()
LOW = Draws(uniform=0.02, normal=-1.5, seed=1990, numpy_seed=126)
"""Low draws, which take one branch of `rand() < p`; the first four from each seed are below 0.15."""
HIGH = Draws(uniform=0.97, normal=0.5, seed=698, numpy_seed=1470)
"""High draws, which take the other branch; the first four from each seed are above 0.85."""

_UNIFORM = ("rand", "rand_like", "uniform_")
_NORMAL = ("randn", "randn_like", "normal", "normal_", "cauchy_")
_FLAGS = ("bernoulli", "bernoulli_")
_DRAWN = {
    getattr(owner, name): name
    for owner in (torch, Tensor)
    for name in (*_UNIFORM, *_NORMAL, *_FLAGS, "exponential_", "log_normal_", "geometric_")
    if hasattr(owner, name)
}


def _integers(draws: Draws, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    drawn = func(*args, **kwargs)
    bounds = [x for x in args if isinstance(x, int)]
    high = kwargs.get("high", kwargs.get("to", bounds.pop() if bounds else None))
    low = kwargs.get("low", kwargs.get("from", bounds[0] if bounds else 0))
    return drawn if high is None else drawn.fill_(low + int(draws.uniform * (high - low)))


def _shares(draws: Draws, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return constant shares [..., K] in place of Dirichlet or Beta draws, as in mixup."""
    drawn = func(*args, **kwargs)
    share = torch.full_like(drawn, draws.uniform / max(1, drawn.shape[-1] - 1))
    share[..., 0] = 1 - draws.uniform
    return share


_REPLACED = {
    torch.randint: _integers,
    torch.randint_like: _integers,
    Tensor.random_: _integers,
    torch._sample_dirichlet: _shares,
    torch._standard_gamma: lambda draws, func, args, kwargs: torch.full_like(func(*args, **kwargs), draws.waiting),
    torch.poisson: lambda _, func, args, kwargs: func(*args, **kwargs).copy_(args[0].round()),
}

_ORDERS = (torch.argsort, Tensor.argsort)


def _any_order(order: Tensor, x: Tensor) -> Tensor:
    """Rotate an order of equal elements, because random draws are constants here."""
    alike = x.dim() == 1 and len(x) > 1 and bool((x == x[0]).all())
    return order.roll(1) if alike else order


def _without_dropout(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if func in _DROPOUT:
        return args[:1] or (kwargs["input"],), {"p": 0.0, _DROPOUT[func]: False}
    if func is F.scaled_dot_product_attention:
        if len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        elif "dropout_p" in kwargs:
            kwargs = {**kwargs, "dropout_p": 0.0}
    return args, kwargs


class DeterministicForward(TorchFunctionMode):
    """Runs a model without dropout and with constant random draws."""

    permuting = True
    """True if permutations rotate, which reveals mixing of samples."""

    def __init__(self, samples: int = 0, draws: Draws = AS_DRAWN) -> None:
        """Take the number of samples; 0 keeps random subsets of samples."""
        super().__init__()
        self.samples = samples
        self.draws = draws
        self._permutations: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if Passthrough.on:
            return func(*args, **kwargs)
        if func is torch.randperm:
            order = func(*args, **kwargs).sort().values.roll(int(self.permuting))
            self._permutations[order] = True
            return order
        if func is Tensor.__getitem__ and isinstance(args[1], slice) and self._permutes_samples(args[0]):
            return args[0]  # take all samples instead of a subset (stochastic depth)
        if func in (torch.index_add, Tensor.index_add, Tensor.index_add_) and self._permutes_samples(args[2]):
            kwargs.pop("alpha", None)  # the scale of that subset
        if func in _DRAWN:
            return func(*args, **kwargs).fill_(self.draws.constant(_DRAWN[func]))
        if func in _REPLACED:
            return _REPLACED[func](self.draws, func, args, kwargs)
        if func in _ORDERS and self.permuting and not kwargs.get("stable"):
            return _any_order(func(*args, **kwargs), args[0])
        args, kwargs = _without_dropout(func, args, kwargs)
        if func in COMPOSITES:
            with self:
                return COMPOSITES[func](*args, **kwargs)
        return func(*args, **kwargs)

    def _permutes_samples(self, order: Tensor) -> bool:
        return self.samples > 0 and order in self._permutations and len(order) == self.samples
