"""Fine-tune GPT-2 and a vision transformer of Hugging Face privately, whole and by LoRA, with parameters in shards.

    python finetune_transformers.py --nproc 2 --shard fsdp2

Both are trained on public inputs first, without privacy, and kept in --out. Then PrivateTrainer fine-tunes them on
private ones, and Trainer does, by the same arguments, to compare. The two take their steps in turn, so that whatever
else the machine does slows down both alike; the ratio of their times is the median over pairs of steps.

text: Python's language reference is public, a docstring of the standard library is a private sample, all in tokens of a
vocabulary that was learnt on the public text. digits: 0 to 4 are public (and moved by a pixel), 5 to 9 are private.
"""

from __future__ import annotations

import argparse
import ast
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from accelerate import PartialState
from peft import LoraConfig, get_peft_model
from sklearn.datasets import load_digits
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

import dpshard
from dpshard.integrations.transformers import PrivateTrainer, ShardsOnCPU

IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large models and runs are."""

    width: int
    layers: int
    vocabulary: int
    length: int
    files: int | None
    """How many files of the standard library are read; None: all."""
    text: tuple[int, int, int, int]
    """Steps on public inputs, by 64; steps on private ones; rows of a micro-batch, of all processes; how many of them
    are an expected batch."""
    digits: tuple[int, int, int, int]
    privacy: dict[str, float]


FULL = Scale(
    width=192,
    layers=4,
    vocabulary=2048,
    length=64,
    files=None,
    text=(150, 20, 128, 2),
    digits=(300, 30, 128, 4),
    privacy={"target_epsilon": 8.0, "target_delta": 1e-5},
)
QUICK = Scale(
    width=16,
    layers=1,
    vocabulary=300,
    length=16,
    files=12,
    text=(4, 2, 16, 1),
    digits=(4, 2, 64, 1),
    privacy={"noise_multiplier": 1.0, "target_delta": 1e-5},
)


class Rows(Dataset):
    """Tensors with a row per sample, by the names of a model's arguments."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {name: column[i] for name, column in self.columns.items()}


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learnt, on what."""

    name: str
    sample: str
    """What one protected sample is."""
    model: PreTrainedModel
    """The model before any training."""
    begin: Callable[[PreTrainedModel], None]
    """What becomes of the model that was trained on public inputs, before it is fine-tuned."""
    public: Dataset
    private: Dataset
    held_out: Dataset
    block: str
    """The class of the model's blocks, which FSDP gathers one at a time."""
    lora: LoraConfig
    learning_rates: dict[str, float]
    privacy: dict[str, float]
    public_steps: int
    batches: tuple[int, int, int]


# --- text -----------------------------------------------------------------------------------------------------------


def text(scale: Scale) -> Task:
    end = "<|endoftext|>"
    public, private = end.join(topics[name] for name in sorted(topics)), docstrings(scale.files)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner = trainers.BpeTrainer(
        vocab_size=scale.vocabulary, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(topics.values(), learner)

    T = scale.length
    stream = torch.tensor(tokenizer.encode(public).ids)
    blocks = stream[: len(stream) // T * T].view(-1, T)
    labels = torch.full((len(private), T), IGNORED)
    for row, encoded in zip(labels, tokenizer.encode_batch([end + x + end for x in private]), strict=True):
        ids = torch.tensor(encoded.ids[:T])
        row[: len(ids)] = ids
    train, held_out = divided(Rows(input_ids=labels.clamp(min=0), labels=labels), 1 / 10)
    config = GPT2Config(
        vocab_size=scale.vocabulary, n_positions=T, n_embd=scale.width, n_layer=scale.layers, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM",
    )  # fmt: skip
    return Task(
        name="GPT-2, text",
        sample="a docstring",
        model=GPT2LMHeadModel(config),
        begin=lambda model: None,
        public=Rows(input_ids=blocks, labels=blocks),
        private=train,
        held_out=held_out,
        block="GPT2Block",
        lora=LoraConfig(r=8, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM"),
        learning_rates={"all weights": 2e-3, "LoRA": 1e-2},
        privacy=scale.privacy,
        public_steps=scale.text[0],
        batches=scale.text[1:],
    )


def docstrings(files: int | None) -> list[str]:
    """The docstrings of the standard library, of modules, classes and functions, each once."""
    root, found = Path(sysconfig.get_path("stdlib")), dict[str, None]()
    others = {"test", "tests", "site-packages", "dist-packages", "pydoc_data"}
    paths = [path for path in sorted(root.rglob("*.py")) if not others & set(path.relative_to(root).parts)]
    for path in paths[:files]:
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:  # of another version of Python
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found[ast.get_docstring(node) or ""] = None
    return [docstring for docstring in found if docstring]


# --- digits ---------------------------------------------------------------------------------------------------------


def digits(scale: Scale) -> Task:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 8 - 1, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)
    low, high = y < 5, y >= 5
    moved = [x[low].roll(by, (2, 3)) for by in ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))]
    train, held_out = divided(Rows(pixel_values=x[high], labels=y[high] - 5), 1 / 5)
    width = 2 * scale.width // 3
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=width, intermediate_size=2 * width, num_labels=5,
        num_hidden_layers=scale.layers, num_attention_heads=2, hidden_dropout_prob=0.0, initializer_range=0.1,
    )  # fmt: skip

    def new_head(model: PreTrainedModel) -> None:
        model.classifier = nn.Linear(width, 5)

    return Task(
        name="ViT, digits",
        sample="a handwritten digit",
        model=ViTForImageClassification(config),
        begin=new_head,
        public=Rows(pixel_values=torch.cat(moved), labels=y[low].repeat(len(moved))),
        private=train,
        held_out=held_out,
        block="ViTLayer",
        lora=LoraConfig(r=8, target_modules=["q_proj", "v_proj", "fc1", "fc2"], modules_to_save=["classifier"]),
        learning_rates={"all weights": 3e-3, "LoRA": 1e-2},
        privacy=scale.privacy,
        public_steps=scale.digits[0],
        batches=scale.digits[1:],
    )


