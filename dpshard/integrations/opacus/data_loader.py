"""The data loader that `make_private` returns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from dpshard.config import SamplingName, steps_of_epoch
from dpshard.engine import PrivacyEngine
from dpshard.errors import ConfigurationError
from dpshard.integrations.loaders import batches_of
from dpshard.integrations.opacus.progress import Progress
from dpshard.integrations.opacus.settings import refuse_unaccounted

_REPLACED = (SequentialSampler, RandomSampler, DistributedSampler)
"""Samplers that only order samples, or assign them to ranks; the engine's sampling replaces them."""


class DPDataLoader:
    """The data set of a DataLoader, sampled by the engine, with as many steps per round.

    Yields logical batches whole, or in micro-batches of at most `physical_batch_size` rows, which the script may
    reorder. A batch without a sample has one row, which contributes nothing.
    """

    def __init__(self, loader: DataLoader[Any], *, physical_batch_size: int | None = None) -> None:
        self.original = loader
        self.physical_batch_size = physical_batch_size
        self.dataset = loader.dataset
        self.batch_size = expected_batch_size(loader)
        self.sample_rate = self.batch_size / len(loader.dataset)  # type: ignore[arg-type]
        self._run: tuple[PrivacyEngine, Progress] | None = None

    @classmethod
    def from_data_loader(
        cls, data_loader: DataLoader[Any], *, generator: None = None, distributed: bool = False
    ) -> DPDataLoader:
        """Return a loader that `make_private(data_loader=...)` completes; before that it cannot draw.

        `distributed` has no effect. Raises ConfigurationError for a `generator`.
        """
        refuse_unaccounted(batch_first=True, noise_generator=generator)
        return cls(original_loader(data_loader))

    @property
    def is_private(self) -> bool:
        """True after `make_private`."""
        return self._run is not None

    def complete(self, engine: PrivacyEngine, progress: Progress) -> None:
        """Draw batches by this engine from now on."""
        self._run = engine, progress

    @property
    def progress(self) -> Progress:
        """Progress within the logical batch; ConfigurationError before `make_private`."""
        return self._require_run()[1]

    def _require_run(self) -> tuple[PrivacyEngine, Progress]:
        if self._run is None:
            raise ConfigurationError(
                "This DPDataLoader has no engine, which would account for its draws: pass it to "
                "PrivacyEngine().make_private(data_loader=...) first."
            )
        return self._run

    def in_physical_batches(self, size: int) -> DPDataLoader:
        """Return this loader in micro-batches of at most `size` rows."""
        small = DPDataLoader(self.original, physical_batch_size=size)
        small.complete(*self._require_run())
        return small

    def __len__(self) -> int:
        steps = self._steps
        if self.physical_batch_size is None:
            return steps
        return math.ceil(steps * self.batch_size / self.physical_batch_size)

    @property
    def _steps(self) -> int:
        sampling = "poisson" if self._run is None else self._run[0].mechanism.sampling
        return steps_of_round(self.original, self.batch_size, sampling)

    def __iter__(self) -> Iterator[Any]:
        engine, progress = self._require_run()
        for logical_batch in batches_of(self.original, engine, self.physical_batch_size, steps=self._steps, pad=False):
            progress.batch = logical_batch
            yield from logical_batch


def expected_batch_size(loader: DataLoader[Any]) -> int:
    """Return the size by which Opacus divides."""
    return max(1, len(loader.dataset) // len(loader))  # type: ignore[arg-type]


def steps_of_round(loader: DataLoader[Any], batch_size: int, sampling: SamplingName) -> int:
    """Return the logical batches of an epoch of balls-in-bins, else of `loader`."""
    if sampling == "poisson":
        return len(loader)
    return steps_of_epoch(len(loader.dataset), batch_size)  # type: ignore[arg-type]


def original_loader(loader: DataLoader[Any] | DPDataLoader) -> DataLoader[Any]:
    """Return the user's DataLoader; ConfigurationError for options that would be lost."""
    if isinstance(loader, DPDataLoader):
        return loader.original
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(f"data_loader is of type {type(loader).__name__}; pass a torch.utils.data.DataLoader.")
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", loader.sampler)):
        if not isinstance(sampler, _REPLACED):
            raise ConfigurationError(
                f"data_loader has the sampler {type(sampler).__name__}, which Poisson sampling would replace. To "
                f"train on a part of the data pass a torch.utils.data.Subset; unequal weights cannot be accounted."
            )
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        raise ConfigurationError(
            f"data_loader has the batch sampler {type(loader.batch_sampler).__name__}, which Poisson sampling would "
            f"replace: give batch_size= instead."
        )
    if loader.multiprocessing_context is not None:
        raise ConfigurationError(
            "data_loader has a multiprocessing_context, which engine.batches does not pass on: leave it out."
        )
    return loader
