"""Effects of private training, in a masked language model small enough for two CPU cores: a plot and its numbers.

    python mechanisms.py snr                  # gradient-SNR grows with the batch, and shrinks over the training
    python mechanisms.py schedule             # growing batches against a fixed one: fewer samples
    python mechanisms.py decay                # weights under LayerNorm grow without a large decay; do gradients die?
    python mechanisms.py thresholds           # automatic, vanilla and adaptive clipping over thresholds
    python mechanisms.py styles               # all-layer, block-wise and layer-wise clipping at equal epsilon
    python mechanisms.py parameters           # all weights, LoRA and biases (BiTFiT) at equal epsilon

Each takes a minute or two, if two cores are free, and writes NAME.json and NAME.png to --out. A sample is a piece of
16 characters of the text that ships with Python: its language reference, and for `parameters` the docstrings of its
standard library.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import math
import statistics
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpshard import PrivacyEngine, QuantileTracking
from dpshard.recipes import DP_BERT

ALPHABET = " etaoinsrhldcumfpgwybvkxjqz0123456789.,:;()_'=-/*"
OTHER, MASK = len(ALPHABET), len(ALPHABET) + 1
SYMBOLS = MASK + 1
IGNORED = -100
T = 16
DELTA = 1e-5

Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The size of the computation."""

    steps: int
    long: int
    """Steps of runs under weight decay, and of the training in the clear."""
    batch: int
    """Expected batch of most runs, in samples."""
    seeds: int
    """Runs of each setting, with other initial weights, batches and noise."""
    files: int
    """Number of files of the standard library that give docstrings."""


FULL = Scale(steps=60, long=300, batch=1024, seeds=2, files=60)
QUICK = Scale(steps=14, long=14, batch=64, seeds=1, files=3)


# --- data and model --------------------------------------------------------------------------------------------------


def reference() -> str:
    return " ".join(topics[name] for name in sorted(topics))


def docstrings(files: int) -> str:
    root = Path(sysconfig.get_path("stdlib"))
    trees = [ast.parse(path.read_bytes()) for path in sorted(root.glob("*.py"))[:files]]
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return " ".join(
        ast.get_docstring(node) or "" for tree in trees for node in ast.walk(tree) if isinstance(node, documented)
    )


