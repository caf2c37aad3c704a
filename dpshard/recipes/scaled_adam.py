"""Adam that scales gradients before clipping and noise: scale-then-privatise.

Adam divides by the root of the second moment, which amplifies the noise of small elements. Scaling gradients by this
factor s first moves clipping and noise into the geometry of Adam's steps. Training changes u in w = s u, whose gradient
is s times that of w. The optimizer divides the private gradient by s, steps on w, and writes w = s' u'. Scales depend
only on private gradients, so epsilon stays the same. After Ganesh, McMahan & Thakurta 2025, arXiv:2507.01129.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from dpshard.config import require_positive
from dpshard.errors import ConfigurationError
from dpshard.recipes.adam import evaluated, require_adam_settings


class _Scaled(nn.Module):
    """The parametrization w = s u."""

    scale: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones_like(weight))

    def forward(self, u: Tensor) -> Tensor:
        """Return w."""
        return u * self.scale


def scale_parameters(model: nn.Module) -> None:
    """Write every trainable parameter of `model` as w = s u, with s = 1; call it before the engine and `ScaledAdam`.

    Names become "0.parametrizations.weight.original". Norms need memory for one copy of the largest weight per row of
    the micro-batch. Raises ConfigurationError for sharded or shared parameters, and for a scaled model.
    """
    if any(isinstance(module, _Scaled) for module in model.modules()):
        raise ConfigurationError("The parameters of this model are scaled already: call scale_parameters once.")
    owners: dict[Tensor, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append(f"{path}.{name}".lstrip("."))
    for parameter, names in owners.items():
        if len(names) > 1:
            raise ConfigurationError(f"{' and '.join(names)} are one parameter, which cannot be scaled: untie them.")
        if hasattr(parameter, "to_local"):
            raise ConfigurationError(f"{names[0]} is sharded: scale whole parameters, as under DDP.")
    for parameter, (name,) in owners.items():
        if parameter.requires_grad:
            path, _, own = name.rpartition(".")
            parametrize.register_parametrization(model.get_submodule(path), own, _Scaled(parameter), unsafe=True)


def unscale_parameters(model: nn.Module) -> None:
    """Restore the weights of `model` under their own names; call it after `engine.detach()`."""
    for module in [m for m in model.modules() if parametrize.is_parametrized(m)]:
        lists: Any = module.parametrizations
        for name in [n for n, (first, *_) in lists.items() if isinstance(first, _Scaled)]:
            parametrize.remove_parametrizations(module, name)


class ScaledAdam(Optimizer):
    """AdamW on the weights of a model after `scale_parameters`.

    After each step s <- 1 / (sqrt(v') + floor), normalized to root mean square 1 over the model: `max_grad_norm` keeps
    its meaning. v' is Adam's second moment; `floor` bounds the ratio of scales.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        floor: float = 1e-4,
        weight_decay: float = 0.0,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("floor", floor)):
            require_positive(name, value)
        require_adam_settings(betas, weight_decay)
        if not isinstance(model, nn.Module):
            raise ConfigurationError(f"ScaledAdam takes the model, not its parameters; got {type(model).__name__}.")
        self._scales: dict[Tensor, Tensor] = {}
        for module in model.modules():
            if isinstance(module, parametrize.ParametrizationList) and isinstance(module[0], _Scaled):
                self._scales[cast(Tensor, module.original)] = cast(_Scaled, module[0]).scale
        if set(self._scales) != {p for p in model.parameters() if p.requires_grad}:
            raise ConfigurationError("Call scale_parameters(model) before ScaledAdam: it steps on scaled parameters.")
        settings = {"lr": lr, "betas": betas, "eps": eps, "floor": floor, "weight_decay": weight_decay}
        super().__init__(self._scales, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; evaluate `closure` once, if given."""
        loss = evaluated(closure)
        weights: dict[Tensor, Tensor] = {}
        fresh: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            for u in group["params"]:
                if u.grad is not None:
                    weights[u], fresh[u] = self._moved(u, group)
        if weights:
            elements = sum(s.numel() for s in fresh.values())
            rms = math.sqrt(sum(float(s.double().square().sum()) for s in fresh.values()) / elements)
            for u, s in fresh.items():
                self._scales[u].copy_(s / rms)
                u.copy_(weights[u] / self._scales[u])
        return loss

    def _moved(self, u: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the new weight, and the next scale before normalization."""
        state, (beta1, beta2) = self.state[u], group["betas"]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(u), torch.zeros_like(u)
        state["step"] += 1
        steps, scale = float(state["step"]), self._scales[u]
        assert u.grad is not None
        gradient = u.grad / scale
        mean: Tensor = state["exp_avg"].lerp_(gradient, 1 - beta1)
        mean_sq: Tensor = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (mean_sq / (1 - beta2**steps)).sqrt_()
        weight = u * scale * (1 - group["lr"] * group["weight_decay"])
        weight.addcdiv_(mean, root + group["eps"], value=-group["lr"] / (1 - beta1**steps))
        return weight, 1 / (root + group["floor"])