def divided(rows: Rows, fraction: float) -> tuple[Dataset, Dataset]:
    """What is trained on, and what is held out: the same in every run, and a multiple of 4 samples."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    count = round(len(rows) * fraction / 4) * 4
    return Subset(rows, order[count:]), Subset(rows, order[:count])


# --- training -------------------------------------------------------------------------------------------------------


class OrdinaryTrainer(ShardsOnCPU, Trainer):
    """A Trainer that shards where there is no GPU, too."""


class Turns:
    """Lets trainings in threads of their own go forward one at a time, a step each."""

    def __init__(self, players: int) -> None:
        self.order = deque(range(players))
        self.changed = threading.Condition()

    def wait(self, player: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.order[0] == player)

    def give(self) -> None:
        with self.changed:
            self.order.rotate(-1)
            self.changed.notify_all()

    def leave(self) -> None:
        with self.changed:
            self.order.popleft()
            self.changed.notify_all()


class TakesTurns(TrainerCallback):
    """Gives its turn away after every step, and notes how long each has taken, in seconds."""

    def __init__(self, turns: Turns, player: int) -> None:
        self.turns, self.player = turns, player
        self.times: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.times.append(time.perf_counter() - self.began)
        self.turns.give()
        self.turns.wait(self.player)
        self.began = time.perf_counter()


def arguments(
    folder: Path, shard: str, block: str, steps: int, rows: int, micro_batches: int, **options: Any
) -> TrainingArguments:
    processes = int(os.environ.get("WORLD_SIZE", 1))
    cpu = not torch.cuda.is_available()
    return TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=rows // processes,
        per_device_eval_batch_size=64,
        gradient_accumulation_steps=micro_batches,
        fsdp=shard == "fsdp2" and processes > 1,
        fsdp_config={"transformer_layer_cls_to_wrap": [block]},
        use_cpu=cpu,
        ddp_backend="gloo" if cpu and processes > 1 else None,
        dataloader_pin_memory=not cpu,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **options,
    )


def per_sample(logits: Any, labels: Tensor) -> Tensor:
    """[B, 3]: the sum of the cross-entropies of a sample, how many predictions were right, and how many there were."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    if labels.dim() == 2:
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = F.cross_entropy(logits.movedim(-1, 1).float(), labels, reduction="none", ignore_index=IGNORED)
    counts = labels != IGNORED
    figures = losses, (logits.argmax(-1) == labels) & counts, counts
    return torch.stack([x.view(len(labels), -1).sum(1).float() for x in figures], dim=1)


def scores(evaluation: Any) -> dict[str, float]:
    """Loss and accuracy over all predictions; Trainer's own loss weighs batches alike, however long they are."""
    loss, right, count = evaluation.predictions.sum(0).tolist()
    return {"held_out_loss": loss / count, "held_out_accuracy": right / count, "samples": len(evaluation.predictions)}


