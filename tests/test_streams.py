"""Streams and fixed orders: which samples take part when, and what is refused."""

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from dpshard.errors import CheckpointError, DataError
from dpshard.sampling.participation import Participation
from dpshard.sampling.streams import Stream, fingerprints


class Items(IterableDataset):
    """A stream of the given samples; `orders[epoch]` picks them, the last one again and again."""

    def __init__(self, *orders, item=lambda i: i):
        self.orders, self.item, self.epochs = orders, item, 0

    def __iter__(self):
        order = self.orders[min(self.epochs, len(self.orders) - 1)]
        self.epochs += 1
        return iter([self.item(i) for i in order])


def first(n, batches):
    return [next(batches) for _ in range(n)]


# --- participation -----------------------------------------------------------------------------------------------


def take(participation, step, samples):
    participation.begin(step, np.array(samples, np.int64))
    participation.end(step)


def test_a_repeated_order_takes_part():
    participation = Participation(6, 3)
    for step in range(9):
        take(participation, step, [2 * (step % 3), 2 * (step % 3) + 1])
    assert participation._last == {0: 6, 1: 6, 2: 7, 3: 7, 4: 8, 5: 8}


def test_another_order_that_keeps_the_distance_takes_part():
    """What accounting needs is the distance, not the order."""
    participation = Participation(6, 3)
    for step, samples in enumerate([[0, 1], [2, 3], [4, 5], [1, 0], [3, 2]]):
        take(participation, step, samples)
    assert participation._last == {0: 3, 1: 3, 2: 4, 3: 4, 4: 2, 5: 2}


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([[0, 1], [2, 0]], "A sample of step 2 was in step 1, too"),
        ([[0, 1], [2, 3], [4, 5], [0, 2]], "A sample of step 4 was in step 2, too"),
        ([[0, 0]], "Step 1 has 2 samples, and 1 of them are equal"),
        ([[0, 1], [2, 3], [4, 5], [6, 7]], "more different samples than sample_size=6"),
    ],
)
def test_what_is_not_accounted_is_refused(steps, message):
    participation = Participation(6, 3)
    for step, samples in enumerate(steps[:-1]):
        take(participation, step, samples)
    with pytest.raises(DataError, match=message):
        participation.begin(len(steps) - 1, np.array(steps[-1]))
    # A refused batch does not take part, and can be replaced by a right one.
    take(participation, len(steps) - 1, [] if len(steps) < 4 else [0, 1])


def test_a_batch_that_was_not_released_did_not_take_part():
    participation = Participation(6, 3)
    participation.begin(0, np.array([0, 1]))
    take(participation, 0, [0, 1])  # begun again
    participation.begin(1, np.array([2, 3]))
    participation.end(5)  # another step
    assert participation._last == {0: 0, 1: 0}
    take(participation, 1, [2, 3])
    assert participation._last == {0: 0, 1: 0, 2: 1, 3: 1}


def test_participation_is_restored_and_goes_on():
    """A loader that begins anew when a run resumes in the middle of an epoch is refused."""
    participation, restored = Participation(6, 3), Participation(6, 3)
    assert participation.state_dict() is None
    take(participation, 0, [2**62, -5])
    restored.load_state_dict(participation.state_dict())
    assert restored.state_dict() == participation.state_dict()
    with pytest.raises(DataError, match="too"):
        restored.begin(1, np.array([-5, 7]))
    take(restored, 1, [6, 7])
    restored.load_state_dict(None)
    take(restored, 0, [-5, 7])


@pytest.mark.parametrize("state", [{}, {"samples": "AAAA", "steps": ""}, {"samples": "!", "steps": ""}, {"samples": 3}])
def test_a_damaged_state_is_refused_and_changes_nothing(state):
    participation = Participation(6, 3)
    take(participation, 0, [1, 2])
    before = participation.state_dict()
    with pytest.raises(CheckpointError, match="participation"):
        participation.load_state_dict(state)
    assert participation.state_dict() == before


# --- fingerprints ------------------------------------------------------------------------------------------------


def test_fingerprints_depend_on_the_content_only():
    big = torch.arange(20.0)
    one = {"x": torch.arange(4.0), "name": "a", "y": (1, np.ones(2))}
    same = {"x": big[:4], "name": "".join(["a"]), "y": (1, np.ones(2))}
    assert fingerprints([one])[0] == fingerprints([same])[0]


@pytest.mark.parametrize(
    "others",
    [
        [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4).double(), torch.tensor([0.0, 0, 0, 1e-30]), np.zeros(4)],
        [1, 1.5, "1", None, True, (1,), [1, 2], {"a": 1}, {"b": 1}, b"1", torch.tensor(1)],
        [("ab", "c"), ("a", "bc"), (("ab",), "c"), ("abc",)],
    ],
)
def test_other_content_has_other_fingerprints(others):
    assert len(set(fingerprints(others).tolist())) == len(others)


def test_what_cannot_be_read_is_refused():
    with pytest.raises(DataError, match="cannot be told from others"):
        fingerprints([(x for x in ())])


# --- streams -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_go_on_over_the_end_of_an_epoch(workers):
    stream = Stream(Items(range(10)), 10, 4, workers)
    assert first(6, stream.batches(0)) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 0, 1],
        [2, 3, 4, 5],
        [6, 7, 8, 9],
        [0, 1, 2, 3],
    ]


@pytest.mark.parametrize("step", range(7))
def test_a_resumed_stream_continues_in_the_middle_of_an_epoch(step):
    whole = first(9, Stream(Items(range(10)), 10, 4).batches(0))
    assert first(2, Stream(Items(range(10)), 10, 4).batches(step)) == whole[step : step + 2]


@pytest.mark.parametrize("length", [9, 11, 20])
def test_an_epoch_of_another_length_is_refused_before_its_last_batch_is_handed_out(length):
    batches = Stream(Items(range(length)), 10, 5).batches(0)
    assert next(batches) == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match="more samples than" if length > 10 else "9 samples instead of"):
        next(batches)


def test_a_later_epoch_of_another_length_is_refused():
    batches = Stream(Items(range(10), range(9)), 10, 5).batches(0)
    first(3, batches)
    with pytest.raises(DataError, match="9 samples instead of sample_size=10"):
        next(batches)


def test_many_workers_are_refused():
    with pytest.raises(DataError, match="num_workers=2: each worker would read the whole stream"):
        Stream(Items(range(10)), 10, 5, 2)
