"""`engine.batches` in a training loop: fixed-size masked micro-batches, schedules, caps, workers, and loops left early.

Failure modes: 1 test_a_schedule_divides_by_the_scheduled_size;
5 test_every_drawn_sample_counts_once_and_padding_not_at_all;
9, 16 test_an_empty_logical_batch_makes_a_noisy_step; 19 test_a_partial_logical_batch_is_never_released;
20 test_a_cap_is_what_the_accountant_is_told, test_a_schedule_is_accounted_step_by_step;
24 test_a_loop_that_was_left_goes_on_with_the_next_step.

Statistical tests fix the run secret; under a random one a correct engine would fail each with probability FALSE_ALARM.
"""

import contextlib
import math

import dp_accounting
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset

from dpshard import PrivacyEngine
from dpshard.errors import BatchLayoutError, BudgetExceededError, ConfigurationError, LogicalBatchError
from tests.oracle import clipped_mean, norm, per_sample_gradients, relative_error

pytestmark = [
    pytest.mark.filterwarnings("ignore:This loop feeds its own batches"),
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
]

FALSE_ALARM = 1e-7
N, D, P, R = 60, 5, 3, 0.8
DATA = torch.randn(N, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.arange(N) % P


def mlp():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, P)).double()


def engine_on(model, **options):
    defaults = {"batch_size": 8, "sample_size": N, "steps": 12, "noise_multiplier": 0, "max_grad_norm": R}
    engine = PrivacyEngine(model, **{"clipping_fn": "abadi", **defaults, **options})
    engine._secret = bytes(range(32))
    return engine


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def rows_of(logical_batch):
    """Indices of the rows of the current micro-batch that are no padding."""
    plan = logical_batch.micro.plan
    return [i for i, padding in zip(plan.indices, plan.is_padding.tolist(), strict=True) if not padding]


def differentiate(model, logical_batch):
    """Backward with a gradient of zero through every micro-batch, for tests of what is added to it."""
    for batch in logical_batch:
        x = batch[0] if isinstance(batch, list) else batch[:, None].float()
        (0 * model(x)).sum().backward()
        yield rows_of(logical_batch)


