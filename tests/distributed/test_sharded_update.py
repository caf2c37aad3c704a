"""Sharding changes where tensors live, never the update: three noisy Poisson steps equal those of one process.

A case trains twice under one run secret: sharded over W ranks (micro-batches of 4 a rank), and in one process
(micro-batches of 7). Parameters must agree to float64 rounding, with noise on.

Failure modes: 9 (parameters without a gradient get noise); 14 (noise of the sum, whatever the world size);
15 (replicas draw the same noise, shards independent noise: else parameters would differ); 16 (equal K); 17 (one global
draw); 18 (two passes under DDP).
"""

from collections.abc import Iterator

import pytest

from tests.distributed.launch import shared
from tests.grids import covering

TABLE = [
    (1, "fsdp2", ("all-layer:auto", "param-wise:bk")),
    (2, "ddp", ("block-wise:auto", "param-wise:bk", "layer-wise:auto+complex+grid", "all-layer:auto+tracked")),
    (2, "ddp-used", ("all-layer:ghost", "all-layer:auto+adafactor")),
    (2, "zero1", ("layer-wise:auto",)),
    (2, "fsdp2", ("all-layer:auto", "all-layer:ghost", "all-layer:auto+lengths+signsgd")),
    (2, "fsdp2", ("block-wise:auto+checkpoint",)),
    (2, "fsdp2", ("all-layer:auto+wrapper", "block-wise:auto+wrapper")),
    (2, "fsdp2", ("all-layer:auto+selective", "layer-wise:auto+selective", "all-layer:ghost+selective")),
    (2, "fsdp2", ("all-layer:auto+hf+checkpoint+lengths", "layer-wise:auto+hf+checkpoint")),
    (2, "fsdp2", ("layer-wise:auto+complex+grid", "block-wise:ghost+complex+unsynced")),
    (2, "fsdp2", ("all-layer:auto+thawed", "layer-wise:auto+thawed+unsynced", "layer-wise:auto+tracked")),
    (2, "fsdp2-kept", ("layer-wise:auto", "all-layer:ghost")),
    (2, "fsdp2-idle", ("all-layer:auto", "param-wise:auto")),
    (2, "fsdp2-list", ("layer-wise:auto", "all-layer:ghost+hf+checkpoint")),
    (2, "fsdp2-root", ("all-layer:auto", "block-wise:auto")),
    (2, "fsdp2-offload", ("all-layer:auto", "layer-wise:auto")),
    (4, "ddp", ("all-layer:auto",)),
    (4, "fsdp2", ("layer-wise:auto",)),
    (4, "hsdp", ("layer-wise:auto", "param-wise:bk", "all-layer:ghost")),
    (4, "hsdp", ("block-wise:auto+tracked+unsynced",)),
]
SEEN_BY_VERIFICATION = {"checkpoint", "wrapper", "selective", "hf", "complex", "lengths", "thawed"}
"""Options that change what the model computes; the others change what becomes of its gradients."""


def cases() -> Iterator[tuple[int, str, str]]:
    """World size, back-end, case; it is verified if its size, back-end or an option is new to verification."""
    seen: set[object] = set()
    for world_size, backend, line in TABLE:
        for case in line:
            shown = {world_size, backend, *SEEN_BY_VERIFICATION.intersection(case.split("+"))}
            yield world_size, backend, case if shown <= seen else f"{case}+verified"
            seen |= shown


def features(world_size: int, backend: str, case: str) -> set[object]:
    style, *options = case.split("+")
    return {world_size, backend, style, *options}


ITEMS = covering(cases(), features)
found = shared("update_worker.py", ITEMS, lambda world_size, backend, case: (world_size, f"{backend}:{case}"))


@pytest.mark.parametrize(("world_size", "backend", "case"), ITEMS)
def test_the_update_does_not_depend_on_sharding(world_size: int, backend: str, case: str) -> None:
    for result in found(world_size, backend, case):
        assert result["error"] <= 1e-10
        sharded, alone = result["epsilon"]
        assert sharded == alone
        sharded, alone = result["metrics"]
        assert {"loss", "clip_fraction", "gradient_snr"} <= sharded.keys()
        assert sharded == pytest.approx(alone, rel=1e-9)
        sharded, alone = result["thresholds"]
        assert sharded == alone
        moved = max(sharded.values()) != pytest.approx(0.5 / len(sharded) ** 0.5, rel=1e-3)
        assert moved == ("tracked" in case)


COMPILED = [
    pytest.param("fsdp2:all-layer:auto+traced+selective"),
    *(
        pytest.param(f"fsdp2:{case}", marks=pytest.mark.exhaustive)
        for case in ("layer-wise:auto+traced", "layer-wise:auto+compile+verified", "block-wise:auto+traced+checkpoint")
    ),
]
found_compiled = shared("update_worker.py", COMPILED, lambda case: (2, case))


@pytest.mark.parametrize("case", COMPILED)
def test_blocks_may_be_compiled_under_fsdp2(case: str) -> None:
    """One graph for equal blocks, over logical batches of different sizes: nothing is compiled again."""
    for result in found_compiled(case):
        assert result["error"] <= 1e-10
        assert result["compiled"] == 1
