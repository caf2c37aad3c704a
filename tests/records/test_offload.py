"""Records in host memory: every order of the copies, what leaves, and that what returns is what left."""

import functools

import pytest
import torch
import torch.nn.functional as F

from dpshard.errors import ConfigurationError, LogicalBatchError
from dpshard.records import Offload, OuterProduct, OwnMemory, PerSampleGrad
from dpshard.records.offload import pinned, self_test
from dpshard.records.offload.copies import Copies
from tests.networks import Network, sentences
from tests.oracle import TOLERANCE, clipped_mean, per_sample_gradients, private_step, relative_error
from tests.records.races import Event, RaceError, SimulatedGpu

N = 1000
ORDERS = [
    ("out", "compute"),
    ("compute", "out"),
    ("into", "out"),
    ("into", "compute"),
    ("compute", "into"),
    ("out", "into"),
]
GIB = 2**30


# --- the orders of copies --------------------------------------------------------------------------------------------


def content(i):
    return (torch.arange(N) * (i + 1)).to(torch.uint8)


def move(gpu, **options):
    """Let records leave and return in every way."""
    copies = Copies(gpu, window=2 * N, **options)

    def leave(i):
        x = content(i)
        gpu.uses(x, gpu.compute, writes=True)
        return copies.leave(x)

    def fetch(away, i):
        found = copies.fetch(away)
        gpu.uses(found, gpu.compute, writes=False)
        assert torch.equal(found[:N], content(i))

    for _ in range(2):
        away = [leave(i) for i in range(6)]
        for i, some in enumerate(away):
            for ahead in away[i : i + 2]:
                copies.begin_return(ahead)
            fetch(some, i)
    ahead = leave(6)
    copies.begin_return(ahead)
    fetch(leave(7), 7)  # its pinned memory is that of `ahead`, whose copy nobody waited for
    fetch(ahead, 6)
    unread = leave(8)
    copies.begin_return(unread)
    copies.forget(unread)
    gpu.find_freed()
    copies.forget(leave(9))
    copies.settle()
    gpu.find_freed()
    assert copies.leaving == copies.arriving == 0


def test_no_copy_races():
    Event.waits_of_the_cpu = 0
    move(SimulatedGpu())
    assert Event.waits_of_the_cpu == 0


@pytest.mark.parametrize("order", ORDERS, ids="-after-".join)
def test_every_wait_is_needed(order):
    with pytest.raises(RaceError):
        move(SimulatedGpu(forgets=order))


def test_without_trust_the_cpu_waits_for_every_event():
    Event.waits_of_the_cpu = 0
    move(SimulatedGpu(), synchronous=True)
    assert Event.waits_of_the_cpu >= 4 * 15


def test_unread_copies_end_before_others_get_their_memory():
    gpu = SimulatedGpu()
    copies = Copies(gpu, window=N)
    away = copies.leave(content(0))
    copies.begin_return(away)
    del copies, away
    gpu.find_freed()


def test_pinned_memory_is_used_again(monkeypatch):
    monkeypatch.setattr(pinned, "_SLAB", 4096)
    gpu, slabs = SimulatedGpu(), list[int]()
    gpu.pinned = lambda n: slabs.append(n) or torch.empty(n, dtype=torch.uint8)
    copies = Copies(gpu)
    for _ in range(3):
        away = [copies.leave(content(i)) for i in range(7)]
        away.append(copies.leave(torch.zeros(5000, dtype=torch.uint8)))
        for i, some in enumerate(away[:6]):
            assert torch.equal(copies.fetch(some)[:N], content(i))
        for some in away[6:]:
            copies.forget(some)
    assert slabs == [4096, 4096, 8192]


def test_a_gpu_that_keeps_no_order_is_found(monkeypatch):
    assert self_test.returned_as_it_left(SimulatedGpu(), 64)
    assert not self_test.returned_as_it_left(Careless(), 64)
    monkeypatch.setattr(self_test, "Gpu", lambda device: Careless())
    monkeypatch.setattr(self_test, "_BYTES", 64)
    with pytest.warns(UserWarning, match="differed from what had left"):
        assert self_test.needs_the_cpu(torch.device("cuda", 7))


class Careless(SimulatedGpu):
    """Brings one byte in a hundred thousand copies back wrongly."""

    def copy(self, target, source, stream):
        super().copy(target, source, stream)
        if stream.name == "into" and self.moved["into"] > 20 * source.nbytes:
            target[-1] += 1


# --- what leaves -----------------------------------------------------------------------------------------------------


