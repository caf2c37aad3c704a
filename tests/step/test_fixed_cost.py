"""The fixed cost of a private step: counts of operators, and of waits for an accelerator."""

import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import guards
from torch.utils._python_dispatch import TorchDispatchMode

import dpshard
from dpshard import PrivacyEngine
from dpshard.applications.transformer import GPT, Block
from dpshard.clipping import scheme
from dpshard.clipping.group_tape import GroupTape
from dpshard.kernels import native
from tests import accelerator
from tests.oracle import noise_free_engine

B, T, V, WIDTH, MICRO_BATCHES = 4, 8, 16, 32, 2
WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")
LIBRARY = str(Path(dpshard.__file__).parent) + os.sep

FREE = {
    *("view", "_unsafe_view", "reshape", "expand", "transpose", "permute", "t", "slice", "select", "unsqueeze"),
    *("squeeze", "squeeze_", "as_strided", "detach", "alias", "split", "split_with_sizes", "unbind", "unfold"),
    *("diagonal", "view_as_real", "empty", "empty_strided", "empty_like", "new_empty", "lift_fresh"),
    *("_record_function_enter_new", "_record_function_exit", "_local_scalar_dense"),
}
"""Operators that compute nothing."""


class Counts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators, self.waits = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if name in WAITS:
            self.waits[name, place()] += 1
        if name not in FREE:
            self.operators[name, place()] += 1
        return func(*args, **(kwargs or {}))


