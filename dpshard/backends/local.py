"""One process, which holds all parameters and samples."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from dpshard.backends.backend import Backend
from dpshard.backends.communicator import Communicator
from dpshard.backends.grad_store import DotGradStore
from dpshard.backends.model_parts import DeclaredParts
from dpshard.backends.roles import Reduction, Take
from dpshard.backends.sharding import Unsharded
from dpshard.errors import DpshardError
from dpshard.records import as_real


def local_backend(model: nn.Module, declared: DeclaredParts | None = None) -> Backend:
    """Back-end of one process, or of plain parts of a model."""
    if declared is None:
        sharding = Unsharded(model)
        store = DotGradStore(sharding)
        return Backend("one process", Communicator(), sharding, NoReduction(store), store)
    sharding, data = Unsharded(model), Communicator()
    everyone, grid = sharding.take_declared(declared, data)
    store = DotGradStore(sharding)
    return Backend(f"parts on {everyone.world_size} ranks", everyone, sharding, NoReduction(store), store, data, grid)


class NoReduction(Reduction):
    """Nothing to reduce."""

    def __init__(self, store: DotGradStore) -> None:
        self._store = store

    def reduce(self, names: Sequence[str], take: Take) -> list[Tensor | None]:
        """Add the sums to `.grad`; return None for each, because autograd must add nothing there."""
        self._store.begins(lambda: None)
        self.add(names, take)
        return [None] * len(names)

    def add(self, names: Sequence[str], take: Take) -> None:
        """Take the clipped sums."""
        self._store.require_untouched(names)
        self._store.add_sums(names, take)

    def runs_everywhere(self, *, last: bool) -> bool:
        """Return False: no rank waits for this one."""
        return False

    def fault(self) -> DpshardError | None:
        """Error that forbids a release, or None."""
        return self._store.fault()


class DirectReduction(NoReduction):
    """Adds this rank's part of each sum to `.grad`."""

    def add(self, names: Sequence[str], take: Take) -> None:
        """Take the clipped sums."""
        self._store.require_untouched(names)
        for name in names:
            total = self._store.whole_sum(name, take(name))
            if total is not None:
                self._store.add_shard(name, as_real(total))
