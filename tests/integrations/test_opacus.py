"""Opacus's interface: its scripts run, and their updates are those of the oracle and of the engine itself.

Failure modes: 1, 5 test_an_update_is_the_oracles (of padded rows, too);
12 test_the_ghost_criterion_keeps_samples_apart;
19 test_steps_and_zero_grad_wait_for_the_logical_batch; 20 test_what_cannot_be_accounted_is_refused;
24 test_a_saved_run_goes_on_bit_for_bit.
"""

import pkgutil
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import dpshard
from dpshard.errors import AccountingError, BudgetExceededError, ConfigurationError, EngineInUseError, LogicalBatchError
from dpshard.integrations.opacus import GradSampleModule, PrivacyEngine, accountants
from dpshard.integrations.opacus.accountants.utils import get_noise_multiplier
from dpshard.integrations.opacus.criterion import DPLoss
from dpshard.integrations.opacus.data_loader import DPDataLoader
from dpshard.integrations.opacus.grad_sample.functorch import make_functional
from dpshard.integrations.opacus.optimizers import DPOptimizer
from dpshard.integrations.opacus.utils.batch_memory_manager import BatchMemoryManager
from dpshard.integrations.opacus.utils.uniform_sampler import UniformWithReplacementSampler
from dpshard.integrations.opacus.validators import ModuleValidator
from tests.integrations.opacus_scripts import SCRIPTS
from tests.oracle import clipped_mean, gradients_of, per_sample_gradients, randn, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:noise_multiplier=0")

N, BATCH, D, C, R = 62, 10, 5, 3, 0.6
EXPECTED = 8
"""Seven batches make a round; Opacus divides by 62 // 7."""


class Rows(Dataset):
    """Inputs, classes, and row numbers."""

    def __init__(self):
        torch.manual_seed(0)
        self.x, self.y = randn(N, D), torch.arange(N) % C

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.x[i], self.y[i], i


DATA = Rows()


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, C)).double()


def make_private(model, *, method="make_private", loader=None, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = loader or DataLoader(DATA, batch_size=BATCH)
    privacy = PrivacyEngine()
    noise = {"noise_multiplier": 0.0} if method == "make_private" else {}
    settings = {"max_grad_norm": R} | noise | options
    made = getattr(privacy, method)(module=model, optimizer=optimizer, data_loader=loader, **settings)
    privacy.engine._secret = bytes(range(32))
    return privacy, *made


def a_round(model, optimizer, loader, criterion=F.cross_entropy, *, first=False):
    """Return rows of each logical batch, and the gradients of each step; zero_grad first or last."""
    seen, used, rows = [], [], []
    optimizer.attach_step_hook(lambda _: used.append(gradients_of(model._module)))
    for x, y, i in loader:
        if first:
            optimizer.zero_grad()
        criterion(model(x), y).backward()
        rows.extend(i[~loader.progress.batch.is_padding].tolist())
        before = len(used)
        optimizer.step()
        if len(used) > before:
            seen.append(rows)
            rows = []
        if not first:
            optimizer.zero_grad()
    assert not rows
    return seen, used


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")  # Lightning
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.exhaustive
def test_a_script_runs_with_its_import_changed(script, tmp_path):
    source = re.sub(r"^from opacus", "from dpshard.integrations.opacus", SCRIPTS[script], flags=re.MULTILINE)
    assert source.count("dpshard") == SCRIPTS[script].count("from opacus")
    namespace = {"__name__": "__main__", "FOLDER": tmp_path}
    exec(compile(source, script, "exec"), namespace)
    assert namespace["privacy_engine"].engine.step == namespace["steps"] > 0
    assert 0 < namespace["privacy_engine"].get_epsilon(1e-5) < 100


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("physical", [None, 3])
def test_an_update_is_the_oracles(mode, reduction, physical):
    model = mlp()
    made = make_private(model, grad_sample_mode=mode, loss_reduction=reduction)
    _, private, optimizer, *criterion, loader = made
    optimizer.param_groups[0]["lr"] = 0.0  # all steps are at the same parameters
    assert optimizer.expected_batch_size == EXPECTED

    def loss(output, y):
        return F.cross_entropy(output, y, reduction=reduction)

    if physical:
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer) as small:
            assert len(small) == 19  # ceil(7 * 8 / 3)
            seen, used = a_round(private, optimizer, small, *(criterion or [loss]), first=True)
    else:
        seen, used = a_round(private, optimizer, loader, *(criterion or [loss]))
    assert len(seen) == len(used) == len(loader) == 7
    assert len({len(rows) for rows in seen}) > 1  # Poisson
    private.cleanup()
    oracle = mlp()
    checked = 0
    for rows, gradients in zip(seen, used, strict=True):
        if not rows:
            continue
        samples = per_sample_gradients(oracle, (DATA.x[rows], DATA.y[rows]), F.cross_entropy)
        divisor = EXPECTED if reduction == "mean" else 1  # Opacus does not divide a sum
        expected = clipped_mean(samples, max_grad_norm=R, batch_size=divisor)
        assert relative_error(gradients, expected) < 1e-10
        checked += 1
    assert checked > 3


