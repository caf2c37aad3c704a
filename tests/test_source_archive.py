"""The source archive is the whole project: what a reader, a packager and a tester need."""

import re
import subprocess
import sys
import tarfile
from pathlib import Path
from shutil import copytree, ignore_patterns

import dpshard

ROOT = Path(__file__).parents[1]
PARTS = (".ci", "dpshard", "docs", "examples", "tests", "benchmarks")
FILES = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "MANIFEST.in",
    "README.md",
    "constraints.txt",
    "mkdocs.yml",
)
BUILD = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"


def test_it_holds_docs_examples_tests_and_headers(tmp_path):
    source = tmp_path / "source"
    for part in PARTS:
        copytree(ROOT / part, source / part, ignore=ignore_patterns("__pycache__", "*.so"))
    for file in (*FILES, "pyproject.toml"):
        (source / file).write_bytes((ROOT / file).read_bytes())
    built = subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path)], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert built.returncode == 0, built.stderr
    (archive,) = tmp_path.glob("dpshard-*.tar.gz")
    with tarfile.open(archive) as tar:
        held = {name.partition("/")[2] for name in tar.getnames()}
    expected = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    missing = {name for name in expected - held if ".egg-info" not in name}
    assert not missing
    assert "dpshard/kernels/native/tiles.h" in held


def test_the_version_is_the_newest_of_the_changelog():
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    released = re.findall(r"^## \[(\d.*)\] - \d{4}-\d\d-\d\d$", changes, re.MULTILINE)
    assert released[0] == dpshard.__version__
