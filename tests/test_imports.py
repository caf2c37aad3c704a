"""What `import dpshard` loads: a script that only asks for an epsilon, or prints help, waits for no more than torch."""

import subprocess
import sys

HEAVY = (
    "torch._dynamo", "triton", "dp_accounting", "scipy", "cryptography", "torch.distributed.fsdp", "transformers",
    "matplotlib",
)  # fmt: skip


def test_the_engine_loads_no_compiler_and_no_accounting_before_they_are_needed():
    told = subprocess.run(
        [sys.executable, "-c", "import sys, dpshard.engine; print(*sys.modules)"],
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout.split()  # fmt: skip
    assert "dpshard.engine" in told
    assert not set(HEAVY) & set(told)