def product(cols, seed=0):
    rows = torch.randn(2, 1, 3, 4, generator=torch.Generator().manual_seed(seed))
    return OuterProduct(rows, cols, torch.Size((4, cols.shape[3])))


def equal(found, expected):
    record, differs = found
    assert differs is None or not differs
    assert torch.equal(record.rows, expected.rows)
    assert torch.equal(record.cols, expected.cols)
    assert record.shape == expected.shape
    return True


def test_a_storage_leaves_once_however_many_records_share_it():
    gpu, x = SimulatedGpu(), torch.randn(2, 3, 5)
    offload = Offload(0, lambda _: gpu)
    records = {name: product(x.unsqueeze(1), seed) for seed, name in enumerate("qkv")}
    waiting = {name: offload.wait(name, record) for name, record in records.items()}
    assert gpu.moved["out"] == x.nbytes + 3 * records["q"].rows.nbytes
    offload.expect(list(waiting.values()))
    assert all(equal(offload.fetch(waiting.pop(name)), records[name]) for name in "qkv")
    assert gpu.moved["into"] == gpu.moved["out"]
    assert not offload.take_differing()


def test_a_small_part_leaves_its_storage_behind():
    gpu, x = SimulatedGpu(), torch.randn(2, 9, 3, 5)
    record = product(x[:, 4:5].mT.mT)
    waiting = Offload(0, lambda _: gpu).wait("w", record)
    assert gpu.moved["out"] == record.rows.nbytes + record.cols.nbytes
    assert waiting.storages()[1].nbytes == record.cols.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64, torch.bool])
def test_views_return_as_they_were(dtype):
    offload = Offload(0, lambda _: SimulatedGpu())
    x = (torch.randn(7, 5, dtype=torch.complex64) if dtype.is_complex else torch.randn(7, 5)).to(dtype)
    for view in (x[1:].T, x[:, 1:], x[::2], x.conj(), x.expand(3, 7, 5), x[:0]):
        record, _ = offload.fetch(offload.wait("w", PerSampleGrad(view)))
        assert torch.equal(record.gradient, view)


def test_another_storage_at_the_same_address_is_another():
    """Autograd frees a storage while its record is away; the next one of this size gets its address."""
    offload, waiting = Offload(0, lambda _: SimulatedGpu()), []
    for i in range(9):
        waiting.append(offload.wait(str(i), PerSampleGrad(torch.full((4, 4), float(i)))))
        offload._copies.settle()
    for i, away in enumerate(waiting):
        assert (offload.fetch(away)[0].gradient == i).all()


def test_what_was_written_since_is_not_the_same():
    offload = Offload(0, lambda _: SimulatedGpu())
    x = torch.ones(2, 1, 3, 5)
    first = offload.wait("q", product(x))
    x.add_(1)
    second = offload.wait("k", product(x))
    for waiting, value in ((first, 1), (second, 2)):
        record, differs = offload.fetch(waiting)
        assert (record.cols == value).all()
        assert not differs
    third = offload.wait("q", product(x))
    x.data.add_(1)
    fourth = offload.wait("k", product(x))
    assert offload.fetch(third)[1]
    assert offload.fetch(fourth)[1]  # measured with 3, but 2 left
    assert offload.take_differing()
    assert offload.take_differing() is None


@pytest.mark.parametrize(
    "offload", [Offload(0, lambda _: SimulatedGpu()), Offload(1, lambda _: SimulatedGpu()), Offload(1)]
)
def test_records_of_their_own_memory_do_not_see_later_writes(offload):
    x, rows = torch.randn(2, 5, 3, 1), torch.randn(2, 1, 1, 4)
    record = OuterProduct(rows.expand(2, 1, 3, 4), x.mT[..., 1:], torch.Size((4, 4)))
    expected = record.rows.clone(), record.cols.clone()
    waiting = offload.wait("w", record).copied(OwnMemory())
    x.data.zero_()
    rows.data.zero_()
    found = offload.fetch(waiting)[0]
    assert torch.equal(found.rows, expected[0])
    assert torch.equal(found.cols, expected[1])


def test_what_records_share_is_copied_once():
    memory, x = OwnMemory(), torch.randn(2, 1, 3, 5)
    first, second = (memory.of(product(x, seed)) for seed in range(2))
    assert first.cols.data_ptr() == second.cols.data_ptr() != x.data_ptr()
    rows = torch.randn(1, 1, 1, 4).expand(2, 1, 3, 4)
    assert memory.copy(rows).untyped_storage().nbytes() == 16


