"""The figures of a logical batch, against a computation of their own from per-sample gradients.

Failure modes: 4 test_samples_without_a_finite_gradient_are_counted (its clipping: test_noise_on_update);
5 test_padding_is_not_counted; 10 test_half_precision_is_summed_in_float32_or_better;
25 test_that_they_are_not_private_is_said.
"""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine
from dpshard.clipping.groups import ClippingGroup
from dpshard.clipping.metrics import BatchMetrics
from tests.oracle import norm, per_sample_gradients, randn

pytestmark = [
    pytest.mark.filterwarnings("ignore:This loop feeds its own batches"),
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
]

N, R = 40, 1.6
LISTS = [["0.weight", "2.bias"], ["2.weight", "0.bias"]]
GROUPS = {
    "all-layer": {"all-layer": ["0.weight", "0.bias", "2.weight", "2.bias"]},
    "layer-wise": {"0": ["0.weight", "0.bias"], "2": ["2.weight", "2.bias"]},
    "block-wise": {"0": ["0.weight", "0.bias"], "2": ["2.weight", "2.bias"]},
    "param-wise": {name: [name] for name in ("0.weight", "0.bias", "2.weight", "2.bias")},
    "lists": {"group 0": LISTS[0], "group 1": LISTS[1]},
}


def mlp():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def data():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return randn(N, 4), torch.arange(N) % 3


def engine_on(model, **options):
    defaults = {"batch_size": 9, "sample_size": N, "steps": 9, "noise_multiplier": 1.5, "max_grad_norm": R}
    engine = PrivacyEngine(model, **{**defaults, **options})
    engine._secret = bytes(range(32))
    return engine


def one_step(engine, model, micro_batch_size, *, loss=F.cross_entropy):
    """Return indices of the samples of the next logical batch, after its release."""
    batches, seen = engine.batches(TensorDataset(*data()), micro_batch_size), []
    for x, y in (logical_batch := next(batches)):
        plan = logical_batch.micro.plan
        seen += [i for i, padding in zip(plan.indices, plan.is_padding.tolist(), strict=True) if not padding]
        loss(model(x), y).backward()
    engine.privatize()
    return seen


@pytest.mark.parametrize(("micro_batch_size", "mode"), [(1, "auto"), (4, "ghost"), (16, "auto")])
@pytest.mark.parametrize("clipping_fn", ["abadi", "automatic", "global"])
@pytest.mark.parametrize("style", GROUPS)
def test_figures(style, clipping_fn, micro_batch_size, mode):
    model = mlp()
    groups = GROUPS[style]
    engine = engine_on(
        model, clipping_style=LISTS if style == "lists" else style, clipping_fn=clipping_fn, clipping_mode=mode
    )
    function, threshold = engine._clipper.function, R / math.sqrt(len(groups))
    seen = one_step(engine, model, micro_batch_size)
    metrics = engine.metrics()
    engine.detach()
    model.zero_grad()
    x, y = data()
    gradients = per_sample_gradients(model, (x[seen], y[seen]), F.cross_entropy)
    norms = {
        label: torch.tensor([norm(g, names) for g in gradients], dtype=torch.float64) for label, names in groups.items()
    }
    above = [float((n > threshold).sum()) for n in norms.values()]
    signal_sq = 0.0
    for label, names in groups.items():
        factors = function.factor(norms[label], threshold)
        for name in names:
            signal_sq += float(sum(f * g[name] for f, g in zip(factors, gradients, strict=True)).square().sum())
    elements = sum(p.numel() for p in model.parameters())
    expected = {
        "realised_batch_size": len(seen),
        "nonfinite_samples": 0,
        "clip_fraction": sum(above) / (len(seen) * len(groups)),
        "clipped_sum_norm": math.sqrt(signal_sq),
        "gradient_snr": math.sqrt(signal_sq) / (1.5 * R * math.sqrt(elements)),
        **{f"grad_norm/{label}": float(n.mean()) for label, n in norms.items()},
        **{f"grad_norm_max/{label}": float(n.max()) for label, n in norms.items()},
    }
    assert metrics == pytest.approx(expected, rel=1e-9)
    assert len(seen) > 4
    assert 0 < sum(above) < len(seen) * len(groups)


def test_padding_is_not_counted():
    """Padding rows repeat a sample; their gradients exist, but even huge ones or NaN do not count."""
    clean, poisoned = {}, {}
    for found, poison in ((clean, False), (poisoned, True)):
        model = mlp()
        engine = engine_on(model)

        def loss(output, y, engine=engine, poison=poison):
            padding = engine._collector.plan.is_padding
            loss_B = F.cross_entropy(output, y, reduction="none")
            return (loss_B * torch.where(padding, math.nan if poison else 1.0, 1.0)).mean()

        found["seen"] = one_step(engine, model, 16, loss=loss)
        found.update(engine.metrics())
    assert clean == poisoned
    assert clean["realised_batch_size"] == len(clean["seen"]) < 16