def train(engine, model, micro_batch_size=3, *, steps=None, dataset=None, **options):
    """Step by step: the indices of the logical batch, and the gradients that an optimizer would see."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batches = engine.batches(dataset or TensorDataset(*DATA), micro_batch_size, **options)
    found = []
    for logical_batch in batches:
        drawn = []
        for x, y in logical_batch:
            assert len(x) == len(y) == micro_batch_size
            drawn += rows_of(logical_batch)
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        found.append((drawn, gradients(model)))
        optimizer.zero_grad()
        if len(found) == steps:
            break
    return found


def assert_oracle(found, divisors, **options):
    model = mlp()
    for (drawn, update), divisor in zip(found, divisors, strict=True):
        assert len(set(drawn)) == len(drawn)
        if drawn:
            per_sample = per_sample_gradients(model, [t[drawn] for t in DATA], F.cross_entropy)
            expected = clipped_mean(per_sample, max_grad_norm=R, batch_size=divisor, **options)
            assert relative_error(update, expected) < 1e-10
        else:
            assert norm(update) == 0


@pytest.mark.parametrize("style", ["all-layer", "param-wise"])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 64])
def test_every_drawn_sample_counts_once_and_padding_not_at_all(micro_batch_size, style):
    model = mlp()
    found = train(engine_on(model, clipping_style=style), model, micro_batch_size)
    groups = [[name] for name in found[0][1]] if style == "param-wise" else None
    assert_oracle(found, [8] * 12, groups=groups)
    assert len({len(drawn) for drawn, _ in found}) > 3


def test_the_number_of_micro_batches_follows_from_the_draw():
    model = mlp()
    engine = engine_on(model)
    for logical_batch in engine.batches(TensorDataset(*DATA), 3):
        assert logical_batch.step == engine.step
        sizes = [len(rows) for rows in differentiate(model, logical_batch)]
        assert len(sizes) == max(1, math.ceil(sum(sizes) / 3))
        assert all(size == 3 for size in sizes[:-1])
        engine.privatize()
        model.zero_grad()
    assert engine.step == 12


def test_realised_sizes_are_those_of_the_draws():
    """Inclusion through the engine: the total over 400 steps is Binomial(400 * N, q)."""
    model = nn.Linear(1, 1)
    engine = engine_on(model, batch_size=6, steps=400, noise_multiplier=1.0, verify=False)
    sizes = []
    for logical_batch in engine.batches(list(range(N)), 16):
        sizes.append(sum(len(rows) for rows in differentiate(model, logical_batch)))
        engine.privatize()
        model.zero_grad()
    low, high = stats.binom.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], 400 * N, 6 / N)
    assert low <= sum(sizes) <= high
    assert len(set(sizes)) > 5


# --- one shape for the compiler -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("clipping_mode", ["auto", "ghost"])
def test_a_compiled_model_is_compiled_once_for_all_logical_batches(in_place, clipping_mode):
    """50 logical batches of 0 to some 6 samples are one shape: no recompilation after the first forward."""
    torch._dynamo.reset()
    counter, model = CompileCounter(), mlp()
    if in_place:
        model.compile(backend=counter)
    else:
        model = torch.compile(model, backend=counter)
    engine = engine_on(model, batch_size=2, steps=50, clipping_mode=clipping_mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    frames, sizes = [], []
    for logical_batch in engine.batches(TensorDataset(*DATA), 2):
        sizes.append(0)
        for x, y in logical_batch:
            sizes[-1] += len(rows_of(logical_batch))
            with torch._dynamo.config.patch(error_on_recompile=bool(frames)):
                F.cross_entropy(model(x), y).backward()
            frames.append(counter.frame_count)
        optimizer.step()
        optimizer.zero_grad()
    assert len(sizes) == 50
    assert min(sizes) == 0
    assert len(set(sizes)) > 4
    assert set(frames) == {1}
    torch._dynamo.reset()


# --- caps and schedules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_batch_size", "cap"), [(9, 9), ("auto", math.ceil(8 + 6 * math.sqrt(8)))])
def test_a_cap_is_what_the_accountant_is_told(max_batch_size, cap):
    model = mlp()
    engine = engine_on(model, max_batch_size=max_batch_size, noise_multiplier=1.0)
    found = train(engine, model)
    sizes = [len(drawn) for drawn, _ in found]
    assert max(sizes) == 9 if cap == 9 else max(sizes) > 9
    (span,) = engine.state_dict()["ledger"]["spans"]
    assert (span["release"]["max_batch_size"], span["release"]["sampling_probability"]) == (cap, 8 / N)
    assert (span["start"], span["stop"]) == (0, 12)
    assert engine._budget.ledger.relation == "replace-special"


def test_a_capped_batch_is_divided_by_the_expected_size():
    model = mlp()
    found = train(engine_on(model, max_batch_size=9), model)
    assert sum(len(drawn) == 9 for drawn, _ in found) > 1
    assert_oracle(found, [8] * 12)


SCHEDULES = {
    "phases": ([(2, 3), (8, 2), (20, 3)], None, [2] * 3 + [8] * 2 + [20] * 3),
    "callable": (lambda step: 4 + 3 * step, 6, [4, 7, 10, 13, 16, 19]),
    "callable by epochs": (lambda step: 20, 2, [20] * 6),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_divides_by_the_scheduled_size(name):
    batch_size, length, sizes = SCHEDULES[name]
    model = mlp()
    run = {"epochs": length, "steps": None} if name.endswith("epochs") else {"steps": length}
    engine = engine_on(model, batch_size=batch_size, **run)
    assert engine.steps == len(sizes)
    found = train(engine, model)
    assert len(found) == len(sizes)
    assert_oracle(found, sizes)
    low, high = stats.poisson.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], sum(sizes))  # wider than the binomial
    assert low <= sum(len(drawn) for drawn, _ in found) <= high


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_accounted_step_by_step(name):
    batch_size, length, sizes = SCHEDULES[name]
    model = mlp()
    run = {"epochs": length, "steps": None} if name.endswith("epochs") else {"steps": length}
    engine = engine_on(model, batch_size=batch_size, noise_multiplier=1.3, accountant="rdp", **run)
    accountant = dp_accounting.rdp.RdpAccountant()
    for logical_batch, size in zip(engine.batches(TensorDataset(*DATA), 16), sizes, strict=True):
        list(differentiate(model, logical_batch))
        engine.privatize()
        model.zero_grad()
        gaussian = dp_accounting.GaussianDpEvent(1.3)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(size / N, gaussian))
        assert engine.epsilon() == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)


def test_the_noise_of_a_schedule_is_divided_by_the_scheduled_size():
    """The noisy sum has one deviation at every step; what the optimizer sees is it over the size of the step."""
    model = nn.Linear(100, 100, bias=False)
    engine = engine_on(model, batch_size=[(2, 2), (20, 2)], steps=None, noise_multiplier=1.5, verify=False)
    for logical_batch in engine.batches(TensorDataset(torch.ones(N, 100)), 16):
        list(differentiate(model, logical_batch))
        engine.privatize()
        std = 1.5 * R / (2 if logical_batch.step < 2 else 20)
        low, high = stats.chi2.ppf([FALSE_ALARM / 8, 1 - FALSE_ALARM / 8], 100 * 100)
        assert low <= float((model.weight.grad.double() / std).square().sum()) <= high
        model.zero_grad()


def test_a_schedule_calibrated_to_a_target_spends_it_and_stops():
    model = mlp()
    engine = engine_on(
        model, batch_size=[(4, 4), (12, 4)], steps=None, noise_multiplier=None, target_epsilon=2.0, accountant="rdp"
    )
    train(engine, model)
    assert 1.97 < engine.epsilon() <= 2.0
    with pytest.warns(UserWarning, match=r"all 8 steps of the run are taken"):
        assert list(engine.batches(TensorDataset(*DATA), 3)) == []
    F.cross_entropy(model(DATA[0][:3]), DATA[1][:3]).backward()
    with pytest.raises(BudgetExceededError, match=r"Step 9 .*target_epsilon=2"):
        engine.privatize()


# --- data of any kind -----------------------------------------------------------------------------------------------


class Sentences(Dataset):
    """Samples are dicts of sentences of different lengths."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        if not 0 <= i < N:
            raise IndexError(i)
        return {"ids": torch.arange(1 + i % 4) + i % 5, "label": i % P, "index": i}


