"""The role that holds the parameters: whole ones here, and what a framework that shards them must answer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_calls
from torch.nn.parameter import is_lazy

from dpshard.backends.guard import Guard
from dpshard.backends.model_parallel import whole_samples
from dpshard.errors import ConfigurationError, UnsupportedParameterError
from dpshard.names import WRAPPERS, canonical_name
from dpshard.records import WIDE

if TYPE_CHECKING:
    from dpshard.backends.training_state import TrainingState

_DTYPES = (*WIDE, torch.bfloat16, torch.float16)


class Sharding(ABC):
    """Holds the parameters of a model, and unshards them.

    `core` is the module whose parameter names count, `outermost` the one whose call is a forward of the training.
    Raises ConfigurationError for parameters that cannot be trained privately: lazy ones, and two of a name.
    """

    two_passes = True
    """Whether a graph can be differentiated twice."""

    def __init__(self, core: nn.Module, outermost: nn.Module) -> None:
        self.core, self.outermost = core, outermost
        named = list(core.named_parameters())
        _check_parameters(named)
        self.parameters = {canonical_name(n): p for n, p in named if p.requires_grad}
        self.names: dict[Tensor, str] = {p: canonical_name(n) for n, p in named}
        """The names of all parameters, frozen ones too."""
        self.anchored: Mapping[str, Tensor] = self.parameters
        """What the anchors differentiate."""
        self.differentiated: Mapping[str, Tensor] = self.parameters
        """What plain autograd differentiates."""
        self.guard = Guard(self.parameters, self.local, self._accumulated, self._in_training, self._hooked)

    # --- what the parameters are ------------------------------------------------------------------------------------

    @property
    def shapes(self) -> Mapping[str, Sequence[int]]:
        """The shapes of the whole parameters."""
        return {name: p.shape for name, p in self.parameters.items()}

    @property
    def values(self) -> Mapping[str, Tensor]:
        """The parameters as forward sees them, with which derivations are replayed."""
        return self.differentiated

    @property
    def held(self) -> set[Tensor]:
        """The tensors by which an optimizer is known to step on the model."""
        return set(self.parameters.values())

    @property
    def device(self) -> torch.device:
        """The device of the first trainable parameter; the CPU if there is none."""
        return next((p.device for p in self.parameters.values()), torch.device("cpu"))

    @property
    def elements(self) -> int:
        """Number of real numbers in the trainable parameters; a complex one is two."""
        shapes = self.shapes
        return sum(math.prod(shapes[name]) * (2 if p.is_complex() else 1) for name, p in self.parameters.items())

    def refuse_changed_parameters(self) -> None:
        """Raise UnsupportedParameterError if the model holds a trainable parameter that the engine does not know."""
        for name, parameter in self.core.named_parameters():
            if parameter.requires_grad and not self._is_known(canonical_name(name), parameter):
                raise UnsupportedParameterError(
                    f"{name} became trainable, or replaced another parameter, after the engine was made: nobody would "
                    f"clip its gradient. Unfreeze, add and load parameters before making the engine; or call "
                    f"engine.state_dict() and engine.detach(), and make a new engine."
                )

    def _is_known(self, name: str, parameter: nn.Parameter) -> bool:
        return self.parameters.get(name) is parameter

    def refuse_hooks(self) -> None:
        """Raise UnsupportedParameterError if a parameter has a hook that is not dpshard's."""
        for name in self.parameters:
            self.guard.refuse_hooks(name)

    def _accumulated(self, name: str) -> None:
        """Take notice that autograd has added to the gradient of a parameter."""
        self.guard.note(name)

    def _hooked(self) -> bool:
        if module_calls._global_backward_hooks or module_calls._global_backward_pre_hooks:
            return True
        return any(module._backward_hooks or module._backward_pre_hooks for module in self.outermost.modules())

    def _in_training(self) -> bool:
        return self.core.training or self.outermost.training

    # --- around forwards --------------------------------------------------------------------------------------------

    @abstractmethod
    def unshards(self, module: nn.Module) -> bool:
        """Return True if hooks around the forward of `module` unshard and reshard its parameters."""

    @abstractmethod
    def unshard_module(self, module: nn.Module) -> None:
        """Unshard the parameters of `module` now."""

    @abstractmethod
    def unsharded_parameters(self, module: nn.Module) -> Iterable[tuple[str, Tensor]]:
        """Return names and tensors of the parameters that exist only while `module` runs."""

    @contextmanager
    def guard_disabled(self) -> Iterator[None]:
        """Let plain gradients reach the parameters in a block that leaves no trace; they go to no `.grad`."""
        with self.guard.guard_disabled(), self._beside():
            yield

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        """Run forwards in a block without a backward; ConfigurationError if ranks share samples in them."""
        with self._together(), self.guard_disabled(), whole_samples():
            yield

    @abstractmethod
    def _beside(self) -> AbstractContextManager[Any]:
        """Leave the framework as it was, after a block of forwards and backwards beside the training."""

    @abstractmethod
    def _together(self) -> AbstractContextManager[Any]:
        """Wait for the ranks whose forwards unshard parameters together; a block of forwards without backward."""

    # --- shards -----------------------------------------------------------------------------------------------------

    def local(self, x: Tensor) -> Tensor:
        """Return the part of a parameter or gradient that this rank holds."""
        return x

    @abstractmethod
    def unshard(self, name: str, shard: Tensor) -> Tensor:
        """Return the whole of a tensor of the size of a parameter; `shard` is what this rank holds of it.

        All ranks call it, for the same names in the same order.
        """

    def full_value(self, name: str) -> Tensor:
        """Return the whole of a parameter that the optimizer steps on, on every rank; called like `unshard`."""
        return self.unshard(name, self.parameters[name].detach())

    @abstractmethod
    def over_shards(self, x: Tensor) -> Tensor:
        """Return the sum of a scalar over the ranks that hold different shards."""

    def training_state(self, optimizer: Any) -> TrainingState:
        """Return model and optimizer as a checkpoint sees them; `optimizer` is the one that steps on the model."""
        from dpshard.backends.training_state import NamedState  # a training without checkpoints does not wait for it

        return NamedState(self.outermost, optimizer, self.names)

    def detach(self) -> None:
        """Remove every trace from the parameters."""
        self.guard.detach()


