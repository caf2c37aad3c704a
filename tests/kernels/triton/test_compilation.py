"""Every kernel compiles to machine code for its GPUs, without one."""

import os
import re
from importlib.util import find_spec

import pytest

if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET"):
    pytest.skip("pip install dpshard[triton]; Triton's interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from dpshard.kernels.triton import digest, gaussian, gram, product, rows
from tests.grids import covering

LEAST_SHARED_MEMORY = 99 * 1024
"""Bytes per program on GPUs of compute capability 8.6, 8.9 and 12.0; others have more."""

POINTERS = {
    **dict.fromkeys(
        ("products", "scales", "gradients", "squares", "total", "factors", "weights", "x", "bounds"), "*fp32"
    ),
    **dict.fromkeys(("owners", "column_weights"), "*i32"),
    **dict.fromkeys(("streams", "row_weights", "lanes", "places", "stretches"), "*i64"),
    **dict.fromkeys(("std", "divisor", "hidden_rows", "hidden_cols", "hidden_sum", "floor", "root"), "fp32"),
    **dict.fromkeys(("rows_b", "cols_b", "x_u", "x_b", "start", "n"), "i64"),  # the largest: tensors of 2**31 elements
}
KERNELS = [
    (gram._ghost_norm_sq, {"TILE": 16, "STEP": 128, "CHUNK": 1024}, 4),
    (gram._ghost_norm_sq, {"TILE": 32, "STEP": 128, "CHUNK": 1024}, 4),
    (gram._ghost_norm_sq, {"TILE": 64, "STEP": 64, "CHUNK": 1024}, 4),
    (gram._ghost_norm_sq, {"TILE": 128, "STEP": 32, "CHUNK": 1024}, 8),
    (gram._bounded, {"STEP": 1024}, 4),
    (product._squares, {"KEEP": False, "R_TILE": 64, "C_TILE": 16, "STEP": 32}, 4),
    (product._squares, {"KEEP": True, "R_TILE": 128, "C_TILE": 128, "STEP": 32}, 8),
    (product._weighted_sum, {"R_TILE": 128, "C_TILE": 128, "STEP": 32}, 8),
    (rows._row_norm_sq, {"STEP": rows._STEP}, 4),
    (rows._weighted_rows, {"SAMPLES": rows._SAMPLES, "ELEMENTS": rows._ELEMENTS}, 4),
    (gaussian._release, {"BLOCK": 2**20, "HALF": 512}, 4),
    (digest._add_digests, {"WIDTH": 4096, "TILE": digest._TILE}, 4),
]


TARGETS = [(80, "bf16"), (90, "bf16"), (100, "bf16"), (120, "fp16")]


@pytest.mark.parametrize(
    ("capability", "dtype", "place"),
    covering(
        ((*target, place) for target in TARGETS for place in range(len(KERNELS))),
        lambda capability, _, place: {place} if capability == 90 else (),
    ),
)
def test_kernels_compile_and_fit(tmp_path, monkeypatch, capability, dtype, place):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {**POINTERS, "rows": f"*{dtype}", "cols": f"*{dtype}"}
    kernel, sizes, warps = KERNELS[place]
    constants = {**sizes, **{name: 1 for name in ("rows_r", "cols_c") if name in kernel.arg_names}}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    pointers = [(i,) for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*")]
    source = ASTSource(kernel, signature, constants, {at: [["tt.divisibility", 16]] for at in pointers})
    compiled = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": 3})
    assert compiled.metadata.shared <= LEAST_SHARED_MEMORY
    if "rows" in signature:  # tensor cores, in half precision or better
        assert re.search(r"mma\.sync|wgmma\.mma|tcgen05\.mma", compiled.asm["ptx"])
        assert "tf32" not in compiled.asm["ptx"]