def collate(samples):
    ids = pad_sequence([s["ids"] for s in samples], batch_first=True, padding_value=9)
    ids = F.pad(ids, (0, 4 - ids.shape[1]), value=9)
    return {"ids": ids, "label": torch.tensor([s["label"] for s in samples])}


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding, self.head = nn.Embedding(10, 4, padding_idx=9), nn.Linear(4, P)
        self.double()

    def forward(self, ids, label=None):
        mean = self.embedding(ids).sum(1) / (ids != 9).sum(1, keepdim=True)
        return {"loss": F.cross_entropy(self.head(mean), label)}


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "prefetch_factor": 3}], ids=["none", "two"])
def test_dicts_and_collate_fn_and_workers(workers):
    model = Reader()
    engine = engine_on(model, steps=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    updates = []
    for logical_batch in engine.batches(Sentences(), 3, collate_fn=collate, **workers):
        drawn = []
        for batch in logical_batch:
            plan = logical_batch.micro.plan
            assert torch.equal(batch["label"], torch.tensor(plan.indices) % P)
            drawn += rows_of(logical_batch)
            model(**batch)["loss"].backward()
        optimizer.step()
        updates.append((drawn, gradients(model)))
        optimizer.zero_grad()
    engine.detach()
    for drawn, update in updates:
        data = [collate([Sentences()[i] for i in drawn])[key] for key in ("ids", "label")]
        parameters, per_sample = dict(model.named_parameters()), []
        for ids, label in zip(*data, strict=True):
            loss = model(ids[None], label[None])["loss"]
            per_sample.append(dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True)))
        expected = clipped_mean(per_sample, max_grad_norm=R, batch_size=8)
        assert relative_error(update, expected) < 1e-10


