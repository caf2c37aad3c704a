"""Models and engines for several verification tests."""

import torch
import torch.nn.functional as F
from torch import nn

from dpshard import PrivacyEngine
from dpshard.errors import BatchLayoutError, UnsupportedParameterError, VerificationError

B, T, D, V = 6, 5, 4, 7


REFUSED = (VerificationError, UnsupportedParameterError, BatchLayoutError)


def engine_on(model, **options):
    defaults = {"batch_size": B, "sample_size": 100, "steps": 50, "noise_multiplier": 0, "max_grad_norm": 0.5}
    engine = PrivacyEngine(model, **{**defaults, **options})
    engine._secret = bytes(range(32))
    return engine


def normal(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Between(nn.Module):
    """Two linear maps with a function of the hidden units [B, T, D] between them."""

    def __init__(self, function):
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, 3)
        self.function = function

    def forward(self, x):
        return self.second(self.function(self.first(x)))


class LanguageModel(nn.Module):
    """Returns its loss; `reduce` gets the losses [B, T] and the mask [B, T] of counted positions."""

    def __init__(self, reduce=None):
        super().__init__()
        self.embedding, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.reduce = reduce

    def forward(self, ids, labels=None):
        scores = self.head(self.embedding(ids).cumsum(1))
        if labels is None:
            return scores
        loss_BT = F.cross_entropy(scores.transpose(1, 2), labels, ignore_index=-100, reduction="none")
        return {"loss": self.reduce(loss_BT, labels != -100), "scores": scores.detach()}


def sample_mean(loss_BT, counts_BT):
    return (loss_BT.sum(1) / counts_BT.sum(1)).mean()


def sentences(lengths=(1, 3, 5, 2, 4, 5)):
    ids = torch.randint(0, V, (len(lengths), T), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    for i, length in enumerate(lengths):
        labels[i, length:] = -100
    return ids, labels


MIXERS = {
    "attention across samples": lambda h: F.scaled_dot_product_attention(*[h.transpose(0, 1)] * 3).transpose(0, 1),
    "mean over samples": lambda h: h - h.mean(0),
    "softmax over samples": lambda h: h.softmax(0),
    "cumulative": lambda h: h.cumsum(0),
    "neighbour": lambda h: h + 0.1 * h.roll(1, 0),
    "maximum": lambda h: h / h.abs().max(),
    "sorted": lambda h: h.sort(0).values,
    "capacity": lambda h: h * (h.sum((1, 2)).argsort().argsort() < 2)[:, None, None],
}


class Looped(nn.Module):
    """A layer that is used three times."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, x):
        for _ in range(3):
            x = self.layer(x).tanh()
        return self.head(x)
