"""A use of parameters in a forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dpshard.errors import BatchLayoutError
from dpshard.records import Record
from dpshard.rules.call import Build, Source, records_of


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """One use of sources; `build` makes records of the tensors that arrive."""

    sources: tuple[Source, ...]
    build: Build
    copies: bool = False
    """True if the slot's template holds per-sample copies of its source."""
    termwise: bool = False
    """True if its records are terms; see [Note: Norms of parts]."""
    call: str = ""
    """In a compiled region, the function and its batch axes."""

    def records(self, tensors: Sequence[Tensor]) -> Sequence[tuple[Source, Record]]:
        """Return the records of arrived tensors, with their sources."""
        try:
            return records_of(self.sources, self.build, tensors)
        except BatchLayoutError as error:
            raise BatchLayoutError(f"{', '.join(source.label for source in self.sources)}: {error}") from error
