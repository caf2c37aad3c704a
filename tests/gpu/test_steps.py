"""Private steps on a GPU: what only a GPU can show. Without one, most take the same steps on the CPU.

`make gpu-kernels` runs them, as a part of `make gpu`. With DPSHARD_TEST_DEVICE=cuda the oracle's tests of rules and
passes run on the GPU, too (tests/oracle.py). Kernels and noise have tests of their own, which take a GPU if there is
one.
"""

import contextlib
import copy
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from scipy import stats
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine
from dpshard.clipping.tape import Clipper, Tape
from dpshard.noise.keyed import BLOCK, KeyedGaussian, SumShard
from dpshard.records import convolution, outer_product
from dpshard.records.convolution import Convolution
from dpshard.records.offload import self_test
from dpshard.records.offload.copies import Copies, Gpu
from dpshard.records.outer_product import OuterProduct
from tests.noise.sampled import sampled
from tests.oracle import clipped_mean, norm, per_sample_gradients, private_step, relative_error

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FALSE_ALARM = 1e-7
B, T, V, D = 6, 8, 16, 32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:This loop feeds its own batches"),
    pytest.mark.filterwarnings("ignore:noise_multiplier=0"),
]
needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")


class Words(nn.Module):
    """A tied language model without attention, whose own backward repeats bit by bit."""

    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(V, D), nn.LayerNorm(D)
        self.inner = nn.Sequential(nn.Linear(D, 2 * D), nn.Tanh(), nn.Linear(2 * D, D))

    def forward(self, x):
        return F.linear(self.norm(self.inner(self.words(x))), self.words.weight)


def words(device=DEVICE, dtype=torch.float64):
    torch.manual_seed(0)
    return Words().to(device, dtype)


def ids(device=DEVICE):
    return (torch.arange(B * T).reshape(B, T) * 7 % 5).to(device)


def loss(output, *_):
    return F.cross_entropy(output.flatten(0, 1).float().double(), ids(output.device).flatten()[: output.shape[0] * T])


def step(model, x, **options):
    return private_step(model, (x,), loss, **{"max_grad_norm": 0.5, "verify": False, **options})


@pytest.mark.parametrize("style", ["all-layer", "layer-wise"])
@pytest.mark.parametrize("mode", ["auto", "ghost", "bk", "per-example"])
def test_an_update_is_that_of_the_cpu(style, mode):
    options = {"clipping_style": style, "clipping_mode": mode, "verify": mode == "auto"}
    found, expected = (step(words(where), ids(where), **options) for where in (DEVICE, "cpu"))
    assert relative_error(found, expected) < 1e-10


def powers(*shape):
    """Powers of two, which TF32 does not round."""
    return 2.0 ** torch.randint(-2, 3, shape)


class Cancelling:
    """A layer, inputs and a loss whose gradients shrink to a tenth in the sum over positions, as TF32 shows.

    TF32 rounds the inputs of positions with a positive sign, and nothing else: it changes the sums by 2e-3 or more.
    They are far above the floor of norms, a hundredth of the sum without signs.
    """

    B, T, D, POSITIVE = 4, 64, 512, 35

    def __init__(self, kind):
        torch.manual_seed(0)
        B, T, D = self.B, self.T, self.D
        linear = kind == "linear"
        self.model = nn.Linear(D, D, bias=False) if linear else nn.Conv1d(D, D, 1, bias=False)
        positive = (torch.arange(T) < self.POSITIVE)[:, None]
        x = torch.where(positive, 1 + 2**-11 + 2**-14, 1.0) * powers(1, D) * 2.0 ** -torch.arange(B).view(B, 1, 1)
        weights = torch.where(positive, 1.0, -1.0) * powers(1, D)
        self.x, self.weights = (x, weights) if linear else (x.mT.contiguous(), weights.mT)

    def loss(self, output, *_):
        return (output * self.weights.to(output)).flatten(1).sum(1).mean()

    def step(self):
        """Return the update of a step with two of four samples clipped, and that of the oracle in float64."""
        exact = per_sample_gradients(copy.deepcopy(self.model).double(), (self.x.double(),), self.loss)
        options = {"max_grad_norm": 0.999 * norm(exact[1])}
        found = private_step(
            self.model.to(DEVICE), (self.x.to(DEVICE),), self.loss, verify=False, clipping_mode="bk", **options
        )
        return found, clipped_mean(exact, batch_size=self.B, **options)


def in_tf32(function):
    """Return the function of tensors whose numbers have lost all but 10 bits."""

    def kept(x):
        return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    return lambda *args: function(*(kept(x) if isinstance(x, torch.Tensor) else x for x in args))


