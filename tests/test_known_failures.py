"""The page of known failures names tests that exist, and failures of others that no other room looks at.

Failure modes: 8 test_a_parameter_that_was_replaced_is_refused; 22 test_epsilon_is_never_negative.
"""

import ast
import re
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

from dpshard import PrivacyEngine
from dpshard.accounting import epsilon_of
from dpshard.accounting.releases import Release
from dpshard.config import AccountantName
from dpshard.errors import UnsupportedParameterError

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/known-failures.md").read_text("utf-8")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@cache
def defined_in(file: str) -> set[str]:
    """The test functions of a file."""
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_test_on_the_page_exists() -> None:
    named = NAMED.findall(PAGE)
    assert len(named) > 70
    missing = [f"{file}::{name}" for file, name in named if name not in defined_in(file)]
    assert not missing


def test_every_line_of_the_page_names_a_test() -> None:
    lines = [
        line
        for line in PAGE.splitlines()
        if line.startswith("| ") and not re.match(r"\| (where|row|what|num|pit)", line)
    ]
    unshown = [line for line in lines if not NAMED.search(line) and not line.endswith("| the same |")]
    assert not unshown


def test_every_fault_of_the_privacy_model_has_a_test_of_a_file_that_claims_it() -> None:
    model = (ROOT / "docs/privacy-model.md").read_text("utf-8").partition("| the fault |")[2]
    claimed = dict(re.findall(r"^\| (\d+) \|.* \| (.*) \|$", model, re.MULTILINE))
    shown = dict(re.findall(r"^\| (\d+) \| `(tests/[\w/]+\.py)::\w+` \|$", PAGE, re.MULTILINE))
    assert shown.keys() == claimed.keys()
    for number, file in shown.items():
        assert f"`{file}`" in claimed[number], number


def test_a_parameter_that_was_replaced_is_refused() -> None:
    """As a model does that makes its parameters when it first runs, or moves: others then hold the old ones."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    engine = PrivacyEngine(model, batch_size=4, sample_size=8, steps=1, noise_multiplier=1.0)
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())
    batches = engine.batches(torch.randn(8, 3), 4)
    x = next(iter(next(batches)))
    with pytest.raises(UnsupportedParameterError, match=r"1\.weight became trainable, or replaced"):
        model(x)


@pytest.mark.parametrize("accountant", get_args(AccountantName))
@pytest.mark.parametrize(("sigma", "steps"), [(50.0, 1), (5.0, 10), (1.0, 100)])
@pytest.mark.filterwarnings("ignore::UserWarning")  # delta above 1 / N, and gdp
def test_epsilon_is_never_negative(accountant: AccountantName, sigma: float, steps: int) -> None:
    counts = ((Release(sigma, 0.01, 1000), steps),)
    spent = [epsilon_of(counts, delta, accountant) for delta in (1e-8, 0.1, 0.5, 0.9, 0.999)]
    assert min(spent) >= 0
    assert spent == sorted(spent, reverse=True)
