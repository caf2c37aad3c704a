"""The course of a logical batch: micro-batches, one release, zero_grad().

Failure modes: 9 test_a_logical_batch_without_backward_is_still_noised; 19 test_sums_must_not_be_thrown_away_unreleased;
21 test_steps_count_releases; 24 test_no_sample_is_in_a_release_twice,
test_a_backward_after_its_logical_batch_is_refused.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from dpshard import checkpoint
from dpshard.accounting.budget import Budget
from dpshard.errors import BatchLayoutError, LogicalBatchError
from dpshard.noise.keyed import KeyedGaussian
from dpshard.sampling import PoissonSampler
from tests.engine.script import UNWARNED, backward, data, engine_on, first_of, gradients, mlp, values
from tests.oracle import relative_error

pytestmark = UNWARNED


def test_steps_count_releases():
    model = mlp()
    engine = engine_on(model, noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.step()  # before any backward: nothing is released
    assert engine.step == 0
    for logical_batch in engine.batches(TensorDataset(*data()), 4):
        for x, y in logical_batch:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert engine.step == logical_batch.step + 1
    assert engine.step == engine.steps == 8
    spent = engine.epsilon()
    assert 0 < spent < math.inf
    assert "8 releases" in engine.statement()


def test_a_step_on_a_half_finished_logical_batch_is_refused():
    model = mlp()
    engine = engine_on(model, batch_size=12)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for logical_batch in engine.batches(TensorDataset(*data()), 2):
        for position, (x, y) in enumerate(logical_batch):
            F.cross_entropy(model(x), y).backward()
            if position == 0:
                with pytest.raises(LogicalBatchError, match="1 of the"):
                    optimizer.step()
                with pytest.raises(LogicalBatchError, match="1 of the"):
                    engine.privatize()
        optimizer.step()
        optimizer.zero_grad()
        if logical_batch.step == 1:
            break
    assert engine.step == 2


def test_a_logical_batch_without_backward_is_still_noised():
    """If no sample is in it. If there is one, its release is refused."""
    model = mlp()
    engine = engine_on(model, noise_multiplier=1.0, batch_size=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    skipped = 0
    for logical_batch in engine.batches(TensorDataset(*data()), 4):
        for x, y in logical_batch:
            if logical_batch.is_padding.all():
                skipped += 1
                continue
            F.cross_entropy(model(x), y).backward()
        before = values(model)
        optimizer.step()
        assert (values(model) != before).all()
        optimizer.zero_grad()
    assert engine.step == 8
    assert 0 < skipped < 8


def test_a_logical_batch_that_was_not_released_is_refused():
    model = mlp()
    engine = engine_on(model)
    with pytest.raises(LogicalBatchError, match=r"step 0 was not released\. Call optimizer\.step\(\)"):  # noqa: PT012
        for logical_batch in engine.batches(TensorDataset(*data()), 4):
            for x, y in logical_batch:
                F.cross_entropy(model(x), y).backward()


def test_a_batch_whose_release_failed_does_not_get_the_noise_of_the_next_step(monkeypatch):
    model = mlp()
    engine = engine_on(model, noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logical_batch = first_of(engine, 4)
    for x, y in logical_batch:
        F.cross_entropy(model(x), y).backward()

    def out_of_memory(*_):
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):  # noqa: PT012
        patch.setattr(KeyedGaussian, "_release_blocks_", out_of_memory)
        optimizer.step()
    assert engine.step == 1  # counted first
    # A run that is resumed from before it gives batch 1 the noise of step 1: the difference would be free of noise.
    with pytest.raises(LogicalBatchError, match="release of step 0 failed"):
        optimizer.step()
    assert next(iter(engine.batches(TensorDataset(*data()), 4))).step == 1


def test_an_optimizer_of_another_model_is_told_from_a_missing_step():
    model = mlp()
    engine, optimizer = engine_on(model), torch.optim.SGD(mlp().parameters(), lr=0.1)
    with pytest.raises(LogicalBatchError, match="holds none of the engine's parameters"):  # noqa: PT012
        for logical_batch in engine.batches(TensorDataset(*data()), 4):
            for x, y in logical_batch:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()


def test_a_detached_engine_has_no_batches():
    engine = engine_on(mlp())
    begun = engine.batches(TensorDataset(*data()), 4)
    engine.detach()
    for batches in (begun, engine.batches(TensorDataset(*data()), 4)):
        with pytest.raises(LogicalBatchError, match="was detached"):
            next(batches)


def test_another_model_learns_through_a_private_one_between_two_logical_batches():
    """The step of a GAN's generator: the gradient that the critic hands back is that of plain autograd."""
    critic, generator = mlp(), torch.nn.Linear(2, data()[0].shape[1], dtype=torch.float64)
    z = torch.randn(7, 2, dtype=torch.float64)
    critic(generator(z)).square().mean().backward()
    expected = generator.weight.grad.clone()
    generator.zero_grad()
    critic.zero_grad()
    engine = engine_on(critic)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.0)
    for logical_batch in engine.batches(TensorDataset(*data()), 4):
        for x, y in logical_batch:
            F.cross_entropy(critic(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(LogicalBatchError, match=r"eval\(\)\.requires_grad_\(False\)"):
            critic(generator(z))
        critic.eval().requires_grad_(False)
        critic(generator(z)).square().mean().backward()
        critic.train().requires_grad_(True)
        torch.testing.assert_close(generator.weight.grad, expected)
        assert all(p.grad is None for p in critic.parameters())
        generator.zero_grad()
    assert engine.step == engine.steps


def test_a_logical_batch_is_iterated_once():
    engine = engine_on(mlp())
    logical_batch = first_of(engine, 4)
    list(logical_batch)
    with pytest.raises(LogicalBatchError, match="iterated only once"):
        list(logical_batch)


def test_a_logical_batch_whose_loop_is_gone_is_refused():
    """Without the engine's knowledge of it, rows that pad it would count as samples."""
    engine = engine_on(mlp())
    logical_batch = next(engine.batches(TensorDataset(*data()), 16))
    with pytest.raises(LogicalBatchError, match="Keep it"):
        next(iter(logical_batch))


def test_a_training_forward_between_micro_batches_is_refused():
    model = mlp()
    engine = engine_on(model)
    batches = engine.batches(TensorDataset(*data()), 4)
    logical_batch = next(batches)
    list(logical_batch)
    with pytest.raises(LogicalBatchError, match="between two micro-batches"):
        model(data(4)[0])
    with torch.no_grad():
        model(data(4)[0])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_must_follow_the_step(set_to_none):
    model = mlp()
    engine = engine_on(model, noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        backward(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    backward(model)
    optimizer.step()
    with pytest.raises(LogicalBatchError, match=r"still has a gradient.*zero_grad\(\)"):
        backward(model)
    optimizer.zero_grad(set_to_none=set_to_none)
    backward(model)
    optimizer.step()
    assert engine.step == 4


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_between_forward_and_backward_is_fine(set_to_none):
    model = mlp()
    engine = engine_on(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    for _ in range(2):
        x, y = data(6)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=set_to_none)
        loss.backward()
        optimizer.step()
        found.append(gradients(model))
    assert relative_error(found[1], found[0]) < 1e-14
    assert engine.step == 2


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("own_loop", [True, False])
def test_sums_must_not_be_thrown_away_unreleased(set_to_none, own_loop):
    """zero_grad() in the inner loop trains on the last micro-batch alone; an own optimizer uses gradients un-noised."""
    model = mlp()
    engine = engine_on(model, batch_size=12)
    rows = [data(4)] * 2 if own_loop else first_of(engine, 2)
    with pytest.raises(LogicalBatchError, match="thrown away"):  # noqa: PT012
        for x, y in rows:
            model.zero_grad(set_to_none=set_to_none)
            F.cross_entropy(model(x), y).backward()


def test_an_empty_own_batch_is_refused():
    """Poisson sampling of a user's own may draw nothing."""
    model = mlp()
    engine_on(model, noise_multiplier=1.0)
    with pytest.raises(BatchLayoutError, match=r"empty batch.*step like any other.*loss weight of 0"):
        model(data()[0][:0])


@pytest.mark.parametrize("loops", ["break", "two generators", "own loop before"])
def test_no_sample_is_in_a_release_twice(loops):
    """A loop that was left and begun again draws the same logical batch: what it had summed must not stay."""
    model, dataset = mlp(), TensorDataset(*data())
    engine = engine_on(model, batch_size=12)

    def run(batches, limit=99):
        for position, (x, y) in enumerate(next(batches), start=1):
            F.cross_entropy(model(x), y).backward()
            if position == limit:
                break

    run(engine.batches(dataset, 4))
    engine.privatize()
    expected, samples = gradients(model), engine.metrics()["realised_batch_size"]
    model.zero_grad()

    with pytest.warns(UserWarning, match="goes back from step 1 to step 0"):
        engine.load_state_dict({**engine.state_dict(), **_at_start(engine)})
    kept = engine.batches(dataset, 4)
    if loops == "own loop before":
        backward(model)
    else:
        run(kept, limit=1 if loops == "break" else 99)
    if loops == "break":
        del kept
    try:
        run(engine.batches(dataset, 4))
    except LogicalBatchError:
        return  # refused: as good
    engine.privatize()
    assert engine.metrics()["realised_batch_size"] == samples
    assert relative_error(gradients(model), expected) < 1e-12


@pytest.mark.parametrize("mode", ["auto", "ghost"])
@pytest.mark.parametrize("when", ["released", "left", "own loop before"])
def test_a_backward_after_its_logical_batch_is_refused(when, mode):
    """Its samples would count in another release, in which they may be a second time."""
    model, dataset = mlp(), TensorDataset(*data())
    engine = engine_on(model, clipping_mode=mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batches = engine.batches(dataset, 24)
    for x, y in [data()] if when == "own loop before" else next(batches):
        late = F.cross_entropy(model(x), y)
    if when == "released":
        with pytest.raises(LogicalBatchError, match="no backward"):
            optimizer.step()  # a second forward, which has one, does not stand for the first
    batches = engine.batches(dataset, 24)
    for x, y in next(batches):
        F.cross_entropy(model(x), y).backward()
    with pytest.raises(LogicalBatchError, match="released or left"):
        late.backward()
    optimizer.step()
    assert engine.metrics()["realised_batch_size"] == len(engine_draw(engine, engine.step - 1))


def engine_draw(engine, step):
    sampler = PoissonSampler(engine.mechanism.sample_size, engine.mechanism.schedule, engine._secret)
    return sampler.draw(step)


def _at_start(engine):
    budget = Budget(engine.mechanism, allow_overspend=False, run=engine._budget.ledger.run)
    return checkpoint.pack(engine.mechanism, engine._secret, budget.state_dict())
