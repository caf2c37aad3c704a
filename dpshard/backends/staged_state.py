"""Model and optimizer of a pipeline for a checkpoint: stages save under names of the whole model.

So a checkpoint is that of one process, whichever stages wrote it, and other stages read what they hold.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.optim import Optimizer

from dpshard.backends.stages import Stages
from dpshard.backends.training_state import NAMING, Groups, NamedState, Snapshot, differing
from dpshard.errors import ConfigurationError


class StagedState(NamedState):
    """The TrainingState of one stage; all stages make it together.

    Raises ConfigurationError, on all ranks, if stages have different tensors of one name.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, names: Mapping[Tensor, str], stages: Stages) -> None:
        super().__init__(model, optimizer, names)
        self._stages = stages
        self._require_one_of_each_name(get_model_state_dict(model))

    def snapshot(self) -> Snapshot:
        """See TrainingState; the parameter groups are those of all stages."""
        own = super().snapshot()
        self._require_one_of_each_name(own.model)
        # Not by `exchange`, which would make lists of tuples.
        return own._replace(groups=joined(self._stages.exchange_objects(list(map(_on_cpu, own.groups)))))

    def _require_one_of_each_name(self, model: Mapping[str, Any]) -> None:
        """Raise ConfigurationError unless frozen parameters and buffers of one name are equal: one would be lost."""
        count = Counter(name for names in self._stages.exchange(list(model)) for name in names)
        own = {name: _digest(model[name]) for name in model if count[name] > 1}
        seen: dict[str, tuple[int, str]] = {}
        for rank, digests in enumerate(self._stages.exchange(own)):
            for name, digest in digests.items():
                first, known = seen.setdefault(name, (rank, digest))
                if known != digest:
                    raise ConfigurationError(
                        f"{name} is another tensor on rank {rank} of the pipeline than on rank {first}, so a "
                        f"checkpoint would lose one of them. Give the layers of a stage the names that they have in "
                        f"the whole model (a ModuleDict keeps them, a list counts from 0), or make the buffer "
                        f"persistent=False."
                    )


def joined(stages: Sequence[Groups]) -> Groups:
    """Return the parameter groups of all stages: those of the same settings are one, but not two of a stage."""
    found: Groups = []
    for groups in stages:
        others = list(found)
        for group in groups:
            twin = next((other for other in others if not differing(other, group)), None)
            if twin is None:
                found.append(dict(group))
                continue
            others = [other for other in others if other is not twin]
            twin.update({key: [*twin[key], *group[key]] for key in NAMING & twin.keys() & group.keys()})
    return found


def _on_cpu(group: dict[str, Any]) -> dict[str, Any]:
    return {key: x.cpu() if isinstance(x, Tensor) else x for key, x in group.items()}


def _digest(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    content = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {list(value.shape)} {hashlib.sha256(content).hexdigest()}"
