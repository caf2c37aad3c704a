"""scikit-learn: private estimators for tables."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpshard.applications.advice import Advice, advise
from dpshard.applications.extras import require
from dpshard.applications.tabular import (
    Classes,
    Column,
    Encoder,
    Numbers,
    Objective,
    fit_privately,
    make_network,
    noise_for,
    parse_columns,
)
from dpshard.applications.tabular.columns import cell_name
from dpshard.config import require_choice
from dpshard.engine import PrivacyEngine
from dpshard.errors import ConfigurationError, DataError
from dpshard.sampling.units import UnitDataset


@dataclass(kw_only=True, eq=False, repr=False)
class _PrivateEstimator(BaseEstimator):
    """The common part of the estimators. Settings stay as given, and `fit` checks them."""

    target_epsilon: float = 3.0
    target_delta: float | None = None
    model: Literal["auto", "linear", "mlp"] | nn.Module = "auto"
    bounds: tuple[Any, Any] | None = None
    columns: Mapping[str, Any] | None = None
    statistics_share: float = 0.3
    batch_size: int | None = None
    steps: int | None = None
    learning_rate: float | None = None
    max_grad_norm: float = 1.0
    rows_per_unit: int = 8
    micro_batch_size: int = 1024
    random_state: int | None = None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.string = tags.input_tags.categorical = True
        tags.non_deterministic = True
        return tags

    def _frame(self, X: Any, *, reset: bool) -> Any:
        require("pandas", "train", "a table")
        import pandas

        if isinstance(X, pandas.DataFrame):
            validate_data(self, cast(Any, X), skip_check_array=True, reset=reset)
            if X.empty:
                raise ValueError(f"Found array with {X.shape[0]} sample(s) and {X.shape[1]} feature(s): give some.")
            return X.rename(columns=str).reset_index(drop=True)
        if hasattr(X, "__array__") or isinstance(X, list | tuple):
            _refuse_cells(np.asarray(X))
        array: Any = validate_data(self, cast(Any, X), reset=reset, dtype=None, ensure_all_finite=False)
        return pandas.DataFrame(array, columns=[f"x{i}" for i in range(array.shape[1])])

    def _given(self, frame: Any) -> dict[str, Column]:
        given = parse_columns(self.columns or {})
        if self.bounds is None:
            return given
        try:
            low, high = (np.broadcast_to(np.asarray(b, float), frame.shape[1]).tolist() for b in self.bounds)
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"bounds: give (low, high), two numbers or {frame.shape[1]} numbers each, one for each column of X."
            ) from None
        of_all = parse_columns({name: pair for name, *pair in zip(frame.columns, low, high, strict=True)})
        numbers = Encoder.of(frame, given).unbounded
        return {name: column for name, column in of_all.items() if name in numbers} | given

    def _fit(self, frame: Any, y: Tensor | None, target: NDArray[np.float64], objective: Any, groups: Any) -> Self:
        """Fit to y [N] of known scale, or None and `target` [N] without public bounds."""
        for name in ("epsilon_", "delta_", "statement_", "n_iter_"):  # no older guarantee after a failed fit
            self.__dict__.pop(name, None)
        units = None if groups is None else _units(groups, len(frame))
        samples = len(frame) if units is None else 1 + int(units.max())
        given = (self.batch_size, self.steps, self.target_delta)
        asked = {"sample_size": samples, "target_epsilon": self.target_epsilon, "target_delta": self.target_delta}
        advice = advise(**asked) if None in given else None
        delta = advice.target_delta if advice and self.target_delta is None else self.target_delta
        budget = {"target_epsilon": self.target_epsilon, "target_delta": delta}
        noise = partial(noise_for, self.statistics_share, samples=samples, **budget)
        facts: dict[str, Any] = {"units": units, "target_N": target if y is None else None}
        if y is not None and self._balances():
            facts |= {"labels": y.numpy(), "classes": objective.count}
        encoder = Encoder.of(frame, self._given(frame))
        encoder, bounds, earlier, weights = fit_privately(encoder, frame, noise, **facts)
        if weights is not None:
            objective = Classes(objective.count, weights)
        if bounds is not None:
            objective = Numbers(*bounds)
        if isinstance(objective, Numbers):
            y = objective.scaled(torch.from_numpy(target))
        self.encoder_, self.objective_ = encoder, objective
        assert y is not None
        x = encoder.encode(frame)
        with torch.random.fork_rng(devices=[]):
            if self.random_state is None:
                torch.seed()
            else:
                torch.manual_seed(self.random_state)
            self.model_ = self._network(x.shape[1], encoder.numbers, objective)
        self._train(TensorDataset(x, y), units, samples, delta, advice, earlier)
        return self

    def _balances(self) -> bool:
        return getattr(self, "class_weight", None) == "balanced"

    def _network(self, features: int, numbers: int, objective: Objective) -> nn.Module:
        if isinstance(self.model, nn.Module):
            return copy.deepcopy(self.model)
        require_choice("model", self.model, ("auto", "linear", "mlp"))
        return make_network("mlp" if self.model == "auto" else self.model, features, numbers, objective.outputs)

    def _train(self, rows: Any, units: Any, samples: int, delta: Any, advice: Advice | None, earlier: Any) -> None:
        K = 1 if units is None else self.rows_per_unit
        dataset = rows if units is None else UnitDataset(rows, units, K)
        batch_size = advice.batch_size if advice and self.batch_size is None else cast(int, self.batch_size)
        engine = PrivacyEngine(
            self.model_,
            batch_size=min(batch_size, samples),
            sample_size=samples,
            steps=advice.steps if advice and self.steps is None else self.steps,
            target_epsilon=self.target_epsilon,
            target_delta=delta,
            max_grad_norm=self.max_grad_norm,
            # See [Note: Weights and clipping] in objectives.py.
            clipping_fn="automatic" if getattr(self.objective_, "weights", None) is None else "abadi",
            rows_per_unit=K,
            earlier=earlier,
        )
        rate = LEARNING_RATES[type(self.objective_)]
        optimizer = torch.optim.AdamW(self.model_.parameters(), self.learning_rate or rate)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, engine.steps)
        self.model_.train()
        try:
            for logical_batch in engine.batches(dataset, min(self.micro_batch_size, samples)):
                for x_B, y_B, *weights in logical_batch:
                    losses_B = self.objective_.losses(self.model_(x_B), y_B)
                    for weight_B in weights:  # of rows of units
                        losses_B = losses_B * weight_B
                    losses_B.mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            self.epsilon_, self.delta_, self.statement_ = engine.epsilon(), delta, engine.statement()
            self.n_iter_ = engine.step
        finally:
            engine.detach()
        self.model_.eval()

    def _outputs(self, X: Any) -> Tensor:
        check_is_fitted(self, "epsilon_")
        with torch.no_grad():
            return self.model_(self.encoder_.encode(self._frame(X, reset=False)))


LEARNING_RATES = {Classes: 0.03, Numbers: 0.01}
"""Learning rates by kind of target; a smaller one suits numbers (docs/tables.md)."""


def _refuse_cells(X: NDArray[Any]) -> None:
    """Raise an error for bad cells, because scikit-learn's own message would show them."""
    if X.dtype.kind == "c":
        raise ValueError("Complex data not supported: give real numbers.")
    if X.ndim < 2:
        raise ValueError(f"Expected 2D array, got {X.ndim}D array. Reshape your data to [N, D].")


