"""Our correlated noise against figures of jax-privacy 2.0.0, stored by `python -m benchmarks factorisations`."""

import json

import pytest

from benchmarks.factorisations import CASES, differences, figures, ours
from benchmarks.results_files import FOLDER
from dpshard.noise.correlation import BandMF

STORED = json.loads((FOLDER / "factorisations.json").read_text())
ROWS = {tuple(row[name] for name in ("strategy", "steps", "bands", "separation")): row for row in STORED["cases"]}


def test_every_case_is_stored():
    assert list(ROWS) == list(CASES)
    assert STORED["versions"] == {"jax": "0.10.2", "jax-privacy": "2.0.0"}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sensitivity_and_error_are_those_of_jax_privacy(case):
    found = differences(ours(*case), ROWS[case]["jax_privacy"])
    assert found["rmse"] < 1e-6
    # An optimum is flat: errors that differ by 1e-10 have coefficients that differ by 1e-5.
    assert found["sensitivity"] < (1e-5 if case[0] == "banded-optimised" else 1e-6)


@pytest.mark.parametrize("case", [case for case in CASES if case[0] == "banded-optimised"], ids=str)
def test_coefficients_of_jax_privacy_have_its_figures(case):
    _, steps, bands, separation = case
    correlation = BandMF(bands=bands, coefficients=tuple(ROWS[case]["coefficients_of_jax_privacy"]))
    found = differences(figures(correlation, steps, separation), ROWS[case]["jax_privacy"])
    assert max(found.values()) < 1e-9
