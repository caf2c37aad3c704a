"""Pipelines that are killed and go on; the machinery is that of restarts.py.

Usage: staged_restarts.py kills | worlds | meshes | handed_out | names. Prints a line of JSON behind "RESULT ".
"""

import functools
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import TensorDataset

from dpshard import Checkpointer, PrivacyEngine
from dpshard.checkpoint.journal import Journal
from dpshard.errors import DpshardError
from tests import seeds
from tests.distributed.pipeline_worker import PARTS, ROWS, Model, cut, loss_of
from tests.distributed.restarts import SECRET, STEPS, Kill, killed, run
from tests.sums import taken_for_equal

SAMPLES, BLOCKS = 40, 4


def parameters_of(model: nn.Module) -> Tensor:
    """The parameters of all stages, in the order of their names."""
    own = {name: p.detach() for name, p in model.named_parameters()}
    everyone: list[Any] = [own]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
    whole = {name: p for some in everyone for name, p in some.items()}
    return torch.cat([whole[name].flatten() for name in sorted(whole)])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups of parameters, which all stages have."""
    groups: list[Any] = [
        {"params": [p for p in model.parameters() if (p.dim() > 1) == decays], "weight_decay": 0.01 * decays}
        for decays in (True, False)
    ]
    return torch.optim.Adam(groups, lr=0.1, eps=1e-3)


def train(style: str, folder: Path, log: Path | None, *, wait: bool = True, until: int = STEPS) -> dict[str, Any]:
    """Resume on as many stages as there are ranks, train up to step `until`, save after every step."""
    torch.manual_seed(0)
    model, size = Model(BLOCKS, set()).double(), dist.get_world_size() if dist.is_initialized() else 1
    told: dict[str, Any] = {}
    if size > 1:
        cut(model, dist.get_rank(), size)
        told = {"model_parallel_group": dist.group.WORLD, "model_parallel_parts": {"*": "stage"}}
    optimizer = optimizer_of(model)
    engine = PrivacyEngine(
        model,
        batch_size=10,
        sample_size=SAMPLES,
        steps=STEPS,
        noise_multiplier=1.0,
        max_grad_norm=2.0,
        clipping_style=style,
        accountant="gdp",  # which takes no time
        verify=False,
        **told,
    )
    seeds.give_secret(engine, SECRET)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    checkpointer = Checkpointer(folder, engine, optimizer, scheduler=scheduler)
    if not checkpointer.load():
        checkpointer.save()
    began, schedule = engine.step, schedule_of(model, size) if size > 1 else None
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(*(torch.randn(SAMPLES, n, generator=generator, dtype=torch.float64) for n in (3, 2)))
    for logical_batch in engine.batches(data, PARTS * ROWS) if began < until else ():
        for x, y in logical_batch:
            step(model, schedule, x, y)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if log is not None:
            digest = hashlib.sha256(parameters_of(model).numpy().tobytes()).hexdigest()
            if size == 1 or dist.get_rank() == 0:
                with log.open("a") as file:
                    file.write(f"{engine.step} {digest}\n")
        checkpointer.save(wait=wait)
        if engine.step == until:
            break
    checkpointer.wait()
    counted = {"step": engine.step, "releases": engine._budget.ledger.releases, "epsilon": engine.epsilon()}
    return {"began": began, **counted, "parameters": parameters_of(model).tolist()}


def schedule_of(model: nn.Module, size: int) -> Any:
    stage = PipelineStage(model, dist.get_rank(), size, torch.device("cpu"), group=dist.group.WORLD)
    return Schedule1F1B(stage, PARTS, loss_fn=loss_of, scale_grads=False)


def step(model: nn.Module, schedule: Any, x: Tensor, y: Tensor) -> None:
    if schedule is None:
        loss_of(model(x), y).backward()
    elif schedule._stage.is_first:
        schedule.step(x)
    elif schedule._stage.is_last:
        schedule.step(target=y)
    else:
        schedule.step()


def kills() -> dict[str, Any]:
    """Two stages, one of them killed in saves, before a release and after it."""
    moments = [
        Kill(wait=True, rank=1, call="fsync", count=4),
        Kill(wait=False, rank=0, call="rename", count=2),
        Kill(wait=True, rank=0, call="journal", count=1),
        Kill(wait=True, rank=1, call="adam", count=2),
        Kill(wait=False, rank=1, call="digest", count=1),
    ]
    return killed("block-wise", moments, train)


def worlds() -> dict[str, Any]:
    """Saved on 4 stages, on 2 and on one process, and continued on others."""
    with taken_for_equal(), tempfile.TemporaryDirectory() as place:
        undisturbed = run(1, lambda: train("all-layer", Path(place, "undisturbed"), None))
        results = {}
        for origin, others in ((4, (2, 1)), (1, (2,)), (2, (2, 4))):
            saved = Path(place, f"saved on {origin}")
            run(origin, lambda: train("all-layer", saved, None, until=3))  # noqa: B023
            for world in others:
                folder = Path(shutil.copytree(saved, Path(place, f"{origin} to {world}")))
                results[folder.name] = run(world, lambda: train("all-layer", folder, None))  # noqa: B023
        return {"undisturbed": undisturbed, "results": results}


def meshes() -> dict[str, Any]:
    """Killed on two stages, continued on one process: what was ever seen of each step, and what the ledger counted."""
    found: dict[str, Any] = {}
    for name, kill in (
        ("in a save", Kill(wait=True, rank=0, call="rename", count=3)),
        ("after a release", Kill(wait=True, rank=1, call="adam", count=4)),
    ):
        with tempfile.TemporaryDirectory() as place:
            folder, log = Path(place, "run"), Path(place, "log")
            log.touch()
            died = run(2, lambda: train("all-layer", folder, log), kill) is None  # noqa: B023
            again = run(1, lambda: train("all-layer", folder, log))  # noqa: B023
            assert died
            assert again is not None
            found[name] = {**again, "seen": len(set(log.read_text().splitlines()))}
    return found


@contextmanager
def slow_disk(log: Path) -> Iterator[None]:
    """Rank 0 dies while it writes its second release to the disk; log the releases that the optimizer gets."""
    note, step, taken = Journal.note, torch.optim.Adam.step, 0

    def slow_note(journal: Journal, step: int, identity: bytes) -> Any:
        written = note(journal, step, identity)
        return journal._thread.submit(die) if step == 1 else written

    def die() -> None:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)

    @functools.wraps(step)
    def logged_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal taken
        taken += 1
        with log.open("a") as file:
            file.write(f"rank {dist.get_rank()}: {taken}\n")
        return step(*args, **kwargs)

    with mock.patch.object(Journal, "note", slow_note), mock.patch.object(torch.optim.Adam, "step", logged_step):
        yield


def handed_out() -> dict[str, Any]:
    """What stages got of a release that rank 0 did not finish writing to the disk."""

    def work() -> dict[str, Any]:
        with slow_disk(log):
            return train("all-layer", folder, None)

    with tempfile.TemporaryDirectory() as place:
        folder, log = Path(place, "run"), Path(place, "log")
        died = run(2, work) is None
        return {"died": died, "handed out": sorted(log.read_text().splitlines())}


def names() -> dict[str, Any]:
    """Stages have a buffer of one name: with one value, and with others."""

    def work(value: float | None) -> dict[str, Any]:
        model, rank = Model(BLOCKS, set()).double(), dist.get_rank()
        cut(model, rank, 2)
        model.register_buffer("scale", torch.tensor(3.0 if value is None else value + rank))
        told: dict[str, Any] = {"model_parallel_group": dist.group.WORLD, "model_parallel_parts": {"*": "stage"}}
        engine = PrivacyEngine(
            model, batch_size=10, sample_size=SAMPLES, steps=STEPS, noise_multiplier=1.0, accountant="gdp", **told
        )
        optimizer = optimizer_of(model)
        with tempfile.TemporaryDirectory() as place:
            folder = [place]
            dist.broadcast_object_list(folder)
            try:
                checkpointer = Checkpointer(folder[0], engine, optimizer)
                checkpointer.save()
                model.get_buffer("scale").add_(rank)
                checkpointer.save()
            except DpshardError as error:
                everyone: list[Any] = [None, None]
                dist.all_gather_object(everyone, str(error))
                return {"step": engine.step, "errors": everyone, "saved": len(list(Path(folder[0]).glob("step-*")))}
        return {}

    return {"at once": run(2, lambda: work(1.0)), "later": run(2, lambda: work(None))}


if __name__ == "__main__":
    scenarios = {"kills": kills, "worlds": worlds, "meshes": meshes, "handed_out": handed_out, "names": names}
    print("RESULT", json.dumps(scenarios[sys.argv[1]]()), flush=True)
