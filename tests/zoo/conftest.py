"""Every model of the zoo starts from the same seed, and is what docs/models.md says."""

import pytest
import torch

from tests.zoo import page


def pytest_runtest_setup():
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    config.stash[page.COLLECTED] = list(items)


@pytest.fixture(autouse=True)
def _as_on_the_page(request):
    page.begin()
    yield
    section = page.SECTIONS.get(request.path.name)
    writing = any(isinstance(plugin, page.Writer) for plugin in request.config.pluginmanager.get_plugins())
    if section is None or not page.seen.model or writing or not page.is_comparable():
        return
    row = page.rows().get((section, page.name_of(request.node)))
    stale = "docs/models.md is stale: run `python -m tests.zoo.page`"
    assert row is not None, stale
    assert row[:3] == page.cells()[:3], stale
