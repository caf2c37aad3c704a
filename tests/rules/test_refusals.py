"""What has no exact rule is refused, and the error says which parameter, which function, why, and what to do.

Failure mode: 8 (a trainable parameter that no rule covers must raise).
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops import while_loop

from dpshard.errors import BatchLayoutError, UnsupportedParameterError, VerificationError
from tests.oracle import Use, noise_free_engine, randn

pytestmark = pytest.mark.filterwarnings("ignore:This loop feeds its own batches")

B, T, D, P = 4, 5, 3, 2


def rows(x):
    return x.flatten(0, 1)


def rows_time_first(x):
    return x.transpose(0, 1).flatten(0, 1)


def picked(x):
    """Return rows [N, D] of about half of each sample's positions."""
    return rows(x)[(rows(x)[:, 0] > 0).nonzero()[:, 0]]


def turned(x):
    return rows(x)[(rows(x)[:, 0] > 0).nonzero()[:, 0].flip(0)]


def written_into(m, x):
    total = torch.zeros(D, dtype=x.dtype)
    total += m.w
    return x + total


def both_orders(m, x):
    return F.linear(rows(x), m.w).view(len(x), -1).sum(1) + F.linear(rows_time_first(x), m.w).view(T, -1).sum(1).sum()


def by_samples(m, x):
    return torch.stack([F.linear(sample, m.w) for sample in x])