def test_an_empty_logical_batch_has_no_figures():
    model = mlp()
    engine = engine_on(model, batch_size=1, sample_size=N)
    batches = engine.batches(TensorDataset(*data()), 4)
    for logical_batch in batches:
        real = 0
        for x, y in logical_batch:
            real += int((~logical_batch.micro.plan.is_padding).sum())
            F.cross_entropy(model(x), y).backward()
        engine.privatize()
        model.zero_grad()
        if real == 0:
            break
    else:
        pytest.fail("no logical batch was empty")
    assert set(engine.metrics().values()) == {0.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("style", ["all-layer", "param-wise"])
def test_samples_without_a_finite_gradient_are_counted(style, bad):
    model = mlp()
    engine = engine_on(model, clipping_style=style)
    x, y = data()
    weights = torch.ones(8, dtype=torch.float64)
    weights[[1, 5]] = bad
    (F.cross_entropy(model(x[:8]), y[:8], reduction="none") * weights).mean().backward()
    engine.privatize()
    metrics = engine.metrics()
    assert metrics["nonfinite_samples"] == 2
    assert metrics["realised_batch_size"] == 8
    model.zero_grad()
    engine.detach()
    rest = [0, 2, 3, 4, 6, 7]
    norms = [norm(g, ["0.weight"]) for g in per_sample_gradients(model, (x[rest], y[rest]), F.cross_entropy)]
    if style == "param-wise":
        assert metrics["grad_norm/0.weight"] == pytest.approx(sum(norms) / 6, rel=1e-9)
        assert metrics["grad_norm_max/0.weight"] == pytest.approx(max(norms), rel=1e-9)
    assert all(math.isfinite(value) for value in metrics.values())


def test_norms_are_those_of_each_samples_own_loss():
    """Not those of the mean over the micro-batch, whose gradients are shorter."""
    found = []
    for reduction in ("mean", "sum"):
        model = mlp()
        engine = engine_on(model, loss_reduction=reduction)
        x, y = data()
        F.cross_entropy(model(x[:8]), y[:8], reduction=reduction).backward()
        engine.privatize()
        found.append(engine.metrics())
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_figures_are_those_of_the_last_release():
    model = mlp()
    engine = engine_on(model)
    assert engine.metrics()["realised_batch_size"] == 0
    x, y = data()
    sizes = []
    for rows in (8, 3):
        F.cross_entropy(model(x[:rows]), y[:rows]).backward()
        before = engine.metrics()
        assert engine.metrics() == before
        engine.privatize()
        model.zero_grad()
        sizes += [before["realised_batch_size"], engine.metrics()["realised_batch_size"]]
    assert sizes == [0, 8, 8, 3]


def test_signal_without_noise():
    model = mlp()
    engine = engine_on(model, noise_multiplier=0)
    x, y = data()
    F.cross_entropy(model(x), y).backward()
    engine.privatize()
    assert engine.metrics()["gradient_snr"] == math.inf


def test_verification_is_not_counted():
    model = mlp()
    engine = engine_on(model)
    x, y = data()
    engine.verify(x[:8])
    F.cross_entropy(model(x[:8]), y[:8]).backward()
    engine.verify(x[:8])
    engine.privatize()
    assert engine.metrics()["realised_batch_size"] == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32_or_better(dtype):
    """The norm of a clipped sum of 2^16 equal elements would be wrong, or overflow, in half precision."""
    model = nn.Linear(256, 256, bias=False).to(dtype)
    engine = engine_on(model, max_grad_norm=100.0, clipping_fn="abadi", verify=False)
    x = torch.ones(2, 256, dtype=dtype)
    (model(x).sum(1) * 10).mean().backward()
    engine.privatize()
    assert engine.metrics()["grad_norm/all-layer"] == pytest.approx(2560, rel=1e-5)
    assert engine.metrics()["clipped_sum_norm"] == pytest.approx(200, rel=1e-5)


# --- the sums themselves --------------------------------------------------------------------------------------------

GROUP = ClippingGroup(0, "g", ("w",), 1.0)


def test_a_norm_at_the_threshold_is_not_clipped():
    metrics = BatchMetrics()
    metrics.observe(GROUP, torch.tensor([0.5, 1.0, 1.5, 4.0]), None)
    summary = metrics.summary()
    assert summary["clip_fraction"] == 0.5
    assert summary["grad_norm/g"] == 1.75
    assert summary["grad_norm_max/g"] == 4


def test_many_micro_batches_are_summed_in_float64():
    metrics = BatchMetrics()
    for _ in range(300):
        metrics.observe(GROUP, torch.full((1000,), 0.1), None)
    assert metrics.summary()["grad_norm/g"] == pytest.approx(float(torch.tensor(0.1)), rel=1e-12)
    assert metrics.summary()["realised_batch_size"] == 300_000


def test_losses_are_averaged_over_samples():
    metrics = BatchMetrics()
    assert "loss" not in metrics.summary()
    padding = torch.tensor([False, False, True, True])
    metrics.add_loss(torch.tensor([1.0, 2.0, math.nan, 9.0]), padding)
    metrics.add_loss(torch.tensor(3.0), torch.tensor([False]))
    assert metrics.summary()["loss"] == pytest.approx(2.0)


def test_losses_that_are_not_finite_do_not_count():
    metrics = BatchMetrics()
    metrics.add_loss(torch.tensor([1.0, math.nan, math.inf, 3.0]), None)
    assert metrics.summary()["loss"] == pytest.approx(2.0)
    only = BatchMetrics()
    only.add_loss(torch.tensor([math.nan]), None)
    assert "loss" not in only.summary()


def test_a_loss_of_padding_alone_is_none():
    metrics = BatchMetrics()
    metrics.add_loss(torch.tensor(math.nan), torch.tensor([True, True]))
    metrics.add_loss(torch.tensor([math.nan]), torch.tensor([True]))
    assert "loss" not in metrics.summary()
    metrics.add_loss(torch.tensor(4.0), torch.tensor([False, False]))
    assert metrics.summary()["loss"] == 4


def test_that_they_are_not_private_is_said():
    assert "NOT private" in PrivacyEngine.metrics.__doc__
    import dpshard.clipping.metrics

    assert "epsilon covers none of them" in dpshard.clipping.metrics.__doc__
    docs = Path(__file__).parents[2] / "docs"
    assert "engine.metrics()" in (docs / "privacy-model.md").read_text().split("## What epsilon does not cover")[1]
