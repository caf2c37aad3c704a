"""A step that is computed twice: equal sums release one value, other sums never share their noise, and are counted.

The oracle is the difference of two releases of one step. Where the sums are equal it is exactly 0. Else it holds two
independent noises: the square of its norm, over 2 (sigma R)^2, has a chi-squared distribution. A test under a random
secret would fail a correct engine with probability FALSE_ALARM. The old engine left the difference of the sums alone.
"""

import copy
import math
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from dpshard import Checkpointer, PrivacyEngine, QuantileTracking, UnitDataset, augment
from dpshard.accounting import Release, compute_epsilon
from dpshard.checkpoint.facts import FactsOfRun, of_rows
from dpshard.checkpoint.journal import Journal
from dpshard.config import BatchSchedule
from dpshard.errors import BudgetExceededError, CheckpointError, ConfigurationError, DataError
from dpshard.sampling import PoissonSampler
from tests.checkpoint.test_resume import WENT_BACK

FALSE_ALARM = 1e-7
SECRET = bytes(range(32))
SAMPLES, BATCH_SIZE, SIGMA = 60, 24, 3.0
X = torch.randn(SAMPLES, 7, generator=torch.Generator().manual_seed(0))
Y = torch.arange(SAMPLES) % 3
DATA = TensorDataset(X, Y)
AGAIN = r"Step \d+ was released before, with other or unknown sums"


class Training:
    """A model, an optimizer, an engine, and the noisy sum of each released step."""

    def __init__(self, *, lr=0.5, dropout=0.0, secret=SECRET, state=None, released=None, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(7, 40), nn.Tanh(), nn.Dropout(dropout), nn.Linear(40, 3))
        defaults = {"batch_size": BATCH_SIZE, "sample_size": SAMPLES, "steps": 6, "noise_multiplier": SIGMA}
        self.engine = PrivacyEngine(self.model, **{**defaults, **options})
        self.engine._secret = secret
        self.engine._budget.ledger.run = secret.hex()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr)
        if state is not None:
            self.load(state, released)

    def save(self):
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict(), self.engine.state_dict()))

    def load(self, state, released=None):
        model, optimizer, engine = copy.deepcopy(state)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict({**optimizer, "param_groups": self.optimizer.state_dict()["param_groups"]})
        self.engine.load_state_dict(engine, released=released)

    def take(self, steps, *, data=DATA, micro=8):
        """Take `steps` steps; return their noisy sums."""
        released = []
        for batch in self.engine.batches(data, micro, steps=steps):
            for x, y in batch:
                torch.manual_seed(1000 * batch.step + batch.position)  # dropout, as scripts restore it
                F.cross_entropy(self.model(x), y).backward()
            self.engine.privatize()
            released.append(torch.cat([p.grad.double().flatten() for p in self.model.parameters()]) * BATCH_SIZE)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return released

    @property
    def count(self):
        return self.engine._budget.ledger.releases


def drawn_at(step):
    schedule = BatchSchedule.parse(BATCH_SIZE, sample_size=SAMPLES, epochs=None, steps=6)
    return PoissonSampler(SAMPLES, schedule, SECRET).draw(step)


def assert_independent(one, other, std=SIGMA) -> bool:
    """Assert that the difference has two independent noises of deviation `std`, whatever a few samples add."""
    square = float((one - other).square().sum()) / (2 * std**2)
    lo, hi = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], len(one))
    # Sums of some 30 clipped gradients differ by 60 at most; these are nearly equal.
    assert (math.sqrt(lo) - 1) ** 2 <= square <= (math.sqrt(hi) + 1) ** 2
    return True


def replays(second, third=None, **options):
    """Take three steps, then repeat them from the state before, by the training of `second`; return both."""
    first = Training(**options)
    start = first.save()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # facts differ; tests of their own are below
        one = first.take(3)
        other = second(start)
    return one, other