def test_only_what_exceeds_the_budget_leaves_and_the_last_summed_first():
    gpu, size = SimulatedGpu(), 400
    offload = Offload(2 * size / GIB, lambda _: gpu)

    def backward(sums):
        before = gpu.moved["out"]
        waiting = {i: offload.wait(str(i), PerSampleGrad(torch.full((10, 10), float(i)))) for i in range(5)}
        away = {i for i, w in waiting.items() if not isinstance(w.storages()[0].place, torch.Tensor)}
        assert gpu.moved["out"] - before == 3 * size
        offload.expect(list(waiting.values()))
        for i in sums:
            assert (offload.fetch(waiting.pop(i))[0].gradient == i).all()
        return away

    assert backward([1, 0, 2, 4, 3]) == {0, 1, 2}  # the oldest: no order is known
    assert backward(range(4, -1, -1)) == {2, 4, 3}
    assert backward(range(5)) == {0, 1, 2}
    assert backward(range(5)) == {2, 3, 4}


def test_auto_keeps_an_eighth_free():
    taken = [0]
    gpu = SimulatedGpu(could=8000, takes=lambda: taken[0])
    offload, kept = Offload("auto", lambda _: gpu), []
    for taken[0], left in ((6900, 0), (7100, 400), (7300, 400), (7900, 1200)):  # what leaves is still taken
        kept.append(offload.wait("w", PerSampleGrad(torch.zeros(10, 10))))
        assert gpu.moved["out"] == left


def test_what_is_dropped_is_no_longer_counted():
    gpu = SimulatedGpu()
    offload = Offload(500 / GIB, lambda _: gpu)
    for _ in range(9):
        offload.wait("w", PerSampleGrad(torch.zeros(10, 10)))
    assert gpu.moved["out"] == 0


def test_records_of_a_cpu_stay():
    waiting = Offload(0).wait("w", PerSampleGrad(torch.zeros(10, 10)))
    assert waiting.storages() == []


def test_other_devices_are_refused():
    with pytest.raises(ConfigurationError, match="not from meta"):
        Offload(0).wait("w", PerSampleGrad(torch.zeros(10, 10, device="meta")))


# --- steps -----------------------------------------------------------------------------------------------------------

B, R = 6, 30.0
DATA = sentences(B)


@pytest.fixture
def gpu(monkeypatch):
    """A simulated GPU for all engines; no record is small."""
    simulated = SimulatedGpu(takes=lambda: 2**50)
    monkeypatch.setattr("dpshard.records.per_sample._SMALL", 0)
    monkeypatch.setattr("dpshard.clipping.tape.Offload", functools.partial(Offload, gpu=lambda _: simulated))
    return simulated


def step(**options):
    return private_step(Network(), DATA, F.cross_entropy, max_grad_norm=R, verify=False, **options)


@functools.cache
def expected():
    return clipped_mean(per_sample_gradients(Network(), DATA, F.cross_entropy), max_grad_norm=R, batch_size=B)


@pytest.mark.parametrize("offload_records", [True, 0, 1e-6, "auto"])
@pytest.mark.parametrize("mode", ["bk", "auto"])
def test_the_update_is_that_of_records_that_stay(gpu, mode, offload_records):
    update = step(clipping_mode=mode, offload_records=offload_records, micro_batch_sizes=[2, 4])
    assert relative_error(update, expected()) <= TOLERANCE
    assert gpu.moved["out"] == gpu.moved["into"] > 0
    gpu.find_freed()


def test_layer_wise(gpu):
    found = [step(clipping_style="layer-wise", offload_records=choice) for choice in (False, True)]
    assert relative_error(*found) == 0
    assert gpu.moved["into"] > 0


def test_a_changed_record_has_no_part_in_the_sum_and_stops_the_release(gpu, monkeypatch):
    copy, sums = gpu.copy, []

    def changing(target, source, stream):
        copy(target, source, stream)
        if stream.name == "into":
            target[0] ^= 1

    def summing(self, clip_coef_B):
        total = clipped_sum(self, clip_coef_B)
        sums.append(total.abs().max())
        return total

    clipped_sum = OuterProduct.clipped_sum
    monkeypatch.setattr(gpu, "copy", changing)
    monkeypatch.setattr(OuterProduct, "clipped_sum", summing)
    with pytest.raises(LogicalBatchError, match="A record that returned from host memory"):
        step(clipping_mode="bk", offload_records=True)
    assert sums
    assert sum(total != 0 for total in sums) <= 1  # the last one closes the group, and stays


@pytest.mark.parametrize("value", ["all", -1, float("nan"), float("inf"), None, [1]])
def test_bad_values_are_refused(value):
    with pytest.raises(ConfigurationError, match="GiB of records that stay"):
        step(offload_records=value)