@contextlib.contextmanager
def watched(kind, *, grams=lambda f: f, sums=lambda f: f):
    """Replace Gram matrices and clipped sums of a kind of layer; yield mocks that count calls, and one of gradients."""
    linear = kind == "linear"
    module = outer_product if linear else convolution
    owner, name = (torch, "bmm") if linear else (Convolution, "_summed")
    record, made = (OuterProduct, "per_sample") if linear else (Convolution, "_made")
    summed = sums(getattr(owner, name))
    with (
        mock.patch.object(outer_product.native, "supports_ghost_norm", return_value=False),
        mock.patch.object(module, "gram", side_effect=grams(module.gram)) as gram,
        mock.patch.object(owner, name, autospec=not linear, side_effect=summed) as total,
        mock.patch.object(record, made, autospec=True, side_effect=getattr(record, made)) as gradients,
    ):
        yield gram, total, gradients


@pytest.mark.parametrize("kind", ["linear", "convolution"])
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_tf32_enters_neither_gram_matrices_nor_clipped_sums(kind, precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with watched(kind) as (gram, total, gradients):
            found, expected = Cancelling(kind).step()
    finally:
        torch.set_float32_matmul_precision(before)
    assert gram.called
    assert total.called
    assert not gradients.called
    assert relative_error(found, expected) < 1e-4


@pytest.mark.parametrize("kind", ["linear", "convolution"])
@pytest.mark.parametrize("rounded", [("grams",), ("sums",), ("grams", "sums")], ids="+".join)
def test_tf32_in_either_would_be_seen(kind, rounded):
    with watched(kind, **dict.fromkeys(rounded, in_tf32)):
        found, expected = Cancelling(kind).step()
    assert relative_error(found, expected) > 4e-4


@pytest.mark.parametrize("mode", ["auto", "ghost", "per-example"])
def test_a_step_repeats_bit_by_bit(mode):
    one, two = (step(words(dtype=torch.float32), ids(), clipping_mode=mode) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_taps_and_anchors_run_in_one_thread():
    threads = {"arrive": set(), "close": set()}
    arrive, close = Tape.arrive, Clipper.close

    def arriving(tape, *arguments):
        threads["arrive"].add(threading.get_ident())
        return arrive(tape, *arguments)

    def closing(clipper, *arguments):
        threads["close"].add(threading.get_ident())
        return close(clipper, *arguments)

    with mock.patch.object(Tape, "arrive", arriving), mock.patch.object(Clipper, "close", closing):
        step(words(), ids(), clipping_style="layer-wise")
    assert threads["arrive"] == threads["close"]
    assert len(threads["arrive"]) == 1


@needs_gpu
def test_a_forward_on_another_stream_is_waited_for():
    expected, stream = step(words(), ids()), torch.cuda.Stream()
    model = words()

    def call(x):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10**8)
            output = model(x)
        torch.cuda.current_stream().wait_stream(stream)
        return output

    assert relative_error(step(model, ids(), call=call), expected) < 1e-10


def test_secure_noise_is_that_of_the_cpu():
    x = torch.randn(3000)
    for dtype in (torch.float32, torch.float64):
        here, there = x.to(dtype), x.to(DEVICE, dtype)
        for tensor in (here, there):
            KeyedGaussian(bytes(32), secure=True).release_([SumShard("w", tensor)], step=1, std=0.3, divisor=7.0)
        assert torch.equal(there.cpu(), here)


def test_noise_of_the_device_is_normal():
    n = 2**28 if DEVICE.type == "cuda" else 2**16
    noise = sampled(KeyedGaussian(bytes(32)), 0, "w", BLOCK - 100, BLOCK - 100 + n, device=DEVICE)
    for power, variance in ((1, 1), (2, 2), (3, 15), (4, 96)):
        mean = {1: 0, 2: 1, 3: 0, 4: 3}[power]
        z = (float(noise.double().pow(power).mean()) - mean) * (n / variance) ** 0.5
        assert abs(z) < stats.norm.isf(FALSE_ALARM)
    largest = float(noise.abs().max())
    assert largest < stats.norm.isf(FALSE_ALARM / n)
    assert largest > 3


def loop(model, batches, optimizer, watch=lambda: None, ignore=lambda: None):
    for x, y in batches:
        x, y = x.to(DEVICE), y.to(DEVICE)
        watch()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        ignore()
    optimizer.step()
    optimizer.zero_grad()


def engine_on(model, **options):
    defaults = {"batch_size": 4, "sample_size": 6, "steps": 8, "target_delta": 1e-2, "accountant": "rdp"}
    engine = PrivacyEngine(model, **{**defaults, "noise_multiplier": 1.0, "verify": False, **options})
    engine._secret = bytes(range(32))
    return engine


@needs_gpu
@pytest.mark.parametrize("style", ["all-layer", "layer-wise"])
@pytest.mark.parametrize(("mode", "offload"), [("auto", False), ("bk", True), ("ghost", False)])
def test_nothing_waits_for_the_gpu_before_the_release(style, mode, offload):
    model = words(dtype=torch.bfloat16)
    engine = engine_on(model, clipping_style=style, clipping_mode=mode, offload_records=offload)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    modes = {True: "error", False: "default"}
    try:
        for batch in engine.batches(TensorDataset(ids("cpu"), ids("cpu")), 2):
            watched = engine.step >= 2
            loop(
                model, batch, optimizer,
                lambda watched=watched: torch.cuda.set_sync_debug_mode(modes[watched]),
                lambda: torch.cuda.set_sync_debug_mode("default"),
            )  # fmt: skip
    finally:
        torch.cuda.set_sync_debug_mode("default")
        engine.detach()


class Masked(nn.Module):
    """Draws integers in forward, which probes and verification must not see move."""

    def __init__(self):
        super().__init__()
        self.inner = words()

    def forward(self, x):
        kept = torch.randint(0, 2, (T, 1), device=x.device)
        return self.inner(x) * kept


def test_generators_are_rewound_between_probes():
    model = Masked()
    assert norm(step(model, ids(), verify=True)) > 0


@pytest.mark.parametrize("keep", [True, 1e-5, "auto"])
def test_offloaded_records_give_the_same_update(keep):
    expected = step(words(), ids(), clipping_mode="bk")
    with mock.patch.object(Gpu, "could_be_taken", return_value=0):  # so that "auto" lets all records leave
        found = step(words(), ids(), clipping_mode="bk", offload_records=keep)
    assert relative_error(found, expected) < 1e-12


@needs_gpu
def test_the_self_test_of_offloading_passes_and_finds_missing_waits():
    assert self_test.returned_as_it_left(Gpu(DEVICE), self_test._BYTES)
    with mock.patch.object(Copies, "_after"):
        assert not self_test.returned_as_it_left(Gpu(DEVICE), self_test._BYTES)


@needs_gpu
def test_offloaded_records_take_no_memory_of_the_gpu():
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(12)]).to(DEVICE)
    x, peaks = torch.randn(8, 2048, 1024, device=DEVICE), []
    for keep in (False, True):
        engine = engine_on(model, batch_size=8, sample_size=8, clipping_mode="bk", offload_records=keep)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            model(x).square().mean((1, 2)).mean().backward()
            peaks.append(torch.cuda.max_memory_allocated())
            torch.optim.SGD(model.parameters(), lr=0.0).step()
            model.zero_grad()
        engine.detach()
    assert peaks[3] < 0.8 * peaks[1]


