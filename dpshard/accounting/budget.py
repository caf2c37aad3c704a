"""The budget of a run: its noise, and the check before every step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from dpshard.accounting.bounds import require_supported
from dpshard.accounting.calibration import calibrate
from dpshard.accounting.history import History
from dpshard.accounting.ledger import PrivacyLedger
from dpshard.accounting.mechanism import Mechanism
from dpshard.accounting.releases import Release, in_figures, rounded_up
from dpshard.config import is_number, require_delta
from dpshard.errors import BudgetExceededError, ConfigurationError


class Budget:
    """Ledger, history and budget check of a run."""

    def __init__(self, mechanism: Mechanism, *, allow_overspend: bool, run: str = "") -> None:
        self.mechanism = mechanism
        self._scheme = mechanism.scheme
        self.ledger = PrivacyLedger(mechanism.accountant, run, mechanism.earlier, scheme=self._scheme)
        self._history = History()
        self.allow_overspend = allow_overspend
        """If True, a step over the budget warns instead of raising."""
        self._warned = False
        self._warned_of_repeats = False
        self._plan = mechanism.releases()

    def statement(self, generator: str) -> str:
        """Return the guarantee so far; `generator` names the noise."""
        mechanism = self.mechanism
        return self.ledger.statement(
            mechanism.target_delta, plan=self._plan, generator=generator, rows_per_unit=mechanism.rows_per_unit
        )

    def spend(self, identity: bytes, *, unverified_sampling: bool) -> bool:
        """Count the next step's release, unless it was counted before; return whether it was new.

        If the step exceeds the budget, raises BudgetExceededError, or warns.
        """
        step = self.ledger.steps
        if self._history.contains(step, identity):
            if not self._history.is_own(step, identity):
                facts = {"unverified_sampling": unverified_sampling, "follows": self._follows(identity, of_own=True)}
                self.ledger.keep(step, self.mechanism.release(step), **facts)
                self._history.add(step, identity, counts=False)
            self.ledger.take_uncharged()
            return False
        facts = {"unverified_sampling": unverified_sampling, "follows": self._follows(identity)}
        release = self._affordable(step, **facts)
        self._warn_of_repeat(step)
        self.ledger.record(release, **facts)
        self._history.add(step, identity)
        return True

    def _follows(self, identity: bytes, *, of_own: bool = False) -> bool:
        return self._scheme is None or self._history.follows(identity, of_own=of_own)

    def _warn_of_repeat(self, step: int) -> None:
        if self._warned_of_repeats or not self._history.was_released(step):
            return
        self._warned_of_repeats = True
        cost = (
            "It costs more than a new step, because it draws the same batch; so does every further repeated step."
            if self._scheme is None
            else "It begins another branch of the run, which costs as much as the run up to its end."
        )
        warnings.warn(
            f"Step {step + 1} was released before, with other or unknown sums. So it gets independent noise. {cost} To "
            f"repeat steps at no cost, restore model, optimizer, data and random states: see Replay in "
            f"docs/privacy-model.md.",
            stacklevel=5,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return ledger and history, as plain JSON."""
        return {"ledger": self.ledger.state_dict(), "history": self._history.state_dict(self.ledger.steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Load a `state_dict()`; return True if all its releases are counted already.

        Releases of this process stay counted. Raises CheckpointError, without any change, for a damaged state.
        """
        ledger = PrivacyLedger(self.mechanism.accountant, scheme=self._scheme)
        ledger.load_state_dict(state["ledger"])
        same_run = ledger.run == self.ledger.run
        history = self._history if same_run else self._history.of_other_run()
        visited = history.load_state_dict(state["history"], ledger.steps)
        self.ledger.load_state_dict(state["ledger"], visited=visited and same_run)
        self._history = history
        return visited

    def count_released(self, releases: int | Iterable[tuple[int, bytes]]) -> int:
        """Count the releases after the loaded state; return the number of new ones.

        `releases`: the number of released steps, or (step, identity) of each release that the state may lack.
        """
        before, unverified = self.ledger.releases, self.ledger.has_unverified_sampling
        steps = range(self._history.end, releases) if isinstance(releases, int) else ()
        for step, identity in [(step, None) for step in steps] if isinstance(releases, int) else releases:
            if identity is None or not self._history.contains(step, identity):
                follows = identity is None or self._follows(identity)
                self.ledger.charge(step, self.mechanism.release(step), unverified_sampling=unverified, follows=follows)
                self._history.add(step, identity)
        return self.ledger.releases - before

    def _affordable(self, step: int, **facts: bool) -> Release:
        mechanism, release = self.mechanism, self.mechanism.release(step)
        if self._scheme is not None and not self._scheme.open_ended and step >= self._scheme.steps:
            raise BudgetExceededError(
                f"Step {step + 1} is not planned: sampling={mechanism.sampling!r} plans the noise for "
                f"{self._scheme.steps} steps, and another step would cost more than its share. Plan more steps from "
                f"the start of a run."
            )
        target, delta = mechanism.target_epsilon, mechanism.target_delta
        if target is None or self.ledger.allows(
            release, target_epsilon=target, target_delta=delta, plan=self._plan, **facts
        ):
            return release
        message = (
            f"Step {step + 1} would spend more than target_epsilon={target:g} at delta={in_figures(delta)}: "
            f"{self.ledger.releases} releases have spent {rounded_up(self.ledger.epsilon(delta))} (planned: "
            f"{mechanism.schedule.steps} steps)."
        )
        if not self.allow_overspend:
            raise BudgetExceededError(f"{message} Stop here, or plan more steps from the start of a run.")
        if not self._warned:
            warnings.warn(f"{message} The run continues, because on_budget='continue'.", stacklevel=3)
            self._warned = True
        return release


def with_noise(mechanism: Mechanism, noise_multiplier: float | None) -> Mechanism:
    """Return `mechanism` with this noise multiplier, or with the smallest one for its target_epsilon.

    Raises ConfigurationError unless exactly one of the two is given, and valid.
    """
    target_epsilon, target_delta = mechanism.target_epsilon, mechanism.target_delta
    if (noise_multiplier is None) == (target_epsilon is None):
        raise ConfigurationError("Give exactly one of target_epsilon= and noise_multiplier=.")
    if target_epsilon is not None:
        return calibrate(
            mechanism, target_epsilon=target_epsilon, target_delta=target_delta, accountant=mechanism.accountant
        )
    assert noise_multiplier is not None
    require_delta(target_delta, mechanism.sample_size)
    if not (is_number(noise_multiplier) and math.isfinite(noise_multiplier) and noise_multiplier >= 0):
        raise ConfigurationError(
            f"noise_multiplier={noise_multiplier!r}: it must be a finite number, 0 or above. "
            "target_epsilon= finds it for a budget; 0 trains without privacy."
        )
    mechanism = replace(mechanism, noise_multiplier=float(noise_multiplier))
    require_supported(mechanism.release(0), mechanism.accountant)
    if noise_multiplier == 0:
        warnings.warn(
            "noise_multiplier=0: NO NOISE is added, the training is NOT private (epsilon is infinite).", stacklevel=3
        )
    return mechanism
