"""Train sharded PyTorch models with differential privacy by one object in the training script."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dpshard.errors import DpshardError

if TYPE_CHECKING:
    from dpshard.applications.advice import advise
    from dpshard.checkpoint.checkpointer import Checkpointer
    from dpshard.checkpoint.scores import PrivateScores
    from dpshard.clipping.thresholds import QuantileTracking
    from dpshard.engine import PrivacyEngine
    from dpshard.noise.correlation import BandedInverse, BandMF
    from dpshard.noise.workloads import Workload
    from dpshard.replacements import replace_unsupported
    from dpshard.sampling.packed_tokens import packed_unit_ids
    from dpshard.sampling.packing import Packing
    from dpshard.sampling.tokens import TokenStore
    from dpshard.sampling.units import UnitDataset, augment
    from dpshard.step.logical_batch import LogicalBatch

__version__ = "0.2.0"

__all__ = [
    "BandMF",
    "BandedInverse",
    "Checkpointer",
    "DpshardError",
    "LogicalBatch",
    "Packing",
    "PrivacyEngine",
    "PrivateScores",
    "QuantileTracking",
    "TokenStore",
    "UnitDataset",
    "Workload",
    "__version__",
    "advise",
    "augment",
    "packed_unit_ids",
    "replace_unsupported",
]

_HOMES = {
    "BandMF": "dpshard.noise.correlation",
    "BandedInverse": "dpshard.noise.correlation",
    "Checkpointer": "dpshard.checkpoint.checkpointer",
    "LogicalBatch": "dpshard.step.logical_batch",
    "Packing": "dpshard.sampling.packing",
    "PrivacyEngine": "dpshard.engine",
    "PrivateScores": "dpshard.checkpoint.scores",
    "QuantileTracking": "dpshard.clipping.thresholds",
    "TokenStore": "dpshard.sampling.tokens",
    "UnitDataset": "dpshard.sampling.units",
    "Workload": "dpshard.noise.workloads",
    "advise": "dpshard.applications.advice",
    "augment": "dpshard.sampling.units",
    "packed_unit_ids": "dpshard.sampling.packed_tokens",
    "replace_unsupported": "dpshard.replacements",
}


def __getattr__(name: str) -> Any:
    # Late: `dpshard --help` does not wait for torch.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
