"""The recipe of De et al. (2022) for images, at a size for two CPU cores: train a small network from scratch.

    python augmentation.py            # handwritten digits, in a few minutes
    python augmentation.py --published  # prints the settings of their CIFAR-10 run at epsilon 1, and trains nothing

A WideResNet with group norm in place of batch norm and standardised weights; each sample in several augmentations,
which are clipped as one; large batches; an exponential average of the weights. arXiv:2204.13650.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset, random_split

from dpshard import PrivacyEngine, augment
from dpshard.recipes import WeightAverage

PUBLISHED = {
    "network": "WideResNet-16-4, GroupNorm of 16 groups, weight standardisation",
    "batch_size": 4096,
    "noise_multiplier": 10.0,
    "steps": 875,
    "optimizer": "SGD, learning rate 2, no momentum; max_grad_norm 1",
    "augmentations": "16: random flips and crops after a padding of 4 pixels",
    "weight_average": 0.999,
}
"""From google-deepmind/jax_privacy, configs/cifar10_wrn_16_4_eps1.py."""


class StandardizedConv(nn.Conv2d):
    """A convolution whose weights have mean 0 and variance 1 / fan-in per output channel, times a learned gain."""

    def __init__(self, *args: int, **kwargs: int) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        centred = w - w.mean((1, 2, 3), keepdim=True)
        fan_in = w[0].numel()
        scaled = self.gain * centred * torch.rsqrt(centred.square().mean((1, 2, 3), keepdim=True) * fan_in + 1e-4)
        return F.conv2d(x, scaled, self.bias, self.stride, self.padding)


class Block(nn.Module):
    """A pre-activation residual block."""

    def __init__(self, before: int, after: int, stride: int, groups: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.GroupNorm(groups, before), nn.GroupNorm(groups, after)
        self.conv_1 = StandardizedConv(before, after, 3, stride=stride, padding=1)
        self.conv_2 = StandardizedConv(after, after, 3, padding=1)
        self.shortcut = StandardizedConv(before, after, 1, stride=stride) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm_1(x))
        through = x if isinstance(self.shortcut, nn.Identity) else self.shortcut(active)
        return through + self.conv_2(F.relu(self.norm_2(self.conv_1(active))))


class WideResNet(nn.Module):
    """WideResNet-(6n + 4)-k; `widths` are those of its three stages before the factor k."""

    def __init__(self, depth: int, factor: int, *, channels: int, groups: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        sizes = [width * factor for width in widths]
        self.stem = StandardizedConv(channels, widths[0], 3, padding=1)
        blocks, before = [], widths[0]
        for stage, size in enumerate(sizes):
            for i in range((depth - 4) // 6):
                blocks.append(Block(before, size, 2 if stage > 0 and i == 0 else 1, groups))
                before = size
        self.blocks, self.norm = nn.Sequential(*blocks), nn.GroupNorm(groups, before)
        self.head = nn.Linear(before, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.blocks(self.stem(x)))).mean((2, 3)))


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The size of the run."""

    depth: int = 10
    factor: int = 1
    batch: int = 256
    steps: int = 40
    augmentations: int = 4
    learning_rate: float = 2.0
    decay: float = 0.9


TINY = Scale(batch=64, steps=2, augmentations=2)


def shifted(item: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Shift an image by up to one pixel; digits may not be mirrored."""
    x, y = item
    down, right = torch.randint(0, 3, (2,)).tolist()
    return F.pad(x, (1, 1, 1, 1))[:, down : down + 8, right : right + 8], y


def main(scale: Scale = Scale(), epsilon: float = 3.0) -> tuple[float, float]:
    """Train, and return the share of test digits right by the last weights and by their average."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16 - 0.5, dtype=torch.float32).view(-1, 1, 8, 8)
    train, test = random_split(TensorDataset(x, torch.tensor(labels)), [0.8, 0.2])
    model = WideResNet(scale.depth, scale.factor, channels=1, groups=4, widths=(8, 16, 32))
    engine = PrivacyEngine(
        model,
        batch_size=scale.batch,
        sample_size=len(train),
        steps=scale.steps,
        target_epsilon=epsilon,
        rows_per_unit=scale.augmentations,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=scale.learning_rate)
    average = WeightAverage(model, decay=scale.decay)
    for logical_batch in engine.batches(augment(train, shifted, scale.augmentations), micro_batch_size=64):
        for x_B, y_B in logical_batch:
            F.cross_entropy(model(x_B), y_B).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
    model.eval()
    x, y = (torch.stack(parts) for parts in zip(*test, strict=True))

    def right() -> float:
        with torch.no_grad():
            return float((model(x).argmax(1) == y).float().mean())

    last = right()
    with average.applied():
        averaged = right()
    print(f"test digits right: {last:.1%}, by the average of the weights {averaged:.1%}\n{engine.statement()}")
    return last, averaged


if __name__ == "__main__":
    if "--published" in sys.argv:
        print("\n".join(f"{name}: {value}" for name, value in PUBLISHED.items()))
    else:
        main()
