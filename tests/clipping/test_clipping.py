"""Clipping functions and clipping groups: what bounds the contribution of one sample.

Failure modes: 2 test_thresholds_add_up_to_the_sensitivity, test_the_sensitivity_is_that_of_one_sample_in_every_group;
4 test_a_factor_keeps_the_norm_below_the_threshold, test_a_factor_keeps_the_norm_below_the_threshold_at_every_boundary,
test_what_is_not_finite_contributes_nothing, test_a_clipping_function_of_the_users_own_is_held_to_the_guarantee;
8 test_a_parameter_that_no_group_holds_is_refused.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dpshard import PrivacyEngine
from dpshard.applications.planner.meter import UnreadValues
from dpshard.clipping.functions import AbadiClipping, AutomaticClipping, GlobalClipping, parse_clipping_fn
from dpshard.clipping.groups import ClippingGroup, form_groups, partition, sensitivity
from dpshard.errors import CheckpointError, ConfigurationError
from tests import accelerator
from tests.oracle import clipped_mean, per_sample_gradients, private_step, ramp_loss, randn, relative_error


@dataclass(frozen=True)
class Careless:
    """A user's clipping function without any guarantee."""

    factors: tuple[float, ...] = (3.0,)

    def factor(self, norm_B, threshold):
        return torch.tensor(self.factors, dtype=norm_B.dtype).expand(norm_B.shape)


FUNCTIONS = [
    AutomaticClipping(),
    AutomaticClipping(1e-30),
    AbadiClipping(),
    GlobalClipping(),
    GlobalClipping(3.0),
    GlobalClipping(0.1),
    parse_clipping_fn(Careless()),
]
DTYPES = [torch.float32, torch.float64]


def above_zero(largest):
    return st.floats(min_value=0, max_value=largest, exclude_min=True, allow_subnormal=True)


thresholds = st.one_of(above_zero(1e300), st.floats(1e-3, 1e3), st.sampled_from([1.0, 0.1, 1e-40, 1e-45, 5e-324, 1e38]))


def assert_bounded(function, norms, threshold, dtype):
    """Assert factor * norm <= threshold, as real numbers, and a finite factor, because it multiplies records."""
    norm_B = torch.tensor(norms, dtype=dtype)
    clip_coef_B = function.factor(norm_B, threshold)
    assert clip_coef_B.dtype == dtype
    assert clip_coef_B.shape == norm_B.shape
    for norm, factor in zip(norm_B.tolist(), clip_coef_B.tolist(), strict=True):
        assert 0 <= factor < math.inf, (norm, factor)
        if math.isfinite(norm):
            assert Fraction(factor) * Fraction(norm) <= Fraction(threshold), (norm, factor)
        else:
            assert factor == 0


@given(st.sampled_from(FUNCTIONS), st.lists(above_zero(1.7e308), min_size=1, max_size=6), thresholds)
@example(AbadiClipping(), [1e-39], 1e-40)  # 1 / norm overflows where threshold / norm does not
@example(AutomaticClipping(), [1.6e38], 870244331.3859357)  # 1 / norm is subnormal
@example(AbadiClipping(), [1.9999], 1.00000006)  # not a float32: rounded up, it exceeds the accounted threshold
@example(AutomaticClipping(), [0.0], 1e38)  # the quotient is infinite
def test_a_factor_keeps_the_norm_below_the_threshold(function, norms, threshold):
    for dtype in DTYPES:
        assert_bounded(function, norms, threshold, dtype)


@given(st.sampled_from(FUNCTIONS), thresholds, st.sampled_from(DTYPES), st.integers(1, 9))
def test_a_factor_keeps_the_norm_below_the_threshold_at_every_boundary(function, threshold, dtype, divisor):
    """At the threshold, where the function changes its formula, and one float to either side."""
    edges = [threshold, threshold * 3.0, threshold * 0.1, threshold / divisor, threshold - 0.01, threshold + 0.01]
    near = torch.tensor([abs(x) for x in edges], dtype=dtype)
    steps = [torch.nextafter(near, torch.full_like(near, x)) for x in (0.0, math.inf)]
    assert_bounded(function, torch.cat([near, *steps]).tolist(), threshold, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS, ids=repr)
