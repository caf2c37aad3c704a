"""The documents keep their word: their Python runs, their links lead somewhere, their table of rules is the registry.

The fenced python blocks of a page run in the order in which they stand, in one namespace, as a reader would run them.
Failure modes: 12 test_python_of_the_page_runs (the token-mean loss of docs/language-models.md is caught).
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
import textwrap
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from benchmarks.cli import app as benchmarks_app
from dpshard import errors
from dpshard.applications.cli import app
from dpshard.rules import COMPOSITES, RULES
from tests.distributed.launch import prints
from tests.grids import chosen

ROOT = Path(__file__).parents[1]
NAMES = (
    *(
        "install",
        "guide",
        "privacy-model",
        "threat-model",
        "audit",
        "architecture",
        "kernels",
        "sharding",
        "sharding-deepspeed",
        "planning",
    ),
    *(
        "model-parallel",
        "accounting",
        "recipes",
        "sources",
        "known-failures",
        "tables",
        "sampling",
        "units",
        "command-line",
        "functions",
        "troubleshooting",
        "language-models",
        "checkpoints",
        "several-models",
    ),
    *("integrations", "torchtitan", "coming-from-opacus", "coming-from-fastdp", "benchmarks"),
)
PAGES = ["README.md", *(f"docs/{name}.md" for name in NAMES)]
START = [f"docs/start/{name}.md" for name in ("table", "images", "language", "own-loop", "several-gpus")]
"""Their blocks run in tests/test_start.py."""
READ_FIRST = ("README.md", "docs/guide.md", "docs/language-models.md", "docs/coming-from-opacus.md")

BLOCK = re.compile(r"^([ ]*)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def python_blocks(page: str) -> list[tuple[int, str]]:
    """Line and source of every python block."""
    text = (ROOT / page).read_text("utf-8")
    return [(text.count("\n", 0, m.start(2)) + 1, textwrap.dedent(m.group(2))) for m in BLOCK.finditer(text)]


@pytest.fixture
def registry() -> Iterator[None]:
    """Takes back what a page registers."""
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("page", chosen(filter(python_blocks, PAGES), *READ_FIRST))
def test_python_of_the_page_runs(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The default back-end of torch.compile calls a C++ compiler, which is not what a page is tested for.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for line, source in python_blocks(page):
        code = compile("\n" * (line - 1) + source, str(ROOT / page), "exec")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(code, namespace)
        promised = re.findall(r"^print\(.*\)\n# (.+)$", source, re.MULTILINE)
        if promised:
            assert capsys.readouterr().out.splitlines()[-len(promised) :] == promised, f"{page}, line {line}"


@pytest.mark.exhaustive
def test_the_pipeline_of_the_page_trains(tmp_path: Path) -> None:
    pages = (ROOT / "docs/model-parallel.md").read_text("utf-8").partition("\n## Pipelines\n")[2]
    script = tmp_path / "pipeline.py"
    script.write_text(pages.partition("```py\n")[2].partition("```\n")[0], "utf-8")
    for printed in prints([sys.executable, script], 2):
        found = re.search(r"loss ([\d.]+)\nepsilon = 3\.0000", printed)
        assert found, printed
        assert float(found.group(1)) < 1.0  # log 4 = 1.39 by chance


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_page_are_understood(page: str) -> None:
    """`dpshard ...` in shell blocks: every command, option and value exists. Nothing is run."""
    commands: Any = typer.main.get_command(app)
    blocks = re.findall(r"^```sh\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
    for line in "".join(blocks).replace("\\\n", " ").splitlines():
        program, *arguments = shlex.split(line, comments=True)
        if program == "dpshard":
            name, *options = arguments
            commands.commands[name].make_context(name, options)  # raises for what it does not know
        elif program in ("python", "torchrun", "deepspeed"):
            ranks = ("--nproc_per_node=", "--num_gpus=")
            first, *rest = [argument for argument in arguments if not argument.startswith(ranks)]
            file = ROOT / rest.pop(0).replace(".", "/") / "__main__.py" if first == "-m" else ROOT / first
            script = file.read_text("utf-8")
            assert all(f'"{option}"' in script for option in rest if option.startswith("--"))
        else:
            assert program == "make"
            assert f"\n{arguments[0]}:" in (ROOT / "Makefile").read_text("utf-8")


def test_the_readme_names_a_command_for_each_claim() -> None:
    """Nothing is run: paths, commands, options and values exist; the models are counted."""
    text = (ROOT / "README.md").read_text("utf-8")
    lines = re.findall(r"\| `([^`|]+)` \|$", text, re.MULTILINE)
    assert len(lines) == len(re.findall(r"^\| .*\*\*", text, re.MULTILINE)) > 10
    ours: Any = typer.main.get_command(app)
    theirs: Any = typer.main.get_command(benchmarks_app)
    for line in lines:
        program, *arguments = shlex.split(line)
        if program == "pytest":
            assert all((ROOT / path).exists() for path in arguments), line
        else:
            commands = ours if program == "dpshard" else theirs
            name, *options = arguments if program == "dpshard" else arguments[2:]
            commands.commands[name].make_context(name, options)  # raises for unknown ones
    rows = re.findall(r"^\| `", (ROOT / "docs/models.md").read_text("utf-8"), re.MULTILINE)
    assert f"[{len(rows)} models](docs/models.md)" in text


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES + START)
def test_links_within_the_repository_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(file), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES + START)
def test_files_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    for name in set(re.findall(r"`((?:dpshard|tests|docs)/[\w/.]+)`", text)):
        assert (ROOT / name).exists(), f"{page}: {name}"
    for name in set(re.findall(r"`(rules/\w+\.py)`", text)):
        assert (ROOT / "dpshard" / name).exists(), f"{page}: {name}"


def claims_of(file: Path) -> dict[str, set[str]]:
    """The failure modes that the docstring of a test file claims, and the tests that it names beside each."""
    claim = re.search(r"Failure modes?:? (.*)", ast.get_docstring(ast.parse(file.read_text("utf-8"))) or "", re.DOTALL)
    found: dict[str, set[str]] = {}
    for part in re.split(r";\s", claim.group(1)) if claim else ():
        numbers = re.match(r"\d+(?:(?:, | and )\d+)*", part)
        for number in re.findall(r"\d+", numbers.group()) if numbers else ():
            found.setdefault(number, set()).update(re.findall(r"\btest_\w+", part))
    return found


def failure_modes() -> dict[str, set[str]]:
    """The test files that the page names for each failure mode."""
    table = (ROOT / "docs/privacy-model.md").read_text("utf-8").partition("| the fault |")[2]
    rows = re.findall(r"^\| (\d+) \|.* \| (.*) \|$", table, re.MULTILINE)
    return {number: set(re.findall(r"`(tests/[\w/]+\.py)`", tests)) for number, tests in rows}


def test_every_failure_mode_has_tests_that_claim_it() -> None:
    modes = failure_modes()
    assert list(modes) == [str(number) for number in range(1, 27)]
    for number, files in modes.items():
        assert files, number
        for name in files:
            assert number in claims_of(ROOT / name), f"failure mode {number}: {name}"


def test_what_tests_claim_exists() -> None:
    files, modes = sorted((ROOT / "tests").rglob("test_*.py")), failure_modes().keys()
    for file in files:
        known = {
            *re.findall(r"^def (test_\w+)", file.read_text("utf-8"), re.MULTILINE),
            *(other.stem for other in files),
        }
        claims = claims_of(file)
        assert claims.keys() <= modes, file
        missing = set().union(*claims.values()) - known
        assert not missing, (file, missing)


def spoken(function: Any) -> str:
    """What a reader calls a function: `add` for Tensor.add_, `+`, and `+=`."""
    name = re.sub(r"^[ri](?=(add|sub|mul|pow|div|truediv|matmul)$)", "", function.__name__.strip("_"))
    return "div" if name == "truediv" else name


def test_table_of_rules_is_the_registry() -> None:
    text = (ROOT / "docs/functions.md").read_text("utf-8")
    table = text.partition("<!-- rules -->")[2].partition("<!-- /rules -->")[0]
    shown: dict[str, set[str]] = {}
    for file, functions in re.findall(r"^\| `rules/(\w+)\.py` \| ([^|]+) \|", table, re.MULTILINE):
        shown.setdefault(file, set()).update(re.findall(r"`(\w+)`", functions))
    registered: dict[str, set[str]] = {}
    for function, rule in (RULES | COMPOSITES).items():
        if rule.__module__.startswith("dpshard"):  # not what is torch's own code, looked into
            registered.setdefault(rule.__module__.rpartition(".")[2], set()).add(spoken(function))
    assert shown == registered


def test_every_error_class_is_in_the_table_of_troubleshooting() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
    shown = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    known = {name for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, Exception)}
    assert shown == known - {"DpshardError"}