def _targets(y: Any, rows: int) -> NDArray[Any]:
    """Return y as [N]. Its errors show no value of y."""
    if y is None:
        raise ValueError("requires y to be passed, but the target y is None.")
    targets = np.asarray(column_or_1d(y, warn=True))
    if len(targets) != rows:
        raise ValueError(f"Found input variables with inconsistent numbers of samples: {[rows, len(targets)]}")
    cells = targets.astype(object)
    if any(cell is None or cell != cell or cell in (math.inf, -math.inf) for cell in cells.tolist()):
        raise ValueError("Input y contains NaN or infinity: leave such rows out.")
    return targets


def _units(groups: Any, rows: int) -> NDArray[np.int64]:
    ids = np.asarray(groups, dtype=object)
    if ids.shape != (rows,) or any(cell is None or cell != cell for cell in ids.tolist()):
        raise DataError(f"groups: give the unit of each of the {rows} rows, none missing.")
    names = np.array([cell_name(cell) for cell in ids.tolist()])  # 1, 1.0 and "1 " are one unit
    return np.unique(names, return_inverse=True)[1].astype(np.int64)


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateClassifier(ClassifierMixin, _PrivateEstimator):
    """A classifier of tables; epsilon covers its weights and its private bounds, as `statement_` says.

    Args:
        target_epsilon: Budget of a fit, private bounds included; k folds cost k times.
        target_delta: Delta of the guarantee; by default a power of ten, at most 1e-5 and 1 / (2 N).
        model: "linear", "mlp" ("auto" is this), or a module from encoded features [B, F] to logits [B, classes].
        bounds: Public bounds (low, high) of X, numbers or one per column; values are clipped to them.
        columns: Public facts of columns by name (of an array x0, x1, ...): [low, high], categories [a, b], "category",
            "drop"; they override `bounds`. Other columns of numbers get private bounds. See docs/tables.md.
        statistics_share: Share of epsilon that private bounds would cost alone.
        batch_size: Expected logical batch; by default that of `dpshard.advise`.
        steps: Optimizer steps; by default those of the advice.
        learning_rate: Of AdamW, falling along a cosine; by default 0.03 for classes, 0.01 for numbers.
        max_grad_norm: Largest norm of a sample's gradient.
        rows_per_unit: Rows of a unit in a step, for `fit(X, y, groups)`.
        micro_batch_size: Samples per forward.
        random_state: Seed of initial weights, not of noise and batches.
        classes: Public labels; by default those of y, which then count as public.
        class_weight: Public weights by label. Or "balanced": one over the share of each label, by private counts that
            `statistics_share` pays for.

    Attributes:
        epsilon_, delta_, statement_: The guarantee.
        classes_: Labels, in the order of `predict_proba`.
        model_, encoder_, n_iter_, n_features_in_, feature_names_in_.
    """

    classes: Sequence[Any] | None = None
    class_weight: Mapping[Any, float] | Literal["balanced"] | None = None

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Fit to rows X [N, D] with labels y [N]; `groups` [N] name the protected unit of each row."""
        frame = self._frame(X, reset=True)
        y = _targets(y, len(frame))
        check_classification_targets(y)
        self.classes_ = np.unique(y if self.classes is None else np.asarray(self.classes))
        known = np.isin(y, self.classes_)
        if not known.all():
            raise DataError("y has a label that classes= lacks: name all labels.")
        if len(self.classes_) < 2:
            raise ValueError("Classifier can't train when only one class is present: give rows of two or more classes.")
        weights = None
        if self.class_weight is not None and not self._balances():
            if not isinstance(self.class_weight, Mapping):
                raise ConfigurationError(
                    f"class_weight={self.class_weight!r}: give public weights, {{label: weight}}, or 'balanced'."
                )
            given = dict(self.class_weight)
            if given.keys() - set(self.classes_.tolist()):
                raise ConfigurationError("class_weight has a label that is no class: give weights of classes only.")
            weights = tuple(float(given.get(label, 1.0)) for label in self.classes_.tolist())
        numbers = torch.from_numpy(np.searchsorted(self.classes_, y))
        return self._fit(frame, numbers, np.empty(0), Classes(len(self.classes_), weights), groups)

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return the probability [N, classes] of each class."""
        return self._outputs(X).double().softmax(1).numpy()

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the likeliest label [N]."""
        best_N = self._outputs(X).argmax(1).numpy()
        return self.classes_[best_N]


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateRegressor(RegressorMixin, _PrivateEstimator):
    """A regressor of tables; epsilon covers its weights and its private bounds, as `statement_` says.

    Args:
        target_bounds: Public bounds (low, high) of y, which is clipped to them; by default private ones.
        Others: as of PrivateClassifier; `model` may be a module to outputs [B, 1], y scaled to [-1, 1].
    """

    target_bounds: tuple[float, float] | None = None

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Fit to rows X [N, D] with numbers y [N]; `groups` as of PrivateClassifier."""
        frame = self._frame(X, reset=True)
        targets = _targets(y, len(frame))
        if targets.dtype.kind not in "biuf":
            raise ValueError("Unknown label type: y must be numbers.")
        target = targets.astype(np.float64)
        if self.target_bounds is None:
            return self._fit(frame, None, target, None, groups)
        facts = parse_columns({"target_bounds": np.asarray(self.target_bounds).tolist()})["target_bounds"]
        if facts.kind != "number" or facts.bounds is None:
            raise ConfigurationError("target_bounds: give two numbers (low, high), or None for private bounds.")
        low, high = facts.bounds
        return self._fit(frame, torch.empty(0), target, Numbers(low, high), groups)

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Return numbers [N] within the bounds."""
        outputs = self._outputs(X)
        return self.objective_.values(outputs).numpy()