def test_dict_samples_without_collate_fn():
    class Pairs(Sentences):
        def __getitem__(self, i):
            return {"x": DATA[0][i], "label": int(DATA[1][i])}

    model = mlp()
    engine = engine_on(model, steps=3)
    for logical_batch in engine.batches(Pairs(), 4):
        for batch in logical_batch:
            assert set(batch) == {"x", "label"}
            assert torch.equal(batch["x"], DATA[0][logical_batch.micro.plan.indices])
            F.cross_entropy(model(batch["x"]), batch["label"]).backward()
        engine.privatize()
        model.zero_grad()
    assert engine.step == 3


def test_workers_change_nothing():
    found = []
    for workers in (0, 2):
        model = mlp()
        found.append(train(engine_on(model, steps=4), model, num_workers=workers))
    for (drawn, update), (other, same) in zip(*found, strict=True):
        assert drawn == other
        assert all(torch.equal(update[name], same[name]) for name in update)


def test_a_loop_over_workers_may_be_left():
    model = mlp()
    engine = engine_on(model)
    first = train(engine, model, num_workers=2, steps=2)
    rest = train(engine, model, num_workers=2, steps=2)
    whole_model = mlp()
    whole = train(engine_on(whole_model), whole_model, steps=4)
    assert [drawn for drawn, _ in first + rest] == [drawn for drawn, _ in whole]


# --- what a loop may not do -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [lambda x: x[:3], lambda x: torch.cat([x, x]), lambda x: x[:0], lambda x: x.flatten(), lambda x: x[:3, :4]],
    ids=["fewer", "more", "none", "flat", "features as many as rows"],
)
def test_other_rows_than_those_of_the_micro_batch_are_refused(change):
    model = mlp()
    engine = engine_on(model)
    batches = engine.batches(TensorDataset(*DATA), 4)
    for x, y in (logical_batch := next(batches)):
        with pytest.raises(BatchLayoutError, match=r"rows"):
            model(change(x))
        F.cross_entropy(model(x), y).backward()
    engine.privatize()
    assert engine.metrics()["realised_batch_size"] > 0
    assert logical_batch.position > 1


def leave(engine, model, *, after, how):
    """A training loop that ends within its first logical batch."""
    for logical_batch in engine.batches(TensorDataset(*DATA), 2):
        for position, (x, y) in enumerate(logical_batch):
            F.cross_entropy(model(x), y).backward()
            if position == after:
                if how == "exception":
                    raise KeyboardInterrupt
                break
        break


@pytest.mark.parametrize("how", ["break", "exception"])
@pytest.mark.parametrize("again", ["step", "privatize", "next batches"])
def test_a_partial_logical_batch_is_never_released(how, again):
    """Its first rows are no Poisson sample, and the whole batch is drawn once more under the same noise."""
    model = mlp()
    engine = engine_on(model, noise_multiplier=1.0)
    try:
        leave(engine, model, after=1, how=how)
    except KeyboardInterrupt:
        assert how == "exception"
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    if again == "next batches":
        found = train(engine, model, 2, steps=1)
        other = mlp()
        assert train(engine_on(other, noise_multiplier=1.0), other, 2, steps=1)[0][0] == found[0][0]
        assert engine.metrics()["realised_batch_size"] == len(found[0][0])
        return
    with contextlib.suppress(LogicalBatchError):
        torch.optim.SGD(model.parameters(), lr=1.0).step() if again == "step" else engine.privatize()
    assert engine.step == 0
    assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), before)
    assert not any(bool(p.grad.any()) for p in model.parameters() if p.grad is not None)


