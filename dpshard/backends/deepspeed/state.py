"""The state of a DeepSpeed training for a checkpoint: fragments of the fp32 partitions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from dpshard.backends.deepspeed.flat_shard import Piece
from dpshard.backends.deepspeed.partitions import ZeroLayout
from dpshard.backends.deepspeed.stage3 import is_gathered
from dpshard.backends.training_state import OPTIMIZER_STATE, Groups, Snapshot, same
from dpshard.errors import CheckpointError, ConfigurationError
from dpshard.names import canonical_name

_INSTEAD = "save by model_engine.save_checkpoint(), with engine.state_dict()"

_Described = dict[str, dict[str, Any]]
"""Optimizer state in a checkpoint, by parameter and name."""


class ZeroState:
    """A TrainingState of a ZeRO optimizer; ConfigurationError if DeepSpeed offloads it in part.

    `zero` is DeepSpeed's wrapper around the optimizer, `core` the module in the DeepSpeedEngine.
    """

    def __init__(
        self, zero: Any, core: nn.Module, layout: ZeroLayout, parameters: Mapping[str, Tensor], rank: int
    ) -> None:
        if getattr(zero, "partial_offload", 1.0) != 1.0:
            raise ConfigurationError(
                f'DeepSpeed offloads a part of the optimizer ("ratio" of offload_optimizer), and keeps two optimizers. '
                f"Offload all of it, or {_INSTEAD}."
            )
        self.zero, self.core, self.layout, self.rank = zero, core, layout, rank
        self.names = {p: name for name, p in parameters.items()}
        self.shapes = {name: torch.Size(getattr(p, "ds_shape", p.shape)) for name, p in parameters.items()}

    @property
    def _optimizer(self) -> Optimizer:
        return self.zero.optimizer

    def snapshot(self) -> Snapshot:
        """Present state; raise CheckpointError for state that is neither per element nor a single value."""
        remembered: dict[str, dict[str, Any]] = {}
        for name, place in self.layout.fragments.items():
            for key, value in self._optimizer.state.get(place.master, {}).items():
                if not isinstance(value, Tensor):
                    kept = value
                elif value.shape == place.master.shape:
                    kept = self._piece(name, value)
                elif value.numel() == 1:
                    kept = value
                else:
                    raise CheckpointError(
                        f"{type(self._optimizer).__name__} stores {key} of shape {tuple(value.shape)} for a partition "
                        f"of shape {tuple(place.master.shape)}, so it fits only this number of ranks. Choose an "
                        f"optimizer that stores one value per element, or {_INSTEAD}."
                    )
                remembered.setdefault(name, {})[key] = kept
        return Snapshot(self._model(), remembered, self._groups())

    @contextmanager
    def receiving(self, saved: Mapping[str, Any], groups: Groups) -> Iterator[Snapshot]:
        """Return a context that reads a checkpoint, and installs it at its end."""
        self._require_fitting(groups)
        described = _described(saved)
        partitions = self._partitions(described)
        remembered: dict[str, dict[str, Any]] = {}
        for name, place in self.layout.fragments.items():
            flat = partitions[id(place.master)]
            remembered[name] = {
                key: self._piece(name, flat[key]) if key in flat else _single(item)
                for key, item in described.get(name, {}).items()
            }
        snapshot = Snapshot(self._model(), remembered, self._groups())
        yield snapshot
        self._load_optimizer(self._with_singles(partitions, remembered), groups)
        self._refresh(snapshot.model)

    # --- what is where

    def _piece(self, name: str, flat: Tensor) -> Tensor:
        place = self.layout.fragments[name]
        return _part(flat[place.offset : place.offset + place.length], place.start, self.shapes[name])

    def _model(self) -> dict[str, Any]:
        return {canonical_name(n): self._own(value) for n, value in self.core.state_dict(keep_vars=True).items()}

    def _own(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value in self.names:
            name = self.names[value]
            return self._piece(name, self.layout.fragments[name].master)
        return _frozen(value, self.rank) if hasattr(value, "ds_tensor") else value.detach()

    def _groups(self) -> Groups:
        # A master is a param group, or in stage 3 a part of one.
        number = {id(master): i for i, master in enumerate(self.layout.masters)}
        group_of = getattr(self.zero, "sub_group_to_group_id", None) or {i: i for i in number.values()}
        groups = [group | {"params": []} for group in self._optimizer.param_groups]
        for name, place in self.layout.fragments.items():
            groups[group_of[number[id(place.master)]]]["params"].append(name)
        return groups

    # --- reading

    def _require_fitting(self, saved: Groups) -> None:
        own = self._groups()
        if [set(group["params"]) for group in own] != [set(group["params"]) for group in saved]:
            raise CheckpointError(
                f"The checkpoint has {len(saved)} parameter groups, the optimizer {len(own)}, or their parameters "
                f"differ: the checkpoint belongs to another model or optimizer."
            )
        missing = sorted({key for a, b in zip(own, saved, strict=True) for key in a.keys() - b.keys()})
        if missing:
            raise CheckpointError(
                f"The checkpoint lacks {', '.join(missing)} of {type(self._optimizer).__name__}: it belongs to another "
                f"optimizer."
            )

    def _partitions(self, described: _Described) -> dict[int, dict[str, Any]]:
        kinds: dict[str, list[bool]] = {}
        for name in self.shapes:
            for key, item in described.get(name, {}).items():
                of_elements = isinstance(item, TensorStorageMetadata) and item.size == self.shapes[name]
                kinds.setdefault(key, []).append(of_elements)
        found: dict[int, dict[str, Any]] = {id(master): {} for master in self.layout.masters}
        for name, place in self.layout.fragments.items():
            master, own = place.master, found[id(place.master)]
            for key, item in described.get(name, {}).items():
                # A value per partition looks like a 0-dimensional parameter's, so all must agree.
                if all(kinds[key]) and key not in own:
                    known = self._optimizer.state.get(master, {}).get(key)
                    fits = isinstance(known, Tensor) and known.shape == master.shape
                    fits = fits and known.dtype == item.properties.dtype
                    own[key] = known if fits else torch.zeros_like(master, dtype=item.properties.dtype).detach()
        return found

    def _with_singles(
        self, partitions: Mapping[int, dict[str, Any]], remembered: Mapping[str, Mapping[str, Any]]
    ) -> dict[int, dict[str, Any]]:
        states = {master: dict(flat) for master, flat in partitions.items()}
        for name, place in self.layout.fragments.items():
            flat, state = partitions[id(place.master)], states[id(place.master)]
            for key, value in remembered[name].items():
                if key not in flat and not same(state.setdefault(key, value), value):
                    raise CheckpointError(
                        f"{key} of {name} is {value}, and {state[key]} of another parameter, but DeepSpeed's optimizer "
                        f"stores one value for both. Resume with the back-end that saved the checkpoint."
                    )
        return states

    def _load_optimizer(self, partitions: Mapping[int, dict[str, Any]], groups: Groups) -> None:
        optimizer, stage_3 = self._optimizer, hasattr(self.zero, "_set_fp32_optimizer_param_groups")
        if stage_3:
            self.zero._set_fp32_optimizer_param_groups()
        held = [group["params"] for group in optimizer.param_groups]
        number = {id(master): i for i, master in enumerate(master for masters in held for master in masters)}
        optimizer.load_state_dict(
            {
                "state": {number[master]: state for master, state in partitions.items() if state},
                "param_groups": [
                    group | {"params": [number[id(master)] for master in masters]}
                    for group, masters in zip(groups, held, strict=True)
                ],
            }
        )
        if stage_3:
            self.zero._clear_fp32_optimizer_param_groups()
        else:
            self.zero._hp_optimizer_states_linked = False  # for safe_get_full_optimizer_state()

    def _refresh(self, model: Mapping[str, Any]) -> None:
        others = {name: value for name, value in model.items() if not isinstance(value, Piece)}
        self.core.load_state_dict(others, strict=False)  # this loads modules' extra state
        if hasattr(self.zero, "update_lp_params"):
            self.zero.update_lp_params()
            return
        for number in range(len(self.layout.masters)):
            self.zero._reassign_or_swap_out_partitioned_parameters(number)
        gathered = [p for p in self.core.parameters() if is_gathered(p)]
        if gathered:
            gathered[0].partition(gathered)  # type: ignore[attr-defined]
            gathered[0].all_gather(gathered)  # type: ignore[attr-defined]


def _part(elements: Tensor, start: int, shape: Sequence[int]) -> Tensor:
    # DeepSpeed does not write empty tensors.
    return Piece(elements, start, shape) if 0 not in shape else elements.detach().new_empty(shape)


def _frozen(parameter: Any, rank: int) -> Tensor:
    start = min(rank * parameter.partition_numel(), parameter.ds_numel)
    elements = parameter.ds_tensor.reshape(-1)[: parameter.ds_numel - start]
    return _part(elements, start, parameter.ds_shape)


def _described(saved: Mapping[str, Any]) -> _Described:
    found: _Described = {}
    for name, item in saved.items():
        if name.startswith(OPTIMIZER_STATE):
            parameter, _, key = name.removeprefix(OPTIMIZER_STATE).rpartition(".")
            found.setdefault(parameter, {})[key] = item
    return found


def _single(item: Any) -> Any:
    return torch.zeros(item.size, dtype=item.properties.dtype) if isinstance(item, TensorStorageMetadata) else b""
