"""The role that holds the parameters."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_calls
from torch.nn.parameter import is_lazy

from dpshard.backends.communicator import Communicator, all_ranks
from dpshard.backends.expert_parts import ExpertParts, ExpertRanks, are_experts
from dpshard.backends.grid import Grid
from dpshard.backends.guard import Guard
from dpshard.backends.model_parallel import whole_samples
from dpshard.backends.model_parts import DeclaredParts, ModelParts, Place
from dpshard.backends.writes import Writes
from dpshard.errors import ConfigurationError, UnsupportedParameterError
from dpshard.names import WRAPPERS, KeptWalk, canonical_name, is_compiled
from dpshard.records import WIDE

if TYPE_CHECKING:
    from dpshard.backends.training_state import TrainingState

_DTYPES = (*WIDE, torch.bfloat16, torch.float16)
_BACKWARD_HOOKS = attrgetter("_backward_hooks", "_backward_pre_hooks")  # a generator would be a call for each


class Sharding(ABC):
    """Holds and unshards the parameters of `core`; a call of `outermost` is a forward of the training.

    Raises ConfigurationError for lazy parameters, and for two of one name.
    """

    two_passes = True
    """True if a graph can be differentiated twice."""
    accumulates = True
    """True if autograd, or a framework in its hooks, adds to `.grad`; then `_accumulated` follows."""
    unclipped: str | None = None
    """Error for a gradient that autograd brings, if clipped sums do not come through autograd."""

    def __init__(self, core: nn.Module, outermost: nn.Module, parts: ModelParts | None = None) -> None:
        self.core, self.outermost, self.parts = core, outermost, parts
        named = list(core.named_parameters())
        _require_parameters(named)
        self.parameters = {canonical_name(n): p for n, p in named if p.requires_grad}
        self.names: dict[Tensor, str] = {p: canonical_name(n) for n, p in named}
        """Names by parameter, also of frozen ones."""
        self._held: set[Tensor] = set(self.parameters.values())
        self._walk, self._outer_walk = KeptWalk(core), KeptWalk(outermost)
        self.writes = Writes(self.parameters, self.local)
        self._trained: list[bool] | None = None  # `requires_grad` of all parameters at the last passed check
        self.anchored: Mapping[str, Tensor] = self.parameters
        self.differentiated: Mapping[str, Tensor] = self.parameters
        """Tensors that plain autograd differentiates."""
        accumulated = self._accumulated if self.accumulates else None
        self.guard = Guard(self.parameters, self.local, accumulated, self._in_training, self._hooked)

    @property
    def exchange(self) -> ModelParts | None:
        """The ranks with parts of the model, if any."""
        return self.parts

    @property
    def note_inputs(self) -> Callable[[Iterable[Tensor]], None] | None:
        """Function that takes the inputs, if other ranks must have the same."""
        return None if self.meeting is None else self.meeting.note_inputs

    @property
    def meeting(self) -> ModelParts | None:
        """The ranks that run this model's forwards together, if any."""
        return self.parts if self.parts is not None and self.parts.meets else None

    # --- what the parameters are

    @property
    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Shapes of the whole parameters."""
        return {name: p.shape for name, p in self.parameters.items()}

    @property
    def shapes_in_forward(self) -> Mapping[str, Sequence[int]]:
        """Shapes in forward: of whole parameters, or of this rank's parts."""
        if self.parts is None:
            return self.shapes
        return {name: self.parts.part_shape(name, shape) for name, shape in self.shapes.items()}

    @property
    def everywhere(self) -> Sequence[Any]:
        """Trainable parameters on all ranks."""
        shapes = self.shapes
        return [(name, tuple(shapes[name]), p.dtype) for name, p in self.parameters.items()]

    @property
    def values(self) -> Mapping[str, Tensor]:
        """The parameters in forward."""
        return self.differentiated

    def tensors_of(self, name: str) -> Sequence[Tensor]:
        """Tensors that plain autograd differentiates for a parameter; their gradients add up."""
        return [self.differentiated[name]]

    @property
    def held(self) -> set[Tensor]:
        """Tensors that identify an optimizer of this model."""
        return self._held

    @property
    def device(self) -> torch.device:
        """Device of the first trainable parameter, else the CPU."""
        return next((p.device for p in self.parameters.values()), torch.device("cpu"))

    @property
    def is_one_call(self) -> bool:
        """True if all records arrive at once, after one compiled call."""
        return is_compiled(self.outermost) and not any(map(self.unshards, self.core.modules()))

    @property
    def passes_rows(self) -> bool:
        """True if other ranks take the output's first dimension for the samples."""
        return False

    @property
    def elements(self) -> int:
        """Number of real trainable numbers; a complex one is two."""
        shapes = self.shapes
        return sum(math.prod(shapes[name]) * (2 if p.is_complex() else 1) for name, p in self.parameters.items())

    def require_trainable(self, clipping_mode: str, *, backward_passes: int) -> None:
        """Raise ConfigurationError unless a parameter is trainable, and the model supports `backward_passes`."""
        if not self.parameters:
            raise ConfigurationError(
                f"{type(self.outermost).__name__} has no trainable parameter, so there is nothing to privatize. Call "
                f"requires_grad_(True) on the parameters to train before making the engine."
            )
        if backward_passes == 2 and not self.two_passes:
            raise ConfigurationError(
                f"clipping_mode={clipping_mode!r} runs backward twice, but ZeRO-3 frees the parameters after the first "
                f"pass. Choose a mode of one pass: 'auto', 'bk', 'bk-mixed-ghost', 'bk-mixed-opt', 'per-example'."
            )

    def refuse_changed_parameters(self) -> None:
        """Raise UnsupportedParameterError if a parameter became trainable later."""
        changed, known = self._walk.renew(), self._trained
        trained = [parameter.requires_grad for _, parameter in self._walk.parameters]
        if not changed and trained == known:
            return
        self._trained = None
        for name, parameter in self._walk.parameters:
            if not parameter.requires_grad:
                continue
            if not self._is_known(canonical_name(name), parameter):
                raise UnsupportedParameterError(
                    f"{name} became trainable, or replaced another parameter, after the engine was made, so its "
                    f"gradient would not be clipped. Unfreeze, add and load parameters before making the engine; or "
                    f"call engine.state_dict() and engine.detach(), and make a new engine."
                )
        self._trained = trained

    def _is_known(self, name: str, parameter: nn.Parameter) -> bool:
        return self.parameters.get(name) is parameter

    def refuse_hooks(self) -> None:
        """Raise UnsupportedParameterError for foreign hooks."""
        for name, parameter in self.parameters.items():
            self.guard.refuse_hooks(name, parameter)

    def _accumulated(self, name: str, _: object = None) -> None:
        if self.unclipped is None:
            self.guard.note(name)
        # Autograd, and FSDP, call this without a gradient, too.
        elif not self.guard.is_untouched(name):
            raise UnsupportedParameterError(f"{name}: {self.unclipped}")

    def _hooked(self) -> bool:
        if module_calls._global_backward_hooks or module_calls._global_backward_pre_hooks:
            return True
        self._outer_walk.renew()
        return any(map(any, map(_BACKWARD_HOOKS, self._outer_walk.modules)))

    def _in_training(self) -> bool:
        return self.core.training or self.outermost.training

    # --- around forwards

    @abstractmethod
    def unshards(self, module: nn.Module) -> bool:
        """Return True if hooks around the module's forward unshard its parameters."""

    @abstractmethod
    def unshard_module(self, module: nn.Module) -> None:
        """Unshard the parameters of `module` now."""

    @abstractmethod
    def unsharded_parameters(self, module: nn.Module) -> Iterable[tuple[str, Tensor]]:
        """Return names and tensors that exist only during the module's forward."""

    @contextmanager
    def guard_disabled(self) -> Iterator[None]:
        """Return a context outside training that accepts unclipped gradients."""
        with self.guard.guard_disabled(), self._isolated():
            yield

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        """Return a context for forwards without backward; raise ConfigurationError if they share samples."""
        with self._together(), self.guard_disabled(), whole_samples(self.parts):
            yield

    def dry_backward(self) -> AbstractContextManager[Any]:
        """Return a context for a backward outside training; it raises ConfigurationError for undeclared parts."""
        return whole_samples(None, "backward") if self.parts is None else nullcontext()

    @property
    def gathers(self) -> tuple[int, int]:
        """The first of the ranks that gather parameters together, and a digest of this rank's gathers."""
        return 0, 0

    def gather_anew(self) -> None:  # noqa: B027
        """Free gathered parameters, which may be wrong, and begin another digest."""

    @abstractmethod
    def _isolated(self) -> AbstractContextManager[Any]:
        """Return a context outside training; it restores the framework."""

    @abstractmethod
    def _together(self) -> AbstractContextManager[Any]:
        """Return a context in which all ranks unshard together."""

    # --- shards

    def local(self, x: Tensor) -> Tensor:
        """Return this rank's part."""
        return x

    @abstractmethod
    def unshard(self, name: str, shard: Tensor) -> Tensor:
        """Whole of a parameter-like tensor; all ranks call it, in one order."""

    def full_value(self, name: str) -> Tensor:
        """Whole parameter as the optimizer sees it."""
        return self.unshard(name, self.parameters[name].detach())

    @abstractmethod
    def over_shards(self, x: Tensor) -> Tensor:
        """Sum over different shards of the data ranks."""

    def training_state(self, optimizer: Any) -> TrainingState:
        """Return model and `optimizer` for a checkpoint."""
        if self.parts is not None and self.parts.plain and any(map(self.parts.is_cut, self.parameters)):
            raise ConfigurationError(
                "A Checkpointer cannot tell which parts of a model plain tensors hold, so it would save those of one "
                "rank. Make the parts DTensors (torch's parallelize_module), or save engine.state_dict(), and the "
                "states of model and optimizer by rank."
            )
        from dpshard.backends.training_state import NamedState

        return NamedState(self.outermost, optimizer, self.names)

    def detach(self) -> None:
        """Remove every trace from the parameters."""
        self.guard.detach()


