"""Settings of a training run; options.yaml says what each means."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from dpshard.applications import user_code
from dpshard.applications.cli.formats import parse_phases, parse_weights
from dpshard.config import AccountantName, ClippingStyle, NoiseName, SamplingName, require_choice
from dpshard.errors import ConfigurationError

TEXT_COLUMN = "text"
LABEL_COLUMN = "label"

MODELS = ("auto", "mlp", "linear", "cnn", "vit", "gpt", "gpt2", "bert", "text")

MAY_CHANGE = ("shard", "nproc")
"""Settings that may change at --resume; repeated steps then count again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """All settings of a run, which must not change; the names are those of the YAML file."""

    task: Literal["digits", "pydoc", "data"] = "digits"
    data: str | None = None
    text_column: str = TEXT_COLUMN
    label_column: str = LABEL_COLUMN
    group_column: str | None = None
    rows_per_unit: int | None = None
    objective: Literal["next", "masked"] = "next"
    columns: str | None = None
    drop: str | None = None
    class_weights: str | None = None
    statistics_share: float | None = 0.3
    statistics_noise: float | None = None
    feature_scale: float | None = None
    image_size: int = 32
    max_length: int = 128
    test_fraction: float = 0.2
    validation_fraction: float = 0.1

    model: str = "auto"
    replace_unsupported: bool = False

    target_epsilon: float | None = 3.0
    noise_multiplier: float | None = None
    target_delta: float = 1e-5
    max_grad_norm: float = 1.0
    clipping_fn: Literal["automatic", "abadi", "global"] = "automatic"
    clipping_style: ClippingStyle = "all-layer"
    clipping_quantile: float | None = None
    accountant: AccountantName = "pld"
    max_batch_size: str | None = None
    sampling: SamplingName = "poisson"
    correlation: Literal["none", "banded-inverse", "band-mf"] = "none"
    bands: str | None = None
    correlation_momentum: float | None = None
    buffers: bool = False
    secure_mode: bool = False
    noise: NoiseName = "gaussian"

    recipe: Literal["none", "dp-bert"] = "none"
    batch_size: int | None = 650
    epochs: float | None = 30.0
    steps: int | None = None
    phases: str | None = None
    micro_batch_size: int = 256
    optimizer: Literal["auto", "sgd", "adam", "adamw", "dp-bert"] = "sgd"
    learning_rate: float | None = 0.5
    momentum: float = 0.9
    weight_decay: float = 0.0
    lr_schedule: Literal["cosine", "constant", "quadratic"] = "cosine"
    clipping_mode: str = "auto"
    seed: int = 0
    device: str = "auto"
    num_workers: int = 0
    checkpoint_every: int = 25
    evaluations: int = 20

    shard: Literal["none", "ddp", "fsdp2", "hsdp", "deepspeed-1", "deepspeed-2", "deepspeed-3"] = "none"
    nproc: int | None = None

    def __post_init__(self) -> None:
        def require(holds: bool, name: str, message: str) -> None:
            if not holds:
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: {message}.")

        for names, (range_, holds) in _RANGES.items():
            for name in names.split():
                value = getattr(self, name)
                require(value is None or (math.isfinite(value) and holds(value)), name, f"it must be {range_}")
        for name, other in _NEEDS.items():
            given = getattr(self, name) is None or getattr(self, other) is not None
            require(given, name, f"it is for --{other.replace('_', '-')}: give both, or neither")
        known = self.model in MODELS or user_code.is_path(self.model)
        require(known, "model", f"choose one of {list(MODELS)}, or name a function of yours, package.module:function")
        fractions = self.test_fraction + self.validation_fraction
        require(fractions < 1, "test_fraction", "with validation_fraction, it leaves no sample to train on")
        both = (self.task == "data") == (self.data is not None)
        require(both, "task", "task=data and data=FOLDER, FILE or hf:NAME go together: give both or neither")
        one = self.batch_size is None or self.phases is None
        require(one, "batch_size", "phases set the size of batches, too: give exactly one of the two")
        together = self.shard != "none" or (self.nproc or 1) == 1
        require(together, "nproc", "say how they share the model, for example --shard fsdp2")
        cap = self.max_batch_size in (None, "auto") or str(self.max_batch_size).isdigit()
        require(cap, "max_batch_size", "it is a number of samples, or 'auto'")
        parse_weights(self.class_weights)

    def expected_batch_size(self) -> Any:
        """Return the `batch_size` of PrivacyEngine: a number, phases, or None before it is fitted."""
        return self.batch_size if self.phases is None else parse_phases(self.phases)

    def mechanism(self) -> dict[str, Any]:
        """Return the arguments of PrivacyEngine."""
        from dpshard.applications.cli.correlated import correlation_of  # these import numpy and torch: slow for --help
        from dpshard.clipping.thresholds import QuantileTracking

        cap, quantile, momentum = self.max_batch_size, self.clipping_quantile, self.correlation_momentum
        return {name: getattr(self, name) for name in _MECHANISM} | {
            "batch_size": self.expected_batch_size(),
            "adaptive_clipping": None if quantile is None else QuantileTracking(quantile),
            "noise_correlation": correlation_of(self.correlation, self.bands, momentum, buffers=self.buffers),
            "max_batch_size": int(cap) if cap is not None and cap.isdigit() else cap,
        }

    def to_yaml(self) -> str:
        """Return YAML of these settings for `read_yaml` and `resolve`."""
        return yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True)


