"""Bad input of the library: each has an error of the package's own class that names the thing and the fix.

From the project's list, tested elsewhere: GradScaler, LBFGS and a second engine (tests/engine), corrupt and foreign
checkpoints (test_resume), samples whose loss is not finite (test_noise_on_update), data sets (test_sampling), clipping
styles and functions (test_clipping), steps past the budget (test_resume).

Failure modes: 8 test_models_without_anything_to_train_are_refused; 23 test_a_large_delta_warns.
"""

import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine
from dpshard.errors import (
    AccountingError,
    BatchLayoutError,
    CheckpointError,
    ConfigurationError,
    DataError,
    DpshardError,
    LogicalBatchError,
)

NAN, INF = math.nan, math.inf


def mlp():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def engine_on(model, **options):
    defaults = {"batch_size": 6, "sample_size": 100, "steps": 5, "noise_multiplier": 1.0}
    return PrivacyEngine(model, **{**defaults, **options})


def calibrated(target_epsilon):
    return {"noise_multiplier": None, "target_epsilon": target_epsilon}


SETTINGS = [
    # epsilon and delta
    *[(calibrated(x), r"target_epsilon=.*finite number above 0") for x in (0, -1.0, NAN, INF, "3", True)],
    *[({"target_delta": x}, r"target_delta=.*strictly between 0 and 1") for x in (0, 1, -1e-5, 2, NAN, "x", None)],
    ({"target_epsilon": 1.0}, "exactly one of target_epsilon= and noise_multiplier="),
    ({"noise_multiplier": None}, "exactly one of target_epsilon= and noise_multiplier="),
    *[({"noise_multiplier": x}, r"noise_multiplier=.*0 or above") for x in (-1.0, NAN, INF, True, "1", [1.0])],
    # the data and its batches
    ({"batch_size": 101}, r"batch_size 101 is larger than the data set .*at most 100"),
    ({"batch_size": [(6, 2), (101, 3)]}, r"batch_size 101 at step 2 .*larger than the data set"),
    ({"batch_size": lambda step: 50 * step + 1}, r"batch_size 101 at step 2 .*larger than the data set"),
    *[({"batch_size": x}, r"batch_size is .*positive int") for x in (0, -3, True)],
    ({"batch_size": lambda step: 0}, r"batch_size at step 0 is .*positive int"),
    *[({"batch_size": x}, r"batch_size=.* int, phases .*callable of the step") for x in (2.5, NAN, None, "256")],
    *[({"batch_size": x}, "A phase is") for x in ([(6,)], [6], ["66"], [(6.0, 5)])],
    ({"batch_size": []}, "phases of batch_size have no step"),
    ({"batch_size": [(6, -1), (6, 6)]}, "phase"),
    ({"batch_size": [(6, 3)]}, r"steps=5, but the phases .* 3 steps"),
    *[({"sample_size": x}, "data set is empty.*at least 1") for x in (0, -1)],
    *[({"sample_size": x}, "sample_size must be an int") for x in (2.5, True, "x", None)],
    *[({"steps": x}, "steps=.* must be an int, and a run has at least one step") for x in (0, -1, 2.5, True, "3")],
    *[({"steps": None, "epochs": x}, r"epochs=.*above 0") for x in (0, -1, NAN, INF, "3")],
    *[({"steps": x, "epochs": y}, r"exactly one of epochs= and steps=") for x, y in ((None, None), (3, 1))],
    *[({"max_batch_size": x}, r"max_batch_size=.*positive int") for x in (0, -1, 2.5, True, "x")],
    # choices
    *[({"max_grad_norm": x}, r"max_grad_norm=.*above 0") for x in (0, -1.0, NAN, INF, "1", None, True)],
    ({"clipping_fn": "hard"}, r"clipping_fn='hard' is unknown.*'abadi'"),
    ({"clipping_style": "blockwise"}, r"clipping_style='blockwise' is unknown.*'block-wise'"),
    ({"clipping_mode": "ghost", "offload_records": True}, "offload_records.*two backward passes"),
    *[({"clipping_mode": x}, r"clipping_mode=.* is unknown.*'auto'") for x in ("fast", None, ["bk"])],
    ({"accountant": "prv"}, r"accountant='prv' is unknown.*'pld', 'rdp', 'gdp'"),
    ({"loss_reduction": "none"}, r"loss_reduction='none' is unknown.*'mean', 'sum'"),
    *[({"secure_mode": x}, r"secure_mode=.* is unknown.*\[False, True\]") for x in ("no", None, 2)],
    *[({"verify": x}, r"verify=.* is unknown.*\[False, True\]") for x in ("yes", 3)],
    ({"on_budget": "stop"}, r"on_budget='stop' is unknown.*'raise', 'continue'"),
]