def trainer_of(kind: type[Trainer], task: Task, model: Any, args: TrainingArguments, **more: Any) -> Trainer:
    trainer = kind(
        model,
        args,
        train_dataset=task.private,
        eval_dataset=task.held_out,
        compute_metrics=scores,
        preprocess_logits_for_metrics=per_sample,
        **more,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def pretrained(task: Task, shard: str, out: Path) -> Path:
    """The folder of the model that was trained on public inputs; trained now, if nobody has done so."""
    size = sum(p.numel() for p in task.model.parameters())
    folder = out / f"{type(task.model).__name__}-{size}-{task.public_steps}"
    args = arguments(
        *(folder, shard, task.block, task.public_steps, 64, 1),
        learning_rate=2e-3, weight_decay=0.1, lr_scheduler_type="cosine", warmup_steps=task.public_steps // 10,
    )  # fmt: skip
    if not (folder / "config.json").exists():
        trainer = OrdinaryTrainer(task.model, args, train_dataset=task.public)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        trainer.save_model()
    PartialState().wait_for_everyone()
    return folder


def fine_tune(task: Task, what: str, folder: Path, shard: str) -> dict[str, Any]:
    """Fine-tune with privacy, and without, in turn; what came out."""

    def begun() -> Any:
        torch.manual_seed(0)
        model = type(task.model).from_pretrained(folder)
        task.begin(model)
        return get_peft_model(model, task.lora) if what == "LoRA" else model

    options = {"learning_rate": task.learning_rates[what], "lr_scheduler_type": "constant_with_warmup"}
    args = arguments(folder, shard, task.block, *task.batches, warmup_steps=3, eval_on_start=True, **options)
    private = trainer_of(PrivateTrainer, task, begun(), args, privacy=task.privacy)
    ordinary = trainer_of(OrdinaryTrainer, task, begun(), args)
    parameters = sum(p.numel() for p in private.model.parameters() if p.requires_grad)
    turns, trainers = Turns(2), (private, ordinary)
    clocks = [TakesTurns(turns, player) for player in range(2)]

    def train(player: int) -> tuple[dict[str, float], dict[str, float]]:
        turns.wait(player)
        try:
            trainers[player].add_callback(clocks[player])
            trainers[player].train()
            after = trainers[player].evaluate()
        finally:
            turns.leave()
        before = next(row for row in trainers[player].state.log_history if "eval_held_out_loss" in row)
        if after["eval_samples"] != len(task.held_out):
            raise RuntimeError(f"{after['eval_samples']} samples were scored, but {len(task.held_out)} are held out.")
        return before, after

    with ThreadPoolExecutor(2) as threads:
        (before, after), (_, without) = threads.map(train, range(2))
    # The first steps also probe and verify, shard, and score the model as it was.
    pairs = list(zip(*(clock.times[1:] for clock in clocks), strict=True))
    return {
        "model": task.name,
        "trained": what,
        "parameters": parameters,
        "sample": task.sample,
        "samples": len(task.private),
        "held_out": len(task.held_out),
        "steps": private.engine.step,
        "expected_batch_size": task.batches[1] * task.batches[2],
        "epsilon": private.engine.epsilon(),
        "delta": task.privacy["target_delta"],
        "noise_multiplier": private.engine.noise_multiplier,
        "learning_rate": task.learning_rates[what],
        **{
            figure: {
                "before": before[f"eval_held_out_{figure}"],
                "private": after[f"eval_held_out_{figure}"],
                "ordinary": without[f"eval_held_out_{figure}"],
            }
            for figure in ("loss", "accuracy")
        },
        "seconds_per_step": {
            "private": statistics.median(private for private, _ in pairs),
            "ordinary": statistics.median(ordinary for _, ordinary in pairs),
        },
        "time_ratio": statistics.median(private / ordinary for private, ordinary in pairs),
    }


# --- results --------------------------------------------------------------------------------------------------------


def table(results: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = [
        "| model | trained | ε | held-out loss: before | private | without privacy | accuracy: before | private "
        "| without privacy | time of a step, to that without privacy |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results["runs"]:
        loss, right = row["loss"], row["accuracy"]
        lines.append(
            f"| {row['model']} | {row['trained']}, {row['parameters']:,} | {row['epsilon']:.2f} "
            f"| {loss['before']:.2f} | **{loss['private']:.2f}** | {loss['ordinary']:.2f} "
            f"| {right['before']:.1%} | **{right['private']:.1%}** | {right['ordinary']:.1%} "
            f"| {row['time_ratio']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2, help="processes to start on this machine")
    parser.add_argument("--shard", choices=["fsdp2", "ddp"], default="fsdp2", help="how they share the model")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"), help="where models and results are kept")
    parser.add_argument("--quick", action="store_true", help="tiny models and few steps, to see it run")
    options = parser.parse_args()
    if options.nproc > 1 and "RANK" not in os.environ:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.nproc}"]
        sys.exit(
            subprocess.call([*torchrun, "--", __file__, *sys.argv[1:]])
        )  # -- lest torchrun take --nproc for its own

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("dpshard").setLevel(logging.ERROR)  # both Trainers have the max_grad_norm that one of them uses
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    scale = QUICK if options.quick else FULL
    runs = []
    for make in (text, digits):
        task = make(scale)
        folder = pretrained(task, options.shard, options.out)
        for what in ("all weights", "LoRA"):
            runs.append(fine_tune(task, what, folder, options.shard))
            if PartialState().is_main_process:
                print(table({"runs": runs[-1:]}).splitlines()[-1], flush=True)
    results = {
        "kind": "fine-tuning",
        "processes": PartialState().num_processes,
        "shard": options.shard,
        "device": PartialState().device.type,
        "cores": os.cpu_count(),
        "versions": {
            "python": platform.python_version(),
            **{library.__name__: library.__version__ for library in (dpshard, torch, transformers)},
        },
        "runs": runs,
    }
    if PartialState().is_main_process:
        (options.out / "finetuning.json").write_text(json.dumps(results, indent=2) + "\n")
        print(table(results), flush=True)
    PartialState().wait_for_everyone()
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