KINDS = {
    "plain": {},
    "secure": {"secure_mode": True},
    "discrete": {"noise": "discrete-gaussian", "accountant": "rdp"},
    "tracked": {"adaptive_clipping": QuantileTracking(), "clipping_style": "layer-wise"},
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_a_replay_with_everything_equal_releases_the_same_value(options):
    one, other = replays(lambda start: Training(state=start, **options).take(3), **options)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_another_micro_batch_size_has_noise_on_its_rounding(options):
    one, other = replays(lambda start: Training(state=start, **options).take(3, micro=5), **options)
    std = SIGMA / math.sqrt(1 - 0.01) if "adaptive_clipping" in options else SIGMA
    for a, b in zip(one, other, strict=True):
        assert_independent(a, b, std)


@pytest.mark.parametrize("mode", ["ghost", "per-example"])
def test_another_clipping_mode_has_noise_on_its_rounding(mode):
    one, other = replays(lambda start: Training(state=start, clipping_mode=mode).take(3))
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b) or assert_independent(a, b)


def test_another_row_layout_with_dropout_has_noise_on_its_sums():
    one, other = replays(lambda start: Training(state=start, dropout=0.1).take(3, micro=6), dropout=0.1)
    for a, b in zip(one, other, strict=True):
        assert_independent(a, b)


def test_one_changed_row_of_the_data_has_noise_on_its_difference():
    row = min({*drawn_at(1)} - {*drawn_at(0)})
    changed = TensorDataset(torch.cat([X[:row], X[row : row + 1] + 1, X[row + 1 :]]), Y)
    one, other = replays(lambda start: Training(state=start).take(3, data=changed))
    assert torch.equal(one[0], other[0])
    for a, b in zip(one[1:], other[1:], strict=True):
        assert_independent(a, b)


def test_another_learning_rate_has_noise_from_the_second_step_on():
    one, other = replays(lambda start: Training(state=start, lr=0.51).take(3))
    assert torch.equal(one[0], other[0])
    for a, b in zip(one[1:], other[1:], strict=True):
        assert_independent(a, b)


@pytest.mark.parametrize("rows", [slice(0, 24), slice(24, 48)], ids=["same rows", "other rows"])
def test_a_loop_of_the_users_own_is_no_exception(rows):
    released = []
    run = Training()
    start = run.save()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for chosen in (slice(0, 24), rows):
            run.load(start)
            F.cross_entropy(run.model(X[chosen]), Y[chosen]).backward()
            run.engine.privatize()
            released.append(torch.cat([p.grad.double().flatten() for p in run.model.parameters()]) * BATCH_SIZE)
            run.optimizer.zero_grad()
    if rows == slice(0, 24):
        assert torch.equal(*released)
        assert run.count == 1
    else:
        assert float((released[0] - released[1]).norm()) > 0.7 * SIGMA * math.sqrt(2 * len(released[0]))
        assert run.count == 2


# --- what the ledger says -------------------------------------------------------------------------------------------


def test_rewinding_one_engine_with_three_learning_rates_counts_every_release():
    run = Training()
    start = run.save()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for lr in (0.1, 0.2, 0.4):
            run.load(start)
            for group in run.optimizer.param_groups:
                group["lr"] = lr
            run.take(3)
    told = [str(w.message) for w in caught]
    assert [len([text for text in told if re.search(what, text)]) for what in (WENT_BACK, AGAIN)] == [2, 1]
    assert run.engine.step == 3
    assert run.count == 7  # the first step has equal sums all three times
    assert "7 releases (4 of them of steps that were taken again" in run.engine.statement()
    # Three releases of one batch are one with a third of the variance: more than three of own batches cost.
    first, copied = (Release(SIGMA / math.sqrt(k), BATCH_SIZE / SAMPLES, SAMPLES) for k in (1, 3))
    assert run.engine.epsilon() == compute_epsilon(((first, 1), (copied, 2)), 1e-5)
    assert run.engine.epsilon() > 1.1 * compute_epsilon(((first, 7),), 1e-5)


def test_going_back_and_repeating_exactly_costs_nothing():
    run = Training()
    start = run.save()
    one = run.take(3)
    spent = run.engine.epsilon()
    with pytest.warns(UserWarning, match=WENT_BACK):
        run.load(start)
    assert run.engine.step == 0
    assert run.engine.epsilon() == spent  # what was released stays released
    other = run.take(3)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert (run.engine.epsilon(), run.count) == (spent, 3)


