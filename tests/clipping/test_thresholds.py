"""Thresholds that follow a quantile of the gradient norms, and what their counts cost.

Failure modes: 2 test_sums_and_counts_together_are_one_gaussian_mechanism; 5 test_padding_is_not_counted;
14 test_counts_have_the_promised_noise (ranks: tests/distributed); 19 test_a_backward_that_failed_does_not_count_twice;
24 test_a_checkpoint_without_thresholds_is_refused (and test_resume.py);
25 test_accounting_sums_and_counts_apart_gives_the_same_epsilon, test_one_sample_changes_the_release_by_its_share,
test_a_sample_that_makes_a_group_run_changes_its_count_by_a_half;
26 test_counts_have_the_promised_noise.

Statistical tests fix the run secret, so they pass or fail for good; under a random secret a correct engine would fail
each with probability FALSE_ALARM.
"""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine, QuantileTracking
from dpshard.clipping import scheme
from dpshard.clipping.groups import ClippingGroup, sensitivity
from dpshard.clipping.metrics import BatchMetrics
from dpshard.clipping.thresholds import TrackedThresholds
from dpshard.config import CLIPPING_MODES
from dpshard.errors import CheckpointError, ConfigurationError, LogicalBatchError
from dpshard.noise.keyed import KeyedGaussian
from tests.grids import chosen
from tests.noise.sampled import sampled
from tests.oracle import factor, norm, per_sample_gradients
from tests.sums import taken_for_equal

pytestmark = pytest.mark.filterwarnings("ignore:noise_multiplier=0")

FALSE_ALARM = 1e-7
SECRET = bytes(range(32))
N = 60
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(N) % 3
STYLES = ["all-layer", "layer-wise", "param-wise"]
TRACKING = QuantileTracking(quantile=0.6, learning_rate=0.5, budget_share=0.05)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def engine_on(model, **options):
    defaults = {"batch_size": 20, "sample_size": N, "steps": 6, "noise_multiplier": 1.0, "clipping_fn": "abadi"}
    engine = PrivacyEngine(model, **{**defaults, "adaptive_clipping": TRACKING, **options})
    engine._secret = SECRET
    return engine


def train(model, engine, *, micro_batch_size=7, steps=None):
    """Return parameters and thresholds after the steps; one SECRET draws the same samples."""
    optimizer, batches = torch.optim.SGD(model.parameters(), lr=1.0), []
    for logical_batch in engine.batches(TensorDataset(X, Y), micro_batch_size, steps=steps):
        rows = []
        for x, y in logical_batch:
            rows += logical_batch.micro.plan.indices[: logical_batch.micro.plan.samples]
            F.cross_entropy(model(x), y).backward()
        batches.append(rows)
        optimizer.step()
        optimizer.zero_grad()
    return batches


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# --- the rule, against plain loops -----------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("clipping_fn", ["abadi", "automatic"])
def test_thresholds_and_updates_are_those_of_plain_loops(style, clipping_fn):
    model = network()
    engine = engine_on(
        model, clipping_style=style, clipping_fn=clipping_fn, noise_multiplier=0, max_grad_norm=0.5, batch_size=20
    )
    groups = engine.mechanism.clipping_groups
    batches = train(model, engine)
    theirs, thresholds = network(), [0.5 / math.sqrt(len(groups))] * len(groups)
    assert {len(rows) for rows in batches} != {20}  # realised sizes, which must not be divisors
    for rows in batches:
        samples = per_sample_gradients(theirs, (X[rows], Y[rows]), F.cross_entropy)
        norms = [[norm(g, names) for g in samples] for names in groups]
        with torch.no_grad():
            for names, threshold, own in zip(groups, thresholds, norms, strict=True):
                for name in names:
                    total = sum(factor(n, threshold, clipping_fn) * g[name] for n, g in zip(own, samples, strict=True))
                    theirs.get_parameter(name).sub_(total / 20)
        unclipped = [0.5 + sum((n <= t) - 0.5 for n in own) / 20 for t, own in zip(thresholds, norms, strict=True)]
        thresholds = [
            t * math.exp(-0.5 * (min(1, max(0, f)) - 0.6)) for t, f in zip(thresholds, unclipped, strict=True)
        ]
    assert torch.allclose(flat(model), flat(theirs), rtol=0, atol=1e-12)
    assert list(engine.thresholds.values()) == pytest.approx(thresholds, rel=1e-12)
    assert len(set(thresholds)) == len(groups)  # they moved separately


