"""Odds for report.html.jinja, rounded against us."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from dpshard.accounting import rounded_up
from dpshard.accounting.risk import RARELY, Pair, belief, found_records, mostly_below, rarely_above, right_guesses

BANDS = (("strong", 1.0), ("reasonable", 10.0), ("weak", math.inf))
"""Of Ponomareva et al. 2023, "How to DP-fy ML", arXiv:2303.00654, Sec. 5.2."""
SCALE = (0.1, 100.0)
"""Ends of the logarithmic scale."""


def strength(epsilon: float) -> dict[str, str]:
    """Return the band, and the place on the scale."""
    low, high = map(math.log10, SCALE)
    place = (math.log10(max(epsilon, SCALE[0])) - low) / (high - low)
    # A band is for what is proved: 10.0001 is above 10.
    return {"band": next(name for name, most in BANDS if epsilon <= most), "place": f"{100 * min(1, place):.1f}%"}


def odds(privacy: Mapping[str, Any]) -> dict[str, float]:
    """Return bounds on an attacker.

    `of_two` is delta for two records: P(S) <= e^eps (e^eps R(S) + delta) + delta (Dwork and Roth 2014).
    """
    epsilon, delta = privacy["epsilon"], privacy["delta"]
    recorded = [Pair(*pair) for pair in privacy.get("profile", ()) if pair[0] is not None]
    pairs, factor = [*recorded, Pair(epsilon, delta)], math.exp(min(epsilon, 700))
    loss, usual = rarely_above(epsilon), mostly_below(pairs)
    found = {"pairs": len(pairs), "loss": loss, "rare": RARELY * delta, "factor": factor}
    found |= {"guess": right_guesses(pairs), "found": found_records(pairs), "of_two": min(1.0, delta * (1 + factor))}
    found |= {"half": belief(loss, 0.5), "tenth": belief(loss, 0.1)}
    return found | {"usual_half": belief(usual, 0.5), "usual_tenth": belief(usual, 0.1)}


def plain(value: float) -> str:
    """Return `value` as lay readers know it: 0.00001."""
    return f"{Decimal(f'{value:.6g}'):f}"


def short(value: float, digits: int = 4) -> str:
    """Return `value` rounded up, without the zeros at its end."""
    shown = rounded_up(value, digits)
    return plain(float(shown)) if math.isfinite(value) else shown


def percent(share: float) -> str:
    """Return a share, rounded up."""
    return rounded_up(100 * share, 1) + "%"


def one_in(probability: float) -> str:
    """Return N of "1 in N", rounded down."""
    return f"{max(1, math.floor((1 + 1e-9) / probability)):,}"


def of_100(share: float) -> str:
    """Return a number of 100, rounded up."""
    return f"{min(100, math.ceil(100 * share - 1e-9))} of 100"


def odds_after(loss: float, prior: float) -> str:
    """Return the belief after a result: 80% (4 to 1), 40% (1 to 1.5)."""
    share, ratio = percent(belief(loss, prior)), math.exp(min(loss, 700)) * prior / (1 - prior)
    if ratio < 1:
        return f"{share} (1 to {math.floor(10 / ratio + 1e-9) / 10:g})"
    whole = f"{math.ceil(ratio - 1e-6):,}" if ratio < 1e6 else f"{ratio:.1e}"
    return f"{share} ({rounded_up(ratio, 1) if ratio < 100 else whole} to 1)"


FILTERS = {f.__name__: f for f in (plain, short, percent, one_in, of_100, odds_after)}