@pytest.mark.parametrize("first", [True, False])
def test_noise_and_batches_are_those_of_the_engine(first):
    """With one run secret, interface and engine give the same parameters, with noise."""
    model = mlp()
    privacy, private, optimizer, loader = make_private(model, noise_multiplier=1.3)
    state = privacy.engine.state_dict()
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as small:
        a_round(private, optimizer, small, first=first)
    plain = mlp()
    engine = dpshard.PrivacyEngine(
        plain,
        batch_size=EXPECTED,
        sample_size=N,
        steps=7,
        noise_multiplier=1.3,
        max_grad_norm=R,
        clipping_fn="abadi",
    )
    engine.load_state_dict(state)
    own = torch.optim.SGD(plain.parameters(), lr=0.5)
    for logical_batch in engine.batches(DATA, 4, pad=False):
        for x, y, _ in logical_batch:
            F.cross_entropy(plain(x), y).backward()
        own.step()
        own.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
    assert privacy.get_epsilon(1e-5) == engine.epsilon(1e-5)
    assert len(privacy.accountant) == 7


def test_per_layer_clipping_is_the_oracles():
    model = mlp()
    norms = [R / 2] * 4
    _, private, optimizer, loader = make_private(model, clipping="per_layer", max_grad_norm=norms)
    optimizer.param_groups[0]["lr"] = 0.0
    seen, used = a_round(private, optimizer, loader)
    private.cleanup()
    groups = [[name] for name, _ in model.named_parameters()]
    samples = per_sample_gradients(model, (DATA.x[seen[0]], DATA.y[seen[0]]), F.cross_entropy)
    expected = clipped_mean(samples, max_grad_norm=R, batch_size=EXPECTED, groups=groups)
    assert relative_error(used[0], expected) < 1e-10


def test_steps_and_zero_grad_wait_for_the_logical_batch():
    """Also the model's zero_grad; leaving a round early releases nothing of its last logical batch."""
    model = mlp()
    privacy, private, optimizer, loader = make_private(model)
    start = [p.clone() for p in model.parameters()]
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=1, optimizer=optimizer) as small:
        for x, y, _ in small:
            F.cross_entropy(private(x), y).backward()
            optimizer.step()
            private.zero_grad()
            optimizer.zero_grad()
            assert small.progress.batch is not None
            if not small.progress.batch.complete:
                break
        assert privacy.engine.step == small.progress.batch.step
        if privacy.engine.step == 0:
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), start, strict=True))
        a_round(private, optimizer, small)
    assert privacy.engine.step == small.progress.batch.step + 1 == loader.progress.batch.step + 1 >= 7


def test_a_closure_is_evaluated_once_per_micro_batch():
    model = mlp()
    privacy, private, optimizer, loader = make_private(model)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as small:
        for x, y, _ in small:

            def closure(x=x, y=y):
                loss = F.cross_entropy(private(x), y)
                loss.backward()
                return loss

            assert optimizer.step(closure) > 0
            optimizer.zero_grad()
    assert privacy.engine.step == 7