def test_a_threshold_comes_to_rest_at_its_quantile():
    model = network()
    engine = engine_on(model, noise_multiplier=0.5, max_grad_norm=100.0, steps=80, batch_size=50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for logical_batch in engine.batches(TensorDataset(X, Y), 60):
        for x, y in logical_batch:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    norms = torch.tensor([norm(g) for g in per_sample_gradients(network(), (X, Y), F.cross_entropy)])
    below = float((norms <= engine.thresholds["all-layer"]).double().mean())
    assert 0.4 < below < 0.8  # the quantile is 0.6; before, all were below


def test_runaways_stop():
    """The threshold of a layer without gradients falls at every step, but stays a usable divisor."""
    model = network()
    engine = engine_on(
        model, clipping_style="layer-wise", adaptive_clipping=QuantileTracking(learning_rate=50.0), noise_multiplier=0
    )
    model[0].requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for logical_batch in engine.batches(TensorDataset(X, Y), 20):
        for x, _ in logical_batch:
            (model(x) * 0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert list(engine.thresholds.values()) == pytest.approx([1e-12 / math.sqrt(2)] * 2)
    assert torch.isfinite(flat(model)).all()


# --- what it costs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 7])
@pytest.mark.parametrize("sigma", [0.6, 2.0])
@pytest.mark.parametrize("share", [0.01, 0.5])
def test_sums_and_counts_together_are_one_gaussian_mechanism(groups, sigma, share):
    """(S / s)^2 + (sqrt(M) / 2 / t)^2 = 1 / sigma^2."""
    tracked, clipper = tracked_thresholds([1.0 + m for m in range(groups)], QuantileTracking(budget_share=share))
    sums = sensitivity(clipper.groups) / tracked.gradient_noise(sigma)
    counts = math.sqrt(groups) / 2 / tracked.count_noise(sigma)
    assert sums**2 + counts**2 == pytest.approx(sigma**-2, rel=1e-12)
    assert counts**2 == pytest.approx(share * sigma**-2, rel=1e-12)


def tracked_thresholds(thresholds, tracking):
    class Groups:
        groups = tuple(ClippingGroup(i, f"g{i}", (f"p{i}",), t) for i, t in enumerate(thresholds))

        def set_thresholds(self, moved):
            self.groups = tuple(ClippingGroup(i, f"g{i}", (f"p{i}",), t) for i, t in enumerate(moved))

    clipper = Groups()
    return TrackedThresholds(clipper, tracking), clipper  # type: ignore[arg-type]


@pytest.mark.parametrize("style", STYLES)
def test_accounting_sums_and_counts_apart_gives_the_same_epsilon(style):
    """dp-accounting gets two Gaussian queries a step on one Poisson sample, with the noises as added."""
    model = network()
    engine = engine_on(model, clipping_style=style, accountant="rdp", noise_multiplier=0.8, adaptive_clipping=TRACKING)
    train(model, engine)
    thresholds, groups = engine._thresholds, len(engine.thresholds)
    sums = GaussianDpEvent(thresholds.gradient_noise(0.8) / math.hypot(*engine.thresholds.values()))
    counts = GaussianDpEvent(thresholds.count_noise(0.8) / (math.sqrt(groups) / 2))
    step = PoissonSampledDpEvent(20 / N, ComposedDpEvent([sums, counts]))
    theirs = RdpAccountant().compose(SelfComposedDpEvent(step, 6)).get_epsilon(1e-5)
    assert engine.epsilon() == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("i", [0, 1, 2])
def test_one_sample_changes_the_release_by_its_share(style, i):
    """With and without one sample, sums and counts change by at most 1 / sigma, in units of their noises.

    One sample is far above the threshold, one far below, and one has no finite gradient.
    """
    model = network()
    engine = engine_on(model, clipping_style=style, max_grad_norm=0.3, noise_multiplier=0, sample_size=3, batch_size=3)
    rows = X[:3].clone()
    rows[0] *= 1e6
    rows[1] *= 1e-9
    rows[2] *= float("nan")
    share, S, M = TRACKING.budget_share, 0.3, len(engine.thresholds)
    first = engine.thresholds
    releases = []
    for kept in ([0, 1, 2], [j for j in range(3) if j != i]):
        fresh = network()
        engine = engine_on(
            fresh, clipping_style=style, max_grad_norm=0.3, noise_multiplier=0, sample_size=len(kept), steps=1,
            batch_size=len(kept), loss_reduction="sum",
        )  # fmt: skip
        collector, seen = engine._collector, []
        end = collector.end_release
        collector.end_release = lambda end=end, seen=seen: seen.append(end()) or seen[0]
        for logical_batch in engine.batches(TensorDataset(rows[kept], Y[kept]), 3):
            for x, y in logical_batch:
                F.cross_entropy(fresh(x), y, reduction="sum").backward()
            engine.privatize()
            sums = torch.cat([p.grad.flatten() for p in fresh.parameters()]) * len(kept)
        releases.append((sums, seen[0].unclipped_excess(list(first))))
    (sums, counts), (fewer_sums, fewer_counts) = releases
    change_of_sums, change_of_counts = float((sums - fewer_sums).norm()), float((counts - fewer_counts).norm())
    assert change_of_counts == pytest.approx(math.sqrt(M) / 2)  # each count changes by 1/2, up or down
    # times sigma: the noises of the mechanism at sigma = 1
    of_sums, of_counts = change_of_sums * math.sqrt(1 - share) / S, change_of_counts * 2 * math.sqrt(share / M)
    assert of_sums**2 + of_counts**2 <= 1 + 1e-12
    assert i == 2 or change_of_sums > 0


class Experts(nn.Module):
    """Rows with a positive first feature go to one expert, the others to the other; one without rows does not run."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(4, 3, dtype=torch.float64)) for _ in range(2))

    def forward(self, x):
        chosen, out = (x[:, 0] > 0).long(), x.new_zeros(len(x), 3)
        for i, weight in enumerate((self.a, self.b)):
            rows = (chosen == i).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, x[rows] @ weight)
        return out


class Branch(nn.Module):
    """A part that is skipped if it has no rows; for a sample that is not finite, 0 * inf is not 0."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(4, 3, dtype=torch.float64)) for _ in range(2))

    def forward(self, x):
        out, wanted = x @ self.a, x[:, :1] > 0
        return out + (x @ self.b) * wanted if wanted.any() else out


@pytest.mark.filterwarnings("ignore:No gradient reached")
@pytest.mark.parametrize("micro_batch_size", [1, 3, 11])
@pytest.mark.parametrize("network", [Experts, Branch])
def test_a_sample_that_makes_a_group_run_changes_its_count_by_a_half(network, micro_batch_size):
    """Not by the number of samples in its micro-batch, whose norms there are 0, or NaN.

    Verification is off, because it would find that a row of -inf becomes NaN.
    """
    rows = -X[:11].abs() - 0.1
    rows[0] *= -1  # the only row for the second parameter
    rows[5] = -math.inf
    counts = []
    for kept in (rows, rows[1:]):
        model, n = network(), len(kept)
        engine = engine_on(
            model, clipping_style="param-wise", noise_multiplier=0, sample_size=n, batch_size=n, steps=1,
            max_grad_norm=1e-3, verify=False,
        )  # fmt: skip
        for logical_batch in engine.batches(TensorDataset(kept, Y[:n]), micro_batch_size):
            for x, y in logical_batch:
                F.cross_entropy(model(x), y).backward()
            engine.privatize()
        counts.append(engine._metrics.unclipped_excess(["a", "b"]))
    assert torch.equal((counts[0] - counts[1]).abs(), torch.full((2,), 0.5, dtype=torch.float64))


def test_the_gradient_gets_the_noise_of_where_its_thresholds_are():
    """Also after thresholds moved; a chi-squared test on 20,000 elements without a signal."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(99, 100), nn.Linear(100, 100))
    engine = engine_on(model, clipping_style="layer-wise", noise_multiplier=0.7, sample_size=64, batch_size=16, steps=4)
    data = TensorDataset(torch.zeros(64, 99))
    for logical_batch in engine.batches(data, 8):
        assert engine.thresholds.keys() == {"0", "1"}
        s = 0.7 / math.sqrt(0.95) * math.hypot(*engine.thresholds.values())
        for (x,) in logical_batch:
            (model(x) * 0).sum().backward()
        engine.privatize()
        noise = torch.cat([p.grad.flatten() for p in model.parameters()]).double() * 16 / s
        assert engine.gradient_noise_std == pytest.approx(s / 16)
        square, n = float(noise.square().sum()), len(noise)
        assert min(stats.chi2.cdf(square, n), stats.chi2.sf(square, n)) > FALSE_ALARM
        model.zero_grad()
    assert max(engine.thresholds.values()) != pytest.approx(1 / math.sqrt(2))


def test_counts_have_the_promised_noise():
    """The step of a threshold reveals its noise.

    It is normal, of the promised deviation, independent over groups and steps, and unlike the gradient's.
    """
    sigma, batch_size, M = 1.3, 10_000, 40
    tracking = QuantileTracking(quantile=0.5, learning_rate=0.1, budget_share=0.02)
    tracked, clipper = tracked_thresholds([1.0] * M, tracking)
    noise, draws = KeyedGaussian(SECRET), []
    for step in range(200):
        before = [group.threshold for group in clipper.groups]
        tracked.move(BatchMetrics(), noise, step=step, sigma=sigma, batch_size=batch_size)
        after = [group.threshold for group in clipper.groups]
        counts = [-math.log(a / b) / 0.1 * batch_size for a, b in zip(after, before, strict=True)]
        draws.append([count / (sigma * math.sqrt(M / 0.02) / 2) for count in counts])
    draws = torch.tensor(draws, dtype=torch.float64)
    assert stats.kstest(draws.flatten().numpy(), "norm").pvalue > FALSE_ALARM
    square, n = float(draws.square().sum()), draws.numel()
    assert min(stats.chi2.cdf(square, n), stats.chi2.sf(square, n)) > FALSE_ALARM
    gradient = torch.stack([sampled(noise, step, "clipping counts", 0, M, torch.float64) for step in range(200)])
    bound = stats.norm.isf(FALSE_ALARM / 2)
    for other in (gradient, draws.roll(1, 0), draws.roll(1, 1)):
        assert abs(float((draws * other).mean())) * n**0.5 < bound


def test_thresholds_show_counts_on_a_grid_alone():
    """Otherwise the last bits of float64 noise would be public."""
    model, tracking = network(), QuantileTracking(quantile=0.5, learning_rate=0.1, budget_share=0.02)
    engine = engine_on(model, adaptive_clipping=tracking)
    (before,) = engine.thresholds.values()
    train(model, engine)
    for logical_batch in engine.batches(TensorDataset(X, Y), 60, steps=1):
        (before,) = engine.thresholds.values()
        for x, y in logical_batch:
            F.cross_entropy(model(x), y).backward()
        engine.privatize()
    (after,) = engine.thresholds.values()
    steps_of_grid = -math.log(after / before) / 0.1 * 20 * 2**10
    assert steps_of_grid == pytest.approx(round(steps_of_grid), abs=1e-6)
    assert steps_of_grid != 0


def test_replays_draw_the_same_counts():
    moved = []
    for _ in range(2):
        tracked, clipper = tracked_thresholds([1.0, 2.0], TRACKING)
        tracked.move(BatchMetrics(), KeyedGaussian(SECRET), step=3, sigma=1.0, batch_size=10)
        moved.append([group.threshold for group in clipper.groups])
    assert moved[0] == moved[1]


@pytest.mark.parametrize("otherwise", [False, True])
def test_a_replay_with_other_counts_has_other_noise(otherwise):
    """The same normals times two deviations would reveal them, and with them the gradient."""
    normals, state = [], engine_on(network()).state_dict()
    for miscounted in (0, otherwise):
        model = network()
        engine = engine_on(model)
        engine.load_state_dict(state)
        exact, seen = engine._thresholds._counts, []

        def counts(metrics, exact=exact, seen=seen, miscounted=miscounted):
            return exact(metrics) + miscounted * (not seen)  # as if rounding moved two norms to their thresholds

        engine._thresholds._counts = counts
        for logical_batch in engine.batches(TensorDataset(X, Y), 60, steps=3):
            std = engine._thresholds.gradient_noise(1.0)
            for x, _ in logical_batch:
                (model(x) * 0).sum().backward()
            engine.privatize()
            seen.append(torch.cat([p.grad.flatten() for p in model.parameters()]) * 20 / std)
            model.zero_grad()
        normals.append(seen)
    for first, second in zip(*normals, strict=True):
        correlation = float(torch.corrcoef(torch.stack([first, second]))[0, 1])
        assert (abs(correlation) < 0.6) if otherwise else correlation == pytest.approx(1)


# --- what must not change it -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("style", chosen(STYLES, "layer-wise"))
def test_the_run_does_not_depend_on_micro_batches_and_modes(style):
    with taken_for_equal():  # the sums are equal up to rounding
        compare_runs(style)


def compare_runs(style):
    def run(micro_batch_size, mode="auto", wrap=lambda model: model):
        model = network()
        engine = engine_on(wrap(model), clipping_style=style, clipping_mode=mode, steps=3)
        train(engine.model, engine, micro_batch_size=micro_batch_size)
        return flat(model), list(engine.thresholds.values())

    weights, thresholds = run(60)
    for micro_batch_size, mode in [(1, "auto"), (7, "auto"), *[(9, mode) for mode in CLIPPING_MODES]]:
        other_weights, other_thresholds = run(micro_batch_size, mode)
        assert torch.allclose(other_weights, weights, rtol=0, atol=1e-12)
        assert other_thresholds == thresholds  # counts are whole numbers
    torch.compiler.reset()
    compiled = run(7, wrap=lambda model: torch.compile(model, backend="aot_eager", fullgraph=True))
    assert torch.allclose(compiled[0], weights, rtol=0, atol=1e-12)  # no graph keeps an old threshold
    assert compiled[1] == thresholds


def test_padding_is_not_counted():
    """Micro-batches of 60 rows with about 20 samples; all gradients are below the threshold."""
    model = network()
    engine = engine_on(model, max_grad_norm=1e3, noise_multiplier=0, steps=1)
    (rows,) = train(model, engine, micro_batch_size=60)
    unclipped = min(1, 0.5 + len(rows) / 2 / 20)
    assert engine.thresholds["all-layer"] == pytest.approx(1e3 * math.exp(-0.5 * (unclipped - 0.6)), rel=1e-12)


class Broken(nn.Tanh):
    """A tanh whose backward fails."""

    broken = True

    def forward(self, x):
        if self.broken:
            x.register_hook(self.fail)
        return super().forward(x)

    def fail(self, _gradient):
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("failure", ["in a layer", "before the first sum is delivered"])
def test_a_backward_that_failed_does_not_count_twice(failure, monkeypatch):
    """Backward fails after the norms of a layer are known; the batch is drawn again, and its samples count once."""
    monkeypatch.setitem(scheme.WAITING, "cpu", 0)  # layers so small would wait for each other
    model = network()
    if failure == "in a layer":
        model[1] = Broken()
    engine = engine_on(model, clipping_style="layer-wise", noise_multiplier=0, verify=False, steps=1)
    if failure != "in a layer":
        model[2].weight.grad = torch.ones_like(model[2].weight)  # of before: refused
    for logical_batch in engine.batches(TensorDataset(X, Y), 60):
        for x, y in logical_batch:
            loss = F.cross_entropy(model(x), y)
            with pytest.raises((RuntimeError, LogicalBatchError), match=r"out of memory|zero_grad"):
                loss.backward()
        break
    assert engine._collector.metrics.unclipped_excess(["0", "2"])[1] != 0
    model[1].broken = False
    model.zero_grad()
    train(model, engine, micro_batch_size=60)
    once = network()
    other = engine_on(once, clipping_style="layer-wise", noise_multiplier=0, verify=False, steps=1)
    train(once, other, micro_batch_size=60)
    for labels in (["0"], ["2"]):
        assert engine._metrics.unclipped_excess(labels) == other._metrics.unclipped_excess(labels)
    assert engine.thresholds == other.thresholds


# --- what is refused, and what is said -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This loop feeds its own batches")
def test_own_loops_are_refused():
    model = network()
    engine = engine_on(model)
    F.cross_entropy(model(X[:20]), Y[:20]).backward()
    with pytest.raises(LogicalBatchError, match=r"Iterate over engine\.batches"):
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert engine.step == 0


def test_the_ledger_and_its_state_tell_of_the_counts():
    model = network()
    engine = engine_on(model, clipping_style="layer-wise")
    train(model, engine)
    assert "6 releases of a sum and 2 clipping counts under Poisson sampling" in engine.statement()
    state = json.loads(json.dumps(engine.state_dict()))
    assert [span["release"]["quantile_counts"] for span in state["ledger"]["spans"]] == [2]
    assert state["thresholds"]["values"] == list(engine.thresholds.values())
    assert "budget_share=0.05" in state["mechanism"]["adaptive_clipping"]


def test_a_checkpoint_without_thresholds_is_refused():
    model = network()
    engine = engine_on(model)
    state = engine.state_dict()
    for damaged in (
        {**state, "thresholds": {"values": [2.0]}},
        {k: v for k, v in state.items() if k != "thresholds"},
    ):
        with pytest.raises(CheckpointError, match="digest"):
            engine.load_state_dict(damaged)
    wrong_values = (None, [], [1.0, 1.0], [0.0], [float("nan")], ["1.0"], "1")
    for wrong in (None, [1.0], *({"values": v} for v in wrong_values)):
        with pytest.raises(CheckpointError, match="no clipping thresholds"):
            engine._thresholds.load_state_dict(wrong)
    for other in (None, QuantileTracking()):
        with pytest.raises(CheckpointError, match="adaptive_clipping"):
            engine_on(network(), adaptive_clipping=other).load_state_dict(state)


@pytest.mark.parametrize(
    "wrong",
    [{"quantile": 0.0}, {"quantile": 1}, {"budget_share": 1.0}, {"budget_share": float("nan")}, {"learning_rate": 0}],
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ConfigurationError):
        QuantileTracking(**wrong)


def test_other_objects_are_refused():
    with pytest.raises(ConfigurationError, match="QuantileTracking"):
        engine_on(network(), adaptive_clipping=0.5)
