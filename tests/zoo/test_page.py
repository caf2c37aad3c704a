"""docs/models.md names the tests of the zoo, all of them; what the rows say, each test holds for itself (conftest)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.zoo import page

pytest.importorskip("transformers")


def test_no_row_is_left_of_a_model_that_is_gone():
    files = [str(Path(__file__).parent / name) for name in page.SECTIONS]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    listed = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTEST_ADDOPTS": ""}, check=False, cwd=page.ROOT
    ).stdout
    collected: dict[str, set[str]] = {}
    for line in listed.splitlines():
        file, _, name = line.partition("::test_")
        if name:
            collected.setdefault(page.SECTIONS[Path(file).name], set()).add(name)
    assert collected
    for section, name in page.rows():
        assert section not in collected or name in collected[section], f"{name}: run `python -m tests.zoo.page`"


def test_a_row_that_changed_is_noticed():
    """The cells that tests compare are those that the page holds."""
    rows = page.rows()
    assert len(rows) > 90
    model, parameters, functions, error = rows["Language models of transformers", "decoders[GPT2]"]
    assert (model, parameters) == ("`GPT2LMHeadModel`", "2,048")
    assert "`addmm`" in functions
    assert float(error) < 1e-10