@pytest.mark.filterwarnings("ignore:The run that saved this state differs")
def test_a_state_that_was_saved_after_going_back_remembers_what_was_released():
    run = Training()
    start = run.save()
    run.take(3)
    with pytest.warns(UserWarning, match=WENT_BACK):
        run.load(start)
    resumed = Training(state=run.save())
    assert (resumed.engine.step, resumed.count) == (0, 3)
    resumed.take(3)
    assert resumed.count == 3
    with pytest.warns(UserWarning, match=AGAIN):
        Training(state=run.save()).take(3, micro=5)


def test_what_an_engine_has_released_outlives_a_state_of_another_run():
    run, other = Training(), Training(secret=bytes(32))
    run.take(2)
    other.take(1)
    run.load(other.save())
    assert (run.engine.step, run.count) == (1, 3)


def test_a_repeated_release_needs_budget():
    run = Training(noise_multiplier=None, target_epsilon=3.0, accountant="rdp")
    start = run.save()
    run.take(6)
    with pytest.warns(UserWarning, match=WENT_BACK):
        run.load(start)
    spent = run.engine.epsilon()
    with pytest.raises(BudgetExceededError):
        run.take(1, micro=5)
    assert run.engine.epsilon() == spent <= 3.0


def test_steps_of_which_nobody_knows_the_sums_are_counted_twice():
    run = Training()
    run.take(1)
    state = run.save()
    run.take(2)  # and a crash
    resumed = Training(state=state, released=3)
    assert (resumed.engine.step, resumed.count) == (1, 3)
    with pytest.warns(UserWarning, match="with other or unknown sums"):
        resumed.take(3)
    assert (resumed.engine.step, resumed.count) == (4, 6)


@pytest.mark.parametrize("released", [0, -1, True])
def test_fewer_steps_than_the_state_has_are_refused(released):
    run = Training()
    run.take(1)
    before = run.engine.state_dict()
    with pytest.raises(ConfigurationError, match=r"released=.*at least the 1 of the state"):
        run.engine.load_state_dict(run.engine.state_dict(), released=released)
    assert run.engine.state_dict() == before


def test_an_empty_logical_batch_is_a_release_like_any_other():
    with mock.patch("dpshard.sampling.PoissonSampler.draw", return_value=[]):
        run = Training()
        start = run.save()
        one = run.take(1)
        other = Training(state=start).take(1)
    assert torch.equal(one[0], other[0])
    assert float(one[0].norm()) > 0


# --- facts ----------------------------------------------------------------------------------------------------------


def test_equal_facts_are_resumed_without_a_word():
    run = Training()
    run.take(2)
    resumed = Training(state=run.save()).take(2)
    assert all(torch.equal(one, other) for one, other in zip(resumed, run.take(2), strict=True))


def test_a_state_of_a_cpu_on_another_device_says_that_steps_may_count_twice():
    run = Training()
    run.take(2)
    state = run.save()
    with mock.patch("dpshard.checkpoint.facts._described", return_value="NVIDIA H200"):
        with pytest.warns(UserWarning, match=r"device NVIDIA H200 \(saved: cpu.*released=n.* n=2"):
            Training(state=state)
        Training(state=state, released=2)  # the caller knows


@pytest.mark.parametrize(
    ("then", "told"),
    [
        (lambda state: Training(state=state, clipping_mode="ghost"), r"clipping_mode ghost \(saved: auto"),
        (lambda state: Training(state=state).take(1, micro=5), r"micro_batch_size 5 \(saved: 8"),
        (lambda state: Training(state=state).take(1, micro=None), r"micro_batch_size all \(saved: 8"),
        (lambda state: Training(state=state).take(1, data=TensorDataset(-X, Y)), r"other rows of data"),
    ],
    ids=["clipping mode", "micro-batch size", "one micro-batch", "data"],
)
def test_other_facts_are_told(then, told):
    run = Training()
    run.take(2)
    state = run.save()
    with pytest.warns(UserWarning, match=told):
        then(state)


