"""Experts on several ranks, each with its own samples: rows travel to the experts' ranks, and return.

An expert's records, norms and clip coefficients cover the W * B samples of all ranks. Each rank has different elements
of a sample's gradient, so squared norms add up. All ranks get the same coefficients. An expert's clipped sum is
complete on its rank. Rows that leave a rank have their samples' numbers plus (rank + 1) * B, unlike those of the other
rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from dpshard.backends.communicator import Communicator
from dpshard.backends.model_parts import SAMPLES, DeclaredParts, ModelParts, kinds_of
from dpshard.errors import ConfigurationError, LogicalBatchError


def are_experts(declared: DeclaredParts) -> bool:
    """Return True if experts meet samples of several ranks."""
    return SAMPLES in declared[1].values()


class ExpertParts(ModelParts):
    """The ranks that hold experts and share the data."""

    of_samples = True

    @classmethod
    def declared(cls, declared: DeclaredParts, parameters: Mapping[str, Tensor], device: torch.device) -> ExpertParts:
        """Return the declared parts: 0 for experts' parameters, "samples" for others."""
        group, kinds = declared
        if wrong := [kind for kind in kinds.values() if kind not in (0, SAMPLES) or isinstance(kind, bool)]:
            raise ConfigurationError(
                f"model_parallel_parts gives {wrong[0]!r} beside 'samples'. If every rank has its own samples, give 0 "
                f"for the parameters of experts, [experts of the rank, ...], and 'samples' for all others."
            )
        known = {pattern: "same" if kind == SAMPLES else kind for pattern, kind in kinds.items()}
        cut, _ = kinds_of(known, {name: p.shape for name, p in parameters.items()})
        half = [name for name in cut if parameters[name].dtype in (torch.float16, torch.bfloat16)]
        if half:
            raise ConfigurationError(
                f"{half[0]} is in half precision, which experts on several ranks do not support. Keep it in float32, "
                f"and use torch.autocast."
            )
        return cls(group, device, cut)

    @property
    def in_terms(self) -> bool:
        """True: only engine.batches gives all ranks equally many samples."""
        return True

    def note_inputs(self, inputs: Iterable[Tensor]) -> None:
        """Do nothing: each rank has inputs of its own."""

    # --- numbers of samples

    def norm_sq(self, cut_B: Tensor, whole_B: Tensor) -> Tensor:
        """Squared norms [B]; no rank has another's elements or samples."""
        return self.over_ranks(cut_B + whole_B)

    def pad_to_all(self, x_B: Tensor) -> Tensor:
        """Return [W * B] numbers: `x_B` for the rank's own samples, else 0."""
        all_B = x_B.new_zeros(self.size, len(x_B))
        all_B[self.rank] = x_B
        return all_B.view(-1)

    def select_own(self, x_B: Tensor) -> Tensor:
        """Numbers [B] of the rank's own samples."""
        return x_B.view(self.size, -1)[self.rank]

    def gather_samples(self, x_B: Tensor) -> Tensor:
        """Numbers [W * B] of all ranks' samples."""
        return self.gather(x_B).view(-1)

    # --- rows

    def send_samples(
        self, sample_N: Tensor, received: Sequence[int], sent: Sequence[int], batch_size: int
    ) -> Tensor | None:
        """Return the samples of the rows that arrive, or None."""
        arrived = self._sent(sample_N, received, sent)
        sizes = self.gather(torch.tensor([batch_size], device=self.device)).view(-1)
        if bool((sizes != batch_size).any()):
            raise LogicalBatchError(
                f"Ranks that send each other rows have {sizes.tolist()} samples. Take the micro-batches from "
                f"engine.batches(...), which gives all ranks equally many."
            )
        if bool((arrived < batch_size).all()):
            source = torch.arange(self.size, device=self.device)
            times = torch.tensor(list(received), device=self.device)
            return arrived + (source.repeat_interleave(times) + 1) * batch_size
        home = arrived - (self.rank + 1) * batch_size
        return home if bool(((home >= 0) & (home < batch_size)).all()) else None

    def sample_count(self, batch_size: int, names: Collection[str]) -> int:
        """Return the number of samples whose rows meet these parameters."""
        return batch_size * self.size if any(map(self.is_cut, names)) else batch_size

    def sample_numbers(self, sample_N: Tensor | None, batch_size: int, names: Collection[str]) -> Tensor | None:
        """Return the samples as these parameters' records number them, or None."""
        of_experts = {self.is_cut(name) for name in names}
        if of_experts == {False}:
            return sample_N if sample_N is None or bool((sample_N < batch_size).all()) else None
        away = sample_N is not None and of_experts == {True} and bool((sample_N >= batch_size).all())
        return sample_N - batch_size if away and sample_N is not None else None


class ExpertRanks:
    """All ranks, if all share the data and hold experts; else raises ConfigurationError."""

    def __init__(self, data: Communicator, parts: ModelParts, everyone: Communicator) -> None:
        ranks = torch.distributed.get_process_group_ranks
        if data.group is None or ranks(data.group) != ranks(parts.group) or parts.size != everyone.world_size:
            raise ConfigurationError(
                f"Experts lie on {parts.size} ranks, {data.world_size} ranks share the data, and there are "
                f"{everyone.world_size}: all of these must be the same ranks. Give model_parallel_group the "
                f"process group of DistributedDataParallel."
            )

    def whole(self, ranks_WL: Tensor) -> Tensor:
        """Digests [W, L] of all sums, from experts' and reduced ones [W, 2 L + 1]."""
        experts_WL, reduced_WL = ranks_WL[:, :-1].chunk(2, 1)
        return experts_WL.sum(0) + reduced_WL
