"""Pipelines that are killed and go on; the machinery is that of restarts.py.

Usage: staged_restarts.py SCENARIO [ARGUMENT]: a function below. Prints a line of JSON behind "RESULT ".

A kind of training is a clipping style with options behind plus signs: ddp (two pipelines, whose stages have replicas),
fsdp (two pipelines, whose stages have shards), across (the ranks of a stage are neighbours, not those of a pipeline),
data (FSDP2 without a pipeline), adaptive (thresholds), correlated (noise), shared (a frozen layer and a buffer that
all stages hold). Without ddp, fsdp and data, all ranks are
stages of one pipeline; one rank is the whole model.
"""

import errno
import functools
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import scipy.signal  # noqa: F401  (what correlated noise imports late, once instead of in every rank)
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dpshard import Checkpointer, PrivacyEngine
from dpshard.checkpoint.journal import Journal, Mark
from dpshard.errors import DpshardError
from tests import seeds
from tests.distributed.pipeline_worker import PARTS, ROWS, SETTINGS, D, Model, cut, loss_of, shard, whole
from tests.distributed.restarts import SECRET, STEPS, Kill, killed, run
from tests.sums import taken_for_equal

SAMPLES, BLOCKS = 40, 4


def parameters_of(model: nn.Module) -> Tensor:
    """The parameters of all stages, in the order of their names; all ranks with one of them have the same bits."""
    own = {name: whole(p) for name, p in model.named_parameters()}
    everyone: list[Any] = [own]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
    found: dict[str, Tensor] = {}
    for some in everyone:
        for name, p in some.items():
            assert torch.equal(found.setdefault(name, p), p), f"ranks have another {name}"
    return torch.cat([found[name].flatten() for name in sorted(found)])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups of parameters, which all stages have."""
    groups: list[Any] = [
        {"params": [p for p in model.parameters() if (p.dim() > 1) == decays], "weight_decay": 0.01 * decays}
        for decays in (True, False)
    ]
    return torch.optim.Adam(groups, lr=0.1, eps=1e-3)


@dataclass
class Training:
    """What a rank trains."""

    model: Any
    """With the names of the whole model."""
    engine: PrivacyEngine
    optimizer: Any
    scheduler: Any
    checkpointer: Checkpointer
    schedule: Any
    """None without stages."""

    @property
    def releases(self) -> int:
        return self.engine._budget.ledger.releases


def distribute(options: set[str]) -> tuple[nn.Module, nn.Module, dict[str, Any], Any]:
    """The wrapped model of this rank, the declaration of its parts, and the schedule of a stage."""
    model, size = Model(BLOCKS, set()).double(), dist.get_world_size() if dist.is_initialized() else 1
    if "shared" in options:  # all stages hold it
        model.shared = nn.Linear(D, D, dtype=torch.float64).requires_grad_(False)
        model.register_buffer("scale", torch.tensor(3.0))
    if size == 1:
        return model, model, {}, None
    if "data" in options:
        shard(model, set(), init_device_mesh("cpu", (size,), mesh_dim_names=("dp",)))
        return model, model, {}, None
    pipelines = 2 if options & {"ddp", "fsdp"} else 1
    sizes = {"dp": pipelines, "pp": size // pipelines}
    dims = ("pp", "dp") if "across" in options else ("dp", "pp")
    mesh = init_device_mesh("cpu", tuple(sizes[dim] for dim in dims), mesh_dim_names=dims)
    rank, group, wrapped = mesh["pp"].get_local_rank(), mesh["pp"].get_group(), model
    cut(model, rank, sizes["pp"])
    if "fsdp" in options:
        shard(model, set(), mesh)
    elif "ddp" in options:
        wrapped = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    told = {"model_parallel_group": group, "model_parallel_parts": {"*": "stage"}}
    stage = PipelineStage(wrapped, rank, sizes["pp"], torch.device("cpu"), group=group)
    return model, wrapped, told, Schedule1F1B(stage, PARTS, loss_fn=loss_of, scale_grads=False)


def prepare(kind: str, folder: Path) -> Training:
    torch.manual_seed(0)
    style, *chosen = kind.split("+")
    options = set(chosen)
    model, wrapped, told, schedule = distribute(options)
    optimizer = optimizer_of(model)
    settings: dict[str, Any] = {}
    for option in options & {"adaptive", "correlated"}:
        settings |= SETTINGS[option]
    settings["accountant"] = "gdp"  # which takes no time
    engine = PrivacyEngine(
        wrapped,
        batch_size=10,
        sample_size=SAMPLES,
        steps=STEPS,
        noise_multiplier=1.0,
        max_grad_norm=2.0,
        clipping_style=style,
        verify=False,
        **settings,
        **told,
    )
    seeds.give_secret(engine, SECRET)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    checkpointer = Checkpointer(folder, engine, optimizer, scheduler=scheduler)
    return Training(model, engine, optimizer, scheduler, checkpointer, schedule)


def go_on(training: Training, until: int, *, log: Path | None = None, wait: bool = True) -> None:
    """Train up to step `until`, save after every step."""
    engine, began = training.engine, training.engine.step
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(*(torch.randn(SAMPLES, n, generator=generator, dtype=torch.float64) for n in (3, 2)))
    for logical_batch in engine.batches(data, PARTS * ROWS) if began < until else ():
        for x, y in logical_batch:
            step(training.model, training.schedule, x, y)
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.scheduler.step()
        if log is not None:
            digest = hashlib.sha256(parameters_of(training.model).numpy().tobytes()).hexdigest()
            if not dist.is_initialized() or dist.get_rank() == 0:
                with log.open("a") as file:
                    file.write(f"{engine.step} {digest}\n")
        training.checkpointer.save(wait=wait)
        if engine.step == until:
            break
    training.checkpointer.wait()


def train(kind: str, folder: Path, log: Path | None, *, wait: bool = True, until: int = STEPS) -> dict[str, Any]:
    """Resume, train up to step `until`, save after every step."""
    training = prepare(kind, folder)
    engine = training.engine
    if not training.checkpointer.load():
        training.checkpointer.save()
    began = engine.step
    go_on(training, until, log=log, wait=wait)
    counted = {"step": engine.step, "releases": training.releases, "epsilon": engine.epsilon()}
    thresholds = {"thresholds": engine.thresholds}
    return {"began": began, **counted, **thresholds, "parameters": parameters_of(training.model).tolist()}


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


def kills_of_replicas() -> dict[str, Any]:
    """Two pipelines, whose thresholds follow their samples: a replica is killed in a save and after a release."""
    moments = [Kill(wait=False, rank=2, call="digest", count=3), Kill(wait=True, rank=3, call="adam", count=2)]
    return killed("all-layer+ddp+adaptive", moments, train, world=4)


def kills_of_shards() -> dict[str, Any]:
    """Two pipelines with correlated noise: a shard is killed in a save and after a release."""
    moments = [Kill(wait=True, rank=3, call="fsync", count=3), Kill(wait=False, rank=1, call="adam", count=3)]
    return killed("all-layer+fsdp+correlated", moments, train, world=4)


def go_on_elsewhere(settings: str, moves: dict[tuple[int, str], list[tuple[int, str]]]) -> dict[str, Any]:
    """Saved as `moves` say, by number of ranks and options, and continued on others."""

    def work(options: str, folder: Path, until: int = STEPS) -> Callable[[], dict[str, Any]]:
        kind = "+".join(filter(None, ("all-layer", options, settings)))
        return lambda: train(kind, folder, None, until=until)

    with taken_for_equal(), tempfile.TemporaryDirectory() as place:
        undisturbed = run(1, work("", Path(place, "undisturbed")))
        results = {}
        for (origin, options), others in moves.items():
            saved = Path(place, f"{origin}+{options}")
            run(origin, work(options, saved, until=3))
            for world, other in others:
                folder = Path(shutil.copytree(saved, Path(place, f"{origin}+{options} to {world}+{other}")))
                results[folder.name] = run(world, work(other, folder))
        return {"undisturbed": undisturbed, "results": results}


def worlds() -> dict[str, Any]:
    return go_on_elsewhere("", {(4, ""): [(2, ""), (1, "")], (1, ""): [(2, "")], (2, ""): [(2, ""), (4, "")]})


def worlds_of_replicas() -> dict[str, Any]:
    others = [(2, ""), (2, "data"), (1, ""), (4, "fsdp+across")]
    return go_on_elsewhere("adaptive", {(4, "ddp"): others})


def worlds_of_shards() -> dict[str, Any]:
    return go_on_elsewhere("correlated", {(4, "fsdp"): [(2, ""), (1, "")], (2, "data"): [(4, "fsdp"), (4, "ddp")]})


def meshes() -> dict[str, Any]:
    """Killed on stages, continued on one process: what was ever seen of each step, and what the ledger counted."""
    with tempfile.TemporaryDirectory() as place:
        found: dict[str, Any] = {"undisturbed": run(1, lambda: train("all-layer", Path(place), None))}
    for name, world, options, kill in (
        ("in a save", 2, "", Kill(wait=True, rank=0, call="rename", count=3)),
        ("after a release", 2, "", Kill(wait=True, rank=1, call="adam", count=4)),
        ("shards in a save", 4, "+fsdp", Kill(wait=True, rank=0, call="rename", count=3)),
    ):
        with tempfile.TemporaryDirectory() as place:
            folder, log = Path(place, "run"), Path(place, "log")
            log.touch()
            died = run(world, lambda: train(f"all-layer{options}", folder, log), kill) is None  # noqa: B023
            again = run(1, lambda: train("all-layer", folder, log))  # noqa: B023
            assert died
            assert again is not None
            noted = Journal(folder / "releases.journal").since(Mark(0, "")) or []
            found[name] = {**again, "seen": len(set(log.read_text().splitlines())), "noted": len(set(noted))}
    return found


def everywhere(work: Callable[[], Any]) -> list[Any]:
    """What `work` returns on all ranks, with its warnings about checkpoints; or the error that it raises."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            own: Any = work()
        except DpshardError as error:
            own = f"{type(error).__name__}: {error}"
        else:
            own = [own, *(text for text in (str(x.message) for x in caught) if "step-" in text)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def on_one_rank(work: Callable[[], Any]) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        work()
    dist.barrier()


def damaged(kind: str) -> dict[str, Any]:
    """Files of ranks are lost, or in another's place; and the journal knows more than the checkpoint, or less."""

    def work() -> dict[str, Any]:
        training = prepare(f"block-wise+{kind}", folder)
        training.checkpointer.save()

        def again() -> list[Any]:
            loaded = training.checkpointer.load()
            after = training.engine.step, training.releases
            go_on(training, 2)
            same = torch.equal(parameters_of(training.model), parameters)
            return [loaded, *after, same, training.releases]

        go_on(training, 2)
        parameters, old, new = parameters_of(training.model), folder / "step-00000001", folder / "step-00000002"
        files = sorted(path.name for path in new.glob("__*"))
        on_one_rank((new / files[-1]).unlink)
        found = {"writers": files, "lost": everywhere(again)}
        on_one_rank(lambda: shutil.copy(new / files[0], new / files[-1]))
        found["swapped"] = everywhere(again)
        on_one_rank((folder / "releases.journal").unlink)
        found["forgotten"] = everywhere(training.checkpointer.load)
        on_one_rank(lambda: [(path / files[-1]).unlink() for path in (old, new)])
        found["all lost"] = everywhere(training.checkpointer.load)
        return found

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "run")
        return run(4, work) or {}


