"""Stages of a pipeline: each rank of a group holds other layers of one model.

[Note: Stages] See docs/model-parallel.md. Stages share one secret, draw, ledger and R. A group on several stages keeps
its records until the schedule's step is done; then stages add up norms. Names are unique, since noise is keyed by them.
Checksums before the release show that all have run the same chunks of the same draw.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpshard.backends.model_parts import ModelParts
from dpshard.clipping.groups import ClippingGroup, form_groups, labelled
from dpshard.errors import ConfigurationError

if TYPE_CHECKING:
    from dpshard.backends.training_state import TrainingState

STAGE = "stage"
"""Declares parameters that only this rank holds."""


def are_stages(declared: Mapping[str, Any]) -> bool:
    """Return True if all parameters are 'stage'; raise ConfigurationError if only some are."""
    kinds = list(declared.values())
    if STAGE in kinds and kinds != [STAGE] * len(kinds):
        raise ConfigurationError(
            f"model_parallel_parts={dict(declared)!r}: only one stage of a pipeline holds a parameter, so all are "
            f"'stage'. Tensor or context parallelism within a stage is not supported."
        )
    return STAGE in kinds


class Stages(ModelParts):
    """The ranks of one pipeline, which make this object together.

    Raises ConfigurationError, on all ranks, without trainable parameters, and for two of one name.
    """

    meets = False
    unlike = (
        "The stages of the pipeline ran other chunks than each other, or chunks of other draws, so a sample's norm "
        "would be that of parts of several samples. Loop over engine.batches(...) of one data set and micro-batch size "
        "on all ranks, and call the schedule's step() once for each micro-batch."
    )

    def __init__(self, group: dist.ProcessGroup, device: torch.device, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(group, device, {})
        self._chunks = 0  # checksum since the last release
        own = [(name, tuple(p.shape), str(p.dtype), p.is_complex()) for name, p in parameters.items()]
        self.everywhere: list[tuple[str, tuple[int, ...], str, bool]] = []
        """Name, shape, dtype and whether it is complex, of all trainable parameters in the order of stages."""
        self._owner: dict[str, int] = {}
        for rank, some in enumerate(self.exchange(own)):
            if not some:
                raise ConfigurationError(
                    f"Stage {rank} of the pipeline has no trainable parameter. Divide the model so that every stage "
                    f"trains some."
                )
            for name, shape, dtype, is_complex in some:
                if name in self._owner:
                    raise ConfigurationError(
                        f"{name} is a parameter of the stages on ranks {self._owner[name]} and {rank} of the group. "
                        f"Noise is keyed by names. Give the layers of a stage the names that they have in the whole "
                        f"model (a ModuleDict keeps them, a list counts from 0). A weight that two stages share (tied "
                        f"embedding and head) is not supported: its gradient is a sum over ranks."
                    )
                self._owner[name] = rank
                self.everywhere.append((name, shape, dtype, is_complex))

    @property
    def facts(self) -> str:
        """Declarations that ranks must share."""
        return STAGE

    def is_cut(self, name: str) -> bool:
        """Return True if ranks hold parts of the parameter."""
        return True

    def exchange(self, value: Any) -> list[Any]:
        """Values of all ranks, of any type that pickles."""
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = self.gather(torch.tensor([len(own)], device="cpu")).flatten().tolist()
        rows = self.gather(torch.cat([own, own.new_zeros(max(lengths) - len(own))]))
        return [pickle.loads(row[:n].numpy().tobytes()) for row, n in zip(rows.cpu(), lengths, strict=True)]

    # --- clipping groups

    def partition(
        self, model: nn.Module, style: str | Sequence[Sequence[str]], trainable: Sequence[str], max_grad_norm: float
    ) -> tuple[ClippingGroup, ...]:
        """Return the groups of the whole model; groups with equal labels are joined.

        If one rank raises ConfigurationError, all raise it.
        """
        try:
            own: tuple[str, Any] = ("", labelled(model, style, trainable))
        except ConfigurationError as error:
            own = (str(error), {})
        groups: dict[str, list[str]] = {}
        for rank, (error, found) in enumerate(self.exchange(own)):
            if error:
                raise ConfigurationError(error)
            for label, names in found.items():
                # A list may name parameters of all stages, and unknown ones.
                held = [name for name in names if self._owner.get(name, rank) == rank]
                groups.setdefault(label, []).extend(held)
        return form_groups(groups, trainable=list(self._owner), max_grad_norm=max_grad_norm)

    def spanning(self, groups: Sequence[ClippingGroup]) -> frozenset[int]:
        """Return the indices of groups on several stages."""
        return frozenset(group.index for group in groups if len({self._owner[name] for name in group.names}) > 1)

    # --- what stages have run

    def note_chunk(self, *identity: Any) -> None:
        """Add a chunk that this stage runs to the checksum, in any order."""
        digest = hashlib.sha256(repr(identity).encode()).digest()
        self._chunks = (self._chunks + int.from_bytes(digest[:7], "little")) % (1 << 62)

    def take_inputs(self) -> Tensor:
        """Return a checksum [1], int64, of chunks since the last call."""
        seen, self._chunks = self._chunks, 0
        return torch.tensor([seen], device=self.device)


class OfStages:
    """Facts about all stages, for the Sharding of one stage. It comes before the Sharding in the bases."""

    parts: Stages
    outermost: nn.Module
    names: dict[Tensor, str]

    @property
    def passes_rows(self) -> bool:
        """True: the next stage takes the output's first dimension for the samples."""
        return True

    @property
    def everywhere(self) -> Sequence[Any]:
        """Trainable parameters of all stages."""
        return self.parts.everywhere

    @property
    def elements(self) -> int:
        """Number of real trainable numbers of all stages."""
        return sum(math.prod(shape) * (1 + is_complex) for _, shape, _, is_complex in self.parts.everywhere)

    def training_state(self, optimizer: Any) -> TrainingState:
        """Return model and `optimizer` of this stage for a checkpoint."""
        from dpshard.backends.staged_state import StagedState

        return StagedState(self.outermost, optimizer, self.names, self.parts.exchange)
