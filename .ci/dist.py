"""Build what a release uploads, into dist/, and try each file in a clean environment: `make dist`.

- the source archive;
- a wheel with compiled C for this platform, for every Python from 3.11 on (the C code uses nothing of Python);
- a wheel without compiled C for all other platforms, where numpy and torch do its work.

pip prefers the wheel of the platform. Wheels of other platforms are built by this script there. auditwheel gives the
Linux wheel its manylinux tag; without auditwheel it keeps the tag linux_*, which an index does not take.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
TORCH = "torch==2.13.0"
EXTENSION = re.compile(r"^\[\[tool\.setuptools\.ext-modules\]\]\n.*?(?=^\[)", re.MULTILINE | re.DOTALL)
STEP = """
import torch, dpshard
from dpshard.applications.cli.formats import HELP
from dpshard.kernels import native
assert HELP["train"]  # package data is there
model = torch.nn.Linear(3, 2)
engine = dpshard.PrivacyEngine(model, batch_size=8, sample_size=32, steps=1, noise_multiplier=1.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for logical_batch in engine.batches(torch.utils.data.TensorDataset(torch.randn(32, 3)), 8):
    for (x,) in logical_batch:
        model(x).square().sum(1).mean().backward()
    optimizer.step()
print(dpshard.__version__, "compiled" if native.is_built() else "without compiled code", engine.statement())
"""


def main() -> None:
    """Build, try, and say what there is."""
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        archive = source_archive(work)
        wheels = [compiled(unpacked(archive, work / "compiled")), pure(unpacked(archive, work / "pure"))]
        check(archive, [wheel for wheel in wheels if wheel is not None], work)
    for file in sorted(DIST.iterdir()):
        say(f"{file.name}: {file.stat().st_size:,} bytes, tried")
    say(f"not built: wheels with compiled C for other platforms than {sysconfig.get_platform()}")


def source_archive(work: Path) -> Path:
    """Build the archive from the files that git knows, so that no leftover of a working tree enters it."""
    clean = work / "clean"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        (clean / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, clean / name)
    build(clean, "sdist")
    (archive,) = DIST.glob("*.tar.gz")
    return archive


def unpacked(archive: Path, target: Path) -> Path:
    """Return the folder of an unpacked archive."""
    with tarfile.open(archive) as tar:
        tar.extractall(target, filter="data")
    (folder,) = target.iterdir()
    return folder


def compiled(source: Path) -> Path | None:
    """Build the wheel with compiled C; None without a compiler."""
    project = source / "pyproject.toml"
    text = EXTENSION.sub(
        lambda found: found.group().rstrip() + "\npy-limited-api = true\n\n", project.read_text("utf-8")
    )
    project.write_text(f'{text}\n[tool.distutils.bdist_wheel]\npy_limited_api = "cp311"\n', "utf-8")
    wheel = build(source, "wheel")
    names = subprocess.run([sys.executable, "-m", "zipfile", "-l", wheel], capture_output=True, text=True, check=True)
    if "_native.abi3.so" not in names.stdout:
        say("not built: the wheel with compiled C, for lack of a C compiler")
        wheel.unlink()
        return None
    if shutil.which("auditwheel", path=environment()["PATH"]) is None:
        say("auditwheel is not installed: the wheel keeps the tag linux_*, which an index does not take")
        return wheel
    run("auditwheel", "repair", "--wheel-dir", str(DIST), str(wheel))
    wheel.unlink()
    (repaired,) = DIST.glob("*.whl")
    return repaired


def pure(source: Path) -> Path:
    """Build the wheel without compiled C."""
    project = source / "pyproject.toml"
    project.write_text(EXTENSION.sub("", project.read_text("utf-8")), "utf-8")
    wheel = build(source, "wheel")
    if not wheel.name.endswith("-py3-none-any.whl"):
        raise SystemExit(f"{wheel.name} is no wheel for every platform")
    return wheel


def build(source: Path, kind: str) -> Path:
    """Build an "sdist" or a "wheel" of `source` into DIST, and return it."""
    before = set(DIST.iterdir())
    run(sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(DIST), str(source))
    (made,) = set(DIST.iterdir()) - before
    return made


def check(archive: Path, wheels: list[Path], work: Path) -> None:
    """Import, `dpshard doctor` and a training step of each file, in an environment with torch and its dependencies."""
    clean = Path(os.environ.get("DIST_VENV", work / "venv"))
    python = str(clean / "bin/python")
    if not clean.exists():
        venv.create(clean, with_pip=True)
    pip = (python, "-m", "pip", "install", "-q", "--no-warn-script-location")
    run(*pip, TORCH)
    run(*pip, "setuptools>=77", str(wheels[-1]))  # with the dependencies
    for file in (*wheels, archive):
        run(*pip, "--force-reinstall", "--no-deps", "--no-build-isolation", "--no-cache-dir", str(file))
        shown = run(python, "-W", "ignore", "-c", STEP, cwd=work)
        code = "without compiled code" if file.name.endswith("-any.whl") else "compiled"
        if f" {code} epsilon = " not in shown:
            raise SystemExit(f"{file.name}: {shown}")
        run(str(clean / "bin/dpshard"), "doctor", cwd=work)
        say(f"{file.name}: {shown.strip()}")


def environment() -> dict[str, str]:
    """Return variables with the programs of this Python first, and without this tree on the path of modules."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PATH": path}


def run(*command: str, cwd: Path | None = None) -> str:
    """Run a program and return what it prints; end with its messages if it fails."""
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
