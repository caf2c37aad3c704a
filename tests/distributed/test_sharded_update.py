"""Sharding changes where tensors live, never the update: four noisy Poisson steps equal those of one process.

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

STYLES = ("all-layer:auto", "layer-wise:auto", "block-wise:auto", "param-wise:bk", "all-layer:ghost")
ONE_PASS = STYLES[:4]
TABLE = [
    (1, "fsdp2", STYLES),
    (2, "ddp", ONE_PASS),
    (2, "ddp", ("all-layer:auto+complex", "layer-wise:auto+complex+grid")),
    (2, "ddp", ("all-layer:auto+tracked", "all-layer:auto+grid")),
    (2, "ddp-used", ("all-layer:auto", "all-layer:ghost", "all-layer:auto+adafactor")),
    (2, "zero1", ("all-layer:auto", "layer-wise:auto")),
    (2, "fsdp2", (*STYLES, "all-layer:auto+unsynced", "layer-wise:auto+unsynced", "all-layer:auto+lengths")),
    (2, "fsdp2", tuple(f"{style}:auto+checkpoint" for style in ("all-layer", "layer-wise", "block-wise"))),
    (2, "fsdp2", ("all-layer:auto+wrapper", "block-wise:auto+wrapper", "all-layer:auto+signsgd")),
    (2, "fsdp2", ("all-layer:auto+selective", "layer-wise:auto+selective", "all-layer:ghost+selective")),
    (2, "fsdp2", ("all-layer:auto+hf+checkpoint", "layer-wise:auto+hf+checkpoint", "all-layer:auto+hf+lengths")),
    (2, "fsdp2", ("all-layer:auto+complex", "layer-wise:auto+complex+grid", "block-wise:ghost+complex+unsynced")),
    (2, "fsdp2", ("all-layer:auto+thawed", "layer-wise:auto+thawed+unsynced")),
    (2, "fsdp2", ("layer-wise:auto+tracked", "layer-wise:auto+grid")),
    (2, "fsdp2-kept", ("all-layer:auto", "layer-wise:auto", "all-layer:ghost")),
    (2, "fsdp2-idle", ("all-layer:auto", "param-wise:auto")),
    (2, "fsdp2-list", ("layer-wise:auto", "all-layer:ghost+hf+checkpoint")),
    (2, "fsdp2-root", ("all-layer:auto", "block-wise:auto")),
    (2, "fsdp2-offload", ("all-layer:auto", "layer-wise:auto")),
    (4, "ddp", ("all-layer:auto",)),
    (4, "fsdp2", ("all-layer:auto", "layer-wise:auto")),
    (4, "hsdp", ("all-layer:auto+tracked", "block-wise:auto+tracked")),
    (4, "hsdp", (*STYLES, "all-layer:auto+checkpoint", "block-wise:auto+unsynced")),
]


def cases() -> Iterator[tuple[int, str, str]]:
    """World size, back-end, case; of the cases of a line that have the same options, the first is verified."""
    for world_size, backend, line in TABLE:
        verified = set()
        for case in line:
            options = case.partition("+")[2]
            yield world_size, backend, case if options in verified else f"{case}+verified"
            verified.add(options)


def features(world_size: int, backend: str, case: str) -> set[object]:
    style, *options = case.split("+")
    styled = (backend, style) if backend in ("ddp", "fsdp2") else style
    return {(world_size, backend), (backend, *options[-1:]) if "verified" in options else style, styled, *options}


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
    pytest.param("fsdp2:layer-wise:auto+traced"),
    pytest.param("fsdp2:all-layer:auto+traced+selective"),
    *(
        pytest.param(f"fsdp2:{case}+verified", marks=pytest.mark.exhaustive)
        for case in ("layer-wise:auto+compile", "all-layer:auto+compile", "block-wise:auto+compile+checkpoint")
    ),
]
found_compiled = shared("update_worker.py", COMPILED, lambda case: (2, case))


@pytest.mark.parametrize("case", COMPILED)
def test_blocks_may_be_compiled_under_fsdp2(case: str) -> None:
    """One graph for equal blocks, over logical batches of different sizes: nothing is compiled again."""
    for result in found_compiled(case):
        assert result["error"] <= 1e-10
        assert result["compiled"] == 1
