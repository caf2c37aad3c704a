"""The texts of a run's reports, in one catalogue: report.en.yaml, or a translation with the same keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any

import yaml

from dpshard.errors import ConfigurationError

ENGLISH = Path(__file__).parent / "report.en.yaml"


@dataclass(frozen=True)
class Texts:
    """Texts by key."""

    by_key: Mapping[str, str]

    def __call__(self, key: str, **values: Any) -> str:
        """Return the text of `key` with its `{name}`s replaced by `values`; raise KeyError for an unknown one."""
        return self.by_key[key].format(**values)

    def has(self, key: str) -> bool:
        """Return True if there is such a text."""
        return key in self.by_key

    def under(self, prefix: str) -> dict[str, str]:
        """Return the texts of the keys that begin with `prefix`, by the rest of their key, in file order."""
        return {key.removeprefix(prefix): text for key, text in self.by_key.items() if key.startswith(prefix)}


@cache
def english() -> Texts:
    """Return the texts that dpshard brings."""
    return Texts(_read(ENGLISH))


def load(path: Path | None) -> Texts:
    """Return the texts in `path`, English for None.

    Raises ConfigurationError unless `path` has the keys of the English file, and in each text the same `{name}`s.
    """
    if path is None:
        return english()
    found, wanted = _read(path), english().by_key
    wrong = [f"it lacks {key!r}" for key in wanted if key not in found]
    wrong += [f"{key!r} is unknown" for key in found if key not in wanted]
    wrong += [f"{key!r} must name {_named(wanted[key])}" for key in found if _differ(found[key], wanted.get(key))]
    if wrong:
        raise ConfigurationError(f"The texts in {path} do not fit {ENGLISH}: {wrong[0]}. Start from a copy of it.")
    return Texts(found)


def _differ(text: str, original: str | None) -> bool:
    return original is not None and _names(text) != _names(original)


def _names(text: str) -> set[str] | None:
    try:
        parts = [(name, spec, change) for _, name, spec, change in Formatter().parse(text) if name is not None]
    except ValueError:
        return None
    # A name alone: {name.attribute} or {name!r} could print what is not meant for the page.
    plain = all(name.isidentifier() and not spec and not change for name, spec, change in parts)
    return {name for name, _, _ in parts} if plain else None


def _named(text: str) -> str:
    return ", ".join(f"{{{name}}}" for name in sorted(_names(text) or ())) or "nothing in braces"


def _read(path: Path) -> dict[str, str]:
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"The texts in {path} cannot be read: {error}") from error
    if not isinstance(content, dict) or not all(type(item) is str for pair in content.items() for item in pair):
        raise ConfigurationError(f"The texts in {path} must be `key: text` lines.")
    return content
