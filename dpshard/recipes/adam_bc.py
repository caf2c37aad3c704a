"""Adam with the noise removed from its second moment.

A private gradient is g + z with z ~ N(0, s^2), so Adam's second moment v is about E[g^2] + s^2. If the noise exceeds
the signal, Adam divides all elements by about s, as SGD with momentum would. AdamBC subtracts s^2, which is public.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dpshard.config import require_positive
from dpshard.errors import ConfigurationError
from dpshard.recipes.adam import evaluated, require_adam_settings


class AdamBC(Optimizer):
    """DP-AdamBC, Tang et al. 2023, arXiv:2312.14334, Alg. 1, with decoupled weight decay.

    n <- beta2 n + (1 - beta2) s^2, with the noise s of this step's gradient. p <- (1 - lr decay) p - lr m' /
    sqrt(max(v' - n', floor)), where ' divides by 1 - beta^t. m and v are Adam's. At a constant batch size n' =
    s^2, as in the paper. `step` calls `noise_std()`: pass `lambda: engine.gradient_noise_std`. Tune `floor`, because v'
    - n' may be negative.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        noise_std: Callable[[], float],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        floor: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        require_positive("lr", lr)
        require_positive("floor", floor)
        require_adam_settings(betas, weight_decay)
        if not callable(noise_std):
            raise ConfigurationError(
                f"noise_std={noise_std!r}: AdamBC calls it at each step, so pass a function, "
                f"lambda: engine.gradient_noise_std."
            )
        super().__init__(params, {"lr": lr, "betas": betas, "floor": floor, "weight_decay": weight_decay})
        self._noise_std = noise_std

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; evaluate `closure` once, if given."""
        loss = evaluated(closure)
        noise_std = float(self._noise_std())
        if not 0 <= noise_std < math.inf:
            raise ConfigurationError(f"noise_std() returned {noise_std!r}: it must be a finite number of at least 0.")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group, noise_std**2)
        return loss

    def _move(self, parameter: nn.Parameter, group: dict[str, Any], noise_sq: float) -> None:
        state, gradient, (beta1, beta2) = self.state[parameter], parameter.grad, group["betas"]
        assert gradient is not None
        if not state:
            # torch loads all state except "step" in the parameter's dtype.
            state["step"], state["noise_sq"] = torch.zeros(()), torch.zeros((), dtype=parameter.dtype)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        state["noise_sq"].mul_(beta2).add_((1 - beta2) * noise_sq)
        tensors = (parameter, gradient, state["exp_avg"], state["exp_avg_sq"])
        # As in torch's Adam, the parts of a complex parameter are two parameters.
        moved, gradient, mean, mean_sq = (torch.view_as_real(x) if x.is_complex() else x for x in tensors)
        mean.lerp_(gradient, 1 - beta1)
        mean_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        steps = float(state["step"])
        unbias1, unbias2 = 1 - beta1**steps, 1 - beta2**steps
        signal_sq = (mean_sq / unbias2 - float(state["noise_sq"].real) / unbias2).clamp_(min=group["floor"])
        moved.mul_(1 - group["lr"] * group["weight_decay"])
        moved.addcdiv_(mean, signal_sq.sqrt_(), value=-group["lr"] / unbias1)
