"""Grids of cases: `make test` runs a few of them that meet every feature, `make test-all` the others.

Most faults show where two settings meet (Kuhn, Wallace and Gallo 2004, IEEE TSE 30:6), so a grid of three axes or more
need not be whole.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def quick(*values: Any, rest: Iterable[Any]) -> list[Any]:
    """The values, and the rest, which are exhaustive."""
    return [*values, *(pytest.param(value, marks=pytest.mark.exhaustive) for value in rest)]


def chosen(values: Iterable[Any], *quickly: Any) -> list[Any]:
    """The values in their order; those that are not among `quickly` are exhaustive."""
    return [v if v in quickly else pytest.param(v, marks=pytest.mark.exhaustive) for v in values]


def each(*axes: Iterable[Any]) -> list[Any]:
    """The product of the axes; every value meets in a case that is not exhaustive."""
    return covering(product(*axes), lambda *case: set(enumerate(case)))


def all_pairs(*axes: Iterable[Any]) -> list[Any]:
    """Cases in which every pair of values of two axes meets; every value is in a case that is not exhaustive."""
    cases = _few([*product(*axes)], lambda case: set(combinations(enumerate(case), 2)))
    return covering(cases, lambda *case: set(enumerate(case)))


def covering(cases: Iterable[tuple[Any, ...]], features: Callable[..., Iterable[Hashable]]) -> list[Any]:
    """The cases; every one of their features is in a case that is not exhaustive."""
    cases = list(cases)
    quickly = {id(case) for case in _few(cases, lambda case: set(features(*case)))}
    rest = pytest.mark.exhaustive
    return [pytest.param(*case, marks=() if id(case) in quickly else rest) for case in cases]


def _few(
    cases: Sequence[tuple[Any, ...]], features: Callable[[tuple[Any, ...]], set[Hashable]]
) -> list[tuple[Any, ...]]:
    """Take the case that adds the most features, again and again until none is missing."""
    of = [features(case) for case in cases]
    missing, taken = set().union(*of), []
    while missing:
        best = max(range(len(cases)), key=lambda i: (len(of[i] & missing), -i))
        taken.append(best)
        missing -= of[best]
    return [cases[i] for i in sorted(taken)]
