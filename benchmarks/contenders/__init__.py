"""The contenders, by name: KIND[:ARGUMENT...][+compile].

nonprivate, dpshard[:STYLE[:MODE]], opacus[:hooks|:ghost], vmap, jax[:masked|:nonprivate].

`+compile` goes with nonprivate, dpshard and vmap: JAX is always compiled, Opacus' hooks never are.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.contenders.contender import Contender, Task
from benchmarks.contenders.extras import reason
from benchmarks.contenders.masked_jax import Jax
from benchmarks.contenders.opacus import Opacus
from benchmarks.contenders.ours import Dpshard, Ordinary
from benchmarks.contenders.vmap import Vmap
from dpshard.clipping.groups import STYLES
from dpshard.config import CLIPPING_MODES, require_choice
from dpshard.errors import ConfigurationError

BASELINE = "nonprivate"
"""The contender with which the others are compared."""
DEFAULT = (
    "nonprivate",
    "dpshard:all-layer",
    "dpshard:all-layer:mixed-ghost",
    "dpshard:block-wise",
    "dpshard:layer-wise",
    "dpshard:param-wise",
    "opacus:hooks",
    "opacus:ghost",
    "vmap",
    "jax:masked",
    "jax:nonprivate",
)
"""The contenders of a run that names none."""

_KINDS: dict[str, Callable[..., Contender]] = {
    "nonprivate": Ordinary,
    "dpshard": Dpshard,
    "opacus": Opacus,
    "vmap": Vmap,
    "jax": Jax,
}
_COMPILED = ("nonprivate", "dpshard", "vmap")


def expand(names: list[str]) -> list[str]:
    """Return the contenders to run, without repetition: `default`, `modes` and `compiled` stand for several.

    The baseline is always the first. Raises ConfigurationError for an unreadable name.
    """
    sets = {
        "default": list(DEFAULT),
        "modes": [f"dpshard:{style}:{mode}" for style in STYLES for mode in CLIPPING_MODES],
        "compiled": ["nonprivate+compile", "dpshard:all-layer+compile", "dpshard:layer-wise+compile", "vmap+compile"],
    }
    found = [BASELINE, *(name for given in names or ["default"] for name in sets.get(given, [given]))]
    for name in found:
        _parse(name)
    return list(dict.fromkeys(found))


def make(name: str, task: Task) -> Contender:
    """Return the contender of that name. Raises MissingExtraError if its library is missing."""
    kind, arguments, compiled = _parse(name)
    return _KINDS[kind](task, *arguments, **({"compiled": compiled} if kind in _COMPILED else {}))


def _parse(name: str) -> tuple[str, list[str], bool]:
    core, plus, flag = name.partition("+")
    kind, *arguments = core.split(":")
    require_choice("contender", kind, list(_KINDS))
    if plus and (flag != "compile" or kind not in _COMPILED):
        raise ConfigurationError(f"contender={name!r}: +compile goes only with {', '.join(_COMPILED)}.")
    if len(arguments) > {"dpshard": 2, "opacus": 1, "jax": 1}.get(kind, 0):
        raise ConfigurationError(f"contender={name!r} has too many parts: {__doc__.splitlines()[2]}")
    if kind == "dpshard":
        for what, value, known in zip(("style", "mode"), arguments, (STYLES, CLIPPING_MODES), strict=False):
            require_choice(what, value, list(known))
    return kind, arguments, bool(plus)


__all__ = ["BASELINE", "DEFAULT", "Contender", "Task", "expand", "make", "reason"]
