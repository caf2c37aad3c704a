"""The settings of the engine: what they do, and the updates that they give.

Failure modes: 1 test_the_update_is_that_of_the_oracle; 3 test_accumulation_does_not_change_the_unit;
20 test_an_own_loop_warns_once.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F

from dpshard import PrivacyEngine
from dpshard.errors import ConfigurationError
from tests.engine.script import STYLES, UNWARNED, N, backward, data, engine_on, first_of, gradients, mlp
from tests.oracle import clipped_mean, per_sample_gradients, relative_error

pytestmark = UNWARNED


def test_every_documented_setting_is_taken():
    model = mlp()
    engine = PrivacyEngine(
        model,
        batch_size=256,
        sample_size=50_000,
        epochs=3,
        target_epsilon=3.0,
        target_delta=1e-5,
        max_grad_norm=1.0,
        clipping_fn="automatic",
        clipping_style="all-layer",
        clipping_mode="auto",
        accountant="rdp",
        loss_reduction="mean",
    )
    assert engine.steps == round(3 * 50_000 / 256)
    assert 0.4 < engine.noise_multiplier < 1.5
    assert engine.epsilon() == 0
    assert engine.step == 0
    assert engine.metrics()["realised_batch_size"] == 0


@pytest.mark.parametrize(("epochs", "batch_size", "steps"), [(1, 6, 4), (3, 7, 10), (2.5, 24, 2), (0.01, 6, 1)])
def test_epochs_are_steps_of_the_expected_batch_size(epochs, batch_size, steps):
    assert engine_on(mlp(), batch_size=batch_size, epochs=epochs, steps=None).steps == steps


@pytest.mark.parametrize("schedule", [[(2, 1), (6, 2)], lambda step: 2 if step == 0 else 6])
def test_a_schedule_divides_and_accounts_step_by_step(schedule):
    model = mlp()
    engine = engine_on(model, batch_size=schedule, steps=None if isinstance(schedule, list) else 3)
    assert engine.steps == 3
    sums = []
    for size in (2, 6, 6):
        backward(model)
        engine.privatize()
        sums.append(model[0].weight.grad * size)
        model.zero_grad()
    torch.testing.assert_close(sums[1], sums[0])
    torch.testing.assert_close(sums[2], sums[0])
    spans = engine.state_dict()["ledger"]["spans"]
    steps = [(span["release"]["sampling_probability"], span["start"], span["stop"]) for span in spans]
    assert steps == [(2 / N, 0, 1), (6 / N, 1, 3)]


@pytest.mark.parametrize("style", STYLES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_update_is_that_of_the_oracle(style, reduction):
    model, (x, y) = mlp(), data(6)
    per_sample = per_sample_gradients(model, (x, y), F.cross_entropy)
    names = list(per_sample[0])
    groups = {
        "all-layer": [names],
        "layer-wise": [names[:2], names[2:]],
        "block-wise": [names[:2], names[2:]],
        "param-wise": [[name] for name in names],
    }[style] if isinstance(style, str) else style  # fmt: skip
    expected = clipped_mean(per_sample, max_grad_norm=0.7, batch_size=11, groups=groups)
    engine_on(model, batch_size=11, max_grad_norm=0.7, clipping_style=style, loss_reduction=reduction)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    F.cross_entropy(model(x), y, reduction=reduction).backward()
    optimizer.step()
    update = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    assert relative_error(update, expected) < 1e-12


def test_accumulation_does_not_change_the_unit():
    found = []
    for cuts in ([6], [1, 5], [2, 2, 2]):
        model = mlp()
        engine = engine_on(model)
        for x, y in zip(*(t.split(cuts) for t in data(6)), strict=True):
            F.cross_entropy(model(x), y).backward()
        engine.privatize()
        found.append(gradients(model))
    assert relative_error(found[1], found[0]) < 1e-12
    assert relative_error(found[2], found[0]) < 1e-12


def test_a_refused_engine_leaves_no_trace():
    model = mlp()
    for options in ({"clipping_style": [["0.weight"]]}, {"target_epsilon": 1.0}, {"max_grad_norm": 0}):
        with pytest.raises(ConfigurationError):
            engine_on(model, **options)
    assert all(not p._backward_hooks and not p._post_accumulate_grad_hooks for p in model.parameters())
    engine_on(model)


def test_no_noise_warns():
    with pytest.warns(UserWarning, match="NOT private"):
        engine = engine_on(mlp())
    assert engine.noise_multiplier == 0


def test_an_own_loop_warns_once():
    model = mlp()
    engine = engine_on(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            backward(model)
            engine.privatize()
            model.zero_grad()
    assert ["engine.batches" in str(w.message) for w in caught] == [True]


def test_batches_of_the_engine_do_not_warn():
    model = mlp()
    with warnings.catch_warnings(action="ignore"):
        engine = engine_on(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in first_of(engine, 4):
            F.cross_entropy(model(x), y).backward()
        engine.privatize()
    assert (len(caught), engine.step) == (0, 1)