def test_what_is_not_finite_contributes_nothing(function, dtype):
    tiny, info = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps, torch.finfo(dtype)
    norms = [math.nan, math.inf, 0.0, -0.0, tiny, info.smallest_normal, info.max, 1.0]
    for threshold in (1e-300, 0.1, 1.0, 1e38):
        assert_bounded(function, norms, threshold, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS, ids=repr)
def test_an_accelerator_has_the_factors_of_the_cpu(function, dtype, monkeypatch):
    info = torch.finfo(dtype)
    special = [math.nan, math.inf, 0.0, -0.0, info.smallest_normal, info.max]
    norm_B = torch.cat([torch.tensor(special, dtype=dtype), torch.rand(200, dtype=dtype).exp() - 1])
    here = [function.factor(norm_B, threshold) for threshold in (1e-3, 0.1, 3.0)]
    accelerator.pretend(monkeypatch)
    there = [function.factor(norm_B, threshold) for threshold in (1e-3, 0.1, 3.0)]
    assert all(torch.equal(x, y) and x.dtype == dtype for x, y in zip(here, there, strict=True))


@given(st.floats(0, 1e6), st.floats(1e-3, 1e3))
def test_formulas(norm, R):
    norm_B = torch.tensor([norm], dtype=torch.float64)

    def factor(function):
        return float(function.factor(norm_B, R))

    def near(x):
        return pytest.approx(x, rel=1e-14, abs=0)

    assert factor(AbadiClipping()) == near(1.0 if norm <= R else R / norm)
    assert factor(AutomaticClipping()) == near(R / (norm + 0.01))
    assert factor(AutomaticClipping(2.0)) == near(R / (norm + 2.0))
    assert factor(GlobalClipping()) == near(1.0 if norm <= R else 0.0)
    assert factor(GlobalClipping(4.0)) == near(0.25 if norm <= 4 * R else 0.0)


def test_names_of_functions():
    assert parse_clipping_fn("automatic") == AutomaticClipping()
    assert parse_clipping_fn("abadi") == AbadiClipping()
    assert parse_clipping_fn("global") == GlobalClipping()
    assert parse_clipping_fn(GlobalClipping(2.0)) == GlobalClipping(2.0)


class Nameless:
    def factor(self, norm_B, threshold):
        return torch.ones_like(norm_B)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("flat", r"'flat' is unknown.*'abadi', 'automatic', 'global'"),
        (None, r"None has no method factor"),
        (lambda norm, threshold: norm, "has no method factor"),
        (AbadiClipping, "pass an instance"),
        (Nameless(), "Nameless defines no __repr__.*frozen dataclass"),
    ],
)
def test_what_is_no_clipping_function_is_refused(wrong, message):
    with pytest.raises(ConfigurationError, match=message):
        parse_clipping_fn(wrong)


@pytest.mark.parametrize("wrong", [0, -0.01, math.nan, math.inf])
def test_impossible_settings_of_a_function_are_refused(wrong):
    with pytest.raises(ConfigurationError, match="stability"):
        AutomaticClipping(wrong)
    with pytest.raises(ConfigurationError, match="bound_over_threshold"):
        GlobalClipping(wrong)


# --- groups ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 300), st.floats(1e-6, 1e6))
def test_thresholds_add_up_to_the_sensitivity(count, R):
    names = [f"p{i}" for i in range(count)]
    groups = form_groups({name: [name] for name in names}, trainable=names, max_grad_norm=R)
    assert [group.index for group in groups] == list(range(count))
    assert {group.threshold for group in groups} == {R / math.sqrt(count)}
    assert sensitivity(groups) == pytest.approx(R, rel=1e-12)


def test_the_sensitivity_is_that_of_unequal_groups_too():
    groups = [ClippingGroup(i, str(i), (str(i),), threshold) for i, threshold in enumerate([3.0, 4.0, 12.0])]
    assert sensitivity(groups) == 13


