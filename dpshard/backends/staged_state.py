"""Model and optimizer of a pipeline for a checkpoint: stages save under names of the whole model."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dpshard.backends.training_state import NAMING, Groups, NamedState, Snapshot, differing
from dpshard.errors import ConfigurationError


class StagedState(NamedState):
    """The TrainingState of one stage. All stages make it together, and pass values by `exchange`.

    Raises ConfigurationError, on all ranks, for different tensors of one name.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        names: Mapping[Tensor, str],
        exchange: Callable[[Any], list[Any]],
    ) -> None:
        super().__init__(model, optimizer, names)
        self._exchange = exchange
        self._reshard()
        self._require_one_of_each_name(get_model_state_dict(model))

    def snapshot(self) -> Snapshot:
        """Present state, with the parameter groups of all stages."""
        own = super().snapshot()
        self._require_one_of_each_name(own.model)
        return own._replace(groups=joined(self._exchange(list(map(_on_cpu, own.groups)))))

    def _require_one_of_each_name(self, model: Mapping[str, Any]) -> None:
        count = Counter(name for names in self._exchange(list(model)) for name in names)
        own = {(name, _place(model[name])): _digest(model[name]) for name in model if count[name] > 1}
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)  # with other pipelines, too, because they would wait for one that raises
        seen: dict[Any, tuple[int, str]] = {}
        for rank, digests in enumerate(everyone):
            for place, digest in digests.items():
                first, known = seen.setdefault(place, (rank, digest))
                if known != digest:
                    raise ConfigurationError(
                        f"{place[0]} is another tensor on rank {rank} than on rank {first}. Several stages of a "
                        f"pipeline have this name, so a checkpoint would lose one of them. Give the layers of a stage "
                        f"the names that they have in the whole model (a ModuleDict keeps them, a list counts from 0). "
                        f"Or make the buffer persistent=False."
                    )


def joined(stages: Sequence[Groups]) -> Groups:
    """Join the parameter groups of all stages; groups with equal settings become one."""
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


def _place(value: Any) -> tuple[int, ...]:
    """Return which shard of `value` this rank holds."""
    return tuple(value.device_mesh.get_coordinate() or ()) if isinstance(value, DTensor) else ()


def _digest(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    value = value.to_local() if isinstance(value, DTensor) else value
    content = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {list(value.shape)} {hashlib.sha256(content).hexdigest()}"