def test_data_of_other_kinds_are_not_read():
    class Rows(Dataset):
        def __len__(self):
            return SAMPLES

        def __getitem__(self, index):
            raise AssertionError("it may open a file, or draw random numbers")

    assert of_rows(Rows(), bytes(32)) is None
    part = Subset(DATA, range(SAMPLES))
    assert of_rows(part, bytes(32)) == of_rows(DATA, bytes(32)) != of_rows(DATA, bytes([1]) * 32)


def _hugging_face(order):
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": list(range(SAMPLES))}).select(order)


WRAPPED = {
    "units": lambda order: UnitDataset(Subset(DATA, order), list(range(SAMPLES)), rows_per_unit=1),
    "groups": lambda order: UnitDataset(range(SAMPLES), order, rows_per_unit=1),
    "subset of groups": lambda order: Subset(UnitDataset(range(SAMPLES), order, rows_per_unit=1), range(5)),
    "augmented": lambda order: augment(Subset(DATA, order), lambda item: item, rows_per_unit=2),
    "lengths of parts": lambda order: ConcatDataset([range(order[1]), range(SAMPLES - order[1])]),
    "concatenated": lambda order: ConcatDataset([Subset(range(SAMPLES), order), range(9)]),
    "Hugging Face": _hugging_face,
    "subset of Hugging Face": lambda order: Subset(_hugging_face(order), range(5)),
}


@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
def test_another_order_is_seen_through_wrappers(wrapped):
    one, other = ([(i * step) % SAMPLES for i in range(SAMPLES)] for step in (7, 13))
    assert of_rows(wrapped(one), SECRET) == of_rows(wrapped(one), SECRET)
    assert None is not of_rows(wrapped(one), SECRET) != of_rows(wrapped(other), SECRET)


@pytest.mark.parametrize("stages", [None, "some"])
def test_only_stages_may_pass_data_of_which_nothing_is_known_beside_rows(stages):
    class Other:
        world_size = 2

        def all_gather(self, own):
            return torch.stack([own, torch.tensor(list(bytes.fromhex(of_rows(DATA, SECRET))))])

    backend = SimpleNamespace(communicator=Other(), data_ranks=Other(), stages=stages)
    backend.layout, backend.sharding = "", SimpleNamespace(device=torch.device("cpu"))

    def begin(data):
        FactsOfRun(backend, "auto").begin_batches(data, 1, SECRET, 0, released=False)  # type: ignore[arg-type]

    begin(DATA)
    for data in (TensorDataset(-X, Y), *([] if stages else [range(SAMPLES)])):
        with pytest.raises(DataError, match="Ranks passed different data sets"):
            begin(data)
    if stages:
        begin(range(SAMPLES))


# --- a journal ------------------------------------------------------------------------------------------------------


def resume(folder, **options):
    run = Training(**options)
    checkpoints = Checkpointer(folder, run.engine, run.optimizer)
    if not checkpoints.load():
        checkpoints.save()
    return run, checkpoints


def test_a_run_that_crashed_between_checkpoints_goes_on_at_no_cost(tmp_path):
    run, _ = resume(tmp_path)
    run.take(3)
    resumed, _ = resume(tmp_path)
    assert (resumed.engine.step, resumed.count) == (0, 3)
    resumed.take(3)
    assert (resumed.engine.step, resumed.count) == (3, 3)


def test_a_resumed_run_counts_what_it_does_otherwise(tmp_path):
    run, _ = resume(tmp_path)
    run.take(3)
    resumed, _ = resume(tmp_path)
    with pytest.warns(UserWarning, match=AGAIN):
        resumed.take(4, micro=5)
    assert (resumed.engine.step, resumed.count) == (4, 7)
    last, _ = resume(tmp_path)  # a third crash: all seven stay
    assert (last.engine.step, last.count) == (0, 7)


def test_only_releases_after_the_checkpoint_are_counted_again(tmp_path):
    run, checkpoints = resume(tmp_path)
    run.take(2)
    checkpoints.save(wait=False)
    run.take(1)
    checkpoints.wait()
    resumed, _ = resume(tmp_path)
    assert (resumed.engine.step, resumed.count) == (2, 3)