def test_the_step_of_a_whole_logical_batch_may_follow_the_loop():
    """The loop is left before optimizer.step(): the same release as within it, with the noise of that batch."""
    found = []
    for inside in (True, False):
        model = mlp()
        engine = engine_on(model, noise_multiplier=1.0)
        engine.load_state_dict(engine.state_dict())  # a resumed run: a loop of the user's own has other noise
        for logical_batch in engine.batches(TensorDataset(*DATA), 3):
            for x, y in logical_batch:
                F.cross_entropy(model(x), y).backward()
            if inside:
                engine.privatize()
            break
        engine.privatize()
        assert engine.step == 1
        found.append(gradients(model))
        model.zero_grad()
        assert len(train(engine, model, steps=2)) == 2
    assert relative_error(*found) == 0


def test_a_loop_that_was_left_goes_on_with_the_next_step():
    model = mlp()
    engine = engine_on(model)
    parts = [train(engine, model, steps=n) for n in (1, 4, 2)] + [train(engine, model)]
    other = mlp()
    whole = train(engine_on(other), other)
    assert [drawn for part in parts for drawn, _ in part] == [drawn for drawn, _ in whole]
    assert engine.step == 12
    with pytest.warns(UserWarning, match="all 12 steps"):
        assert train(engine, model) == []


@pytest.mark.parametrize("style", ["all-layer", "layer-wise"])
@pytest.mark.parametrize("mode", ["auto", "ghost"])
def test_an_empty_logical_batch_makes_a_noisy_step(style, mode):
    model = mlp()
    engine = engine_on(model, batch_size=1, steps=40, noise_multiplier=2.0, clipping_style=style, clipping_mode=mode)
    found = train(engine, model, 4, steps=20)
    empty = [torch.cat([g.flatten() for g in update.values()]) for drawn, update in found if not drawn]
    assert len(empty) > 3
    assert engine.step == 20
    noise = torch.stack(empty)
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], noise.numel())
    assert low <= float((noise / (2.0 * R)).square().sum()) <= high
    off = np.corrcoef(noise.numpy())[np.triu_indices(len(empty), 1)]
    assert np.abs(off).max() < stats.norm.isf(FALSE_ALARM / 2 / len(off)) / math.sqrt(noise.shape[1])


def test_the_end_of_a_run():
    model = mlp()
    engine = engine_on(model, steps=2)
    assert len(train(engine, model)) == 2
    with pytest.warns(UserWarning, match="all 2 steps of the run are taken.*leave out the loop over epochs"):
        assert list(engine.batches(TensorDataset(*DATA), 3)) == []
    assert engine.step == engine.steps == 2


def test_whole_logical_batches_and_a_given_number_of_them():
    """One micro-batch of what was drawn; and more steps than were planned, where no budget ends the run."""
    engine = engine_on(mlp(), steps=2)
    optimizer = torch.optim.SGD(engine.model.parameters(), lr=0.0)
    sizes = []
    for part in (1, 3):
        for logical_batch in engine.batches(TensorDataset(*DATA), None, steps=part):
            for x, y in logical_batch:
                assert logical_batch.complete
                sizes.append(len(x))
                assert not logical_batch.is_padding.any()
                F.cross_entropy(engine.model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert engine.step == len(sizes) == 4
    assert len(set(sizes)) > 1
    for wrong in (0, -1, 1.5):
        with pytest.raises(ConfigurationError, match="steps="):
            engine.batches(TensorDataset(*DATA), None, steps=wrong)
