"""The ranks that hold the parts of one model. See also [Note: Norms of parts] in clipping/parts.py.

Data ranks share the samples of a logical batch, model ranks the model. Together they are a grid of all ranks. All share
secrets, verdicts and digests. Model ranks add up a norm in one order, so its clip coefficient is bitwise equal. The
digest covers the sums of all parts, and whole sums once, so the noise is that of one process. Whole sums must have the
same digest on all model ranks. A gradient of only one would be missing from the norms of the others.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dpshard.backends.slices import Slices
from dpshard.errors import ConfigurationError, LogicalBatchError
from dpshard.noise.keyed import SumShard
from dpshard.records import as_complex, as_real

DeclaredParts = tuple[dist.ProcessGroup, Mapping[str, int | str]]

SAME, SUM, SAMPLES = "same", "sum", "samples"
"""Parameters that every rank holds whole. Its gradient is whole, a term of a sum, or that of its own samples."""


class Place(NamedTuple):
    """Place of a rank's part in the flattened whole, as in noise.keyed.SumShard."""

    start: int = 0
    run: int = 0
    stride: int = 0


class ModelParts:
    """The ranks of one model; `cut`: the dimension along which each rank has a part, by parameter.

    Parts are those of torch.chunk. `termwise`: parameters whose gradient is a sum over ranks. `mesh`: of DTensors.
    """

    meets = True
    """True if these ranks run every forward together."""
    unlike = (
        "The ranks that hold one model were given different inputs, so a sample would count several times. "
        "Take the micro-batches from engine.batches(...), or give all of these ranks the same, in one order."
    )

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        cut: Mapping[str, int],
        termwise: frozenset[str] = frozenset(),
        *,
        mesh: Any = None,
    ) -> None:
        self.group, self.device, self.mesh = group, device, mesh
        self.size, self.rank = group.size(), dist.get_rank(group)
        self._cut, self._termwise = dict(cut), termwise
        self.slices = Slices(group)
        self.spread: bool = False
        """True if FSDP shards over these ranks, too."""
        self._exchanges = False
        self._seen = torch.zeros(1, dtype=torch.int64, device=device)

    @classmethod
    def declared(cls, declared: DeclaredParts, parameters: Mapping[str, Tensor], device: torch.device) -> ModelParts:
        """Return declared parts."""
        group, kinds = declared
        cut, termwise = kinds_of(kinds, {name: p.shape for name, p in parameters.items()})
        return cls(group, device, cut, termwise)

    @property
    def terms(self) -> ModelParts:
        """The ranks that each hold a term of a sum."""
        return self

    @property
    def axes(self) -> Sequence[ModelParts]:
        """Dimensions of the grid of these ranks, outermost first."""
        return (self,)

    @property
    def in_terms(self) -> bool:
        """True if ranks may hold parts of samples."""
        return bool(self._termwise)

    @property
    def plain(self) -> bool:
        """True if parts are plain tensors."""
        return self.mesh is None

    def agreed(self, numbers: Sequence[int]) -> list[int]:
        """Return the first rank's numbers."""
        return self.gather(torch.tensor(list(numbers), device="cpu"))[0].tolist()

    @property
    def facts(self) -> str:
        """Declarations that ranks must share."""
        return repr((sorted(self._cut.items()), sorted(self._termwise)))

    # --- samples of all ranks: see clipping.parts and ExpertParts

    of_samples = False
    """False: all ranks have the same samples."""

    def pad_to_all(self, x_B: Tensor) -> Tensor:
        """Return `x_B`: all ranks have the same samples."""
        return x_B

    def select_own(self, x_B: Tensor) -> Tensor:
        """Return `x_B`: all ranks have the same samples."""
        return x_B

    def gather_samples(self, x_B: Tensor) -> Tensor:
        """Return `x_B`: all ranks have the same samples."""
        return x_B

    def sample_count(self, batch_size: int, names: Collection[str]) -> int:
        """Return the number of samples whose rows meet these parameters."""
        return batch_size

    def sample_numbers(self, sample_N: Tensor | None, batch_size: int, names: Collection[str]) -> Tensor | None:
        """Return the samples as these parameters' records number them, or None."""
        return sample_N

    # --- inputs

    def note_inputs(self, inputs: Iterable[Tensor]) -> None:
        """Add the inputs of a forward to a checksum, unless ranks have parts of the sequence.

        Raise ConfigurationError for DTensors, whose placements the checksum would not see.
        """
        if self._termwise:
            return
        for x in inputs:
            if hasattr(x, "device_mesh"):
                raise ConfigurationError(
                    f"The model was given a DTensor placed as {x.placements}. Give it plain tensors, the same on all "  # type: ignore[attr-defined]
                    f"ranks of one model; PrepareModuleInput places them."
                )
            flat = x.detach().contiguous().view(-1)
            flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
            words = flat.view(torch.int32 if flat.itemsize % 4 == 0 else torch.uint8).to(self.device, torch.int64)
            # By position: rows in another order are other samples.
            places = torch.arange(1, len(words) + 1, device=self.device)
            self._seen = self._seen * 1_000_003 + (words * places).sum()

    def take_inputs(self) -> Tensor:
        """Return a checksum [1], int64, of inputs since the last call."""
        seen, self._seen = self._seen, torch.zeros_like(self._seen)
        return seen

    # --- records and norms: see clipping.parts

    def is_cut(self, name: str) -> bool:
        """Return True if ranks hold parts of the parameter."""
        return name in self._cut

    def is_termwise(self, name: str) -> bool:
        """Return True if the parameter's records are terms."""
        return name in self._termwise

    def adds_squares(self, name: str) -> bool:
        """Return True if the parameter's squares add up over ranks."""
        return name in self._cut or name in self._termwise

    def norm_sq(self, cut_B: Tensor, whole_B: Tensor) -> Tensor:
        """Squared norms [B], bitwise equal on all ranks."""
        return self.over_ranks(cut_B + whole_B if self.rank == 0 else cut_B)

    def norm_sq_of_sums(self, cut_X: Tensor, whole_X: Tensor) -> Tensor:
        """Squared norms [X] of sums over terms."""
        return self.norm_sq(cut_X, whole_X)

    def over_ranks(self, x: Tensor) -> Tensor:
        """Sum over the ranks, each in the same order."""
        return self.gather(x).sum(0)

    def gather(self, x: Tensor) -> Tensor:
        """Tensors of all ranks [ranks, *shape]."""
        own = x.detach().to(self.device).contiguous()
        rows = own.new_empty(self.size, *own.shape)
        dist.all_gather_into_tensor(rows.view(-1), own.view(-1), group=self.group)
        return rows.to(x.device)

    def knows(self, group: str) -> bool:
        """Return True if the group has these ranks."""
        return group == self.group.group_name

    def send_samples(
        self, sample_N: Tensor, received: Sequence[int], sent: Sequence[int], batch_size: int
    ) -> Tensor | None:
        """Return the samples of the rows that arrive, or None."""
        arrived = self._sent(sample_N, received, sent)
        return arrived if bool(((arrived >= 0) & (arrived < batch_size)).all()) else None

    def _sent(self, sample_N: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        self._exchanges = True
        own = sample_N.to(self.device).contiguous()
        arrived = own.new_empty(sum(received))
        dist.all_to_all_single(arrived, own, list(received), list(sent), group=self.group)
        return arrived

    def meet(self, group: int) -> None:
        """Raise LogicalBatchError if other ranks clip another group now."""
        if self._exchanges and self.gather(torch.tensor([group], device=self.device)).ne(group).any():
            raise LogicalBatchError(
                "Ranks that send each other rows clip different parameters at the same time, so norms would mix "
                "parameters. Run the same modules on all ranks, also an expert that no row has reached."
            )

    def summed(self, x: Tensor) -> Tensor:
        """Sum of terms, bitwise equal on all ranks."""
        x = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=self.group)
        return x

    def sliced(self, name: str, terms_B: Tensor) -> Tensor:
        """Return this rank's slices [B, n] of sums of terms."""
        return self.slices.scatter(name, terms_B.detach())

    def whole_sum(self, name: str, total: Tensor | None, parameter: Tensor) -> Tensor | None:
        """Return a whole sum, perhaps from slices; all ranks call it."""
        if total is None or not self.is_termwise(name):
            return total
        return as_complex(self.slices.whole(name, total, as_real(parameter).shape), parameter.dtype)

    def divide(self, shards: Sequence[SumShard]) -> tuple[list[SumShard], list[SumShard]]:
        """Return the shards that are parts, and those that are whole."""
        if self.spread:
            return list(shards), []
        return [s for s in shards if self.is_cut(s.name)], [s for s in shards if not self.is_cut(s.name)]

    def over_shards(self, parts: Tensor, same: Tensor) -> Tensor:
        """Sum a squared norm over all shards, from those of the two lists of `divide`."""
        return self.over_ranks(parts) + same

    # --- where parts lie

    def whole_shape(self, name: str, part: Sequence[int]) -> torch.Size:
        """Whole shape of a plain parameter, in equal parts."""
        dim = self._cut.get(name)
        return torch.Size(n * self.size if d == dim else n for d, n in enumerate(part))

    def part_shape(self, name: str, whole: Sequence[int]) -> torch.Size:
        """Shape of this rank's part."""
        dim = self._cut.get(name)
        return torch.Size(self._span(n)[1] if d == dim else n for d, n in enumerate(whole))

    def place(self, name: str, whole: Sequence[int], first: int = 0) -> Place:
        """Return where this rank's part lies, from row `first` on."""
        dim, inner = self._cut.get(name), math.prod(whole[1:])
        if dim is None:
            return Place(first * inner)
        begin, length = self._span(whole[dim])
        if dim == 0:
            return Place((begin + first) * inner)
        inside = math.prod(whole[dim + 1 :])
        return Place(first * inner + begin * inside, length * inside, whole[dim] * inside)

    def _span(self, n: int) -> tuple[int, int]:
        most = -(-n // self.size)
        begin = min(n, self.rank * most)
        return begin, min(n, begin + most) - begin

    def joined(self, name: str, part: Tensor) -> Tensor:
        """Whole of a plain parameter or gradient."""
        return torch.cat(list(self.gather(part)), self._cut[name]) if name in self._cut else part


def kinds_of(
    declared: Mapping[str, int | str], shapes: Mapping[str, Sequence[int]]
) -> tuple[dict[str, int], frozenset[str]]:
    """Return the dimension of each parameter in parts, and the parameters whose gradients are terms.

    The first pattern that fits counts. Raise ConfigurationError for other values and undeclared parameters.
    """
    cut: dict[str, int] = {}
    termwise = set()
    for name, shape in shapes.items():
        found = next((kind for pattern, kind in declared.items() if fnmatch.fnmatchcase(name, pattern)), None)
        if found is None:
            raise ConfigurationError(
                f"model_parallel_parts does not mention {name}. If each rank holds a part of it, give a "
                f"dimension (0 for column-wise, 1 for row-wise linear maps). Give 'same' if each holds it and its "
                f"whole gradient, 'sum' if each has a term of its gradient (parts of the sequence). Give 'samples' if "
                f"each has other samples (beside experts in parts)."
            )
        if found == SUM:
            termwise.add(name)
        elif isinstance(found, int) and not isinstance(found, bool) and 0 <= found < len(shape):
            cut[name] = found
        elif found == SAMPLES:
            raise ConfigurationError(
                f"model_parallel_parts gives 'samples' for {name}. Experts on several ranks, each with samples of its "
                f"own, are supported under DistributedDataParallel over the same ranks. Give 'samples' for every "
                f"parameter except the experts' (dimension 0). See docs/model-parallel.md."
            )
        elif found != SAME:
            raise ConfigurationError(
                f"model_parallel_parts gives {found!r} for {name} of shape {tuple(shape)}: it must be one of its "
                f"dimensions, 'same', 'sum' or 'samples'."
            )
    return cut, frozenset(termwise)