def place():
    """Return the file and function of dpshard that issue an operator."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(LIBRARY):
            return f"{frame.f_code.co_filename.removeprefix(LIBRARY)}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "the model"


def gpt(depth):
    torch.manual_seed(0)
    return GPT(V, T, WIDTH, depth, lambda: Block(WIDTH, 2, causal=True))


def backwards(model, micro_batches):
    x = torch.arange(B * T).reshape(B, T) % V
    for _ in micro_batches:
        F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()


def ordinary(depth):
    model = gpt(depth)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backwards(model, range(MICRO_BATCHES))
    optimizer.step()
    optimizer.zero_grad()
    with Counts() as counts:
        backwards(model, range(MICRO_BATCHES))
        optimizer.step()
    return counts.operators


def private(model, style):
    """Return the counts of the third logical batch: forwards and backwards, and with the release."""
    n = B * MICRO_BATCHES
    options = {"clipping_style": style, "verify": False, "accountant": "rdp", "target_delta": 1e-5}
    engine = PrivacyEngine(model, batch_size=n, sample_size=n, steps=4, noise_multiplier=1.0, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.utils.data.TensorDataset(torch.arange(n))
    operators, before = Counter(), Counter()
    for batch in engine.batches(rows, B):
        with Counts() as counts:
            backwards(model, batch)
            before = Counter(counts.waits)
            optimizer.step()
        operators = counts.operators
        optimizer.zero_grad()
        if engine.step == 3:
            break
    engine.detach()
    return operators, before


def python_calls(function):
    """Return the number of Python functions that `function` calls."""
    calls = Counter()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls["call"]


def a_block(count):
    """Return the operators that a block adds to its equals, by place."""
    shallow, deep = count(4), count(5)
    deep.subtract(shallow)
    return +deep


@pytest.mark.skipif(not native.is_built(), reason="torch takes more operators for what compiled code does")
@pytest.mark.parametrize(("style", "most"), [("all-layer", 68 / 84), ("layer-wise", 74 / 84)])
def test_a_block_takes_few_more_operators_than_without_privacy(style, most):
    plain, clipped = a_block(ordinary), a_block(lambda depth: private(gpt(depth), style)[0])
    assert plain.total() > 60  # the counter sees backward, too
    assert clipped.total() <= most * plain.total(), clipped.most_common(30)


@pytest.mark.skipif(not native.is_built(), reason="torch takes more operators for what compiled code does")
def test_a_step_has_few_operators_that_no_block_adds():
    plain, clipped = ordinary(1).total(), private(gpt(1), "all-layer")[0].total()
    assert clipped - 104 / 84 * plain <= 181


@pytest.mark.skipif(not native.is_built(), reason="numpy and torch take more calls for what compiled code does")
def test_backward_and_release_take_few_python_calls_for_a_parameter():
    def calls(depth):
        model = gpt(depth)
        options = {"verify": False, "accountant": "rdp", "target_delta": 1e-5, "noise_multiplier": 1.0}
        engine = PrivacyEngine(model, batch_size=B, sample_size=B, steps=4, **options)
        x, found, in_backward = torch.arange(B * T).reshape(B, T) % V, (0, 0), 0
        for batch in engine.batches(torch.utils.data.TensorDataset(torch.arange(B)), B):
            for _ in batch:
                loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
                in_backward = python_calls(loss.backward)
            found = in_backward, python_calls(engine.privatize)
            model.zero_grad()
            if engine.step == 3:
                break
        return *found, len(list(model.parameters()))

    few, many = calls(3), calls(4)
    in_backward, in_release, parameters = (y - x for x, y in zip(few, many, strict=True))
    assert in_backward <= 40 * parameters
    assert in_release <= 16 * parameters


@pytest.mark.filterwarnings("ignore:This loop feeds its own batches")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model_takes_few_python_calls_of_dpshard_for_a_parameter():
    def note(frame, event, argument):
        found.update([event] * frame.f_code.co_filename.startswith(LIBRARY))

    def calls(depth):
        torch.compiler.reset()
        model = gpt(depth)
        model.compile(backend="aot_eager")
        engine = noise_free_engine(model, batch_size=B, verify=False)
        x = torch.arange(B * T).reshape(B, T) % V
        for last in (False, False, True):  # the second release compares values, too
            found.clear()
            sys.setprofile(note if last else None)  # compilation makes millions of calls
            try:
                F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
            finally:
                sys.setprofile(None)
            engine.privatize()
            model.zero_grad()
        engine.detach()
        return found["call"], len(list(model.parameters()))

    found = Counter()
    few, many = calls(4), calls(5)
    more, parameters = (y - x for x, y in zip(few, many, strict=True))
    assert more <= 5 * parameters


@pytest.mark.filterwarnings("ignore:This loop feeds its own batches")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_block_adds_few_guards(monkeypatch):
    """Dynamo evaluates its guards before every forward."""
    make = guards.CheckFunctionManager.__init__

    def noting(manager, *args, **kwargs):
        make(manager, *args, **kwargs)
        found.append(len(str(manager.guard_manager).splitlines()))

    def count(depth, *, clipped):
        torch.compiler.reset()
        found.clear()
        model = gpt(depth)
        model.compile(backend="aot_eager")
        engine = noise_free_engine(model, batch_size=B, verify=False) if clipped else None
        backwards(model, range(1))
        if engine is not None:
            engine.detach()
        return sum(found)

    found: list[int] = []
    monkeypatch.setattr(guards.CheckFunctionManager, "__init__", noting)
    ordinary, private = (count(3, clipped=clipped) - count(2, clipped=clipped) for clipped in (False, True))
    assert ordinary > 100  # guards are counted
    assert private <= 2.5 * ordinary


@pytest.mark.filterwarnings("ignore:This loop feeds its own batches")
def test_a_group_that_waits_for_others_is_looked_at_once(monkeypatch):
    """Sizes of all that wait, again for each group that comes: 80,200 for 400 groups."""
    monkeypatch.setitem(scheme.COMPLETE, "cpu", 2**27)
    sizes, looks = GroupTape.nbytes.fget, Counter()
    monkeypatch.setattr(GroupTape, "nbytes", property(lambda group: looks.update([id(group)]) or sizes(group)))
    model = nn.Sequential(*[nn.Conv1d(3, 3, 1) for _ in range(20)])
    engine = noise_free_engine(model, batch_size=2, clipping_style="layer-wise", verify=False)
    model(torch.randn(2, 3, 4)).sum(2).mean().backward()
    engine.detach()
    assert [*looks.values()] == [1] * 20


@pytest.mark.parametrize("style", ["all-layer", "layer-wise"])
def test_nothing_waits_for_an_accelerator_before_the_release(style, monkeypatch):
    """dpshard takes these tensors to be on one."""
    accelerator.pretend(monkeypatch)
    read = Counter()
    for method in ("tolist", "numpy", "cpu", "item"):
        original = getattr(torch.Tensor, method)

        def noting(x, *args, _original=original, _method=method, **kwargs):
            read[_method, place()] += torch._C._current_graph_task_id() != -1
            return _original(x, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, method, noting)
    waits = private(nn.Sequential(gpt(1)), style)[1]
    planned = {key: n for key, n in waits.items() if "sampling/" in key[1]}  # of plans, which are on the CPU
    assert +waits - Counter(planned) == Counter()
    assert +read == Counter()
