"""Warns of trained parameters without a gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from dpshard.clipping.tape import Take

_SHOWN = 5


class FirstGradients:
    """Records the `parameters` that get a gradient, until `tell` warns. `names`: the parameters of all ranks."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], names: Sequence[str]) -> None:
        self._parameters, self._names = parameters, names
        self._reached: set[str] | None = set()

    def noting(self, take: Take) -> Take:
        """Return a `take` that records sums. Zero sums count, because adapters begin with them."""
        reached = self._reached
        if reached is None:
            return take

        def noted(name: str) -> Tensor | None:
            total = take(name)
            if total is not None:
                reached.add(name)
            return total

        return noted

    def tell(self, gather: Callable[[Tensor], Tensor]) -> None:
        """Warn once, after the first gradients, of parameters without one on any rank. `gather` stacks tensors."""
        if self._reached is None:
            return
        own = torch.tensor([name in self._reached for name in self._names], dtype=torch.uint8, device="cpu")
        reached = gather(own).any(0).tolist()
        if not any(reached):
            return
        self._reached = None
        by_name = dict(zip(self._names, reached, strict=True))
        trained = {name: by_name[name] for name, p in self._parameters.items() if p.requires_grad}
        missed = [name for name, was_reached in trained.items() if not was_reached]
        if missed:
            more = f" and {len(missed) - _SHOWN} more" if len(missed) > _SHOWN else ""
            warnings.warn(
                f"No gradient reached {', '.join(missed[:_SHOWN])}{more} in the first logical batch ({len(missed)} of "
                f"{len(trained)} trained parameters), so only noise moves them. Experts and layers that are skipped at "
                f"random may get a gradient later. Otherwise the forward does not use these parameters, or cuts them "
                f"off (detach(), no_grad()). Repair it, or freeze them before making the engine.",
                stacklevel=2,
            )