def pieces(text: str) -> tuple[TensorDataset, TensorDataset]:
    """Return training samples, and a held-out tenth: masked symbols [N, T], and the true ones at the masks."""
    number = {symbol: i for i, symbol in enumerate(ALPHABET)}
    ids = torch.tensor([number.get(symbol, OTHER) for symbol in " ".join(text.lower().split())])
    ids = ids[: len(ids) // T * T].view(-1, T)
    generator = torch.Generator().manual_seed(0)
    ids = ids[torch.randperm(len(ids), generator=generator)]
    hidden = torch.rand(ids.shape, generator=generator).argsort(1) < 3  # 3 of 16 in every piece
    x, y = ids.masked_fill(hidden, MASK), ids.masked_fill(~hidden, IGNORED)
    cut = len(ids) // 10
    return TensorDataset(x[cut:], y[cut:]), TensorDataset(x[:cut], y[:cut])


class Block(nn.Module):
    """A convolution over five neighbours and two linear layers, each with LayerNorm after its sum, as in BERT.

    The convolution replaces BERT's attention, which learns little more than the frequencies of symbols in so few
    steps.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Conv1d(width, width, 5, padding=2)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.mix(x.mT).mT)
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class MaskedLanguageModel(nn.Module):
    """Maps symbols [B, T] to scores [B, T, SYMBOLS]. The part under `norm` is scale-invariant: embeddings, together."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.symbols, self.positions = nn.Embedding(SYMBOLS, width), nn.Embedding(T, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, SYMBOLS)
        for embedding in (self.symbols, self.positions):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.symbols(ids) + self.positions(torch.arange(T)))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def losses(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy [B] over the masked symbols of each piece: the same number in all of them."""
    return F.cross_entropy(logits.mT, y, reduction="none", ignore_index=IGNORED).sum(1) / 3


@torch.no_grad()
def accuracy(model: nn.Module, held_out: TensorDataset) -> float:
    x, y = held_out.tensors
    return float((model(x).argmax(2) == y)[y != IGNORED].double().mean())


# --- private trainings -----------------------------------------------------------------------------------------------


def train(
    model: nn.Module,
    data: tuple[TensorDataset, TensorDataset],
    phases: list[tuple[int, int]],
    *,
    lr: float = 1e-2,
    weight_decay: float = 0.0,
    epsilon: float = 8.0,
    watch: Callable[[nn.Module], float] | None = None,
    **settings: Any,
) -> Result:
    """Train by Adam with the moments of DP-BERT at `epsilon`; return the figures of each step, and the final score."""
    private, held_out = data
    engine = PrivacyEngine(
        model,
        batch_size=phases,
        sample_size=len(private),
        target_epsilon=epsilon,
        target_delta=DELTA,
        accountant="rdp",
        **settings,
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr, betas=DP_BERT.betas, eps=DP_BERT.eps, weight_decay=weight_decay)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    series: dict[str, list[float]] = {"loss": [], "gradient-SNR": [], "gradient norm": [], "watched": []}
    began = time.perf_counter()
    for logical_batch in engine.batches(private, min(512, phases[-1][0])):
        for x, y in logical_batch:
            losses_B = losses(model(x), y)
            losses_B.mean().backward()
            engine.record_loss(losses_B)
        optimizer.step()
        optimizer.zero_grad()
        warmup.step()
        metrics = engine.metrics()
        series["loss"].append(metrics.get("loss", math.nan))  # an empty batch has none
        series["gradient-SNR"].append(metrics["gradient_snr"])
        series["gradient norm"].append(
            next((v for name, v in metrics.items() if name.startswith("grad_norm/")), math.nan)
        )
        series["watched"].append(watch(model) if watch else 0.0)
    return series | {
        "accuracy": accuracy(model, held_out),
        "epsilon": engine.epsilon(),
        "noise multiplier": engine.noise_multiplier,
        "samples": sum(size * steps for size, steps in phases),
        "parameters": sum(p.numel() for p in trained),
        "seconds": time.perf_counter() - began,
    }


def averaged(seeds: int, build: Callable[[], nn.Module], *args: Any, **settings: Any) -> Result:
    """Repeat the training from `seeds` initial weights, with new batches and noise; return averaged figures."""
    results = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        results.append(train(build(), *args, **settings))
    mean: Result = {}
    for key, value in results[0].items():
        columns = [result[key] for result in results]
        if isinstance(value, list):
            mean[key] = [statistics.fmean(values) for values in zip(*columns, strict=True)]
        else:
            mean[key] = statistics.fmean(columns)
    return mean | {"accuracies": [result["accuracy"] for result in results]}


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One part of a plot: a series of all runs over the steps, or a score of each run."""

    title: str
    key: str
    """Key of the runs' figures: a series, or "accuracy"."""
    log: bool = False


Experiment = tuple[dict[str, Result], list[Panel]]
SCORE = Panel(title="masked symbols right, held out", key="accuracy")


def snr(scale: Scale) -> Experiment:
    data = pieces(reference())
    sizes = [scale.batch // 4, scale.batch, scale.batch * 4]
    found = {f"batch {B:,}": averaged(1, MaskedLanguageModel, data, [(B, scale.steps)]) for B in sizes}
    return found, [Panel(title="gradient-SNR", key="gradient-SNR", log=True), SCORE]


def schedule(scale: Scale) -> Experiment:
    data, small = pieces(reference()), DP_BERT.scaled(steps=scale.steps, last_batch=scale.batch)
    choices = {
        f"{small.first_batch:,}, fixed": [(small.first_batch, scale.steps)],
        f"{small.first_batch:,} to {scale.batch:,}": small.engine_settings()["batch_size"],
        f"{scale.batch:,}, fixed": [(scale.batch, scale.steps)],
    }
    found = {name: averaged(scale.seeds, MaskedLanguageModel, data, phases) for name, phases in choices.items()}
    return found, [Panel(title="gradient-SNR", key="gradient-SNR", log=True), SCORE]


def decay(scale: Scale) -> Experiment:
    """Vary the decay over the run: the sum of learning rate times lambda is 4.8 for DP-BERT, and for the last run."""
    data, phases, lr = pieces(reference()), [(scale.batch // 8, scale.long)], 1e-2
    invariant = ["symbols.weight", "positions.weight"]
    rest = [name for name, _ in MaskedLanguageModel().named_parameters() if name not in invariant]

    def norm(model: nn.Module) -> float:
        return float(torch.cat([model.get_parameter(name).detach().flatten() for name in invariant]).norm())

    settings: dict[str, Any] = {"clipping_style": [invariant, rest], "watch": norm, "lr": lr, "epsilon": 2.0}
    found = {}
    for total in (0.0, 1.5, 4.8):
        weight_decay = total / lr / phases[0][1]
        found[f"decay {total:g}"] = averaged(
            1, MaskedLanguageModel, data, phases, weight_decay=weight_decay, **settings
        )
    panels = [Panel(title="norm of the embeddings", key="watched"), Panel(title="their gradient", key="gradient norm")]
    return found, [*panels, SCORE]


def thresholds(scale: Scale) -> Experiment:
    data, steps = pieces(reference()), -(-2 * scale.steps // 3)
    tracking = QuantileTracking(learning_rate=0.5)
    found = {}
    for R in (0.01, 1.0, 100.0):
        for name, settings in {
            "automatic": {"clipping_fn": "automatic"},
            "vanilla": {"clipping_fn": "abadi"},
            "adaptive": {"clipping_fn": "abadi", "adaptive_clipping": tracking},
        }.items():
            found[f"{name}, R = {R:g}"] = averaged(
                1, MaskedLanguageModel, data, [(scale.batch, steps)], max_grad_norm=R, **settings
            )
    return found, [SCORE]


def styles(scale: Scale) -> Experiment:
    data, phases = pieces(reference()), [(scale.batch, scale.steps)]
    names = ("all-layer", "block-wise", "layer-wise")
    found = {name: averaged(scale.seeds, MaskedLanguageModel, data, phases, clipping_style=name) for name in names}
    return found, [Panel(title="loss", key="loss"), SCORE]


def parameters(scale: Scale) -> Experiment:
    """Train in the clear on the language reference; then, at epsilon 1, on docstrings."""
    public, private = pieces(reference())[0], pieces(docstrings(scale.files))
    torch.manual_seed(0)
    start = MaskedLanguageModel()
    optimizer = torch.optim.AdamW(start.parameters(), 5e-3)
    for _ in range(scale.long):
        x, y = public[torch.randint(0, len(public), (256,))]
        losses(start(x), y).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"before: {accuracy(start, private[1]):.1%} of the private samples' masked symbols right")

    def whole() -> nn.Module:
        return copy.deepcopy(start)

    def lora() -> nn.Module:
        model = copy.deepcopy(start).requires_grad_(False)
        for block in model.blocks:
            block.up, block.down = LoRA(block.up), LoRA(block.down)
        model.head = LoRA(model.head)
        return model

    def biases() -> nn.Module:
        model = copy.deepcopy(start)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))
        return model

    phases = [(scale.batch // 2, scale.steps)]
    choices = {"all weights": (whole, 2e-3), "LoRA": (lora, 1e-2), "biases": (biases, 1e-2)}
    found = {
        name: averaged(scale.seeds, build, private, phases, lr=lr, epsilon=1.0) for name, (build, lr) in choices.items()
    }
    return found, [Panel(title="loss", key="loss"), Panel(title="gradient-SNR", key="gradient-SNR", log=True), SCORE]


class LoRA(nn.Module):
    """A frozen linear layer, and a trained map of rank 4 that begins at 0; Hu et al. 2021, arXiv:2106.09685."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, 4, bias=False)
        self.up = nn.Linear(4, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


EXPERIMENTS: dict[str, Callable[[Scale], Experiment]] = {
    "snr": snr,
    "schedule": schedule,
    "decay": decay,
    "thresholds": thresholds,
    "styles": styles,
    "parameters": parameters,
}


# --- the output -------------------------------------------------------------------------------------------------------


def table(found: dict[str, Result]) -> str:
    rows = [f"{'':24}{'accuracy':>10}{'epsilon':>9}{'sigma':>8}{'samples':>10}{'SNR at first, last':>20}{'seconds':>9}"]
    for name, run in found.items():
        snr, n = run["gradient-SNR"], max(1, len(run["gradient-SNR"]) // 10)
        ends = f"{statistics.fmean(snr[:n]):.2f}, {statistics.fmean(snr[-n:]):.2f}"
        rows.append(
            f"{name:24}{run['accuracy']:>10.1%}{run['epsilon']:>9.3f}{run['noise multiplier']:>8.3f}"
            f"{run['samples']:>10,.0f}{ends:>20}{run['seconds']:>9.1f}"
        )
    return "\n".join(rows)


def draw(found: dict[str, Result], panels: list[Panel], path: Path) -> None:
    figure = Figure(figsize=(4.2 * len(panels), 3.2), layout="constrained")
    colours = [f"C{i}" for i in range(10)] * 2
    for ax, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for i, (name, run) in enumerate(found.items()):
            if panel is SCORE:
                ax.bar(i, run["accuracy"], color=colours[i])
                ax.plot([i] * len(run["accuracies"]), run["accuracies"], "k_")
            else:
                ax.plot(range(1, len(run[panel.key]) + 1), run[panel.key], color=colours[i], label=name)
        ax.set_title(panel.title)
        if panel is SCORE:
            ax.set_xticks(range(len(found)), list(found), rotation=90 if len(found) > 3 else 15, fontsize="small")
        else:
            ax.set_xlabel("step")
            ax.set_yscale("log" if panel.log else "linear")
            ax.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*EXPERIMENTS, "all"])
    parser.add_argument("--quick", action="store_true", help="a few steps of small batches, to test that it runs")
    parser.add_argument("--out", type=Path, default=Path("mechanisms"), help="folder for the figures")
    args = parser.parse_args(arguments)
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out {args.out} is a file: name a folder")
    args.out.mkdir(parents=True, exist_ok=True)
    for name in EXPERIMENTS if args.name == "all" else [args.name]:
        found, panels = EXPERIMENTS[name](QUICK if args.quick else FULL)
        print(f"{name}\n{table(found)}\n")
        draw(found, panels, args.out / f"{name}.png")
        (args.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