def resolve(*layers: Mapping[str, Any]) -> TrainSettings:
    """Return the settings of the task's recipe, overridden by each layer; a setting clears those that it excludes."""
    hints = get_type_hints(TrainSettings)
    for name in (name for layer in layers for name in layer):
        if name not in hints:
            raise ConfigurationError(f"Unknown setting {name!r}; the known ones are {', '.join(hints)}.")
    given = _overlay(layers)
    if given.get("data") is not None:
        given.setdefault("task", "data")
    recipe, preset = RECIPES.get(str(given.get("task")), {}), PRESETS.get(str(given.get("recipe")), {})
    weighted = {} if given.get("class_weights") is None else WEIGHTED
    merged = _overlay([recipe, preset, weighted, given])
    return TrainSettings(**{name: _coerce(name, value, hints[name]) for name, value in merged.items()})


def _overlay(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for layer in layers:
        for one, other in [*_EXCLUSIVE, *(pair[::-1] for pair in _EXCLUSIVE)]:
            if layer.get(one) is not None:
                merged[other] = None
        merged |= layer
    return merged


def _coerce(name: str, value: Any, hint: Any) -> Any:
    """Convert `value`; YAML reads 1e-5 as text, and 3 as an int."""
    if value is None and NoneType in get_args(hint):
        return None
    if get_origin(hint) is Literal:
        require_choice(name, value, get_args(hint))
        return value
    kind = (get_args(hint) or (hint,))[0]
    try:
        if (kind is bool) != isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise ValueError
        converted = kind(value)
        if kind is int and converted != float(value):
            raise ValueError
    except (ValueError, OverflowError):
        kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        raise ConfigurationError(f"{name}={value!r}: expected {kinds[kind]}.") from None
    return converted


_MECHANISM = (
    "epochs steps target_epsilon noise_multiplier target_delta max_grad_norm clipping_fn clipping_style clipping_mode "
    "accountant secure_mode noise sampling"
).split()

_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "num_workers seed weight_decay": ("a finite number of at least 0", lambda x: x >= 0),
    "rows_per_unit nproc micro_batch_size checkpoint_every evaluations max_length image_size": (
        "at least 1",
        lambda x: x >= 1,
    ),
    "clipping_quantile statistics_share": ("above 0 and below 1", lambda x: 0 < x < 1),
    "learning_rate feature_scale statistics_noise": ("a finite number above 0", lambda x: x > 0),
    "test_fraction validation_fraction momentum": ("at least 0 and below 1", lambda x: 0 <= x < 1),
}

_NEEDS = {"rows_per_unit": "group_column"} | dict.fromkeys(("group_column", "columns", "drop", "class_weights"), "data")

_EXCLUSIVE = [
    *(("epochs", "steps"), ("epochs", "phases"), ("steps", "phases"), ("batch_size", "phases")),
    *(("target_epsilon", "noise_multiplier"), ("statistics_share", "statistics_noise")),
]

RECIPES: dict[str, dict[str, Any]] = {
    "pydoc": {"batch_size": 256, "epochs": 10.0, "max_length": 64, "micro_batch_size": 64},
    "data": {"batch_size": None, "epochs": None, "optimizer": "auto", "learning_rate": None},
}
"""Defaults of tasks except digits, tuned only on validation splits. None: see fitting.py."""

WEIGHTED = {"clipping_fn": "abadi"}
"""Settings that --class-weights implies; see [Note: Weights and clipping] in tabular/objectives.py."""

PRESETS: dict[str, dict[str, Any]] = {
    "dp-bert": {
        "objective": "masked",
        "clipping_fn": "abadi",
        "max_grad_norm": 3.2429e-3,
        "batch_size": None,
        "steps": 400,
        "optimizer": "dp-bert",
        "learning_rate": 6.0902e-4,
        "weight_decay": 1.0,
        "lr_schedule": "quadratic",
    }
}
"""Settings of --recipe, with numbers of dpshard.recipes, which imports torch; fitting.py sets batches."""