def test_a_resumed_run_is_the_run():
    def train(model, steps, state=None, engine_state=None):
        engine = engine_on(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if state is not None:
            model.load_state_dict(state)
            engine.load_state_dict(engine_state)
        for batch in engine.batches(TensorDataset(ids("cpu"), ids("cpu")), 2):
            loop(model, batch, optimizer)
            if engine.step == steps:
                break
        saved = copy.deepcopy(model.state_dict()), engine.state_dict()
        engine.detach()
        return saved

    whole, _ = train(words(), 4)
    resumed, _ = train(words(), 4, *train(words(), 2))
    for name, value in whole.items():
        torch.testing.assert_close(resumed[name], value, rtol=1e-12, atol=1e-12)


@needs_gpu
@pytest.mark.parametrize("style", ["all-layer", "layer-wise"])
def test_a_compiled_model_takes_the_same_step(style):
    expected, model = step(words(), ids(), clipping_style=style), words()
    assert relative_error(step(model, ids(), call=torch.compile(model), clipping_style=style), expected) < 1e-9


@needs_gpu
@pytest.mark.parametrize("style", ["all-layer", "layer-wise"])
def test_one_rank_of_fsdp2_takes_the_same_step(style):
    expected, model = step(words(), ids(), clipping_style=style), words()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        fully_shard(model.inner)
        fully_shard(model)
        sharded = step(model, ids(), clipping_style=style)
        found = {name: value.full_tensor() for name, value in sharded.items()}
    finally:
        dist.destroy_process_group()
    assert relative_error(found, expected) < 1e-10


@needs_gpu
def test_layer_wise_clipping_takes_little_more_memory_than_training_without_privacy():
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(12)]).to(DEVICE)
    x = torch.randn(8, 128, 2048, device=DEVICE)
    peaks = []
    for private in (False, True):
        engine = engine_on(model, clipping_style="layer-wise") if private else None
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            model(x).square().mean().backward()
            if engine is not None:
                engine.privatize()
            model.zero_grad()
        peaks.append(torch.cuda.max_memory_allocated())
    engine.detach()
    assert peaks[1] < 1.3 * peaks[0]
