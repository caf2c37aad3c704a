"""Train a classifier of handwritten digits from scratch, at epsilon 3: the README's loop, and a score at its end."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

from dpshard import PrivacyEngine


def main(epochs: float = 30) -> float:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x = F.normalize(torch.tensor(images / 16 - 0.5, dtype=torch.float32))  # scaled without a statistic of the data set
    train, test = random_split(TensorDataset(x, torch.tensor(labels)), [0.8, 0.2])

    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10))
    engine = PrivacyEngine(model, batch_size=700, sample_size=len(train), epochs=epochs, target_epsilon=3.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)

    for logical_batch in engine.batches(train, micro_batch_size=256):
        for x, y in logical_batch:
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    model.eval()
    right = sum(int(model(x).argmax() == y) for x, y in test) / len(test)
    print(f"{right:.1%} of the test digits right\n{engine.statement()}")
    return right


if __name__ == "__main__":
    main()