class Unsharded(Sharding):
    """Every process holds all parameters.

    `beside` makes the block for forwards and backwards beside the training.
    """

    def __init__(
        self,
        core: nn.Module,
        outermost: nn.Module | None = None,
        beside: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__(core, core if outermost is None else outermost)
        self._make_beside = beside

    def unshards(self, module: nn.Module) -> bool:
        """Return False: no parameter is ever sharded."""
        return False

    def unshard_module(self, module: nn.Module) -> None:
        """Do nothing."""

    def unsharded_parameters(self, module: nn.Module) -> Iterable[tuple[str, Tensor]]:
        """Return nothing: parameters are always there."""
        return ()

    def _beside(self) -> AbstractContextManager[Any]:
        return self._make_beside()

    def _together(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def unshard(self, name: str, shard: Tensor) -> Tensor:
        """Return `shard`, which is whole."""
        return shard

    def start(self, name: str) -> int:
        """Return 0."""
        return 0

    def assign(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Put `gradient` in `.grad`."""
        parameter.grad = gradient

    def over_shards(self, x: Tensor) -> Tensor:
        """Return `x`: every rank has the whole."""
        return x


def _check_parameters(named: list[tuple[str, nn.Parameter]]) -> None:
    seen: set[str] = set()
    for name, parameter in named:
        canonical = canonical_name(name)
        if canonical in seen:
            raise ConfigurationError(
                f"{name}: another parameter has the name {canonical!r} too, once the names that wrappers add "
                f"({WRAPPERS}) are left out; noise is keyed by it. Rename one of the modules."
            )
        seen.add(canonical)
        if not parameter.requires_grad:
            continue
        if is_lazy(parameter):
            raise ConfigurationError(
                f"{name} is not initialised yet (a lazy module): run one forward under torch.no_grad() before making "
                f"the engine."
            )
        if parameter.dtype not in _DTYPES:
            raise ConfigurationError(
                f"{name} is of {parameter.dtype}; private training knows {', '.join(str(d)[6:] for d in _DTYPES)}. "
                f"Freeze it with requires_grad_(False), or cast it."
            )
