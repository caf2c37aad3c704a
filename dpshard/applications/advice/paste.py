"""The command and the program of an advice."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

DATA = {"tabular": "table.csv", "vision": "images", "language": "texts.jsonl"}

_SHARED = (
    "model batch_size steps target_epsilon target_delta max_grad_norm clipping_fn clipping_style optimizer "
    "learning_rate lr_schedule"
).split()


def command(advice: Mapping[str, Any]) -> str:
    """Return the command of `dpshard train`."""
    given = {"data": DATA[advice["task"]]} | {name: advice[name] for name in _SHARED}
    if advice["optimizer"] == "sgd":
        given["momentum"] = advice["momentum"]
    options = [f"--{name.replace('_', '-')} {shlex.quote(_text(value))}" for name, value in given.items()]
    lines = [" ".join(options[i : i + 3]) for i in range(0, len(options), 3)]
    return " \\\n  ".join(["dpshard train", *lines])


def _text(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)  # rounding could raise epsilon


def code(advice: Mapping[str, Any]) -> str:
    """Return a program with random data."""
    own = ":" in advice["model"]
    module, _, function = advice["model"].partition(":")
    wanted = f"from {module} import {function}\n" if own else _IMPORTS.get(advice["model"], "")
    model = f"{function}(tuple(x.shape[1:]), classes)" if own else _MODELS[advice["model"]]
    return _PROGRAM.format_map(
        {
            **{name: repr(value) for name, value in advice.items()},
            "imports": wanted,
            "x": _SAMPLES[advice["task"]],
            "network": model,
            "y": _TOKENS if advice["model"] == "gpt" else _LABELS,
            "loss": _TOKEN_LOSS if advice["model"] == "gpt" else "F.cross_entropy",
            "optimizer": _optimizer(advice),
            "factor": "1.0" if advice["lr_schedule"] == "constant" else "0.5 * (1 + math.cos(math.pi * step / steps))",
        }
    )


def _optimizer(advice: Mapping[str, Any]) -> str:
    rate = f"lr={advice['learning_rate']:g}"
    if advice["optimizer"] != "sgd":
        return f"torch.optim.{_ADAM[advice['optimizer']]}(model.parameters(), {rate})"
    return f"torch.optim.SGD(model.parameters(), {rate}, momentum={advice['momentum']:g})"


_ADAM = {"adam": "Adam", "adamw": "AdamW"}

_LABELS = "torch.randint(0, classes, (sample_size,))"
_TOKENS = "x.roll(-1, 1)  # [N, T], the next token of each"
_TOKEN_LOSS = "lambda logits, ids: sample_losses(logits, ids).mean()  # a mean over each text, then over texts"

_SAMPLES = {
    "tabular": "torch.rand(sample_size, 30)  # [N, D], each column divided by a public bound",
    "vision": "torch.rand(sample_size, 3, 16, 16)  # [N, C, H, W] in [0, 1]",
    "language": "torch.randint(0, 258, (sample_size, 64))  # [N, T], token ids",
}

_IMPORTS = {
    "gpt": "from dpshard.applications.transformer import GPT, Block\nfrom dpshard.losses import sample_losses\n"
}
_MODELS = {
    "gpt": "GPT(258, x.shape[1], 64, 2, lambda: Block(64, 4, causal=True))",
    "mlp": "nn.Sequential(nn.Linear(x.shape[1], 128), nn.ReLU(), nn.Linear(128, classes))",
    "cnn": (
        "nn.Sequential(\n"
        "    nn.Conv2d(x.shape[1], 32, 3, stride=2, padding=1), nn.GroupNorm(8, 32), nn.ReLU(),\n"
        "    nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GroupNorm(8, 64), nn.ReLU(),\n"
        "    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes),\n"
        ")"
    ),
    "text": (
        "nn.Sequential(\n"
        "    nn.Embedding(258, 64),\n"
        "    nn.TransformerEncoderLayer(64, 4, 128, dropout=0, batch_first=True),\n"
        "    nn.Flatten(), nn.Linear(64 * x.shape[1], classes),\n"
        ")"
    ),
}

_PROGRAM = """\
import math

import torch
import torch.nn.functional as F
from torch import nn
{imports}
from dpshard import PrivacyEngine

sample_size, steps, classes = {sample_size}, {steps}, 2
# Put your data here:
x = {x}
y = {y}

loss_of = {loss}
model = {network}
engine = PrivacyEngine(
    model,
    batch_size={batch_size},
    sample_size=sample_size,
    steps=steps,
    target_epsilon={target_epsilon},
    target_delta={target_delta},
    max_grad_norm={max_grad_norm},
    clipping_fn={clipping_fn},
    clipping_style={clipping_style},
)
optimizer = {optimizer}
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: {factor})
engine.verify(x[:4], loss_fn=loss_of, targets=y[:4])

for logical_batch in engine.batches(torch.utils.data.TensorDataset(x, y), micro_batch_size=64):
    for x, y in logical_batch:
        loss_of(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()

print(engine.statement())
"""
