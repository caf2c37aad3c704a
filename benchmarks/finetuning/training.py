"""One task, with privacy and without: the two take their steps in turn, so that a busy machine slows both alike."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import PartialState
from peft import get_peft_model
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from benchmarks.finetuning.tasks import IGNORED, Task
from dpshard.integrations.transformers import PrivateTrainer, ShardsOnCPU


class OrdinaryTrainer(ShardsOnCPU, Trainer):
    """A Trainer that also shards without a GPU."""


class Turns:
    """Lets trainings in threads of their own proceed one at a time, a step each."""

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
    """Passes its turn on after every step, and notes the seconds of each."""

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
    """Return [B, 3]: the sum of the cross-entropies of a sample, the right predictions, and all predictions."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    if labels.dim() == 2:
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = F.cross_entropy(logits.movedim(-1, 1).float(), labels, reduction="none", ignore_index=IGNORED)
    counts = labels != IGNORED
    figures = losses, (logits.argmax(-1) == labels) & counts, counts
    return torch.stack([x.view(len(labels), -1).sum(1).float() for x in figures], dim=1)


def scores(evaluation: Any) -> dict[str, float]:
    """Return loss and accuracy over all predictions; Trainer's own loss weighs batches of any length alike."""
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
    """Return the folder of the model trained on public inputs; train it now if it is missing."""
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
    """Fine-tune with privacy, and without, in turn; return the results."""

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
    # The first steps also probe, verify and shard, and score the initial model.
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
