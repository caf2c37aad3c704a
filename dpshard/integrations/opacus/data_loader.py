"""The data loader that `make_private` returns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NoReturn

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from dpshard.config import SamplingName, steps_of_epoch
from dpshard.engine import PrivacyEngine
from dpshard.errors import ConfigurationError
from dpshard.integrations.loaders import loading_options
from dpshard.integrations.opacus.progress import Progress

_REPLACED = (SequentialSampler, RandomSampler, DistributedSampler)
"""Samplers that only order samples, or assign them to ranks: Poisson sampling replaces them."""


class DPDataLoader:
    """The data set of a DataLoader, sampled by the engine, with as many steps per round.

    It yields logical batches whole, or in micro-batches of at most `physical_batch_size` rows. All rows are samples,
    which the script may reorder. A batch without a sample has one row that counts nothing.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        engine: PrivacyEngine,
        progress: Progress,
        *,
        physical_batch_size: int | None = None,
    ) -> None:
        self.original = loader
        self.engine = engine
        self.progress = progress
        self.physical_batch_size = physical_batch_size
        self.dataset = loader.dataset
        self.batch_size = engine.mechanism.schedule[0]
        self.sample_rate = self.batch_size / engine.mechanism.sample_size

    @classmethod
    def from_data_loader(cls, data_loader: DataLoader[Any], **options: Any) -> NoReturn:
        """Refuse: the draws belong to an engine."""
        raise ConfigurationError(
            "DPDataLoader.from_data_loader draws batches without an engine, which cannot account for them. Use the "
            "loader that PrivacyEngine().make_private(data_loader=...) returns."
        )

    def in_physical_batches(self, size: int) -> DPDataLoader:
        """Return this loader in micro-batches of at most `size` rows."""
        return DPDataLoader(self.original, self.engine, self.progress, physical_batch_size=size)

    def __len__(self) -> int:
        """Return the logical batches of a round, or as in Opacus the expected number of micro-batches."""
        steps = self._steps
        if self.physical_batch_size is None:
            return steps
        return math.ceil(steps * self.batch_size / self.physical_batch_size)

    @property
    def _steps(self) -> int:
        return steps_of_round(self.original, self.batch_size, self.engine.mechanism.sampling)

    def __iter__(self) -> Iterator[Any]:
        batches = self.engine.batches(
            self.dataset,
            self.physical_batch_size,
            steps=self._steps,
            pad=False,
            **loading_options(self.original),
        )
        for logical_batch in batches:
            self.progress.batch = logical_batch
            yield from logical_batch


def steps_of_round(loader: DataLoader[Any], batch_size: int, sampling: SamplingName) -> int:
    """Return the logical batches of a round: an epoch of balls-in-bins, else as many as `loader` has."""
    if sampling == "poisson":
        return len(loader)
    return steps_of_epoch(len(loader.dataset), batch_size)  # type: ignore[arg-type]


def original_loader(loader: DataLoader[Any] | DPDataLoader) -> DataLoader[Any]:
    """Return the user's DataLoader; raise ConfigurationError for samplers and options that would be lost."""
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
