"""`dpshard train`."""

from __future__ import annotations

import hashlib
import io
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dpshard.applications.cli import console, launch
from dpshard.applications.cli.formats import read_yaml
from dpshard.applications.cli.options import described, with_options
from dpshard.applications.cli.run_folder import RunFolder, write_atomically, write_json
from dpshard.applications.cli.settings import MAY_CHANGE, TrainSettings, resolve
from dpshard.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from dpshard import PrivacyEngine
    from dpshard.backends.ranks import Ranks


@with_options
@described("run", resume={"metavar": "RUN"})
def command(
    context: typer.Context,
    config: Path | None = None,
    out: Path | None = None,
    resume: Path | None = None,
    **flags: Any,
) -> None:
    """Train a model with differential privacy, by default a classifier of handwritten digits.

    The run folder holds settings, metrics, checkpoints, plots, and the weights
    (model.pt). Its report has the accuracy and the exact privacy guarantee.

    Ctrl-C saves and stops. --resume continues, also after a crash. Steps that
    are repeated exactly cost nothing more. On other processes they count again,
    and the report says so.
    """
    if resume is not None and out is not None:
        raise ConfigurationError("--resume continues in the run folder: leave --out out.")
    settings, folder = chosen(config, flags, resume)
    if folder is not None and folder.report.exists():
        console.out.print(f"The run has finished already: its report is {folder.report}.")
        return
    in_other_processes(settings, context)
    with on_all_ranks(settings) as (settings, ranks):
        _train(settings, folder, out, ranks)


def chosen(config: Path | None, flags: Mapping[str, Any], run: Path | None) -> tuple[TrainSettings, RunFolder | None]:
    """Return the settings in `config`, or of `run`, changed by `flags`."""
    given = {name: value for name, value in flags.items() if value is not None}
    if run is None:
        return resolve(read_yaml(config) if config else {}, given), None
    if given.keys() - set(MAY_CHANGE) or config:
        raise ConfigurationError(
            f"A run folder has all settings except {' and '.join(MAY_CHANGE)}: leave the other options out."
        )
    folder = RunFolder.open(run)
    if given.get("shard") == "none" or launch.joined():  # torchrun and srun decide the number of ranks
        given = {"nproc": None} | given
    return replace(folder.settings(), **given), folder


def in_other_processes(settings: TrainSettings, context: typer.Context) -> None:
    """Run the same command in ranks, and exit; return if none are asked for."""
    if settings.shard.startswith("deepspeed"):
        from dpshard.applications.cli import sharding

        sharding.require_deepspeed()
    if settings.shard == "none" or launch.joined():
        return
    count = settings.nproc
    if count is None:
        import torch

        count = max(1, torch.cuda.device_count()) if settings.device in ("auto", "cuda") else 1
    raise typer.Exit(launch.start(count, [*context.obj, "--nproc", str(count)]))


@contextmanager
def on_all_ranks(settings: TrainSettings) -> Iterator[tuple[TrainSettings, Ranks]]:
    """Yield the settings with the device, and all ranks."""
    with console.out.status("loading ..."):
        from dpshard.applications.cli import training, world

    device = str(training.pick_device(settings.device))
    with world.joined(device) as ranks:
        if ranks.size > 1 and settings.shard == "none":
            raise ConfigurationError(
                f"{ranks.size} processes are running. Choose how they share the model, for example by --shard fsdp2."
            )
        if settings.nproc not in (None, ranks.size):
            raise ConfigurationError(
                f"nproc={settings.nproc}, but {ranks.size} processes are running: leave --nproc out."
            )
        yield replace(settings, device=device), ranks


def _train(settings: TrainSettings, folder: RunFolder | None, out: Path | None, ranks: Ranks) -> None:
    with console.out.status("loading and calibrating the noise ..."):
        from dpshard.accounting import rounded_up
        from dpshard.applications.cli import final_report, provenance, tables, tasks, training

        def agree(fit: Callable[[], Any]) -> Any:
            return ranks.on_first(fit) if folder is None else tables.Fitted.read(folder.columns)

        samples = tasks.load(settings, agree)
        run = training.Run.prepare(settings, samples, ranks)
        settings = run.settings
        before = run.score(samples.test)
    resumed = folder is not None
    folder = ranks.on_first(lambda: folder or RunFolder.create(out, settings))
    with ExitStack() as stack:
        ranks.on_first(lambda: stack.enter_context(folder.locked()))
        if not resumed and ranks.first:
            if samples.fitted is not None:
                write_json(folder.columns, samples.fitted.plain())
            stack.enter_context(_kept_if_released(folder, run.engine))
        ranks.on_first(lambda: provenance.record(folder, settings, samples, resumed=resumed))
        checkpoints = run.checkpointer(folder)
        if not resumed:
            checkpoints.save()  # a run killed early resumes with the same secret
        elif not checkpoints.load():
            raise CheckpointError(
                f"There is no checkpoint in {folder.checkpoints}: the run was stopped before its first one, or they "
                f"were removed. Start a new run, and add its epsilon to the epsilon that this run may have spent."
            )
        engine = run.engine
        verb = f"Resuming after step {engine.step} of" if resumed else "Training for"
        where = f"{run.device.type}" if ranks.alone else f"{ranks.size} x {run.device.type}, {settings.shard}"
        what = f"{engine.steps} steps on {engine.mechanism.sample_size} samples ({where})"
        console.out.print(f"{verb} {what}: sigma = {engine.noise_multiplier:.6g}, run folder {folder.path}")
        if not run.train(folder, checkpoints, console.out):
            spent = f"step {engine.step} of {engine.steps}, epsilon = {rounded_up(engine.epsilon())} is spent"
            console.out.print(f"Stopped after {spent}. Resume with: dpshard train --resume {folder.path}")
            raise typer.Exit(console.INTERRUPTED)
        with console.out.status("scoring the test split, drawing plots ..."):
            weights, scores = run.sharded.weights(), {"before": before, "after": run.score(samples.test)}
            result = final_report.collect(run, scores)
            ranks.on_first(lambda: _conclude(folder, weights, result))
        final_report.show(console.out, folder, result)


@contextmanager
def _kept_if_released(folder: RunFolder, engine: PrivacyEngine) -> Iterator[None]:
    try:
        yield
    except Exception:
        if engine.step == 0:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


def _conclude(folder: RunFolder, weights: dict[str, Any], result: dict[str, Any]) -> None:
    import torch

    from dpshard.applications.cli import final_report, plots, provenance

    content = io.BytesIO()
    torch.save(weights, content)
    write_atomically(folder.model, content.getvalue())
    provenance.conclude(folder)
    try:
        plots.draw(folder)
    except Exception as error:  # noqa: BLE001 (a missing plot must not cost the report)
        warnings.warn(f"No plot was drawn: {error}", stacklevel=2)
    result["model_sha256"] = hashlib.sha256(content.getbuffer()).hexdigest()
    final_report.write(folder, result)  # last: the report marks a finished run
