"""`dpshard doctor` says what is there, what is off, and what to do."""

import json
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from dpshard import __version__
from dpshard.applications.cli import doctor
from dpshard.kernels.native import library


@pytest.fixture
def findings(dpshard, tmp_path):
    """Return the findings by part, as the command writes them."""

    def of(exit_code=0):
        dpshard("doctor", "--json", tmp_path / "doctor.json", exit_code=exit_code)
        return {finding["part"]: finding for finding in json.loads((tmp_path / "doctor.json").read_bytes())}

    library.library.cache_clear()
    yield of
    library.library.cache_clear()


def test_versions_and_all_parts_are_there(findings):
    found = findings()
    assert found["dpshard"]["found"] == __version__
    assert found["torch"]["found"] == version("torch")
    assert {"compiled code", "GPU", "Triton kernels", "threads", "extra hf"} <= found.keys()
    assert all(part["state"] == "on" or part["found"] for part in found.values())


def test_the_table_names_what_to_do(dpshard, monkeypatch):
    monkeypatch.setitem(doctor.EXTRAS, "plots", ("no-such-package", "pictures"))
    monkeypatch.setenv("DPSHARD_TRITON", "0")
    shown = " ".join(dpshard("doctor").stdout.split())
    assert "no-such-package" in shown
    assert "dpshard[plots]" in shown
    assert "DPSHARD_TRITON" in shown


def test_compiled_code_that_is_switched_off_says_so(findings, monkeypatch):
    monkeypatch.setenv("DPSHARD_NATIVE", "0")
    assert findings()["compiled code"]["remedy"] == "unset DPSHARD_NATIVE"


@pytest.mark.parametrize("compiler", [None, "/usr/bin/gcc"])
def test_compiled_code_that_was_not_built_says_why(findings, monkeypatch, compiler):
    monkeypatch.setattr(library, "path", lambda: None)
    monkeypatch.setattr("shutil.which", lambda name: compiler)
    found = findings()["compiled code"]
    assert found["state"] == "off"
    assert ("no C compiler" in found["found"]) == ("install a C compiler" in found["remedy"]) == (compiler is None)


@pytest.mark.filterwarnings("ignore:.*cannot be used")
def test_a_broken_library_is_an_error(findings, monkeypatch, tmp_path):
    (tmp_path / "broken.so").write_bytes(b"no library")
    monkeypatch.setattr(library, "path", lambda: str(tmp_path / "broken.so"))
    assert findings(exit_code=1)["compiled code"]["state"] == "broken"


def test_extras_are_those_of_the_package():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    for extra, (package, _) in doctor.EXTRAS.items():
        assert any(need.startswith(package) for need in project["optional-dependencies"][extra])