def test_an_entry_that_was_cut_short_was_not_handed_out(tmp_path):
    run, _ = resume(tmp_path)
    run.take(2)
    journal = tmp_path / "releases.journal"
    journal.write_bytes(journal.read_bytes()[:-3])
    resumed, _ = resume(tmp_path)
    assert resumed.count == 1
    resumed.take(2)
    assert len(journal.read_bytes()) == 2 * 32


def _of_another_run(path):
    """It is as long, and has no release after the checkpoint."""
    other = Journal(path.with_name("other"))
    other.note(0, bytes(16)).result()
    path.with_name("other").replace(path)


DAMAGES = [lambda path: path.unlink(), lambda path: path.write_bytes(bytes(64)), _of_another_run]


@pytest.mark.parametrize("damage", DAMAGES, ids=["missing", "damaged", "of another run"])
def test_a_lost_journal_is_told(tmp_path, damage):
    run, checkpoints = resume(tmp_path)
    run.take(1)
    checkpoints.save()
    run.take(2)
    damage(tmp_path / "releases.journal")
    resumed = Training()
    checkpoints = Checkpointer(tmp_path, resumed.engine, resumed.optimizer)
    with pytest.warns(UserWarning, match=r"releases.journal is missing, damaged or of another run.*load\(released=n\)"):
        assert checkpoints.load()
    assert resumed.count == 1
    assert checkpoints.load(released=3)
    assert (resumed.engine.step, resumed.count) == (1, 3)


def test_a_journal_lost_since_the_first_checkpoint_is_told(tmp_path):
    run, _ = resume(tmp_path)  # a checkpoint before the first release
    run.take(2)
    (tmp_path / "releases.journal").unlink()
    with pytest.warns(UserWarning, match="releases.journal is missing"):
        assert resume(tmp_path)[0].count == 0


@pytest.mark.parametrize("lose", [Path.unlink, lambda path: path.write_bytes(path.rename(f"{path}.old").read_bytes())])
def test_a_run_stops_if_its_journal_is_lost_meanwhile(tmp_path, lose):
    run, checkpoints = resume(tmp_path)
    run.take(1)
    lose(tmp_path / "releases.journal")
    with pytest.raises(CheckpointError, match="removed or replaced while this run wrote"):
        checkpoints.save()
    with pytest.raises(CheckpointError, match="removed or replaced while this run wrote"):
        run.take(1)


@pytest.mark.parametrize("first", ["the hung one", "its restart"])
def test_two_live_runs_in_one_folder_are_stopped(tmp_path, first):
    """A hung job goes on after its restart: a checkpoint of either would cover releases that it did not count."""
    hung, of_hung = resume(tmp_path)
    hung.take(2)
    restart, of_restart = resume(tmp_path)
    runs = [(hung, of_hung), (restart, of_restart)]
    (one, saves), (other, other_saves) = runs if first == "the hung one" else runs[::-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of second releases
        one.take(2, micro=5)
    for act in (other_saves.save, lambda: other.take(3)):  # two may repeat what is known
        with pytest.raises(CheckpointError, match=r"Another process.*2 releases to releases\.journal.*two folders"):
            act()
    saves.save()
    last, _ = resume(tmp_path)
    assert last.count == one.count >= 4


def test_a_second_checkpointer_of_one_engine_notes_its_releases_again(tmp_path):
    """A cell of a notebook that runs twice."""
    run, first = resume(tmp_path)
    run.take(1)
    second = Checkpointer(tmp_path, run.engine, run.optimizer)
    run.take(2)
    for checkpoints in (first, second):
        checkpoints.save()
        assert resume(tmp_path)[0].count == 3


def test_a_release_is_noted_before_its_noise_is_added(tmp_path):
    run, _ = resume(tmp_path)
    with (
        mock.patch("dpshard.noise.keyed.KeyedGaussian.release_", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        run.take(1)
    resumed, _ = resume(tmp_path)
    assert (resumed.engine.step, resumed.count) == (0, 1)