class Unsharded(Sharding):
    """Whole parameters in every process, or plain parts of them.

    `isolated` makes the context of `guard_disabled`; ranks meet in `together` before forwards that communicate.
    """

    accumulates = False

    def __init__(
        self,
        core: nn.Module,
        outermost: nn.Module | None = None,
        isolated: Callable[[], AbstractContextManager[Any]] = nullcontext,
        parts: ModelParts | None = None,
        together: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(core, core if outermost is None else outermost, parts)
        self._make_isolated, self._meet = isolated, together

    def take_declared(self, declared: DeclaredParts, data: Communicator) -> tuple[Communicator, Grid | ExpertRanks]:
        """Treat the parameters as declared parts of a model; return all ranks, and their grid with `data`."""
        everyone = all_ranks(self.device)
        try:
            parts, ranks = self._parts_and_ranks(declared, data)
            grid = ranks(data, parts, everyone)
        except ConfigurationError:
            self.detach()
            raise
        self.parts, self._meet = parts, everyone.meet if parts.meets else None
        return everyone, grid

    def _parts_and_ranks(self, declared: DeclaredParts, data: Communicator) -> tuple[ModelParts, Any]:
        experts = data.world_size > 1 and are_experts(declared)
        kind, ranks = (ExpertParts, ExpertRanks) if experts else (ModelParts, Grid)
        return kind.declared(declared, self.parameters, self.device), ranks

    @property
    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Shapes of the whole parameters."""
        if self.parts is None:
            return super().shapes
        return {name: self.parts.whole_shape(name, p.shape) for name, p in self.parameters.items()}

    def unshards(self, module: nn.Module) -> bool:
        """Return False."""
        return False

    def unshard_module(self, module: nn.Module) -> None:
        """Do nothing."""

    def unsharded_parameters(self, module: nn.Module) -> Iterable[tuple[str, Tensor]]:
        """Return nothing: all are always whole."""
        return ()

    def _isolated(self) -> AbstractContextManager[Any]:
        return self._make_isolated()

    def _together(self) -> AbstractContextManager[Any]:
        if self._meet is not None:
            self._meet()
        return nullcontext()

    def unshard(self, name: str, shard: Tensor) -> Tensor:
        """Whole of a part."""
        return shard if self.parts is None else self.parts.joined(name, shard)

    def place(self, name: str) -> Place:
        """Place of this rank's part in the flattened parameter."""
        return Place() if self.parts is None else self.parts.place(name, self.shapes[name])

    def assign(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Put `gradient` in `.grad`."""
        parameter.grad = gradient

    def over_shards(self, x: Tensor) -> Tensor:
        """Return `x`: data ranks have equal shards."""
        return x


def _require_parameters(named: list[tuple[str, nn.Parameter]]) -> None:
    seen: set[str] = set()
    for name, parameter in named:
        canonical = canonical_name(name)
        if canonical in seen:
            raise ConfigurationError(
                f"{name}: another parameter is also called {canonical!r} without the names that wrappers add "
                f"({WRAPPERS}). The noise is keyed by this name, so rename one of the modules."
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
                f"{name} is of {parameter.dtype}; private training supports {', '.join(str(d)[6:] for d in _DTYPES)}. "
                f"Freeze it with requires_grad_(False), or cast it."
            )
