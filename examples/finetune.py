"""Fine-tune a public model on private data, at epsilon 1: a new head on frozen features.

The digits 0 to 4 play the public data here, 5 to 9 the private ones. Frozen parameters cost neither time nor memory,
and fewer trained parameters get less noise in all.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from dpshard import PrivacyEngine


def pretrained(public: TensorDataset) -> nn.Sequential:
    """Return a convolutional network, trained without privacy."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GroupNorm(8, 64), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 5)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(5):
        for x, y in DataLoader(public, batch_size=64, shuffle=True):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def main(epochs: float = 30) -> float:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)
    model = pretrained(TensorDataset(x[y < 5], y[y < 5]))
    train, test = random_split(TensorDataset(x[y >= 5], y[y >= 5] - 5), [0.8, 0.2])

    model.requires_grad_(False)  # before you make the engine
    model[-1] = nn.Linear(256, 5)

    engine = PrivacyEngine(model, batch_size=350, sample_size=len(train), epochs=epochs, target_epsilon=1.0)
    optimizer = torch.optim.SGD(model[-1].parameters(), lr=0.2, momentum=0.9)

    for logical_batch in engine.batches(train, micro_batch_size=128):
        for x, y in logical_batch:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    model.eval()
    right = sum(int(model(x[None]).argmax() == y) for x, y in test) / len(test)
    print(f"{right:.1%} of the test digits right\n{engine.statement()}")
    return right


if __name__ == "__main__":
    main()
