"""Trainings that are killed and go on: ranks are forked from one process that has loaded torch, so a restart is cheap.

Usage: restarts.py kills SEED | worlds | recount | zero_worlds | zero_kills | buffered_kills | parted_kills | meshes.
Prints a line of JSON behind "RESULT ".

A kind of training is "alone", one of `update_worker.shard`, or "deepspeed-STAGE" with flags of
`deepspeed_setup.configuration` behind plus signs. DeepSpeed trains in float32, as "+float32" has the others do.
"+buffered": with noise over steps, from buffers. "+parted": the model and a mesh of tensor_parallel_worker.
"""

import functools
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec  # noqa: F401  (what torch.distributed.checkpoint imports late, once instead of in every rank)
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from dpshard import BandMF, Checkpointer, PrivacyEngine
from dpshard.backends.fsdp2 import reduction
from dpshard.backends.model_parts import ModelParts
from dpshard.checkpoint.journal import Journal
from tests import seeds
from tests.distributed import tensor_parallel_worker as parted
from tests.distributed.update_worker import SECRET, Model, shard, whole
from tests.sums import taken_for_equal

SAMPLES, STEPS = 60, 6

DEADLY = {
    "fsync": (os, "fsync"),
    "rename": (pathlib.Path, "rename"),
    "digest": (hashlib, "file_digest"),
    "chmod": (pathlib.Path, "chmod"),
    "rmtree": (shutil, "rmtree"),
    "mkdir": (pathlib.Path, "mkdir"),
    "torch.save": (torch, "save"),
    "gather": (dist, "all_gather_object"),
    "reduce_scatter": (reduction, "reduce_scatter"),
    "adam": (torch.optim.Adam, "step"),
    "norm of parts": (ModelParts, "norm_sq"),
    "journal": (Journal, "note"),
}
"""Calls in which a rank may be killed: in every phase of a save, and of a step."""
OF_FSDP2 = tuple(call for call in DEADLY if call not in ("norm of parts", "journal"))
OF_A_SAVE = ("fsync", "rename", "digest", "chmod", "torch.save", "gather")


@dataclass(frozen=True)
class Kill:
    """SIGKILL for one rank, before the `count`-th call of something; or for all of them, after some seconds."""

    wait: bool
    """Whether the training waits for its saves."""
    rank: int | None = None
    call: str = ""
    count: int = 1
    seconds: float = 0.0


@contextmanager
def deadly(kill: Kill | None, rank: int) -> Iterator[None]:
    if kill is None or kill.rank != rank:
        yield
        return
    owner, name = DEADLY[kill.call]
    original, calls = getattr(owner, name), 0

    @functools.wraps(original)
    def lethal(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == kill.count:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, lethal)
    yield
    setattr(owner, name, original)