def test_a_step_that_was_forgotten_is_noticed():
    _, private, _, loader = make_private(mlp())
    batches = iter(loader)
    x, y, _ = next(batches)
    F.cross_entropy(private(x), y).backward()
    with pytest.raises(LogicalBatchError, match="was not released"):
        next(batches)


def test_without_poisson_sampling_every_sample_comes_once_an_epoch():
    """Epsilon is that of balls-in-bins, not of Poisson sampling at the same noise."""
    options = {"noise_multiplier": 0.8, "poisson_sampling": False}
    privacy, model, optimizer, loader = make_private(mlp(), **options)
    for _ in range(2):
        seen, used = a_round(model, optimizer, loader)
        assert len(seen) == len(used) == len(loader) == 8
        assert sorted(row for rows in seen for row in rows) == list(range(N))
    assert "one random step of each (balls in bins)" in privacy.engine.statement()
    spent = privacy.get_epsilon(1e-5)
    run = {"sample_size": N, "batch_size": EXPECTED, "steps": 16, "target_epsilon": spent}
    allocated, poisson = (
        dpshard.PrivacyEngine(mlp(), sampling=sampling, **run).noise_multiplier
        for sampling in ("balls-in-bins", "poisson")
    )
    assert allocated == pytest.approx(0.8, rel=1e-3)
    assert poisson != pytest.approx(0.8, rel=1e-2)


def test_other_accountants_know_no_balls_in_bins():
    privacy = PrivacyEngine(accountant="rdp")
    model = mlp()
    with pytest.raises(AccountingError, match="balls-in-bins"):
        privacy.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(DATA, batch_size=BATCH),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
        )


@pytest.mark.exhaustive
def test_the_budget_holds():
    privacy, private, optimizer, loader = make_private(
        mlp(),
        method="make_private_with_epsilon",
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=2,
    )
    for _ in range(2):
        a_round(private, optimizer, loader)
    assert 2.9 < privacy.get_epsilon(delta=1e-5) <= 3.0
    with pytest.raises(BudgetExceededError):
        a_round(private, optimizer, loader)


def test_what_comes_before_make_private_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="Nothing is private yet: call make_private first"):
        PrivacyEngine().save_checkpoint(path=tmp_path / "run.pt", module=mlp())


def test_a_criterion_that_only_sums_is_refused():
    criterion = nn.Module()
    criterion.reduction = "mean"
    criterion.forward = lambda scores, labels: F.cross_entropy(scores, labels)
    with pytest.raises(ConfigurationError, match="Module does not return one loss per sample under reduction='none'"):
        DPLoss(criterion, "mean")(torch.randn(3, C), torch.zeros(3, dtype=torch.long))


class Pairs(BatchSampler):
    pass


