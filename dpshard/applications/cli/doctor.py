"""`dpshard doctor`."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from dpshard import __version__
from dpshard.applications.cli import console
from dpshard.applications.cli.run_folder import write_json

EXTRAS: Mapping[str, tuple[str, str]] = {
    "plots": ("matplotlib", "plots of runs, accounts and plans"),
    "train": ("scikit-learn", "the digits of dpshard train"),
    "pdf": ("weasyprint", "PDF of dpshard report, unless there is a browser"),
    "hf": ("transformers", "Hugging Face models and data"),
    "lightning": ("lightning", "Lightning's callback"),
    "deepspeed": ("deepspeed", "ZeRO by DeepSpeed"),
}


class State(StrEnum):
    """State of a part."""

    ON = "on"
    OFF = "off"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """A part."""

    part: str
    state: State
    found: str
    remedy: str = ""


ON, OFF, BROKEN = State
COLOURS = {ON: "green", OFF: "yellow", BROKEN: "bold red"}
REBUILD = "pip install --force-reinstall --no-deps --no-cache-dir dpshard"


def command(as_json: console.JsonFile = None) -> None:
    """Show versions, compiled code, GPU, threads and extras: what is on, what is off, why, and what to do.

    Exits with code 1 if an installed part cannot be used.
    """
    with console.err.status("looking ..."):
        findings = [*_versions(), _compiled_code(), _gpu(), _triton(), _threads()]
        findings += [_extra(extra, *facts) for extra, facts in EXTRAS.items()]
    _print(findings)
    if as_json is not None:
        write_json(as_json, [asdict(finding) for finding in findings], public=True)
    if any(finding.state is BROKEN for finding in findings):
        raise typer.Exit(1)


def _versions() -> list[Finding]:
    found = {"dpshard": __version__, "python": f"{platform.python_version()} ({sys.platform}, {platform.machine()})"}
    found |= {package: version(package) for package in ("torch", "numpy", "dp-accounting")}
    return [Finding(part, ON, text) for part, text in found.items()]


def _compiled_code() -> Finding:
    from dpshard.kernels.native import library

    part, instead = "compiled code", "numpy and torch replace it, slower"
    if os.environ.get("DPSHARD_NATIVE") == "0":
        return Finding(part, OFF, f"DPSHARD_NATIVE=0: {instead}", "unset DPSHARD_NATIVE")
    if library.path() is not None:
        if library.is_built():
            return Finding(part, ON, "noise, norms and sums on CPUs are made by C")
        found = "the library was built, but cannot be used: see the warning above"
        return Finding(part, BROKEN, found, f"install dpshard again: {REBUILD}")
    compiler = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if compiler:
        return Finding(part, OFF, f"not built; there is {compiler} now; {instead}", REBUILD)
    found = f"not built: no C compiler (cc, gcc, clang) on PATH; {instead}"
    return Finding(part, OFF, found, f"install a C compiler, such as gcc, and Python's headers; then {REBUILD}")


def _gpu() -> Finding:
    import torch

    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return Finding("GPU", ON, f"{names} (CUDA {torch.version.cuda})")
    if torch.version.cuda is None and torch.version.hip is None:
        remedy = "for a GPU, install a torch for it: https://pytorch.org/get-started"
        return Finding("GPU", OFF, "this torch is built for CPUs only", remedy)
    remedy = "for a GPU, check its driver with nvidia-smi, and CUDA_VISIBLE_DEVICES"
    return Finding("GPU", OFF, f"torch is built for CUDA {torch.version.cuda} and finds no GPU", remedy)


def _triton() -> Finding:
    import torch

    from dpshard.kernels.triton import dispatch

    part, installed = "Triton kernels", _installed("triton")
    if os.environ.get("DPSHARD_TRITON") == "0":
        return Finding(part, OFF, "DPSHARD_TRITON=0: torch does their work", "unset DPSHARD_TRITON")
    if not torch.cuda.is_available():
        return Finding(part, OFF, f"they need a GPU (triton: {installed or 'not installed'})")
    if installed is None:
        return Finding(part, OFF, "triton is not installed", "pip install 'dpshard[triton]'")
    if dispatch.run_on(torch.device("cuda")):
        return Finding(part, ON, f"triton {installed}")
    return Finding(part, BROKEN, f"triton {installed} is not used here: see the warning above", "install a C compiler")


def _threads() -> Finding:
    import torch

    used = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    remedy = ""
    if used > cores:
        remedy = f"more threads than cores are slow: OMP_NUM_THREADS={cores}"
    elif used == 1 < cores and os.environ.get("OMP_NUM_THREADS") == "1":
        remedy = "OMP_NUM_THREADS=1 is set; unset it to use all cores"
    return Finding("threads", ON, f"torch uses {used} of {cores} cores", remedy)


def _extra(extra: str, package: str, purpose: str) -> Finding:
    if installed := _installed(package):
        return Finding(f"extra {extra}", ON, f"{package} {installed}")
    found = f"{package} is not installed; needed for {purpose}"
    return Finding(f"extra {extra}", OFF, found, f"pip install 'dpshard[{extra}]'")


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _print(findings: list[Finding]) -> None:
    table = Table("part", "", "found", "what to do", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    for finding in findings:
        state = f"[{COLOURS[finding.state]}]{finding.state}[/]"
        table.add_row(finding.part, state, escape(finding.found), escape(finding.remedy))
    console.out.print(table)