def apart(kind: str) -> dict[str, Any]:
    """The last rank has a folder of its own, with another checkpoint of the step; then rank 0 has a full disk."""

    def work() -> dict[str, Any]:
        training = prepare(f"all-layer+{kind}", folder)
        go_on(training, 1)
        with torch.no_grad():
            for p in training.model.parameters():
                (p.to_local() if isinstance(p, DTensor) else p).add_(1)
        others = {"scheduler": training.scheduler}
        Checkpointer(folder.with_name("other"), training.engine, training.optimizer, **others).save()
        own = folder if dist.get_rank() < dist.get_world_size() - 1 else folder.with_name("other")
        fresh = prepare(f"all-layer+{kind}", folder.with_name("fresh"))
        before, mixed = parameters_of(fresh.model), Checkpointer(own, fresh.engine, fresh.optimizer, **others)
        found: dict[str, Any] = {"mixed": everywhere(mixed.load), "step": fresh.engine.step}
        found["unchanged"] = torch.equal(parameters_of(fresh.model), before)
        with mock.patch.object(Journal, "note", side_effect=OSError(errno.ENOSPC, "No space left on device")):
            found["full"] = everywhere(lambda: go_on(fresh, 1))
        fresh.optimizer.step()
        found["still unchanged"] = torch.equal(parameters_of(fresh.model), before)
        return found

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "run")
        return run(2 if kind == "alone" else 4, work) or {}


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