REFUSED = {
    "time first": ({"batch_first": False}, "transpose in the model's forward"),
    "a generator": ({"noise_generator": torch.Generator()}, "predictable"),
    "adaptive": ({"clipping": "adaptive"}, "Adaptive clipping is not supported"),
    "a list for flat": ({"max_grad_norm": [1.0]}, "'flat' with a number"),
    "unequal norms": ({"clipping": "per_layer", "max_grad_norm": [1.0, 1.0, 1.0, 2.0]}, "all equal"),
    "too few norms": ({"clipping": "per_layer", "max_grad_norm": [1.0]}, "4 trainable parameters"),
    "no gradients": ({"grad_sample_mode": "no_op"}, "p.grad_sample"),
    "other reduction": (
        {"grad_sample_mode": "ghost", "criterion": nn.CrossEntropyLoss(reduction="sum")},
        "loss_reduction='mean'",
    ),
    "a subset by sampler": (
        {"loader": DataLoader(DATA, batch_size=4, sampler=SubsetRandomSampler(range(9)))},
        "torch.utils.data.Subset",
    ),
    "weights": (
        {"loader": DataLoader(DATA, batch_size=4, sampler=WeightedRandomSampler([1.0] * N, N))},
        "WeightedRandomSampler",
    ),
    "no loader": ({"loader": [1]}, "DataLoader"),
    "its own batches": (
        {"loader": DataLoader(DATA, batch_sampler=Pairs(SequentialSampler(DATA), 2, drop_last=False))},
        "batch sampler Pairs, which Poisson sampling would replace: give batch_size=",
    ),
    "another way to start workers": (
        {"loader": DataLoader(DATA, batch_size=4, num_workers=1, multiprocessing_context="spawn")},
        "multiprocessing_context, which engine.batches does not pass on",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_accounted_is_refused(case):
    options, message = REFUSED[case]
    model = mlp()
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        make_private(model, **options)
    make_private(model)  # the refusal had no side effects


def test_foreign_and_forgotten_parameters_are_refused():
    model = mlp()
    loader = DataLoader(DATA, batch_size=BATCH)
    for parameters in (mlp().parameters(), model[0].parameters()):
        with pytest.raises(ConfigurationError, match="different parameters"):
            PrivacyEngine().make_private(
                module=model,
                optimizer=torch.optim.SGD(parameters, lr=0.1),
                data_loader=loader,
                noise_multiplier=1.0,
                max_grad_norm=1.0,
            )


def test_an_engine_makes_one_model_private():
    privacy, private, optimizer, loader = make_private(mlp(), noise_multiplier=1.0)
    again = {"module": private, "optimizer": optimizer, "data_loader": loader}
    with pytest.raises(EngineInUseError, match="make_private was called before"):
        privacy.make_private(**again, noise_multiplier=1.0, max_grad_norm=1.0)
    private.cleanup()
    # Results of make_private can be made private again.
    _, optimizer, _ = PrivacyEngine().make_private(**again, noise_multiplier=1.0, max_grad_norm=1.0)
    assert isinstance(optimizer, DPOptimizer)
    assert isinstance(optimizer.original_optimizer, torch.optim.SGD)


def test_the_wrapped_model_is_like_the_users():
    model = mlp()
    model.note = "mine"
    _, private, _, _ = make_private(model)
    assert isinstance(private, GradSampleModule)
    assert private.note == "mine"
    assert set(private.state_dict()) == {f"_module.{key}" for key in model.state_dict()}
    private.eval()
    assert not model[0].training
    assert private.to_standard_module() is model
    assert "forward" not in vars(model[0])


def test_a_saved_run_goes_on_bit_for_bit(tmp_path):
    privacy, private, optimizer, loader = make_private(mlp(), noise_multiplier=1.0)
    a_round(private, optimizer, loader)
    privacy.save_checkpoint(path=tmp_path / "run.pt", module=private, optimizer=optimizer, checkpoint_dict={"epoch": 1})
    a_round(private, optimizer, loader)
    other, resumed, second, again = make_private(mlp(), noise_multiplier=1.0)
    assert other.load_checkpoint(path=tmp_path / "run.pt", module=resumed, optimizer=second)["epoch"] == 1
    a_round(resumed, second, again)
    assert other.get_epsilon(1e-5) == privacy.get_epsilon(1e-5)
    for p, q in zip(private.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_ghost_criterion_keeps_samples_apart():
    """A mean over the tokens of all samples, or class weights, would make them depend on each other."""
    torch.manual_seed(0)
    logits, target = randn(4, 6, C), torch.randint(0, C, (4, 6))
    target[0, 1:] = -100
    target[1] = -100
    weight = torch.tensor([1.0, 2.0, 5.0]).double()
    model = mlp()
    *_, criterion, _ = make_private(
        model, grad_sample_mode="ghost", criterion=nn.CrossEntropyLoss(ignore_index=-100, weight=weight)
    )
    alone = [
        F.cross_entropy(logits[i], target[i], weight=weight, reduction="sum") / max(1, (target[i] >= 0).sum())
        for i in range(4)
    ]
    flat = criterion(logits.view(-1, C), target.view(-1), shape=logits.shape)
    torch.testing.assert_close(flat, torch.stack(alone).mean())
    torch.testing.assert_close(criterion(logits.transpose(1, 2), target), flat)


def test_the_validator_leaves_the_model_alone():
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(3, 4), norm)
    errors = ModuleValidator.validate(model)
    assert "BatchNorm1d -> GroupNorm(1, 4)" in str(errors[0])
    assert model[1] is norm
    fixed = ModuleValidator.fix_and_validate(model)
    assert isinstance(fixed[1], nn.GroupNorm)
    assert fixed[0].weight is not model[0].weight
    with pytest.raises(dpshard.DpshardError, match=r"ModuleValidator\.fix"):
        PrivacyEngine().validate(module=model)
    assert not PrivacyEngine().is_compatible(module=model)
    assert PrivacyEngine().is_compatible(module=PrivacyEngine.get_compatible_module(model))
    assert ModuleValidator.validate(nn.BatchNorm1d(4))  # a whole model that cannot be replaced


def test_the_validator_differs_from_opacus_as_the_page_says():
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16))
    model[1].requires_grad_(False)
    assert not ModuleValidator.is_valid(model)
    fixed = ModuleValidator.fix(model)
    assert fixed[1].num_groups == 8
    assert ModuleValidator.is_valid(fixed.eval())


