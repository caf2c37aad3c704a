"""What no gradient reaches in the first logical batch is named, once; what only begins at zero is not.

Adapters that were cut off train for hours, while epsilon grows and the loss falls.
"""

import warnings

import pytest
import torch
from torch import Tensor, nn

from dpshard import PrivacyEngine

DATA = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


class Adapted(nn.Module):
    """A linear layer with an adapter of rank 2 that starts at zero."""

    def __init__(self, *, cut: bool) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(4, 3), nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False)
        nn.init.zeros_(self.up.weight)
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.cut):
            adapter = self.up(self.down(x))
        return self.base(x) + adapter


def told(model: nn.Module, *, steps: int = 2, batch_size: int = 16, style: str = "all-layer") -> list[str]:
    """Return the warnings of a run of two steps, except that of missing noise."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = PrivacyEngine(
            model, batch_size=batch_size, sample_size=16, steps=steps, noise_multiplier=0.5, clipping_style=style
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for logical_batch in engine.batches(DATA, 8):
            for x in logical_batch:
                model(x).square().mean(1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(w.message) for w in caught if "No gradient reached" in str(w.message)]


@pytest.mark.parametrize("style", ["all-layer", "layer-wise"])
def test_what_no_gradient_reaches_is_named(style: str) -> None:
    (message,) = told(Adapted(cut=True), style=style)
    assert (
        "No gradient reached down.weight, up.weight in the first logical batch (2 of 4 trained parameters)" in message
    )
    assert "detach()" in message


def test_what_begins_at_zero_is_not_named() -> None:
    assert told(Adapted(cut=False)) == []


def test_what_is_frozen_is_not_named() -> None:
    model = Adapted(cut=True)
    model.down.requires_grad_(False)
    model.up.requires_grad_(False)
    assert told(model) == []


def test_an_empty_batch_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([[], list(range(16)), []])
    monkeypatch.setattr("dpshard.sampling.PoissonSampler.draw", lambda *_: next(drawn))
    model = Adapted(cut=True)
    assert len(told(model, steps=3)) == 1


class WithUnused(Adapted):
    def __init__(self) -> None:
        super().__init__(cut=False)
        self.unused = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))


def test_many_are_counted() -> None:
    (message,) = told(WithUnused())
    assert "unused.2.weight and 3 more" in message
    assert "(8 of 12 trained parameters)" in message