def handed_out(kind: str) -> dict[str, Any]:
    """What stages got of a release that rank 0 did not finish writing to the disk."""

    def work() -> dict[str, Any]:
        with slow_disk(log):
            return train(f"all-layer+{kind}", folder, None)

    with tempfile.TemporaryDirectory() as place:
        folder, log = Path(place, "run"), Path(place, "log")
        died = run(2 if kind == "alone" else 4, work) is None
        return {"died": died, "handed out": sorted(log.read_text().splitlines())}


def names(kind: str) -> dict[str, Any]:
    """All stages have a frozen layer and a buffer of one name: with one value, and with others on the last rank."""

    def changed(tensor: Tensor) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().add_(1)

    def work() -> dict[str, Any]:
        training = prepare(f"all-layer+shared+{kind}", folder)
        model, save = training.model, training.checkpointer.save
        found = {"equal": everywhere(lambda: save() is None)}
        changed(model.scale)
        found["buffer"] = everywhere(save)
        found["new"] = everywhere(lambda: Checkpointer(folder, training.engine, training.optimizer) is None)
        model.scale.fill_(3.0)
        changed(model.shared.weight)
        found["frozen"] = everywhere(save)
        return found

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "run")
        found = run(2 if kind == "alone" else 4, work) or {}
        return {**found, "saved": sorted(path.name for path in folder.glob("step-*"))}


if __name__ == "__main__":
    scenarios: dict[str, Callable[..., dict[str, Any]]] = {
        found.__name__: found
        for found in (kills, kills_of_replicas, kills_of_shards, worlds, worlds_of_replicas, worlds_of_shards)
    }
    scenarios |= {"meshes": meshes, "damaged": damaged, "handed_out": handed_out, "names": names, "apart": apart}
    print("RESULT", json.dumps(scenarios[sys.argv[1]](*sys.argv[2:])), flush=True)
