"""Contenders take the private step, all of it; one that does not is refused before it is timed."""

import functools

import pytest
import torch
from torch._dynamo.utils import counters

from benchmarks import contenders, oracle
from benchmarks.contenders import Task, make
from benchmarks.contenders.extras import MissingExtraError, needed
from benchmarks.contenders.vmap import Vmap
from benchmarks.feed import PoissonFeed
from benchmarks.workloads import GPU_WORKLOADS, WORKLOADS, find
from dpshard.applications.benchmark.training import expected_batch
from dpshard.errors import ConfigurationError


def trial(workload, **changes):
    """A task at tiny size, in float64 and without noise, whose updates can be read off the parameters."""
    task = Task(workload=find(workload, tiny=True), threshold=1.0, noise_multiplier=0.0, lr=1.0, dtype=torch.float64)
    threshold = oracle.typical_norm(task.workload, dtype=task.dtype)
    return Task(**{**vars(task), "threshold": threshold, **changes})


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("name", ["dpshard:all-layer", "dpshard:layer-wise:ghost", "dpshard:param-wise", "vmap"])
@pytest.mark.exhaustive
def test_the_update_is_that_of_one_sample_at_a_time(name, workload):
    task = trial(workload)
    assert oracle.check(make(name, task), task) < 1e-10


@pytest.mark.parametrize("workload", GPU_WORKLOADS)
def test_models_of_the_gpu_set_are_trained_exactly_at_tiny_size(workload):
    task = trial(workload)
    assert oracle.check(make("dpshard:block-wise", task), task) < 1e-10


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("name", ["opacus:hooks", "opacus:ghost"])
def test_opacus_takes_the_same_step(name, workload):
    pytest.importorskip("opacus", reason="`make bench` installs it")
    task = trial(workload)
    if (name, workload) == ("opacus:ghost", "W5"):
        with pytest.raises(NotImplementedError, match="tying"):
            oracle.check(make(name, task), task)
    else:
        assert oracle.check(make(name, task), task) < 2e-6  # it adds 1e-6 to every norm


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workload", ["W3", "W4", "W5"])
def test_jax_takes_the_same_step(workload):
    pytest.importorskip("jax", reason="of the extra jax")
    task = trial(workload, dtype=torch.float32)
    assert oracle.check(make("jax:masked", task), task, steps=1) < 1e-4


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it
@pytest.mark.parametrize("name", ["nonprivate+compile", "dpshard:all-layer+compile", "vmap+compile"])
def test_what_is_called_compiled_is(name, monkeypatch):
    """`nn.Sequential`, which W4 is, has a forward of torch's own: its `compile()` compiles nothing.

    Without inductor, which calls a C++ compiler: graphs are counted before.
    """
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    counters.clear()
    make(name, trial("W4")).step()
    assert counters["stats"]["unique_graphs"] > 0


class ForgetsPadding(Vmap):
    def _clipped_sum(self, parameters, batch):
        x, y, is_padding = batch
        return super()._clipped_sum(parameters, (x, y, torch.zeros_like(is_padding)))


class ForgetsABias(Vmap):
    """Its norm leaves a parameter out."""

    def _clipped_sum(self, parameters, batch):
        name = next(n for n in parameters if n.endswith("bias"))
        some = {n: p for n, p in parameters.items() if n != name}
        return super()._clipped_sum(some, batch) | {name: super()._clipped_sum(parameters, batch)[name]}

    def _loss(self, parameters, x, y):
        return super()._loss({**dict(self._trained), **parameters}, x, y)


class DividesByTheRealisedBatch(Vmap):
    def step(self):
        before = {name: p.detach().clone() for name, p in self._trained.items()}
        batch = super().step()
        realised = max(1, int((~batch.is_padding).sum()))
        with torch.no_grad():
            for name, p in self._trained.items():
                p.copy_(before[name] + (p - before[name]) * self._task.expected_batch / realised)
        return batch


@pytest.mark.parametrize("wrong", [ForgetsPadding, ForgetsABias, DividesByTheRealisedBatch])
def test_a_wrong_step_is_refused(wrong):
    task = trial("W4")
    with pytest.raises(oracle.WrongStepError, match="differs from that of plain autograd"):
        oracle.check(wrong(task, compiled=False), task, steps=8)


def test_noise_is_on_where_it_is_timed():
    """Without it a peer would be timed at less work: two steps on the same draws differ by the noise alone."""
    for name in ("dpshard:all-layer", "vmap"):
        task = trial("W4", noise_multiplier=1.0)
        with pytest.raises(oracle.WrongStepError):
            oracle.check(make(name, task), task)


def test_batches_are_of_one_size_and_their_padding_is_behind():
    x = torch.arange(80)
    feed = PoissonFeed(x, x, 10)
    sizes = []
    for _ in range(500):
        batch = feed.draw()
        count = int((~batch.is_padding).sum())
        assert len(batch.x) == len(batch.is_padding) == 10
        assert not batch.is_padding[:count].any()
        assert len(set(batch.x[:count].tolist())) == count
        sizes.append(count)
    # Binomial(80, 0.1) cut at 10; the mean of 500 is within 6 standard errors (0.12 each) with probability 1 - 2e-9.
    assert expected_batch(10) == 8
    assert abs(sum(sizes) / len(sizes) - 7.7) < 0.75
    assert len(set(sizes)) > 3


def test_names_are_read_and_refused():
    assert contenders.expand(["vmap", "nonprivate"]) == ["nonprivate", "vmap"]
    assert len(contenders.expand(["modes"])) == 1 + 4 * 8
    for wrong in ("what", "dpshard:nix", "dpshard:all-layer:nix", "opacus:hooks+compile", "vmap+fast", "vmap:a"):
        with pytest.raises(ConfigurationError):
            contenders.expand([wrong])


def test_a_missing_library_says_how_to_get_it():
    with pytest.raises(MissingExtraError, match=r"pip install -e '\.\[jax\]'"):
        needed("no_such_library", extra="jax")


def test_sizes_of_a_sweep():
    assert find("W1").resized("T", 64).sizes["length"] == 64
    assert find("W2").resized("depth", 3).sizes["layers"] == 3
    assert find("W4").resized("B", 7).batch == 7
    with pytest.raises(ConfigurationError, match="W4 has no T"):
        find("W4").resized("T", 64)
    with pytest.raises(ConfigurationError, match="unknown"):
        find("W9")
