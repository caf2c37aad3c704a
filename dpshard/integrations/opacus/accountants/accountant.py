"""`privacy_engine.accountant`; and accountants without an engine, whose caller counts steps and guarantees sampling."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from dpshard.accounting import Release, epsilon_of
from dpshard.config import AccountantName, is_count, require_choice
from dpshard.engine import PrivacyEngine
from dpshard.errors import ConfigurationError

ACCOUNTANTS: dict[str, AccountantName] = {"prv": "pld", "rdp": "rdp", "gdp": "gdp"}
"""dpshard's name of each accountant of Opacus; "prv" and "pld" both compose privacy loss distributions."""


class IAccountant:
    """Counter of Poisson-sampled DP-SGD steps."""

    name: ClassVar[str]

    def __init__(self) -> None:
        self._counts: Counter[Release] = Counter()

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Count a step. Raises ConfigurationError for impossible figures."""
        # Without a cap, epsilon does not depend on the sample size.
        self._counts[Release(noise_multiplier, sample_rate, sample_size=1)] += 1

    def get_epsilon(self, delta: float) -> float:
        """Return epsilon of all steps at `delta`."""
        return epsilon_of(tuple(self._counts.items()), delta, ACCOUNTANTS[self.name])

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """(noise multiplier, sample rate, number) of steps of each kind."""
        return [(r.noise_multiplier, r.sampling_probability, count) for r, count in self._counts.items()]

    def __len__(self) -> int:
        return self._counts.total()

    @classmethod
    def mechanism(cls) -> str:
        """Return Opacus's name of the accountant."""
        return cls.name

    def state_dict(self) -> dict[str, Any]:
        """Return the steps as plain values."""
        return {"history": self.history, "mechanism": self.mechanism()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load steps; ConfigurationError for another accountant's, or an impossible count."""
        if state_dict.get("mechanism") != self.mechanism():
            raise ConfigurationError(
                f"The state is that of {state_dict.get('mechanism')!r}; this accountant is {self.mechanism()!r}. "
                f"Load it into the accountant that saved it."
            )
        counts: Counter[Release] = Counter()
        for sigma, q, count in state_dict["history"]:  # Opacus begins an entry at every change: some are equal
            if not is_count(count):
                raise ConfigurationError(f"history: {count!r} is no number of steps. Load a state that was saved.")
            counts[Release(sigma, q, sample_size=1)] += count
        self._counts = counts


class RDPAccountant(IAccountant):
    """Renyi differential privacy."""

    name = "rdp"


class PRVAccountant(IAccountant):
    """Numerical composition of privacy loss distributions; an upper bound."""

    name = "prv"


class GaussianAccountant(IAccountant):
    """Central limit of Gaussian differential privacy: NOT a bound, often below the true epsilon."""

    name = "gdp"


def create_accountant(mechanism: str) -> IAccountant:
    """Return a new accountant by Opacus's name."""
    kinds = {kind.mechanism(): kind for kind in (RDPAccountant, PRVAccountant, GaussianAccountant)}
    require_choice("mechanism", mechanism, tuple(kinds))
    return kinds[mechanism]()


class Accountant:
    """The ledger of an engine; empty before `make_private`."""

    def __init__(self) -> None:
        self.engine: PrivacyEngine | None = None

    def get_epsilon(self, delta: float) -> float:
        """Return epsilon so far at `delta`."""
        return 0.0 if self.engine is None else self.engine.epsilon(delta)

    def __len__(self) -> int:
        return 0 if self.engine is None else self.engine.step
