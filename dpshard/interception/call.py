"""A call of a torch function, as its rule gets it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dpshard.clipping.autograd_nodes import hold
from dpshard.clipping.tape import Use
from dpshard.interception.batch_dims import CallLayout
from dpshard.interception.packed import TokenGrid
from dpshard.interception.placed import is_placed, placed_use
from dpshard.interception.plans import Plans
from dpshard.interception.protocols import Exchange
from dpshard.interception.slots import Slots
from dpshard.records import PerSampleGrad, Record
from dpshard.rules.call import BatchAxis, Build, Planned, Source, records_of
from dpshard.rules.routed import at_samples, without_rows
from dpshard.rules.torch_functions import Function, function_name

Refusal = Callable[..., Exception]
"""(labels of the parameters, function, reason, advise=) -> the error to raise."""


@dataclass(slots=True)
class ForwardContext:
    """Facts that all modes of one forward share."""

    refusal: Refusal
    rows_per_unit: int = 1
    grid: TokenGrid | None = None
    """Rows and tokens of packed rows, else None."""
    exchange: Exchange | None = None


@dataclass(eq=False)
class InterceptedCall:
    """A rules.call.Call that interception has made."""

    func: Function
    args: Any
    kwargs: Any
    tensors: list[Tensor]
    layout: CallLayout
    sources: dict[Tensor, Source]
    slots: Slots
    refusal: Refusal
    rows_per_unit: int = 1
    samples: Tensor | None = None
    """Index of the sample of every row, [N], if rows are routed."""
    exchange: Exchange | None = None
    plans: Plans | None = None
    batch_size: int = field(init=False)
    output_axis: BatchAxis | None = field(init=False)

    def __post_init__(self) -> None:
        self.batch_size = self.slots.batch_size if self.samples is None else len(self.samples)
        self.output_axis = self.layout.output

    def source(self, x: Any) -> Source | None:
        """Return `x` as a source, or None."""
        return self.sources.get(x) if isinstance(x, Tensor) else None

    def plain(self, x: Any) -> Any:
        """Return `x`, detached if it is a source."""
        return x.detach() if isinstance(x, Tensor) and x in self.sources else x

    def axis(self, x: Tensor) -> BatchAxis | None:
        """Return the batch axis of `x`, or None."""
        for tensor, axis in zip(self.tensors, self.layout.inputs, strict=True):
            if tensor is x:
                return axis
        return None

    def hold(self, x: Tensor) -> Tensor:
        """Return `x` for a function and its later tap."""
        return x if type(x) is not Tensor and is_placed(x) else hold(x)

    def run(self, planned: Planned, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Run and tap the call, and keep the plan."""
        if self.plans is not None:
            self.plans.keep(self.func, self.args, self.kwargs, self.sources, planned, (input, weight, bias))
        output, keep = planned.run(self.hold, input, self.plain(weight), self.plain(bias))
        return self.tap(output, keep, planned.sources, planned.maker)

    def tap(self, output: Tensor, keep: tuple[Tensor, ...], sources: Any, build: Build) -> Tensor:
        """Return `output`; `build` makes records of its gradient and the kept tensors."""
        if type(output) is not Tensor and is_placed(output):
            return self._placed_tap(output, keep, sources, build)
        build = build if self.samples is None else self._at_samples(sources, build, self.samples)
        use = Use(tuple(sources), build, call=self._described())
        return self.slots.tap(use, output, keep)

    def tap_without_rows(self, output: Tensor) -> Tensor:
        """Give the sources empty records: ranks that have rows exchange norms with this one, which has none."""
        sources = tuple(self.sources[x] for x in self.tensors if x in self.sources)
        count = self._recorded
        return self.slots.tap(
            Use(sources, lambda g: [without_rows(source, g, count) for source in sources]), output, ()
        )

    def _placed_tap(self, output: Tensor, keep: tuple[Tensor, ...], sources: Any, build: Build) -> Tensor:
        if self.slots.compiled or self.samples is not None:
            reason = (
                "torch.compile, and rows that the data picks, have no rule for parameters in parts on several ranks"
            )
            raise self.refuse(reason, advise=False)
        use, own = placed_use(self, output, keep, sources, build)
        return self.slots.tap(use, output, own)

    def per_sample(self, x: Tensor) -> Tensor:
        """Return source `x`, one copy per sample, [B, *shape], whose gradient is the record."""
        source = self.sources[x]
        if is_placed(x):
            raise self.refuse(
                "only linear maps, tables and normalisation layers have rules for a parameter in parts on several "
                "ranks. Take nn.RMSNorm instead of one by hand, and leave a bare parameter out of the plan",
                advise=False,
            )
        described = self._described()
        use = Use((source,), lambda gradient: [(source, PerSampleGrad(gradient))], copies=True, call=described)
        (copies,) = self.slots.slot(use, x.detach().unsqueeze(0).expand(self._recorded, *x.shape))
        return copies if self.samples is None else copies[self.samples]

    def _described(self) -> str:
        return f"{function_name(self.func)} {self.layout.described}" if self.slots.compiled else ""

    def _at_samples(self, sources: Any, build: Build, sample_N: Tensor) -> Build:
        B = self._recorded

        def at(*tensors: Tensor) -> Sequence[tuple[Source, Record]]:
            return [at_samples(source, record, sample_N, B) for source, record in records_of(sources, build, tensors)]

        return at

    @property
    def _recorded(self) -> int:
        B = self.slots.batch_size
        return B if self.exchange is None else self.exchange.sample_count(B, self.roots)

    @property
    def roots(self) -> list[str]:
        """Names of the parameters used."""
        return [name for x in self.tensors if x in self.sources for name in self.sources[x].roots]

    def has_met_no_constants(self) -> bool:
        """Return True if all sources derive from parameters only, without constants."""
        return all(self.sources[x].exact for x in self.tensors if x in self.sources)

    def refuse(self, reason: str, *, advise: bool = True) -> Exception:
        """Return an error with parameter, module and function."""
        labels = ", ".join(dict.fromkeys(self.sources[x].label for x in self.tensors if x in self.sources))
        return self.refusal(labels, self.func, reason, advise=advise)