def test_padding_reaches_no_gradient_of_an_empty_batch():
    """A round with a tiny sampling rate has empty batches: one row each, and steps that release only noise."""
    data = TensorDataset(randn(40, D), torch.zeros(40, dtype=torch.long))
    model = mlp()
    privacy, private, optimizer, loader = make_private(model, loader=DataLoader(data, batch_size=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        empty = 0
        for x, y in loader:
            F.cross_entropy(private(x), y).backward()
            padding = loader.progress.batch.is_padding
            if bool(padding.all()):
                empty += 1
                assert len(x) == 1
                assert all(p.grad is None or not p.grad.any() for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    assert privacy.engine.step == 40
    assert empty > 0


FACADE = "dpshard.integrations.opacus"
PAGE = (Path(__file__).parents[2] / "docs" / "coming-from-opacus.md").read_text()


def names_in(heading):
    """Return the names `opacus.…` in the first column of the table under a heading."""
    table = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    return [name for cell in cells for name in re.findall(r"`opacus\.([\w.]+)`", cell)]


@pytest.mark.parametrize("name", names_in("What carries over"))
def test_what_the_page_says_carries_over_is_there(name):
    found = pkgutil.resolve_name(f"{FACADE}.{name}")
    assert callable(found) or found.__name__ == f"{FACADE}.{name}"  # else a module


@pytest.mark.parametrize("name", names_in("What is missing"))
def test_what_the_page_says_is_missing_is_missing_or_says_why(name):
    try:
        found = pkgutil.resolve_name(f"{FACADE}.{name}")
    except (ImportError, AttributeError):
        return
    with pytest.raises(ConfigurationError, match="make_private"):
        found(mlp())


def test_a_loader_draws_only_after_make_private():
    loader = DPDataLoader.from_data_loader(DataLoader(DATA, batch_size=BATCH), distributed=True)
    assert (len(loader), loader.sample_rate) == (7, EXPECTED / N)
    for refused in (lambda: next(iter(loader)), lambda: loader.progress, lambda: loader.in_physical_batches(2)):
        with pytest.raises(ConfigurationError, match=r"no engine, which would account for its draws: pass it to"):
            refused()
    with pytest.raises(ConfigurationError, match="predictable"):
        DPDataLoader.from_data_loader(DataLoader(DATA, batch_size=BATCH), generator=torch.Generator())
    _, private, optimizer, completed = make_private(mlp(), loader=loader)
    assert completed is loader
    seen, _ = a_round(private, optimizer, loader)
    assert len({len(rows) for rows in seen}) > 1  # Poisson
    private.cleanup()
    _, _, _, again = make_private(mlp(), loader=loader)
    assert again is not loader  # two engines never share a loader


def test_a_model_as_a_function_of_its_parameters():
    model, other = mlp(), mlp()
    with torch.no_grad():
        other[0].weight.add_(1.0)
    run, copies = make_functional(model)
    torch.testing.assert_close(run(copies, DATA.x), model(DATA.x))
    torch.testing.assert_close(run(list(other.parameters()), DATA.x), other(DATA.x))
    assert not torch.equal(model(DATA.x), other(DATA.x))


def test_samplers_of_scripts_are_refused_when_made():
    with pytest.raises(ConfigurationError, match="UniformWithReplacementSampler draws without an engine"):
        UniformWithReplacementSampler(num_samples=N, sample_rate=0.1)


def test_the_page_lists_names():
    assert len(names_in("What carries over")) >= 6
    assert len(names_in("What is missing")) >= 6


def test_accountants_alone_have_the_figures_of_the_ledger():
    """sigma = 1, q = 0.01, 1000 steps, delta = 1e-5; figures of other parameters, in several steps, add up."""
    for kind, epsilon in ((accountants.RDPAccountant, 2.1014), (accountants.PRVAccountant, 1.8282)):
        accountant, other = kind(), kind()
        assert accountant.get_epsilon(1e-5) == 0
        for _ in range(1000):
            accountant.step(noise_multiplier=1.0, sample_rate=0.01)
        assert accountant.get_epsilon(delta=1e-5) == pytest.approx(epsilon, abs=1e-4)
        assert accountant.history == [(1.0, 0.01, 1000)]
        other.load_state_dict(accountant.state_dict())
        other.step(noise_multiplier=0.8, sample_rate=0.02)
        assert len(other) == 1001
        assert other.get_epsilon(1e-5) > accountant.get_epsilon(1e-5)
        with pytest.raises(ConfigurationError, match="accountant that saved it"):
            accountants.GaussianAccountant().load_state_dict(accountant.state_dict())


def test_equal_entries_of_a_saved_history_add_up():
    """Opacus's history has an entry for each change: 1000 steps, one of other noise, 1000 like the first ones."""
    whole, split = accountants.RDPAccountant(), accountants.RDPAccountant()
    whole.load_state_dict({"history": [(1.0, 0.01, 2000), (2.0, 0.01, 1)], "mechanism": "rdp"})
    split.load_state_dict({"history": [(1.0, 0.01, 1000), (2.0, 0.01, 1), (1.0, 0.01, 1000)], "mechanism": "rdp"})
    assert len(split) == 2001
    assert split.get_epsilon(1e-5) == whole.get_epsilon(1e-5)
    with pytest.raises(ConfigurationError, match="no number of steps"):
        split.load_state_dict({"history": [(1.0, 0.01, -1000)], "mechanism": "rdp"})


@pytest.mark.parametrize("name", ["rdp", "prv", "gdp"])
def test_accountants_by_name(name):
    assert accountants.create_accountant(name).mechanism() == name
    with pytest.raises(ConfigurationError, match="mechanism"):
        accountants.create_accountant("pld")


@pytest.mark.parametrize("name", ["rdp", "prv"])
def test_the_noise_for_a_budget_keeps_it(name):
    settings = {"target_epsilon": 1.0, "target_delta": 1e-5, "sample_rate": 0.01, "accountant": name}
    sigma = get_noise_multiplier(**settings, steps=1000)
    assert sigma == get_noise_multiplier(**settings, epochs=10)
    accountant = {"rdp": accountants.RDPAccountant, "prv": accountants.PRVAccountant}[name]()
    for _ in range(1000):
        accountant.step(noise_multiplier=sigma, sample_rate=0.01)
    assert 0.999 < accountant.get_epsilon(1e-5) <= 1.0
    for wrong in ({}, {"steps": 1, "epochs": 1}, {"steps": 1, "sample_rate": 0.0}):
        with pytest.raises(ConfigurationError, match=r"exactly one|sample_rate"):
            get_noise_multiplier(**{**settings, **wrong})


def test_instance_norm_may_take_the_place_of_batch_norm():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=0.1), nn.BatchNorm2d(4, affine=False)).eval()
    fixed = ModuleValidator.fix(model, replace_bn_with_in=True)
    assert [type(layer) for layer in fixed[1:]] == [nn.InstanceNorm2d] * 2
    assert torch.equal(fixed[1].weight, model[1].weight)
    assert fixed[1].eps == 0.1
    assert not fixed[1].training
    assert fixed[2].weight is None
    assert ModuleValidator.is_valid(fixed)
    assert isinstance(model[1], nn.BatchNorm2d)
