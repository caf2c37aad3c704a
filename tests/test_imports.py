"""What `import dpshard` loads: a script that only asks for an epsilon, or prints help, waits for no more than torch."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

HEAVY = (
    "torch._dynamo", "triton", "dp_accounting", "scipy", "cryptography", "torch.distributed.fsdp", "transformers",
    "matplotlib",
)  # fmt: skip

COUNTING = """
import sys
calls = 0
def note(frame, event, _):
    global calls
    calls += event == "call"
sys.setprofile(note)
import torch
before, of_torch = set(sys.modules), calls
import dpshard.engine
sys.setprofile(None)
print(of_torch, calls - of_torch)
print(*sys.modules)
print(*(set(sys.modules) - before))
"""


def test_the_engine_loads_no_compiler_and_no_accounting_before_they_are_needed():
    """Calls stand for time: at 0.095 of torch's calls, the CPU time is 1.17 of torch's, both from cached bytecode."""
    told = subprocess.run(
        [sys.executable, "-c", COUNTING], capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()
    of_torch, ours = map(int, told[0].split())
    assert "dpshard.engine" in told[1].split()
    assert not set(HEAVY) & set(told[1].split())
    assert ours < 0.12 * of_torch
    assert sum(not name.startswith("dpshard") for name in told[2].split()) <= 25


def test_what_benchmarks_and_examples_import_is_there():
    """They run in few tests, so a name that has moved would show late."""
    missing = []
    for path in (path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("dpshard"):
                module = importlib.import_module(node.module)
                names = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                found = [f"{node.module}.{name}" for name in names]
                missing += [f"{path.name}:{node.lineno} {name}" for name in found if not importlib.util.find_spec(name)]
    assert not missing
