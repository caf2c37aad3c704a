"""Formats of figures and of options, for users, YAML and JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml

from dpshard.errors import ConfigurationError

BALANCED = "balanced"
"""Value of --class-weights for weights by private counts."""

_BLANK = "that differ in one sample: one data set has a blank instead, which contributes nothing"
NEIGHBOURS = {
    "add-or-remove-one": f"two data sets of N samples {_BLANK}",
    "replace-special": f"two data sets of N samples {_BLANK}; another sample may take its place in a capped batch",
    "zero-out": f"two data sets of N samples in the same order {_BLANK}",
}
"""Meanings of neighbouring relations."""

HELP: dict[str, dict[str, dict[str, str]]] = yaml.safe_load((Path(__file__).parent / "options.yaml").read_text("utf-8"))
"""Help texts of options by command, panel and name."""


def to_json(value: Any, indent: int | None = None) -> str:
    """Return `value` as strict JSON, with null for NaN and infinity."""
    finite = json.loads(json.dumps(value), parse_constant=lambda name: None)
    return json.dumps(finite, indent=indent, ensure_ascii=False, allow_nan=False)


class Names(yaml.SafeLoader):
    """Reads yes, no, on and off as texts."""


Names.yaml_implicit_resolvers = {
    first: [(tag, words) for tag, words in found if first in "tTfF" or tag != "tag:yaml.org,2002:bool"]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse_weights(text: str | None) -> dict[str, float]:
    """Parse "yes=5,no=1" as {"yes": 5.0, "no": 1.0}; "balanced" names no weight."""
    try:
        pairs = [] if text in (None, BALANCED) else [pair.rsplit("=", 1) for pair in text.split(",")]
        weights = {name.strip(): float(weight) for name, weight in pairs}
    except ValueError:
        weights = {"": math.nan}
    if not all(0 < weight < math.inf for weight in weights.values()):
        raise ConfigurationError(f"class_weights={text!r}: write LABEL=WEIGHT,..., with finite weights above 0.")
    return weights


def read_yaml(path: Path, *, names: bool = False) -> dict[str, Any]:
    """Return the mapping in a YAML file. Keys are settings, or `names` that stay; there yes and no are names, too."""
    try:
        content = yaml.load(path.read_text("utf-8"), Names if names else yaml.SafeLoader)  # both are safe
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"The settings file {path} cannot be read: {error}") from error
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise ConfigurationError(f"The settings file {path} must be a mapping of `key: value` lines.")
    return {str(key) if names else str(key).replace("-", "_"): value for key, value in content.items()}


def parse_phases(text: str) -> list[tuple[int, int]]:
    """Parse "128x50,512x100" as [(128, 50), (512, 100)]."""
    try:
        return [(int(size), int(steps)) for size, steps in (phase.split("x") for phase in text.split(","))]
    except ValueError as error:
        raise ConfigurationError(f"phases={text!r}: write BATCHxSTEPS,... such as 128x50,512x100.") from error
