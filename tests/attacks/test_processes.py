"""An engine belongs to the process that made it: forks, or a later group, would make releases that it misses."""

import os
import traceback
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from dpshard.applications.planner.simulation import fake_group
from dpshard.errors import ConfigurationError, EngineInUseError
from tests.checkpoint.test_resume import Run, X, Y


def in_a_fork(work: Callable[[], object]) -> str:
    """Return the error of `work` in a child process, or ""."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        try:
            work()
        except BaseException:  # noqa: BLE001
            text = traceback.format_exc()
        os.write(writing, text.encode()[-4000:])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    return found


def forward(run):
    for logical_batch in run.engine.batches(torch.utils.data.TensorDataset(X, Y), 3):
        for x, y in logical_batch:
            F.cross_entropy(run.model(x), y).backward()
        break


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_forked_child_that_trains_is_refused(steps_before):
    run = Run()
    if steps_before:
        run.train(steps_before)
    error = in_a_fork(lambda: forward(run))
    assert EngineInUseError.__name__ in error
    assert "Make the engine in the process that trains, after the fork" in error
    run.train(1)  # the parent goes on


def test_a_forked_child_that_releases_what_the_parent_summed_is_refused():
    run = Run()
    batches = run.engine.batches(torch.utils.data.TensorDataset(X, Y), 3)
    for x, y in next(batches):
        F.cross_entropy(run.model(x), y).backward()
    for release in (run.optimizer.step, run.engine.privatize):
        assert EngineInUseError.__name__ in in_a_fork(release)
    run.optimizer.step()
    assert run.engine.step == 1


class Rows(Dataset):
    def __init__(self, engine):
        self.engine = engine

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        self.engine.epsilon()  # asking is allowed
        return X[index], Y[index]


def test_workers_of_a_loader_that_hold_the_engine_go_on():
    run = Run()
    loader = DataLoader(Rows(run.engine), 8, num_workers=1, multiprocessing_context="fork")
    assert sum(len(x) for x, _ in loader) == len(X)
    for logical_batch in run.engine.batches(Rows(run.engine), 3, num_workers=1):
        for x, y in logical_batch:
            F.cross_entropy(run.model(x), y).backward()
        run.optimizer.step()
        break
    assert run.engine.step == 1


def test_a_forked_child_may_evaluate_and_make_an_engine_of_its_own():
    run = Run()
    run.train(1)

    def evaluate_and_train():
        with torch.no_grad():
            run.model.eval()(X)
        own = Run()
        own.train(1)
        assert own.engine._secret != run.engine._secret

    assert in_a_fork(evaluate_and_train) == ""


def test_ranks_that_meet_after_their_engines_were_made_are_refused():
    """Averages of their private gradients would be releases of all ranks, each counted as one."""
    batches, own = Run(), Run()
    with fake_group(2):
        with pytest.raises(ConfigurationError, match=r"made before torch.distributed.init_process_group\(\)"):
            forward(batches)
        with pytest.raises(ConfigurationError, match="made before"):
            own.model(X[:4])
    forward(batches)
