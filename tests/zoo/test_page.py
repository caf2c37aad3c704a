"""docs/models.md names the tests of the zoo, all of them; what the rows say, each test holds for itself (conftest)."""

import pytest

from tests.zoo import page

pytest.importorskip("transformers")


def test_no_row_is_left_of_a_model_that_is_gone(request):
    if any("::" in argument for argument in request.config.args):
        pytest.skip("single tests were asked for, and which others there are is not known")
    collected: dict[str, set[str]] = {}
    for item in request.config.stash[page.COLLECTED]:
        if item.path.name in page.SECTIONS:
            collected.setdefault(page.SECTIONS[item.path.name], set()).add(page.name_of(item))
    for section, name in page.rows():
        assert section not in collected or name in collected[section], f"{name}: run `python -m tests.zoo.page`"


def test_a_row_that_changed_is_noticed():
    """Tests compare the cells that the page holds."""
    rows = page.rows()
    assert len(rows) > 90
    model, parameters, functions, error = rows["Language models of transformers", "decoders[GPT2]"]
    assert (model, parameters) == ("`GPT2LMHeadModel`", "2,048")
    assert "`addmm`" in functions
    assert float(error) < 1e-10
