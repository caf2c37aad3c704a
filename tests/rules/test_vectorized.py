"""Functions that run sample by sample, with the parameter at every place, against the oracle."""

import pytest
import torch
import torch.nn.functional as F

from dpshard.errors import DpshardError
from tests.oracle import Use, assert_exact, randn

T = D = 4
P = 3


@pytest.mark.parametrize(
    ("use", "parameters"),
    [
        (lambda m, x: torch.bmm(x, m.w.expand(len(x), -1, -1)), {"w": (D, P)}),
        (lambda m, x: x.bmm(m.w.unsqueeze(0).repeat(len(x), 1, 1)), {"w": (D, P)}),
        (lambda m, x: torch.bmm(x.transpose(0, 1), m.w).transpose(0, 1), {"w": (T, D, P)}),
        (lambda m, x: torch.bmm(m.w, x.permute(1, 2, 0)).permute(2, 0, 1), {"w": (T, P, D)}),
        (lambda m, x: torch.baddbmm(m.b, x.transpose(0, 1), m.w).transpose(0, 1), {"w": (T, D, P), "b": (T, 1, P)}),
        (lambda m, x: torch.mv(x[:, 0], m.w), {"w": (D,)}),
        (lambda m, x: x[:, 0].mv(m.w), {"w": (D,)}),
        (lambda m, x: torch.addmv(m.b, x[:, 0], m.w), {"w": (D,), "b": (1,)}),
        (lambda m, x: torch.einsum("btd,dp->btp", x, m.w), {"w": (D, P)}),
        (lambda m, x: torch.einsum("btd,hdp->bhtp", x, m.w), {"w": (2, D, P)}),
        (lambda m, x: torch.einsum("btd,hdp->bhtp", [x, m.w]), {"w": (2, D, P)}),
        (lambda m, x: torch.einsum("pd,tbd->btp", m.w, x.transpose(0, 1)), {"w": (P, D)}),
        (lambda m, x: torch.einsum("btd,td,dp->bp", x, m.w, m.u), {"w": (T, D), "u": (D, P)}),
        (lambda m, x: torch.einsum("nd,dp->np", x.flatten(0, 1), m.w).view(-1, T, P), {"w": (D, P)}),
        (lambda m, x: torch.tensordot(x, m.w, dims=2), {"w": (T, D, P)}),
        (lambda m, x: torch.outer(x[:, 0, 0], m.w), {"w": (D,)}),
        (lambda m, x: torch.cdist(x, m.w), {"w": (P, D)}),
        (lambda m, x: F.cosine_similarity(x[:, :, None], m.w, dim=-1), {"w": (P, D)}),
        (lambda m, x: F.pairwise_distance(x[:, 0], m.w), {"w": (1, D)}),
        (lambda m, x: F.prelu(x, m.w), {"w": (1,)}),
        (lambda m, x: F.prelu(x, m.w), {"w": (T,)}),
        (lambda m, x: torch.prelu(x[:, 0], m.w), {"w": (D,)}),
        (lambda m, x: F.prelu(x.flatten(0, 1), m.w).view(x.shape), {"w": (D,)}),
        (lambda m, x: F.prelu(x[:, :, :, None, None], m.w), {"w": (T,)}),
    ],
)
def test_exact(use, parameters):
    assert_exact(Use(use, before=D, **{name: randn(*shape) for name, shape in parameters.items()}), randn(4, T, D))


def test_an_output_without_samples_is_refused():
    model = Use(lambda m, x: x + torch.einsum("btd,dp->tp", x, m.w), w=randn(D, D))
    with pytest.raises(DpshardError, match=r"w in the model \(Use\), function (torch.functional.)?einsum"):
        assert_exact(model, randn(4, T, D))
