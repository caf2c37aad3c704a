"""The noise for a budget."""

from __future__ import annotations

import math
import warnings

from dpshard.accounting import SampledMechanism, calibrate
from dpshard.config import BatchSchedule, require_choice
from dpshard.errors import ConfigurationError
from dpshard.integrations.opacus.accountants.accountant import ACCOUNTANTS

_RESOLUTION = 10**9
"""Sample rates are rounded up to multiples of one over this."""


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    epochs: int | None = None,
    steps: int | None = None,
    accountant: str = "rdp",
) -> float:
    """Return the smallest noise multiplier within the budget; `epochs` are 1 / `sample_rate` steps.

    Raises ConfigurationError for impossible settings, AccountingError if no noise suffices.
    """
    require_choice("accountant", accountant, ("rdp", "prv"))
    if (epochs is None) == (steps is None):
        raise ConfigurationError(f"epochs={epochs!r}, steps={steps!r}: give exactly one of them.")
    if not 0 < sample_rate <= 1:
        raise ConfigurationError(f"sample_rate={sample_rate!r}: it is (batch size) / (sample size), in (0, 1].")
    count = math.ceil(epochs / sample_rate) if epochs is not None else steps
    drawn = math.ceil(sample_rate * _RESOLUTION)
    schedule = BatchSchedule.parse(min(drawn, _RESOLUTION), sample_size=_RESOLUTION, steps=count)
    with warnings.catch_warnings():  # about the unknown sample size
        warnings.simplefilter("ignore")
        mechanism = calibrate(
            SampledMechanism(schedule=schedule, sample_size=_RESOLUTION),
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            accountant=ACCOUNTANTS[accountant],
        )
    return mechanism.noise_multiplier
