"""The model that `make_private` returns."""

from __future__ import annotations

from typing import Any

from torch import nn

from dpshard.engine import PrivacyEngine
from dpshard.errors import ConfigurationError
from dpshard.integrations.opacus.progress import Progress


class GradSampleModule(nn.Module):
    """The private model around the user's `_module`, which may also be called directly.

    State-dict keys begin with `_module.`, as in Opacus.
    """

    def __init__(
        self, module: nn.Module, engine: PrivacyEngine | None = None, progress: Progress | None = None
    ) -> None:
        super().__init__()
        if engine is None or progress is None:
            raise ConfigurationError(
                "GradSampleModule(model) would fill p.grad_sample, which dpshard never makes: use the module that "
                "PrivacyEngine().make_private(...) returns. engine.metrics() of its engine has the gradient norms."
            )
        self._module = module
        self.training = module.training  # it may differ from the mode of parts
        self._dpshard = (engine, progress)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's model."""
        return self._module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_module"), name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, except clipped sums."""
        if not self._dpshard[1].collecting:
            super().zero_grad(set_to_none)

    def cleanup(self) -> None:
        """Detach the engine."""
        self._dpshard[0].detach()

    remove_hooks = cleanup

    def to_standard_module(self) -> nn.Module:
        """Detach the engine, and return the user's model."""
        self.cleanup()
        return self._module