UNSUPPORTED = {
    "no rule": (lambda m, x: torch.special.xlog1py(x, m.w), (D,), r"xlog1py: no rule gives its per-sample gradient"),
    "repeated twice": (
        lambda m, x: rows(x.new_zeros(len(x), 2, 1) + x[:, :1]) * m.w.repeat(2 * len(x), 1),
        (1, D),
        r"repeat: it is repeated 6 times along the samples, but there are 3",
    ),
    "masked": (
        lambda m, x: x + torch.masked_fill(m.w, x > 0, 0.0),
        (D,),
        r"masked_fill: its output would be a parameter masked by the data; use torch\.where",
    ),
    "summed over samples": (
        lambda m, x: x + torch.einsum("btd,de->e", x, m.w),
        (D, D),
        r"einsum: its output carries no samples of the micro-batch",
    ),
    "samples last": (
        lambda m, x: F.group_norm(x.permute(1, 2, 0), 1, m.w).permute(2, 0, 1),
        (D,),
        r"group_norm: the samples of the micro-batch must lie along dimension 0 of its input",
    ),
    "no batch dimension": (
        lambda m, x: F.conv1d(x[:, 0].T, m.w).T,
        (P, D, 1),
        r"conv1d: its input has no batch dimension; pass \[B, C, \.\.\.\]",
    ),
    "written into": (written_into, (D,), r"it writes into a tensor that no sample has met.*out of place"),
    "beside routed rows": (
        lambda m, x: torch.addcmul(picked(x), torch.ones(len(picked(x)), 1).double(), m.w).sum(),
        (D,),
        r"addcmul: .*this function is not known to treat them one by one",
    ),
    "rows of others": (
        lambda m, x: torch.addcmul(picked(x), m.w, turned(x)).sum(),
        (D,),
        r"addcmul: .*its inputs hold rows of different samples side by side",
    ),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_has_no_rule_is_refused(case):
    use, shape, message = UNSUPPORTED[case]
    torch.manual_seed(0)
    model = Use(use, w=randn(*shape))
    noise_free_engine(model, batch_size=B)
    x = randn(B, T, D)
    x[0, :, 0], x[1, :, 0] = 1, torch.tensor([1, -1, -1, 1, -1])  # so that unequal numbers of rows are picked
    with pytest.raises(UnsupportedParameterError, match=rf"^w in the model \(Use\), function .*{message}"):
        model(x)


counter = itertools.count()
LAYOUTS = {
    "orders": (both_orders, (P, D), r"linear with w is called with the rows of the samples in different orders"),
    "loop over samples": (
        by_samples,
        (P, D),
        r"runs different functions on 3 samples than on 2 .*Python loop over samples",
    ),
    "rank": (
        lambda m, x: F.linear(x.view(*[1] * len(x), *x.shape), m.w),
        (P, D),
        r"linear with w: the rank of a tensor depends on the batch size",
    ),
    "a fixed size": (
        lambda m, x: F.linear(x.view(B, T, D), m.w),
        (P, D),
        r"Use failed on 2 or 3 of its 4 samples .*were cut along \(shape, dimension\) \[\(\(4, 5, 3\), 0\)\]",
    ),
    "another course every time": (
        lambda m, x: x * m.w[next(counter) % 1000],
        (1000,),
        r"runs different functions in every forward.*Remove control flow",
    ),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_what_carries_no_evidence_of_samples_is_refused(case):
    use, shape, message = LAYOUTS[case]
    model = Use(use, w=randn(*shape))
    # Without `verify`, which would refuse for another reason: the output changes.
    noise_free_engine(model, batch_size=B, verify=False)
    with pytest.raises(BatchLayoutError, match=message):
        model(randn(B, T, D))


def test_inputs_of_different_lengths_are_refused():
    class Two(nn.Linear):
        def forward(self, x, y):
            return super().forward(x) + super().forward(y).sum(0)

    model = Two(D, P).double()
    noise_free_engine(model, batch_size=B)
    with pytest.raises(
        BatchLayoutError, match=r"inputs of Two have different first dimensions \[4, 5\].*samples first"
    ):
        model(randn(B, D), randn(T, D))


def test_bags_of_flat_ids_from_outside_are_refused():
    """They have no sample dimension, so the sample that reads a row is unknown."""

    class Bags(nn.EmbeddingBag):
        def forward(self, x, ids, offsets):
            return x + super().forward(ids, offsets)

    model = Bags(7, D, mode="sum").double()
    engine = noise_free_engine(model, batch_size=B, sample_size=B)
    for logical_batch in engine.batches(torch.utils.data.TensorDataset(randn(B, D)), micro_batch_size=B):
        for (x,) in logical_batch:
            with pytest.raises(UnsupportedParameterError, match=r"index_add_: no rule .*flat ids with offsets"):
                model(x, torch.arange(2 * B) % 7, torch.arange(0, 2 * B, 2))
        break


def test_an_error_of_the_model_itself_stays_what_it_is():
    """For example, a token beyond the vocabulary has nothing to do with the batch dimension."""
    model = nn.Embedding(7, D)
    noise_free_engine(model, batch_size=B)
    with pytest.raises(IndexError, match="index out of range"):
        model(torch.full((B, T), 7))


CONTROL_FLOW = {
    "cond": lambda m, x: torch.cond(x.sum() > 0, lambda x: x * m.w, lambda x: x.sin(), (x,)),
    "while_loop": lambda m, x: while_loop(
        lambda i, _: i < 2, lambda i, x: (i + 1, x * m.w), (torch.tensor(0), x.clone())
    )[1],
}


@pytest.mark.parametrize("flow", CONTROL_FLOW)
def test_parameters_within_control_flow_of_torch_are_refused(flow):
    model = Use(CONTROL_FLOW[flow], before=D, w=randn(D)).double()
    noise_free_engine(model, batch_size=B)
    with pytest.raises(UnsupportedParameterError, match=r"^Use: torch\.cond, .* uses a parameter"):
        model(randn(B, D))


def needs_two(m, x):
    if len(x) < 2:
        raise ValueError("I need two")
    return F.linear(x, m.w)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (needs_two, r"fails on only 1 sample\(s\) of the micro-batch \(I need two\)"),
        (
            lambda m, x: F.linear(x, m.w).sum((1, 2))[:, None] - x.sum((1, 2)),
            r"An output has shape \(3, 3\) for 3 samples",
        ),
    ],
    ids=["alone", "output"],
)
def test_what_samples_cannot_do_alone_is_refused(use, message):
    model = Use(use, w=randn(P, D))
    noise_free_engine(model, batch_size=B)
    with pytest.raises(VerificationError, match=message):
        model(randn(B, T, D))


def test_the_error_names_the_module_that_owns_the_parameter():
    layers = [Use(lambda m, x: F.linear(x, m.w), w=randn(D, D)) for _ in range(10)]
    model = nn.Sequential(*layers, Use(lambda m, x: torch.special.xlog1py(x, m.w), w=randn(D)))
    noise_free_engine(model, batch_size=B)
    with pytest.raises(UnsupportedParameterError, match=r"^10\.w in 10 \(Use\)"):  # not in 0, which has a 0.w
        model(randn(B, D))
