"""Small models that together use every kind of record."""

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.workloads import GPU_WORKLOADS
from dpshard.applications.transformer import GPT, Block

ROWS, LENGTH, LONG, VOCABULARY, CLASSES = 7, 32, 1024, 64, 10


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(8, 32)
        self.second, self.back = nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ConvTranspose2d(64, 16, 2, 2)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = F.relu(self.second(F.relu(self.norm(self.first(x)))))
        return self.head(F.relu(self.back(x)).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.cells = nn.Embedding(VOCABULARY, 32), nn.LSTM(32, 64, batch_first=True)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x):
        return self.head(self.cells(self.words(x))[0][:, -1])


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, 64), nn.Parameter(torch.zeros(LENGTH, 64))
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x):
        return self.head(self.layer(self.words(x) + self.places).mean(1))


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags, self.slopes = nn.EmbeddingBag(VOCABULARY, 64, mode="mean"), nn.PReLU()
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x):
        return self.head(self.slopes(self.bags(x)))


def gpt(depth=2):
    return GPT(VOCABULARY, LENGTH, 64, depth, lambda: Block(64, 4, causal=True))


def wide(depth=2):
    """Return a GPT whose products are too large to wait for others."""
    return GPT(VOCABULARY, LONG, 1024, depth, lambda: Block(1024, 4, causal=True))


def _of_benchmark(name):
    return lambda depth=2: GPU_WORKLOADS[name].resized("depth", depth).build()


MODELS = {
    "gpt": gpt,
    "wide": wide,
    "images": Images,
    "recurrent": Recurrent,
    "encoder": Encoder,
    "bags": Bags,
}
MODELS |= {name: _of_benchmark(name) for name in GPU_WORKLOADS}


def data(model):
    """Seven rows of inputs and targets."""
    if model in GPU_WORKLOADS:
        return GPU_WORKLOADS[model].data(ROWS)
    length = LONG if model == "wide" else LENGTH
    x = torch.arange(ROWS * length).view(ROWS, length) % VOCABULARY
    if model in ("gpt", "wide"):
        return x, x
    x = {"images": torch.rand(ROWS, 3, 8, 8), "recurrent": x[:, :8]}.get(model, x)
    return x, torch.arange(ROWS) % CLASSES


def loss(output, y):
    return F.cross_entropy(output.float().flatten(0, -2), y.flatten())