def train(kind: str, folder: Path, log: Path | None, *, wait: bool = True, until: int = STEPS) -> dict[str, Any]:
    """Resume, train up to step `until`, save after every step; parameters and epsilon."""
    torch.manual_seed(0)
    kind, *flags = kind.split("+")
    single = kind.startswith("deepspeed") or "float32" in flags
    model: Any = Model() if single else Model().double()
    make_optimizer = functools.partial(torch.optim.Adam, lr=0.1, eps=1e-3)  # which does not blow up rounding errors
    optimizer: Any
    if kind.startswith("deepspeed"):
        from tests.distributed import deepspeed_setup as zero

        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        config = zero.configuration(int(kind[-1]), *flags)
        model = zero.start(model, config, make_optimizer(model.parameters()))
        optimizer, inner = model.optimizer, model.optimizer.optimizer
        parameters_of = zero.masters if "bf16" in flags else zero.whole
    elif "parted" in flags:
        model = parted.distribute(parted.Model().double(), kind, set())
        optimizer = inner = make_optimizer(model.parameters(), foreach=False)  # meshes of parameters differ
        parameters_of = parted.whole
    else:
        model = model if kind == "alone" else shard(model, kind)
        optimizer = inner = make_optimizer(model.parameters())
        parameters_of = whole
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randint(0, 11, (SAMPLES, parted.T if "parted" in flags else 4), generator=generator),
        torch.randint(0, 11, (SAMPLES,), generator=generator),
    )
    correlation = BandMF(bands=3, buffers=True)
    engine = PrivacyEngine(
        model,
        batch_size=10,
        sample_size=SAMPLES,
        steps=STEPS,
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        accountant="gdp",  # which takes no time
        verify=False,
        **({"sampling": "cyclic-poisson", "noise_correlation": correlation} if "buffered" in flags else {}),
    )
    seeds.give_secret(engine, SECRET)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 3)
    checkpointer = Checkpointer(folder, engine, optimizer, scheduler=scheduler)
    if not checkpointer.load():
        checkpointer.save()
    began, core = engine.step, engine.model
    for logical_batch in engine.batches(data, 4) if began < until else ():
        for x, y in logical_batch:
            F.cross_entropy(model(x).mean(1), y).backward()
        if kind.startswith("deepspeed"):
            model.step()
        else:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        if log is not None:
            parameters = b"".join(p.contiguous().numpy().tobytes() for p in parameters_of(core).values())
            if not dist.is_initialized() or dist.get_rank() == 0:
                with log.open("a") as file:
                    file.write(f"{engine.step} {hashlib.sha256(parameters).hexdigest()}\n")
        with torch.no_grad():
            model.eval()
            model(data.tensors[0][:4])  # an evaluation leaves the root unit of FSDP2 gathered
            model.train()
        checkpointer.save(wait=wait)
        if engine.step == until:
            break
    checkpointer.wait()
    parameters = torch.cat([p.flatten() for p in parameters_of(core).values()])
    counted = {"step": engine.step, "releases": engine._budget.ledger.releases, "epsilon": engine.epsilon()}
    return {"began": began, **counted, "parameters": parameters.tolist()}


def run(world: int, work: Callable[[], dict[str, Any]], kill: Kill | None = None) -> dict[str, Any] | None:
    """What rank 0 returns; None if a rank was killed. A rank that outlives another by 30 seconds fails the test."""
    with tempfile.TemporaryDirectory() as scratch:
        children = [os.fork() or _rank(world, rank, Path(scratch), work, kill) for rank in range(world)]
        alive, killed, deadline = dict(enumerate(children)), False, time.monotonic() + 60
        timer = time.monotonic() + kill.seconds if kill is not None and kill.rank is None else None
        codes: dict[int, int] = {}
        while alive:
            for rank, child in list(alive.items()):
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    del alive[rank]
                    if codes[rank] == -signal.SIGKILL and not killed:
                        killed, deadline = True, time.monotonic() + 30
            if timer is not None and time.monotonic() > timer:
                for child in alive.values():
                    os.kill(child, signal.SIGKILL)
                timer = None
            if time.monotonic() > deadline:
                for child in alive.values():
                    os.kill(child, signal.SIGKILL)
                raise TimeoutError(f"ranks {sorted(alive)} hang: {codes}, {kill}")
            time.sleep(0.005)
        if killed:
            return None
        errors = "\n".join(path.read_text() for path in Path(scratch).glob("error-*"))
        assert set(codes.values()) == {0}, f"{codes} {kill}\n{errors}"
        return json.loads((Path(scratch) / "result").read_text())


def _rank(world: int, rank: int, scratch: Path, work: Callable[[], dict[str, Any]], kill: Kill | None) -> int:
    code = 1
    try:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", ".*Resuming from")  # that a checkpoint is damaged must not happen
        os.environ["LOCAL_RANK"] = str(rank)  # DeepSpeed insists
        if world > 1:
            rendezvous = f"file://{scratch / 'rendezvous'}"
            dist.init_process_group(
                "gloo", init_method=rendezvous, rank=rank, world_size=world, timeout=timedelta(seconds=60)
            )
        with deadly(kill, rank):
            result = work()
        if rank == 0:
            (scratch / "result").write_text(json.dumps(result))
        code = 0
    except BaseException:  # noqa: BLE001
        (scratch / f"error-{rank}").write_text(traceback.format_exc())
    os._exit(code)


