"""Settings of a training run, from defaults, a YAML file and flags."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from dpshard.applications import user_code
from dpshard.applications.cli.formats import MOMENTUM_HELP, SAMPLING_HELP, field_of_option, parse_phases, parse_weights
from dpshard.config import AccountantName, ClippingStyle, NoiseName, SamplingName, require_choice
from dpshard.errors import ConfigurationError

TEXT_COLUMN = "text"

MODELS = ("auto", "mlp", "linear", "cnn", "vit", "gpt", "gpt2", "bert", "text")

MAY_CHANGE = ("shard", "nproc")
"""Settings that may change at --resume; repeated steps then count again."""

_data = partial(field_of_option, panel="Data")
_model = partial(field_of_option, panel="Model")
_privacy = partial(field_of_option, panel="Privacy")
_training = partial(field_of_option, panel="Training")
_ranks = partial(field_of_option, panel="Several processes")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """All settings of a run; its folder keeps them, and they must not change.

    The help texts are those of `dpshard train --help`, the field names the keys of the YAML file.
    """

    task: Literal["digits", "pydoc", "data"] = _data(
        "digits",
        "What to learn: handwritten digits (scikit-learn's), the text of Python's own documentation (a language "
        "model), or the data of --data.",
    )
    data: str | None = _data(
        None,
        "Your own data: a folder of images with a sub-folder per class; a .csv, .tsv, .jsonl or .parquet table with a "
        "text column, or any other columns, and a label column; an .npz file with arrays x and y; or hf:NAME[:CONFIG], "
        "a Hugging Face data set. Text without a label column trains a language model. Implies --task data.",
    )
    text_column: str = _data(TEXT_COLUMN, "Name of the text column or field.")
    label_column: str = _data("label", "Name of the label column or field.")
    group_column: str | None = _data(
        None,
        "Name of the column with the unit of each row (a patient, a user), for --data of a table. The guarantee "
        "covers all rows of a unit; batches count units, and splits keep them whole.",
    )
    rows_per_unit: int | None = _data(
        None, "Rows of each unit of --group-column in a step, by default 8. If a unit has more, each step draws some."
    )
    objective: Literal["next", "masked"] = _data(
        "next", "Targets of texts without labels: the next byte, or the 15% of their bytes that are masked."
    )
    columns: str | None = _data(
        None,
        "YAML file with public facts of columns: age: [0, 120], sex: [female, male], visit: date, name: drop "
        "(docs/tables.md). Bounds of the label make it a number to predict.",
    )
    drop: str | None = _data(None, "Names of columns to leave out, separated by commas: identifiers, names.")
    class_weights: str | None = _data(
        None,
        "Public weights of labels, LABEL=WEIGHT,...: a larger weight counts more; labels without one have 1. Or "
        "'balanced': one over the share of each label, by private counts that --statistics-share pays for.",
    )
    statistics_share: float | None = _data(
        0.3, "Share of epsilon that private bounds of columns without public ones would cost by themselves, 0 to 1."
    )
    statistics_noise: float | None = _data(
        None, "Noise sigma of private bounds, over their sensitivity; instead of --statistics-share."
    )
    feature_scale: float | None = _data(
        None,
        "Public bound of the absolute values of all number columns without bounds; images in .npz are divided by it. "
        "Choose it without looking at the data.",
    )
    image_size: int = _data(32, "Images are resized to this many pixels a side.")
    max_length: int = _data(128, "Texts are cut after this many bytes (a token is a byte).")
    test_fraction: float = _data(
        0.2, "Share of the samples that is held out for the final score, 0 to 1; always the same samples."
    )
    validation_fraction: float = _data(
        0.1, "Share of the samples that is held out for the scores during the run, 0 to 1."
    )

    model: str = _model(
        "auto",
        "Network: mlp or linear (tables), mlp (images without their brightness and contrast), cnn or vit (images), gpt "
        "(ours) or gpt2 (transformers' GPT-2, small) for the next byte, bert (transformers' BERT, small) for masked "
        "bytes, text (a transformer) to classify text; auto "
        "picks one that fits the data. Or your own, package.module:function: function(shape, classes) returns "
        "a module with logits for x of that shape.",
    )
    replace_unsupported: bool = _model(
        False, "In your own network, replace layers without per-sample gradients: BatchNorm by GroupNorm."
    )

    target_epsilon: float | None = _privacy(
        3.0, "Privacy budget epsilon of the whole run (natural-log units); the noise is calibrated to it."
    )
    noise_multiplier: float | None = _privacy(
        None,
        "Noise sigma: standard deviation over the sensitivity, unitless; instead of --target-epsilon. The sensitivity "
        "is max_grad_norm, or more if many steps are one release (--sampling fixed-order, --correlation).",
    )
    target_delta: float = _privacy(1e-5, "Delta of the guarantee, a probability well below 1/(samples).")
    max_grad_norm: float = _privacy(1.0, "L2 norm to which the gradient of every sample is clipped.")
    clipping_fn: Literal["automatic", "abadi", "global"] = _privacy(
        "automatic", "How a gradient is clipped: R/(|g|+0.01), min(1, R/|g|), or dropped above R."
    )
    clipping_style: ClippingStyle = _privacy("all-layer", "Which parameters share one norm.")
    clipping_quantile: float | None = _privacy(
        None,
        "Each threshold follows this quantile of the gradient norms, 0 to 1, starting at max_grad_norm; epsilon "
        "covers it.",
    )
    accountant: AccountantName = _privacy(
        "pld", "Method for epsilon: pld (tightest), rdp, or gdp (an approximation that may under-state)."
    )
    max_batch_size: str | None = _privacy(
        None, "Cap of a logical batch in samples, or 'auto' (B + 6 sqrt B): truncated Poisson sampling."
    )
    sampling: SamplingName = _privacy(
        "poisson",
        SAMPLING_HELP,
    )
    correlation: Literal["none", "banded-inverse", "band-mf"] = _privacy(
        "none",
        "Noise that partly cancels over the steps, so the model has less of it. Needs --bands, and a --sampling other "
        "than poisson; cyclic-poisson needs band-mf. dpshard account says whether it pays.",
    )
    bands: str | None = _privacy(
        None,
        "Number of bands of --correlation, or auto: of a few numbers, the one with the least noise at "
        "--target-epsilon. The run folder keeps it.",
    )
    correlation_momentum: float | None = _privacy(
        None,
        MOMENTUM_HELP,
    )
    buffers: bool = _privacy(
        False,
        "With band-mf, keep the noise of the last bands - 1 steps: a vector for each, as large as the trained "
        "parameters. By default noise is drawn again, without memory, and step t takes t draws.",
    )
    secure_mode: bool = _privacy(
        False, "Draw the noise on the CPU for every device, from a cryptographic stream: its last bits reveal nothing."
    )
    noise: NoiseName = _privacy(
        "gaussian",
        "Distribution of the noise; discrete-gaussian is exact, on a grid to which sums are rounded (accountant rdp).",
    )

    recipe: Literal["none", "dp-bert"] = _training(
        "none",
        "Set of settings; each option overrides its value: dp-bert pre-trains a BERT from scratch as "
        "Anil et al. 2021 did, with growing batches (docs/recipes.md).",
    )
    batch_size: int | None = _training(
        650,
        "Expected logical batch in samples; large ones suit privacy. For your own data: "
        "256, or half of the samples if they are few.",
    )
    epochs: float | None = _training(30.0, "Length of the run in expected passes over the samples.")
    steps: int | None = _training(None, "Length of the run in optimizer steps; instead of --epochs.")
    phases: str | None = _training(
        None, "Batch-size schedule BATCHxSTEPS,...: e.g. 128x50,512x100; instead of size and length."
    )
    micro_batch_size: int = _training(
        256, "Samples per forward; decides memory and speed, and the result only by rounding."
    )
    optimizer: Literal["auto", "sgd", "adam", "adamw", "dp-bert"] = _training(
        "sgd", "Optimizer; auto is adam to classify text, else sgd; dp-bert is adamw with the paper's moments."
    )
    learning_rate: float | None = _training(
        0.5, "Learning rate at the first step; for your own data, the optimizer decides."
    )
    momentum: float = _training(0.9, "Momentum of sgd, 0 to 1.")
    weight_decay: float = _training(0.0, "Weight decay of the optimizer.")
    lr_schedule: Literal["cosine", "constant", "quadratic"] = _training(
        "cosine",
        "Learning rate over the run: down to 0 along a cosine, constant, or up for 3/8 of the steps and down to 0 "
        "along a parabola.",
    )
    clipping_mode: str = _training(
        "auto", "How norms are computed (see docs/guide.md); decides memory and speed, never the result."
    )
    seed: int = _training(0, "Seed of initial weights and dropout. Noise and batches come from a secret of the run.")
    device: str = _training("auto", "cpu, cuda, cuda:1, ...; auto takes a GPU if there is one.")
    num_workers: int = _training(0, "Processes that read samples ahead; 0 reads in the main process.")
    checkpoint_every: int = _training(25, "Steps from one checkpoint to the next.")
    evaluations: int = _training(20, "How often the validation split is scored and epsilon computed.")

    shard: Literal["none", "ddp", "fsdp2", "hsdp", "deepspeed-1", "deepspeed-2", "deepspeed-3"] = _ranks(
        "none",
        "How several processes share the model: a copy each (ddp), shards of parameters, gradients and optimizer state "
        "(fsdp2), shards within each of two or more replicas (hsdp), or DeepSpeed's ZeRO-1, 2 or 3. The result and the "
        "guarantee stay the same. May change at --resume; repeated steps then count again.",
    )
    nproc: int | None = _ranks(
        None,
        "Processes to start on this machine, by default one for each GPU. Leave it out under torchrun or srun, "
        "which start them. Each takes --micro-batch-size samples at once. May change at --resume.",
    )

    def __post_init__(self) -> None:
        if self.model not in MODELS and not user_code.is_path(self.model):
            raise ConfigurationError(
                f"model={self.model!r} is unknown; choose one of {list(MODELS)}, or name your own function, "
                f"package.module:function."
            )
        for names, holds, range_ in _RANGES:
            for name in names:
                if not holds(getattr(self, name)):
                    raise ConfigurationError(f"{name}={getattr(self, name)!r}: it must be {range_}.")
        if self.test_fraction + self.validation_fraction >= 1:
            raise ConfigurationError("test_fraction and validation_fraction leave no sample to train on.")
        if (self.task == "data") != (self.data is not None):
            raise ConfigurationError("task=data and data=FOLDER, FILE or hf:NAME go together: give both or neither.")
        if self.group_column is not None and self.data is None:
            raise ConfigurationError(f"group_column={self.group_column!r} names a column of --data: give both.")
        if self.rows_per_unit is not None and self.group_column is None:
            raise ConfigurationError("rows_per_unit is for units: name them by group_column (--group-column).")
        for name in ("columns", "drop", "class_weights"):
            if getattr(self, name) is not None and self.data is None:
                raise ConfigurationError(f"{name} is for the columns of --data: give both.")
        parse_weights(self.class_weights)
        if self.batch_size is not None and self.phases is not None:
            raise ConfigurationError("Give exactly one of batch_size and phases: both set the size of batches.")
        if self.nproc is not None and self.nproc < 1:
            raise ConfigurationError(f"nproc={self.nproc!r}: it must be at least 1.")
        if self.shard == "none" and (self.nproc or 1) > 1:
            raise ConfigurationError(f"nproc={self.nproc}: say how they share the model, for example --shard fsdp2.")
        if self.max_batch_size is not None and self.max_batch_size != "auto" and not self.max_batch_size.isdigit():
            raise ConfigurationError(f"max_batch_size={self.max_batch_size!r}: it is a number of samples, or 'auto'.")

    def expected_batch_size(self) -> Any:
        """Return the `batch_size` of PrivacyEngine: a number, phases, or None before it is fitted."""
        return self.batch_size if self.phases is None else parse_phases(self.phases)

    def mechanism(self) -> dict[str, Any]:
        """Return the arguments of PrivacyEngine, except model and sample size."""
        from dpshard.applications.cli.correlated import correlation_of  # these import numpy and torch: slow for --help
        from dpshard.clipping.thresholds import QuantileTracking

        cap, quantile = self.max_batch_size, self.clipping_quantile
        return {name: getattr(self, name) for name in _MECHANISM} | {
            "batch_size": self.expected_batch_size(),
            "adaptive_clipping": None if quantile is None else QuantileTracking(quantile),
            "noise_correlation": correlation_of(
                self.correlation, self.bands, self.correlation_momentum, buffers=self.buffers
            ),
            "max_batch_size": int(cap) if cap is not None and cap.isdigit() else cap,
        }

    def to_yaml(self) -> str:
        """Return YAML of these settings for `read_yaml` and `resolve`."""
        return yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True)


def resolve(*layers: Mapping[str, Any]) -> TrainSettings:
    """Return the settings of the task's recipe, overridden by each layer in turn.

    A setting clears excluded ones of the layers below, such as steps clears epochs. Raises ConfigurationError for
    unknown keys and values of the wrong type.
    """
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
        for one, other in _EXCLUSIVE:
            for setting, excluded in ((one, other), (other, one)):
                if layer.get(setting) is not None:
                    merged[excluded] = None
        merged |= layer
    return merged


def _coerce(name: str, value: Any, hint: Any) -> Any:
    """Convert `value` to the type `hint`; YAML reads 1e-5 as text, and 3 as an int."""
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
    if value is None and NoneType in get_args(hint):
        return None
    if get_origin(hint) is Literal:
        require_choice(name, value, get_args(hint))
        return value
    kind = kinds[0]
    try:
        if (kind is bool) != isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise ValueError
        converted = kind(value)
        if kind is int and converted != float(value):
            raise ValueError
    except (ValueError, OverflowError):
        raise ConfigurationError(f"{name}={value!r}: expected {_KINDS[kind]}.") from None
    return converted


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}

_MECHANISM = (
    "epochs steps target_epsilon noise_multiplier target_delta max_grad_norm clipping_fn clipping_style clipping_mode "
    "accountant secure_mode noise sampling"
).split()

_RANGES: list[tuple[tuple[str, ...], Callable[[Any], bool], str]] = [
    (("num_workers", "seed"), lambda x: x >= 0, "at least 0"),
    (("rows_per_unit",), lambda x: x is None or x >= 1, "at least 1"),
    (("weight_decay",), lambda x: 0 <= x < math.inf, "a finite number of at least 0"),
    (
        ("micro_batch_size", "checkpoint_every", "evaluations", "max_length", "image_size"),
        lambda x: x >= 1,
        "at least 1",
    ),
    (("clipping_quantile",), lambda x: x is None or 0 < x < 1, "above 0 and below 1"),
    (("statistics_share",), lambda x: x is None or 0 < x < 1, "above 0 and below 1"),
    (
        ("learning_rate", "feature_scale", "statistics_noise"),
        lambda x: x is None or 0 < x < math.inf,
        "a finite number above 0",
    ),
    (("test_fraction", "validation_fraction", "momentum"), lambda x: 0 <= x < 1, "at least 0 and below 1"),
]

_EXCLUSIVE = [
    ("epochs", "steps"),
    ("epochs", "phases"),
    ("steps", "phases"),
    ("batch_size", "phases"),
    ("target_epsilon", "noise_multiplier"),
    ("statistics_share", "statistics_noise"),
]

RECIPES: dict[str, dict[str, Any]] = {
    "pydoc": {"batch_size": 256, "epochs": 10.0, "max_length": 64, "micro_batch_size": 64},
    "data": {"batch_size": None, "epochs": None, "optimizer": "auto", "learning_rate": None},
}
"""Defaults of tasks except digits, tuned only on validation splits. None: see fitting.py."""

WEIGHTED = {"clipping_fn": "abadi"}
"""Of --class-weights; see [Note: Weights and clipping] in tabular/objectives.py."""

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
    },
}
"""Settings of --recipe, with numbers of dpshard.recipes, which imports torch; fitting.py sets batches."""
