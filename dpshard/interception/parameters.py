"""The trainable parameters of a model, as sources."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from dpshard.interception.active import ActiveForward
from dpshard.interception.parameter_writes import written
from dpshard.interception.protocols import ShardingHooks
from dpshard.interception.refusals import refusal
from dpshard.rules.call import Source
from dpshard.rules.modes import Passthrough


class TrainedParameters:
    """The parameters, whole or gathered."""

    def __init__(
        self, model: nn.Module, sources: dict[Tensor, Source], sharding: ShardingHooks, active: ActiveForward
    ) -> None:
        self.model = model
        self.sources = sources
        self.temporary: set[str] = set()
        """Names of parameters that exist only while a module runs."""
        self.unshards = sharding.unshards
        self.exchange = sharding.exchange
        self.refusal = functools.partial(refusal, model)
        self.by_name = {source.label: source for source in sources.values()}
        self._flags: list[bool] = []
        self.trained: dict[Tensor, Source] = {}
        """The parameters that `trainable` returned last; another object when they are others."""
        self._sharding = sharding
        self._active = active
        self._plain = [(name, p) for name, p in model.named_parameters() if type(p) is nn.Parameter]

    def trainable(self) -> dict[Tensor, Source]:
        """Return the parameters that require gradients now."""
        flags = [parameter.requires_grad for parameter in self.sources]
        if flags != self._flags:  # to copy a dict is fast, because it hashes no tensor
            self._flags = flags
            self.trained = {x: source for x, source in self.sources.items() if x.requires_grad}
        return dict(self.trained)

    def values(self) -> dict[str, Tensor]:
        """Return the parameters by name; for gathered ones, the latest gathered tensor."""
        return {source.label: x for x, source in self.sources.items()}

    def versions(self) -> list[int]:
        """Return torch's version counter of each parameter."""
        return [p._version for _, p in self._plain]

    def refuse_writes(self, before: list[int]) -> None:
        """Raise UnsupportedParameterError if a parameter was written since `before`."""
        if self.versions() == before:
            return
        for (name, p), version in zip(self._plain, before, strict=True):
            if p._version != version:
                raise written(name)

    def unshard(self, module: nn.Module) -> None:
        """Gather the parameters of a sharded module."""
        if self.unshards(module):
            with Passthrough.set(True):
                self._sharding.unshard_module(module)
            self.take_up(module)

    def take_up(self, module: nn.Module) -> None:
        """Add the parameters gathered for `module`."""
        with Passthrough.set(True):
            for name, parameter in self._sharding.unsharded_parameters(module):
                source = self.sources[parameter] = self.by_name[name]
                self.temporary.add(name)
                if self._active.mode is not None:
                    self._active.mode.rebind(parameter, source)

    def repeatable(self, module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `original`, which gathers first, because backward frees what hooks gathered."""
        if not self.unshards(module):
            return original

        def gathered(*args: Any, **kwargs: Any) -> Any:
            self.unshard(module)
            return original(*args, **kwargs)

        return gathered
