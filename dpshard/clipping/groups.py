"""Clipping styles: which parameters of a model form a clipping group."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import get_args

from torch import Tensor, nn

from dpshard.clipping.functions import ClippingGroup, form_groups
from dpshard.config import ClippingStyle, check_choice
from dpshard.errors import ConfigurationError
from dpshard.names import canonical_name

STYLES: tuple[str, ...] = get_args(ClippingStyle)


def partition(
    model: nn.Module, style: str | Sequence[Sequence[str]], trainable: Sequence[str], max_grad_norm: float
) -> tuple[ClippingGroup, ...]:
    """Return the clipping groups of `style` over the parameters named in `trainable`.

    "layer-wise": by the module that owns the parameter (a shared one by its first owner). "block-wise": by the
    outermost element of a ModuleList or Sequential that holds it; other parameters form one more group. Raises
    ConfigurationError for an unknown style, and for lists that do not hold every trainable parameter once.
    """
    if not isinstance(style, str):
        return form_groups(_listed(model, style), trainable=trainable, max_grad_norm=max_grad_norm)
    check_choice("clipping_style", style, STYLES)
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
    return form_groups(groups, trainable=trainable, max_grad_norm=max_grad_norm)


def _listed(model: nn.Module, style: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    """Return the groups of an explicit style, with every name of a tied weight mapped to its first."""
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
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not any(path.startswith(f"{b}.") for b in found):
            prefix = f"{path}." if path else ""
            if not any(path == block for block in found):
                found += [f"{prefix}{name}" for name, _ in module.named_children()]
    return found
