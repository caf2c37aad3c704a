"""The states of a logical batch: each transition of the table in `BatchState`, and what ends with an epoch.

Failure mode: 19 test_a_loop_that_is_left.
"""

import contextlib
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from dpshard.errors import LogicalBatchError
from dpshard.step.collector import BatchState
from tests.engine.script import UNWARNED, backward, data, engine_on, mlp

pytestmark = UNWARNED


class Script:
    """A model, its engine, and where they stand."""

    def __init__(self):
        self.model = mlp()
        self.engine = engine_on(self.model, batch_size=12, verify=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.collector = self.engine._collector

    def batches(self):
        return self.engine.batches(TensorDataset(*data()), 4)

    def run(self, logical_batch, limit=99):
        for position, (x, y) in enumerate(logical_batch, start=1):
            F.cross_entropy(self.model(x), y).backward()
            if position == limit:
                break

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    @contextlib.contextmanager
    def moves(self, before, after, epochs=0):
        """A block that takes the state from `before` to `after`, and so many epochs on."""
        assert self.collector.state is BatchState[before]
        then = self.collector.epoch
        yield
        assert self.collector.state is BatchState[after]
        assert self.collector.epoch == then + epochs


@pytest.fixture
def script():
    return Script()


def test_a_loop_over_logical_batches(script):
    with script.moves("EMPTY", "EMPTY", epochs=1):
        batches = script.batches()
        logical_batch = next(batches)
    with script.moves("EMPTY", "COLLECTING"):
        script.run(logical_batch)
    with script.moves("COLLECTING", "PRIVATIZED", epochs=1):
        script.step()
    with script.moves("PRIVATIZED", "PRIVATIZED"):
        script.step()
    with script.moves("PRIVATIZED", "EMPTY"):
        other = next(batches)
    assert other.in_progress
    assert not logical_batch.in_progress
    assert script.engine.step == 1


def test_a_logical_batch_without_samples(script):
    script.engine.detach()
    script.engine = engine_on(script.model, batch_size=1, verify=False)
    script.collector = script.engine._collector
    empty = 0
    for logical_batch in script.batches():
        for x, y in logical_batch:
            if logical_batch.is_padding.all():
                empty += 1
            else:
                F.cross_entropy(script.model(x), y).backward()
        collected = script.collector.state is BatchState.COLLECTING
        with script.moves("COLLECTING" if collected else "EMPTY", "PRIVATIZED", epochs=1):
            script.step()
    assert 0 < empty < 8


def test_a_loop_of_the_users_own(script):
    for state in ("EMPTY", "PRIVATIZED"):
        with script.moves(state, "COLLECTING"):
            backward(script.model)
        with script.moves("COLLECTING", "COLLECTING"):
            backward(script.model)
        with script.moves("COLLECTING", "PRIVATIZED"):
            script.step()


def test_a_release_that_is_refused_in_a_loop_of_the_users_own(script):
    script.model(data(4)[0])
    backward(script.model)
    with script.moves("COLLECTING", "EMPTY", epochs=1), pytest.raises(LogicalBatchError, match="Feed all rows"):
        script.step()
    backward(script.model)
    with script.moves("COLLECTING", "PRIVATIZED"):
        script.step()


@pytest.mark.parametrize("limit", [0, 1, 99])
def test_a_loop_that_is_left(script, limit):
    batches = script.batches()
    logical_batch = next(batches)
    if limit:
        script.run(logical_batch, limit)
    if limit == 99:
        with script.moves("COLLECTING", "COLLECTING"):
            batches.close()
        with script.moves("COLLECTING", "PRIVATIZED", epochs=1):
            script.step()
    else:
        with script.moves("COLLECTING" if limit else "EMPTY", "EMPTY", epochs=1):
            batches.close()
    assert not logical_batch.in_progress
    backward(script.model)  # a loop of the user's own may begin


@pytest.mark.parametrize("state", ["EMPTY", "COLLECTING", "PRIVATIZED"])
def test_another_loop_begins(script, state):
    batches = script.batches()
    logical_batch = next(batches)
    if state != "EMPTY":
        script.run(logical_batch)
    if state == "PRIVATIZED":
        script.step()
    with script.moves(state, "EMPTY", epochs=1):
        later = script.batches()
        next(later)
    assert not logical_batch.in_progress
    with pytest.raises(LogicalBatchError, match="This loop began before"):
        next(batches)
    again = script.batches()
    script.run(next(again))


@pytest.mark.parametrize("state", ["EMPTY", "PRIVATIZED"])
def test_another_state_is_loaded(script, state):
    batches = script.batches()
    if state == "PRIVATIZED":
        script.run(next(batches))
        script.step()
    with script.moves(state, "EMPTY", epochs=1):
        script.engine.load_state_dict(script.engine.state_dict())
    if state == "PRIVATIZED":
        with pytest.raises(LogicalBatchError, match="This loop began before"):
            next(batches)


@pytest.mark.parametrize("state", ["EMPTY", "COLLECTING", "PRIVATIZED"])
def test_the_engine_is_detached(script, state):
    batches = script.batches()
    logical_batch = next(batches)
    if state != "EMPTY":
        script.run(logical_batch)
    if state == "PRIVATIZED":
        script.optimizer.step()
    with script.moves(state, "CLOSED", epochs=1):
        script.engine.detach()
    assert not logical_batch.in_progress
    for ended in (batches, script.batches()):
        with pytest.raises(LogicalBatchError, match="was detached"):
            next(ended)
    with pytest.raises(LogicalBatchError, match="was detached"):
        script.engine.privatize()
    with pytest.raises(LogicalBatchError, match="was detached"):  # it would hand out batches, and add no noise
        script.engine.load_state_dict(script.engine.state_dict())


@pytest.mark.parametrize("end", ["another loop", "loop left", "state loaded", "detached"])
def test_a_tape_ends_with_its_epoch(script, end):
    """A backward that comes late would put its samples into another release."""
    if end == "loop left":
        batches = script.batches()
        x, y = next(iter(next(batches)))
    else:
        x, y = data(4)
    late = F.cross_entropy(script.model(x), y)
    if end == "another loop":
        kept = script.batches()
        next(kept)
    elif end == "loop left":
        batches.close()
    elif end == "state loaded":
        script.engine.load_state_dict(script.engine.state_dict())
    else:
        script.engine.detach()
    with pytest.raises(LogicalBatchError, match="released or left"):
        late.backward()
    assert all(p.grad is None for p in script.model.parameters())


def test_a_logical_batch_cannot_be_written_to(script):
    batches = script.batches()
    logical_batch = next(batches)
    for name in ("step", "position", "samples", "complete", "in_progress", "micro", "is_padding"):
        with pytest.raises(AttributeError):
            setattr(logical_batch, name, 0)


def test_a_captured_cuda_graph_is_refused(script):
    """Its replay would run no hooks, and so add no noise."""
    x, _ = data(4)
    with (
        mock.patch.object(script.engine._collector, "_device", torch.device("cuda")),
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=True),
        pytest.raises(LogicalBatchError, match="CUDA graph captures this forward"),
    ):
        script.model(x)