@pytest.mark.parametrize(
    ("options", "message"), SETTINGS, ids=[f"{i}-{'-'.join(options)}" for i, (options, _) in enumerate(SETTINGS)]
)
def test_impossible_settings_are_refused(options, message):
    model = mlp()
    with pytest.raises(ConfigurationError, match=message):
        engine_on(model, **options)
    assert all(not p._backward_hooks for p in model.parameters())
    assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: nn.Sequential(nn.DataParallel(model))])
def test_copies_of_a_model_in_threads_are_refused(wrap):
    with pytest.raises(ConfigurationError, match="DistributedDataParallel"):
        engine_on(wrap(mlp()))


@pytest.mark.parametrize("size", [np.int64(6), np.int32(6)])
def test_numbers_of_numpy_are_taken_or_refused_by_name(size):
    for name in ("batch_size", "sample_size", "steps"):
        try:
            engine = engine_on(mlp(), **{name: size})
        except ConfigurationError as error:
            assert name.split("_")[0] in str(error)  # noqa: PT017
        else:
            assert engine.steps in (5, 6)


def test_a_cap_needs_an_accountant_that_knows_it():
    with pytest.raises(AccountingError, match="pld"):
        engine_on(mlp(), max_batch_size=20, accountant="rdp")


@pytest.mark.parametrize("delta", [0.01, 0.5])
def test_a_large_delta_warns(delta):
    with pytest.warns(UserWarning, match=r"target_delta=.*1/N = 0\.01.*well below 1/N"):
        engine = engine_on(mlp(), target_delta=delta)
    assert engine.mechanism.target_delta == delta


@pytest.mark.parametrize("budget", [calibrated(3.0), {}])
def test_a_large_delta_warns_once(budget):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine_on(mlp(), target_delta=0.01, **budget)
    assert ["target_delta" in str(warning.message) for warning in caught] == [True]


def test_a_cap_below_the_expected_batch_warns():
    with pytest.warns(UserWarning, match="max_batch_size=5 is below the expected batch size 6"):
        engine_on(mlp(), max_batch_size=5)


@pytest.mark.parametrize("model", [[mlp()], mlp], ids=["list", "function"])
def test_what_is_no_module_is_refused_by_its_type(model):
    with pytest.raises(ConfigurationError, match=f"^model is of type {type(model).__name__}, not a torch.nn.Module"):
        engine_on(model)


@pytest.mark.parametrize("delta", [0, 1, -1, NAN])
def test_epsilon_at_an_impossible_delta_is_refused(delta):
    with pytest.raises(ConfigurationError, match=r"delta=.*strictly between 0 and 1"):
        engine_on(mlp()).epsilon(delta)


# --- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [nn.Tanh, lambda: mlp().requires_grad_(False)], ids=["no parameter", "all frozen"])
def test_models_without_anything_to_train_are_refused(build):
    with pytest.raises(ConfigurationError, match=r"no trainable parameter.*requires_grad_\(True\)"):
        engine_on(build())


@pytest.mark.parametrize("model", [None, lambda x: x, "model", mlp], ids=["None", "function", "name", "builder"])
def test_what_is_no_module_is_refused(model):
    with pytest.raises(ConfigurationError, match=r"torch\.nn\.Module"):
        engine_on(model)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.LazyLinear(3), r"weight is not initialised yet.*one forward under torch\.no_grad"),
        (
            lambda: nn.ParameterList([torch.zeros(3, dtype=torch.complex32)]),
            r"0 is of torch\.complex32.*requires_grad_\(False\)",
        ),
        (lambda: nn.ModuleDict({"_orig_mod": nn.Linear(2, 2), **mlp_named()}), r"weight: another parameter.*rename"),
    ],
    ids=["lazy", "complex", "names"],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_parameters_that_cannot_be_trained_are_refused(build, message):
    with pytest.raises(ConfigurationError, match=message):
        engine_on(build())


