"""Clipping groups, and the styles that form them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from torch import Tensor, nn

from dpshard.config import ClippingStyle, require_choice
from dpshard.errors import ConfigurationError
from dpshard.names import canonical_name

STYLES: tuple[str, ...] = get_args(ClippingStyle)


@dataclass(frozen=True, slots=True)
class ClippingGroup:
    """Parameters with a common norm."""

    index: int
    label: str
    """Module path, parameter name, or "all-layer"."""
    names: tuple[str, ...]
    """In the order of `named_parameters()`."""
    threshold: float
    """R_m: largest norm of one sample's contribution."""


def sensitivity(groups: Iterable[ClippingGroup]) -> float:
    """Return sqrt(sum R_m^2): L2 sensitivity of the clipped sums to adding or removing one sample."""
    return math.sqrt(sum(group.threshold**2 for group in groups))


def partition(
    model: nn.Module, style: str | Sequence[Sequence[str]], trainable: Sequence[str], max_grad_norm: float
) -> tuple[ClippingGroup, ...]:
    """Return the groups of `style` over the `trainable` parameters."""
    groups = labelled(model, style, trainable)
    return form_groups(groups, trainable=trainable, max_grad_norm=max_grad_norm)


def labelled(model: nn.Module, style: str | Sequence[Sequence[str]], trainable: Sequence[str]) -> dict[str, list[str]]:
    """Parameter names of each clipping group, by label.

    "layer-wise": by the first module that owns the parameter. "block-wise": by the outermost element of a ModuleList, a
    Sequential, or a ModuleDict of one class; other parameters form one group. Raise ConfigurationError for an unknown
    style.
    """
    if not isinstance(style, str):
        return _listed(model, style)
    require_choice("clipping_style", style, STYLES)
    groups: dict[str, list[str]] = {}
    blocks = _blocks(model) if style == "block-wise" else []
    for name in trainable:
        if style == "all-layer":
            label = "all-layer"
        elif style == "param-wise":
            label = name
        elif style == "layer-wise":
            label = name.rpartition(".")[0] or "(root)"
        else:
            label = next((block for block in blocks if name.startswith(f"{block}.")), "outside of blocks")
        groups.setdefault(label, []).append(name)
    return groups


def form_groups(
    partition: Mapping[str, Sequence[str]], *, trainable: Sequence[str], max_grad_norm: float
) -> tuple[ClippingGroup, ...]:
    """Return groups with thresholds max_grad_norm / sqrt(M).

    Raise ConfigurationError unless every trainable parameter is in exactly one group.
    """
    seen: dict[str, str] = {}
    for label, names in partition.items():
        for name in names:
            if name not in trainable:
                raise ConfigurationError(
                    f"clipping_style: {name!r} is not a trainable parameter of the model. Known: {_some(trainable)}."
                )
            if seen.get(name, label) != label:
                raise ConfigurationError(
                    f"clipping_style: {name!r} is in two groups ({seen[name]!r} and {label!r}); "
                    f"a parameter has one clipping group."
                )
            seen[name] = label
    missing = [name for name in trainable if name not in seen]
    if missing:
        raise ConfigurationError(
            f"clipping_style: no group holds {_some(missing)}; every trainable parameter must be clipped. "
            f"Add it to a list, or freeze it with requires_grad_(False)."
        )
    filled = [(label, tuple(dict.fromkeys(names))) for label, names in partition.items() if names]
    threshold = max_grad_norm / math.sqrt(len(filled))
    return tuple(ClippingGroup(i, label, names, threshold) for i, (label, names) in enumerate(filled))


def _listed(model: nn.Module, style: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    first: dict[Tensor, str] = {}
    named = [(canonical_name(name), p) for name, p in model.named_parameters(remove_duplicate=False)]
    known = {name: first.setdefault(p, name) for name, p in named}
    sound = isinstance(style, Sequence) and all(
        isinstance(group, Collection) and not isinstance(group, str) and all(isinstance(name, str) for name in group)
        for group in style
    )
    if not sound:
        raise ConfigurationError(
            f"clipping_style={style!r}: it must be one of {list(STYLES)}, or a list of groups, each a list of "
            f"parameter names, such as [['0.weight', '0.bias'], ['2.weight']]."
        )
    return {f"group {i}": [known.get(canonical_name(name), name) for name in group] for i, group in enumerate(style)}


def _blocks(model: nn.Module) -> list[str]:
    found: list[str] = []
    for path, module in model.named_modules():
        path = canonical_name(path)
        if _is_row(module) and not any(path.startswith(f"{b}.") for b in found):
            prefix = f"{path}." if path else ""
            if not any(path == block for block in found):
                found += [f"{prefix}{name}" for name, _ in module.named_children()]
    return found


def _is_row(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleDict):
        return len(module) > 1 and len({type(child) for child in module.values()}) == 1
    return isinstance(module, (nn.ModuleList, nn.Sequential))


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