class Network(nn.Module):
    """A tied head, a bare parameter, nested blocks, and a module with two names."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.scale = nn.Parameter(torch.rand(4))
            self.embedding = nn.Linear(4, 4, bias=False)
            self.blocks = nn.ModuleList(
                [nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4))), nn.Linear(4, 4)]
            )
            self.again = self.blocks[1]
            self.head = nn.Linear(4, 4)
            self.head.weight = self.embedding.weight
        self.double()

    def forward(self, x):
        x = self.embedding(x) * self.scale
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(self.again(x))


NAMES = [name for name, _ in Network().named_parameters()]
FIRST, SECOND = (
    [f"blocks.0.{i}.{x}" for i in ("0", "1.1") for x in ("weight", "bias")],
    ["blocks.1.weight", "blocks.1.bias"],
)
GROUPS = {
    "all-layer": {"all-layer": NAMES},
    "layer-wise": {
        "(root)": ["scale"],
        "embedding": ["embedding.weight"],
        "blocks.0.0": FIRST[:2],
        "blocks.0.1.1": FIRST[2:],
        "blocks.1": SECOND,
        "head": ["head.bias"],
    },
    "block-wise": {
        "outside of blocks": ["scale", "embedding.weight", "head.bias"],
        "blocks.0": FIRST,
        "blocks.1": SECOND,
    },
    "param-wise": {name: [name] for name in NAMES},
}


@pytest.mark.parametrize("style", GROUPS)
def test_styles(style):
    groups = partition(Network(), style, NAMES, 2.0)
    assert {group.label: list(group.names) for group in groups} == GROUPS[style]
    assert all(group.threshold == 2.0 / math.sqrt(len(GROUPS[style])) for group in groups)


def test_blocks_of_a_sequential():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Tanh(), nn.Linear(2, 2))
    names = [name for name, _ in model.named_parameters()]
    assert [group.label for group in partition(model, "block-wise", names, 1.0)] == ["0", "2"]


def test_blocks_of_a_dictionary():
    """torchtitan's blocks have numbers as keys; a dictionary of different modules is the model itself."""
    blocks = nn.ModuleDict({str(i): nn.Linear(1, 1) for i in range(2)})
    model = nn.ModuleDict(
        {"table": nn.Embedding(2, 1), "layers": blocks, "alone": nn.ModuleDict({"a": nn.Linear(1, 1)})}
    )
    names = [name for name, _ in model.named_parameters()]
    labels = [group.label for group in partition(model, "block-wise", names, 1.0)]
    assert labels == ["outside of blocks", "layers.0", "layers.1"]


def test_blocks_whose_names_begin_alike():
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(12)))
    names = [name for name, _ in model.named_parameters()]
    groups = partition(model, "block-wise", names, 1.0)
    assert [list(group.names) for group in groups] == [[f"{i}.weight", f"{i}.bias"] for i in range(12)]


def test_frozen_parameters_are_in_no_group():
    model = Network()
    model.blocks.requires_grad_(False)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    for style in GROUPS:
        groups = partition(model, style, names, 1.0)
        assert sorted(name for group in groups for name in group.names) == sorted(names)
        assert sensitivity(groups) == pytest.approx(1.0)


REST = [name for name in NAMES if name != "embedding.weight"]


@pytest.mark.parametrize(
    "style",
    [
        [["embedding.weight"], REST],
        [["head.weight"], REST],
        (("head.weight", "embedding.weight"), REST),
        [["embedding.weight", "embedding.weight"], REST],
        [["_orig_mod.head.weight"], [], [name.replace("blocks.1", "again") for name in REST]],
    ],
    ids=["first name", "second name", "both names", "twice in a group", "wrappers, no group, another path"],
)
def test_a_tied_weight_may_be_called_by_any_of_its_names(style):
    groups = partition(Network(), style, NAMES, 1.0)
    assert groups[0].names == ("embedding.weight",)
    assert set(groups[1].names) == set(REST)
    assert {group.threshold for group in groups} == {1 / math.sqrt(2)}