def mlp_named():
    return {"_checkpoint_wrapped_module": nn.Linear(2, 2)}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "without a tensor argument.*Pass tensors"),
        ((3,), "without a tensor argument"),
        ((torch.tensor(1.0),), "without a tensor argument"),
        ((torch.zeros(0, 4),), r"empty batch.*engine\.batches"),
    ],
)
@pytest.mark.filterwarnings("ignore:This loop feeds its own batches")
def test_inputs_without_samples_are_refused(args, message):
    model = mlp()
    engine = engine_on(model)
    with pytest.raises(BatchLayoutError, match=message):
        model(*args)
    with pytest.raises(BatchLayoutError, match=message):
        engine.verify(*args)


# --- data -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (TensorDataset(torch.zeros(0, 4)), "is empty"),
        ([], "is empty"),
        (TensorDataset(torch.zeros(99, 4)), r"99 samples.*sample_size=100.*Pass sample_size=99"),
        (iter(range(100)), "no __getitem__"),
        (7, "no __getitem__"),
    ],
    ids=["empty", "empty list", "of another size", "iterator", "number"],
)
def test_data_sets_that_do_not_fit_are_refused_at_once(dataset, message):
    with pytest.raises(DataError, match=message):
        engine_on(mlp()).batches(dataset, 4)


@pytest.mark.parametrize("size", [0, -1, 2.5, "4", True])
def test_impossible_micro_batch_sizes_are_refused_at_once(size):
    """At the call, not at the first batch, where a generator would raise far from the mistake."""
    with pytest.raises(ConfigurationError, match=r"micro_batch_size=.*at least 1"):
        engine_on(mlp()).batches(TensorDataset(torch.zeros(100, 4)), size)


@pytest.mark.parametrize("state", [None, {}, torch.zeros(3), {"model": 1}, nn.Linear(2, 2).state_dict()])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(CheckpointError, match="not the state of a PrivacyEngine"):
        engine_on(mlp()).load_state_dict(state)


@pytest.mark.parametrize("part", ["mechanism", "ledger"])
@pytest.mark.parametrize("value", [None, [], 3, "x", {}])
def test_a_sealed_state_of_nonsense_is_refused(part, value):
    """Anyone who can write a checkpoint can seal it: the digest shows damage, not intent."""
    from dpshard.checkpoint import engine_state

    engine = engine_on(mlp())
    state = {**engine.state_dict(), part: value}
    state["digest"] = engine_state.digest_of({key: x for key, x in state.items() if key != "digest"})
    before = engine.state_dict()
    with pytest.raises(CheckpointError):
        engine.load_state_dict(state)
    assert engine.state_dict() == before


def test_every_error_is_caught_by_the_base_class():
    from dpshard import errors

    found = [x for x in vars(errors).values() if isinstance(x, type)]
    assert len(found) > 10
    assert all(issubclass(x, DpshardError) for x in found)
    assert issubclass(ConfigurationError, ValueError)


def test_a_refused_forward_leaves_a_working_engine():
    model = mlp()
    engine = engine_on(model)
    x, y = torch.randn(100, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(100, dtype=torch.long)
    for logical_batch in engine.batches(TensorDataset(x, y), 4):
        for rows, labels in logical_batch:
            with pytest.raises(BatchLayoutError, match="has 4 rows, padding included"):
                model(rows[:3, None, :3])
            F.cross_entropy(model(rows), labels).backward()
        engine.privatize()
        break
    assert engine.step == 1


def test_a_data_loader_in_place_of_its_data_set_is_refused():
    loader = torch.utils.data.DataLoader(TensorDataset(torch.randn(100, 4)), batch_size=10)
    with pytest.raises(DataError, match=r"pass loader\.dataset"):
        engine_on(mlp()).batches(loader, 6)


@pytest.mark.parametrize(
    "use",
    [
        lambda model, batch: model(batch),
        lambda model, batch: model(batch[0]),
        lambda model, batch: torch.tanh(batch),
    ],
)
def test_a_logical_batch_in_place_of_a_micro_batch_is_refused(use):
    model = mlp()
    engine = engine_on(model)
    batch = next(engine.batches(TensorDataset(torch.randn(100, 4)), 6))
    with pytest.raises((LogicalBatchError, BatchLayoutError), match="for x, y in logical_batch"):
        use(model, batch)


def test_a_schedule_is_sliced_like_its_sizes():
    schedule = engine_on(mlp(), batch_size=[(6, 2), (8, 3)], steps=5).mechanism.schedule
    assert schedule[:3] == (6, 6, 8)
    assert schedule[99] == 8
    assert list(schedule) == [6, 6, 8, 8, 8]