def kills(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    moments = [
        *(Kill(wait=True, rank=draw.randrange(2), call=call, count=draw.randint(1, 6)) for call in OF_FSDP2),
        *(Kill(wait=False, rank=draw.randrange(2), call=call, count=draw.randint(1, 6)) for call in OF_A_SAVE),
        *(Kill(wait=bool(i % 2), seconds=draw.uniform(0.05, 1.0)) for i in range(2)),
    ]
    draw.shuffle(moments)
    return killed("fsdp2", moments)


def killed(
    kind: str, moments: list[Kill], train: Callable[..., dict[str, Any]] = train, world: int = 2
) -> dict[str, Any]:
    """A run that is killed again and again, and one that is not."""
    with tempfile.TemporaryDirectory() as place:
        folder, log, reference = Path(place, "run"), Path(place, "log"), Path(place, "reference")
        log.touch()
        undisturbed = run(world, lambda: train(kind, Path(place, "undisturbed"), reference))
        deaths, starts = 0, []
        for kill in moments:
            result = run(world, lambda: train(kind, folder, log, wait=kill.wait), kill)  # noqa: B023
            deaths += result is None
            if result is not None:  # it came to its end: begin another run, for the moments that are left
                starts.append(result)
                shutil.rmtree(folder)
        final = run(world, lambda: train(kind, folder, log))
        left = sorted(path.name for path in folder.iterdir() if path.is_dir())
        known = dict(line.split() for line in reference.read_text().splitlines())
        lines = [line.split() for line in log.read_text().splitlines() if line.count(" ") == 1]
        return {
            "deaths": deaths,
            "steps": len(lines),
            "replayed": len(lines) - STEPS * (1 + len(starts)),
            "differing": sorted({step for step, digest in lines if known[step] != digest}),
            "undisturbed": undisturbed,
            "finished": [*starts, final],
            "left": left,
        }


def worlds() -> dict[str, Any]:
    """Saved on 4 ranks, continued on others."""
    with taken_for_equal(), tempfile.TemporaryDirectory() as place:
        undisturbed = run(1, lambda: train("alone", Path(place, "undisturbed"), None))
        saved = Path(place, "fsdp2-4")
        run(4, lambda: train("fsdp2", saved, None, until=3))
        one = Path(place, "alone-1")
        run(1, lambda: train("alone", one, None, until=3))
        results = {}
        for name, origin, world, kind in [
            ("4 to 2", saved, 2, "fsdp2"),
            ("4 to 1", saved, 1, "alone"),
            ("4 to ddp", saved, 2, "ddp"),
            ("4 to hsdp", saved, 4, "hsdp"),
            ("1 to 2", one, 2, "fsdp2"),
        ]:
            folder = Path(shutil.copytree(origin, Path(place, name)))
            results[name] = run(world, lambda: train(kind, folder, None))  # noqa: B023
        back = Path(shutil.copytree(Path(place, "4 to ddp"), Path(place, "back")))
        shutil.rmtree(max(path for path in back.iterdir() if path.is_dir()))  # to the step before the last
        results["ddp to 1"] = run(1, lambda: train("alone", back, None))
        return {"undisturbed": undisturbed, "results": results}


def recount() -> dict[str, Any]:
    """The last of five steps, which no checkpoint knows, taken again by as many ranks, and by one."""
    with tempfile.TemporaryDirectory() as place:
        saved = Path(place, "fsdp2-2")
        run(2, lambda: train("fsdp2", saved, None, until=5))
        shutil.rmtree(saved / "step-00000005")
        found = {}
        for name, world, kind in (("2 again", 2, "fsdp2"), ("by 1", 1, "alone")):
            folder = Path(shutil.copytree(saved, Path(place, name)))
            found[name] = run(world, lambda: train(kind, folder, None, until=5))  # noqa: B023
        return found


def zero_worlds() -> dict[str, Any]:
    """Saved by DeepSpeed on 4 ranks, continued on others, at other stages, by other back-ends; and the other way."""
    from tests.distributed import deepspeed_setup  # noqa: F401  (loaded once, not in every rank)

    with taken_for_equal(), tempfile.TemporaryDirectory() as place:
        undisturbed = run(1, lambda: train("alone+float32", Path(place, "undisturbed"), None))
        saved = {kind: Path(place, kind) for kind in ("deepspeed-3", "fsdp2+float32")}
        run(4, lambda: train("deepspeed-3", saved["deepspeed-3"], None, until=3))
        run(2, lambda: train("fsdp2+float32", saved["fsdp2+float32"], None, until=3))
        results = {}
        for origin, world, kind in [
            ("deepspeed-3", 2, "deepspeed-3"),
            ("deepspeed-3", 1, "deepspeed-2+offload"),
            ("deepspeed-3", 1, "alone+float32"),
            ("fsdp2+float32", 2, "deepspeed-1+robin"),
        ]:
            name = f"{origin} to {world} of {kind}"
            folder = Path(shutil.copytree(saved[origin], Path(place, name)))
            results[name] = run(world, lambda: train(kind, folder, None))  # noqa: B023
        return {"undisturbed": undisturbed, "results": results}


def zero_kills() -> dict[str, Any]:
    """DeepSpeed in bf16, killed in saves and in a step."""
    from tests.distributed import deepspeed_setup  # noqa: F401  (loaded once, not in every rank)

    return killed(
        "deepspeed-3+bf16",
        [
            Kill(wait=True, rank=1, call="fsync", count=2),
            Kill(wait=False, rank=0, call="rename", count=2),
            Kill(wait=True, rank=1, call="adam", count=7),
        ],
    )


def buffered_kills() -> dict[str, Any]:
    """FSDP2 with buffers of noise, killed in saves and in a step."""
    return killed(
        "fsdp2+buffered",
        [
            Kill(wait=True, rank=1, call="fsync", count=4),
            Kill(wait=False, rank=0, call="rename", count=2),
            Kill(wait=True, rank=1, call="adam", count=2),
        ],
    )


def parted_kills() -> dict[str, Any]:
    """Tensor parallelism, one rank killed in a save and in a step, then both."""
    return killed(
        "tp+parted",
        [
            Kill(wait=True, rank=0, call="rename", count=3),
            Kill(wait=True, rank=1, call="adam", count=2),
            Kill(wait=True, seconds=1.0),
        ],
    )


def meshes() -> dict[str, Any]:
    """Killed on one mesh, continued on another: what was ever seen of each step, and what the ledger counted."""
    with tempfile.TemporaryDirectory() as place:
        undisturbed = run(2, lambda: train("data+parted", Path(place), None))
    found: dict[str, Any] = {"undisturbed": undisturbed}
    for name, world, kind, kill in (
        ("in a backward", 2, "tp", Kill(wait=True, rank=1, call="norm of parts", count=3)),
        ("in a save", 2, "tp", Kill(wait=True, rank=0, call="rename", count=3)),
        ("after a release", 4, "fsdp2", Kill(wait=True, rank=3, call="adam", count=4)),
    ):
        with tempfile.TemporaryDirectory() as place:
            folder, log = Path(place, "run"), Path(place, "log")
            log.touch()
            died = run(world, lambda: train(f"{kind}+parted", folder, log), kill) is None  # noqa: B023
            again = run(world, lambda: train("data+parted", folder, log))  # noqa: B023
            assert died
            assert again is not None
            found[name] = {**again, "seen": len(set(log.read_text().splitlines()))}
    return found


if __name__ == "__main__":
    scenarios = {"worlds": worlds, "recount": recount, "zero_worlds": zero_worlds, "zero_kills": zero_kills}
    scenarios |= {"buffered_kills": buffered_kills, "parted_kills": parted_kills, "meshes": meshes}
    found = kills(int(sys.argv[2])) if sys.argv[1] == "kills" else scenarios[sys.argv[1]]()
    print("RESULT", json.dumps(found), flush=True)
