"""Half precision under DP, with and without loss scaling: the shape of Table 3 and Figure 4 of arXiv:2311.11822.

The forward runs in float32, bfloat16 or float16 (autocast); clipping, sums and noise are float32 in any case.
Ordinary float16 training multiplies the loss by a scale S, so that small gradients do not underflow, and divides the
gradient by S afterwards. Under DP the multiplication may overflow, and clipping undoes it before the division: the
gradient is then S times too small. So a GradScaler is refused; here both halves are done by hand.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

from dpshard import PrivacyEngine

RUNS = {
    "float32": (None, 1.0, False),
    "bfloat16": (torch.bfloat16, 1.0, False),
    "float16": (torch.float16, 1.0, False),
    "float16, loss x 2^12": (torch.float16, 2.0**12, False),
    "float16, loss x 2^12, gradient / 2^12": (torch.float16, 2.0**12, True),
    "float16, loss x 2^30": (torch.float16, 2.0**30, False),
}
"""Dtype of the forward, scale of the loss, whether the private gradient is divided by the scale."""


def train(dtype: torch.dtype | None, scale: float, back: bool, epochs: float) -> tuple[float, float, PrivacyEngine]:
    """Return the share of test digits right, the share of samples dropped for overflow, and the engine."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x = F.normalize(torch.tensor(images / 16 - 0.5, dtype=torch.float32))
    train, test = random_split(TensorDataset(x, torch.tensor(labels)), [0.8, 0.2])
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10))
    engine = PrivacyEngine(model, batch_size=700, sample_size=len(train), epochs=epochs, target_epsilon=3.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    dropped = seen = 0.0
    for logical_batch in engine.batches(train, micro_batch_size=256):
        for x, y in logical_batch:
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                logits = model(x)
                # Scaled in the dtype of the forward, as a GradScaler does: the output gradients carry the scale.
                loss = F.cross_entropy(logits.float(), y) * scale
            loss.backward()
        engine.privatize()
        for p in model.parameters():
            p.grad /= scale if back else 1.0  # after the noise, no change costs privacy, but it may harm the training
        optimizer.step()
        optimizer.zero_grad()
        dropped += engine.metrics()["nonfinite_samples"]
        seen += engine.metrics()["realised_batch_size"]
    model.eval()
    right = sum(int(model(x).argmax() == y) for x, y in test) / len(test)
    return right, dropped / seen, engine


def main(epochs: float = 20) -> dict[str, tuple[float, float]]:
    results = {}
    for name, settings in RUNS.items():
        right, dropped, engine = train(*settings, epochs)
        results[name] = right, dropped
        print(f"{name:40} {right:6.1%} of the test digits right, {dropped:6.1%} of the samples overflowed")
    print(engine.statement())
    return results


if __name__ == "__main__":
    main()