def test_the_update_under_the_second_name_is_that_of_the_oracle():
    torch.manual_seed(0)
    model, x = Network(), randn(5, 4)
    expected = clipped_mean(
        per_sample_gradients(model, (x,)), max_grad_norm=0.5, batch_size=5, groups=[["embedding.weight"], REST]
    )
    update = private_step(model, (x,), ramp_loss, max_grad_norm=0.5, clipping_style=[["head.weight"], REST])
    assert relative_error(update, expected) < 1e-10


@pytest.mark.parametrize(
    ("style", "message"),
    [
        ("layerwise", r"'layerwise' is unknown.*'all-layer', 'layer-wise', 'block-wise', 'param-wise'"),
        ([["embedding.weight"], ["scale"]], r"no group holds 'blocks.0.0.weight'.* and 2 more.*freeze"),
        ([], r"no group holds 'scale'"),
        ([[]], r"no group holds 'scale'"),
        ([NAMES, ["scale"]], r"'scale' is in two groups \('group 0' and 'group 1'\)"),
        ([NAMES, ["head.weight"]], r"'embedding.weight' is in two groups"),
        ([NAMES, ["nonsense"]], r"'nonsense' is not a trainable parameter of the model. Known: 'scale'"),
        (["scale", "embedding.weight"], r"a list of groups, each a list of parameter names, such as \[\["),
        (["all-layer"], r"a list of groups"),
        ([[1, 2]], r"a list of groups"),
        (None, r"clipping_style=None: it must be one of"),
        (3, r"clipping_style=3: it must be one of"),
    ],
)
def test_a_parameter_that_no_group_holds_is_refused(style, message):
    with pytest.raises(ConfigurationError, match=message):
        partition(Network(), style, NAMES, 1.0)


def test_a_frozen_parameter_in_a_list_is_refused():
    model = Network()
    model.scale.requires_grad_(False)
    trainable = [name for name in NAMES if name != "scale"]
    with pytest.raises(ConfigurationError, match="'scale' is not a trainable parameter"):
        partition(model, [NAMES], trainable, 1.0)


# --- through the engine ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", GROUPS)
def test_the_sensitivity_is_that_of_one_sample_in_every_group(style):
    """One sample, clipped in every group, contributes exactly max_grad_norm: thresholds are not larger than needed."""
    torch.manual_seed(0)
    update = private_step(
        Network(),
        (randn(1, 4),),
        lambda output: 1e6 * ramp_loss(output),
        max_grad_norm=0.3,
        clipping_style=style,
    )
    assert math.sqrt(sum(float(g.square().sum()) for g in update.values())) == pytest.approx(0.3, rel=1e-12)


@pytest.mark.parametrize("factors", [(5.0,), (math.inf,), (math.nan,), (-1.0,)])
def test_a_clipping_function_of_the_users_own_is_held_to_the_guarantee(factors):
    torch.manual_seed(0)
    update = private_step(
        nn.Linear(4, 3).double(), (randn(1, 4),), lambda y: 1e3 * ramp_loss(y), clipping_fn=Careless(factors)
    )
    size = math.sqrt(sum(float(g.square().sum()) for g in update.values()))
    assert size == pytest.approx(1.0 if factors[0] > 0 else 0.0, rel=1e-12)


def test_a_clipping_function_of_the_users_own_resumes():
    def engine(factors):
        return PrivacyEngine(
            nn.Linear(4, 3), batch_size=5, sample_size=50, steps=3, noise_multiplier=1.0, clipping_fn=Careless(factors)
        )

    state = engine((1.0,)).state_dict()
    engine((1.0,)).load_state_dict(state)
    with pytest.raises(CheckpointError, match="clipping_fn"):
        engine((2.0,)).load_state_dict(state)


@pytest.mark.parametrize("name", ["automatic", "abadi", "global"])
def test_a_plan_made_in_between_changes_no_factor(name):
    """Fake tensors have no values, and results computed with them must not be cached."""
    function, threshold, norm_B = parse_clipping_fn(name), 0.7310585786300049, torch.tensor([0.1, 0.7, 3.0])
    with FakeTensorMode(), UnreadValues():
        function.factor(torch.ones(3), threshold)
    expected = function.factor(norm_B.double(), threshold)
    torch.testing.assert_close(function.factor(norm_B, threshold).double(), expected, rtol=1e-6, atol=0)
