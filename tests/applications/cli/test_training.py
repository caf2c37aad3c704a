import io
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch.utils.data import TensorDataset

from dpshard.accounting import rounded_up
from dpshard.applications.cli.data import Data, Kind
from dpshard.applications.cli.run_folder import RunFolder
from dpshard.applications.cli.settings import resolve
from dpshard.applications.cli.training import Run, TrainingProgress, draw_seed, pick_device, sample_losses
from dpshard.backends.ranks import Ranks
from dpshard.errors import ConfigurationError
from dpshard.sampling.packing import IGNORED


def test_the_loss_of_a_text_is_the_mean_over_its_own_tokens():
    logits, y = torch.randn(3, 4, 7), torch.tensor([[1, 2, 3, 4], [1, 2, IGNORED, IGNORED], [IGNORED] * 4])
    losses = sample_losses(logits, y)
    assert losses[0].item() == pytest.approx(F.cross_entropy(logits[0], y[0]).item())
    assert losses[1].item() == pytest.approx(F.cross_entropy(logits[1, :2], y[1, :2]).item())
    assert losses[2] == 0


def test_the_loss_of_a_sample_does_not_depend_on_the_others():
    logits, y = torch.randn(5, 10), torch.arange(5)
    alone = torch.cat([sample_losses(logits[i : i + 1], y[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(sample_losses(logits, y), alone)


def test_seeds_differ_by_step_and_micro_batch():
    assert len({draw_seed(0, step, micro) for step in range(10) for micro in range(10)}) == 100


def test_an_unknown_device_is_refused():
    for name in ("tpu9", "cuda:99"):
        with pytest.raises(ConfigurationError, match=name):
            pick_device(name)


@pytest.fixture
def run():
    """Forty images of which the first has no finite loss."""
    x, y = torch.rand(40, 1, 8, 8), torch.arange(40) % 10
    x[0] = math.nan
    split = TensorDataset(x, y)
    data = Data(train=split, validation=split, test=split, kind=Kind.IMAGE, sample="one image", classes=10)
    settings = resolve(
        {"device": "cpu", "batch_size": 40, "steps": 3, "noise_multiplier": 1.0, "micro_batch_size": 16, "model": "mlp"}
    )
    run = Run.prepare(settings, data, Ranks())
    yield run
    run.engine.detach()


def test_a_sample_without_a_finite_loss_is_left_out_of_the_reported_loss_and_counted(run):
    for logical_batch in run.engine.batches(run.data.train, 16):
        assert math.isfinite(run.take_step(logical_batch))
        assert run.engine.metrics()["nonfinite_samples"] == 1
    assert all(p.isfinite().all() for p in run.sharded.model.parameters())


def test_the_reported_loss_is_the_mean_over_the_samples_with_a_finite_one(run, monkeypatch):
    losses = torch.full((40,), 2.0)
    losses[0] = math.nan
    rows = iter(losses.split(16))

    def sample_losses(logits, y):
        row = next(rows)
        return torch.cat([row, torch.full((len(y) - len(row),), math.nan)]) + 0 * logits.sum(1)

    monkeypatch.setattr("dpshard.applications.cli.training.sample_losses", sample_losses)
    assert run.take_step(next(iter(run.engine.batches(run.data.train, 16)))) == 2.0


def test_an_epsilon_on_the_screen_is_never_below_what_is_spent(run, tmp_path, monkeypatch):
    shown = []
    show = TrainingProgress.show

    def watch(progress, row):
        show(progress, row)
        shown.append((progress.tasks[0].fields["epsilon"], run.engine.epsilon(), "epsilon" in row))

    monkeypatch.setattr(TrainingProgress, "show", watch)
    run.settings = replace(run.settings, evaluations=2)
    folder = RunFolder.create(tmp_path / "run", run.settings)
    lines = io.StringIO()
    run.train(folder, run.checkpointer(folder), Console(file=lines, width=200))
    assert [exact for *_, exact in shown] == [False, True, True]
    assert all(float(text.strip("≤ ")) >= spent for text, spent, _ in shown)
    assert shown[0][0] == f"≤ {rounded_up(shown[1][1], 3)}"
    assert f"ε {rounded_up(shown[1][1], 3)}  validation" in lines.getvalue()
    assert float(TrainingProgress(Console(), run.engine, 2).tasks[0].fields["epsilon"]) >= run.engine.epsilon()


@pytest.mark.filterwarnings("ignore:Step . was released before")
def test_an_epsilon_on_the_screen_counts_releases_that_the_plan_lacks(run):
    """As after a crash: the journal has a further step, or the step was taken twice."""
    engine, state = run.engine, run.engine.state_dict()
    engine.load_state_dict(state, released=2)
    progress = TrainingProgress(Console(), engine, 1)
    for logical_batch in engine.batches(run.data.train, 16):
        run.take_step(logical_batch)
        progress.show({"step": engine.step, "realised_batch_size": 40, "loss": 1.0})
        assert float(progress.tasks[0].fields["epsilon"].strip("≤ ")) >= engine.epsilon()


def test_the_learning_rate_falls_to_zero_along_a_cosine(run):
    rates = []
    for logical_batch in run.engine.batches(run.data.train, 16):
        rates.append(run.sharded.optimizer.param_groups[0]["lr"])
        run.take_step(logical_batch)
    assert rates == pytest.approx([0.5, 0.375, 0.125])
    assert run.sharded.optimizer.param_groups[0]["lr"] == pytest.approx(0)
