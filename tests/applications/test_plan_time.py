"""The planner's times: the model of a collective, overlap, whole runs, budgets, and parallel models."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dpshard.applications.planner import Clipping, Estimate, Plan, Setup, Transformer
from dpshard.applications.planner.counts import PARTS
from dpshard.applications.planner.frontier import Means, frontier, parse_means
from dpshard.applications.planner.hardware import Hardware
from dpshard.applications.planner.run_cost import Run, best_run_cost, run_cost
from dpshard.applications.planner.simulation import simulated
from dpshard.applications.planner.timeline import Event, parallel_share, replay, scaled, spread
from dpshard.errors import ConfigurationError

# A product of FLOP takes a second, and a gather of BYTES over two ranks a second within a node, and 10 between nodes.
HARDWARE = Hardware(gpu="h100", mfu=1.0, intra=450, inter=45, latency=0.0)
FLOP, BYTES = 989 * 10**12, 900 * 10**9
GATHER = Event("forward", kind="all-gather", nbytes=BYTES, ranks=2)
USE, PRODUCT = Event("forward", kind="use"), Event("forward", FLOP)


def test_a_ring_sends_all_but_ones_own_part_and_an_all_reduce_twice_that() -> None:
    slow = replace(HARDWARE, latency=0.5)
    assert slow.collective_seconds("all-gather", BYTES, 4, within_node=True) == pytest.approx(0.5 * 2 + 3 / 4 * 2)
    assert slow.collective_seconds("all-reduce", BYTES, 4, within_node=False) == pytest.approx(2 * (1 + 3 / 4 * 20))
    assert slow.collective_seconds("all-gather", BYTES, 1, within_node=True) == 0.0


def test_a_unit_is_gathered_while_the_one_before_it_computes() -> None:
    times = replay([GATHER, USE, PRODUCT, GATHER, USE, PRODUCT, GATHER, USE, PRODUCT], HARDWARE, "bf16")
    assert times.phases["forward"] == pytest.approx(1 + 3)  # the first gather, and three products
    assert (times.computing, times.sending) == (pytest.approx(3), pytest.approx(3))


def test_a_network_that_is_slower_than_the_products_decides() -> None:
    far = replace(GATHER, within_node=False)
    times = replay([far, USE, PRODUCT, far, USE, PRODUCT, far, USE, PRODUCT], HARDWARE, "bf16")
    assert times.phases["forward"] == pytest.approx(3 * 10 + 1)


def test_sums_that_come_late_are_waited_for() -> None:
    """In all-layer clipping the network idles until the last norm; then all reductions come at once."""
    product, reduce = Event("backward", FLOP), Event("backward", kind="reduce-scatter", nbytes=BYTES, ranks=2)
    early = replay([product, reduce, product, reduce, product, reduce], HARDWARE, "bf16")
    late = replay([product, product, product, reduce, reduce, reduce], HARDWARE, "bf16")
    assert early.phases["update"] == pytest.approx(1)
    assert late.phases["update"] == pytest.approx(3)
    assert early.sending == late.sending == pytest.approx(3)


def test_products_wait_for_collectives_in_the_middle_of_a_layer() -> None:
    within = replace(GATHER, waits=True)
    times = replay([PRODUCT, within, PRODUCT], HARDWARE, "bf16", update_bytes=3350 * 10**9)
    assert times.phases == {"forward": pytest.approx(3), "update": pytest.approx(1)}


def test_phases_that_micro_batches_repeat_add_up() -> None:
    backward = replace(PRODUCT, phase="backward", flops=2 * FLOP)
    times = replay([PRODUCT, backward] * 3, HARDWARE, "bf16", update_bytes=3350 * 10**9)
    assert times.phases == {"forward": pytest.approx(3), "backward": pytest.approx(6), "update": pytest.approx(1)}


def test_more_samples_multiply_the_products_and_more_ranks_the_network() -> None:
    assert [e.flops for e in scaled([PRODUCT, GATHER], 2.5)] == [2.5 * FLOP, 0]
    far = replace(GATHER, within_node=False)
    assert [e.ranks for e in spread([PRODUCT, GATHER, far], 2, 64)] == [1, 2, 64]


def test_amdahls_share_is_found_again() -> None:
    speeds = [(n, 7 / ((1 - 0.93) + 0.93 / n)) for n in (1, 2, 4, 16)]
    assert parallel_share(speeds) == pytest.approx(0.93)


def test_poisson_batches_need_a_second_round_half_of_the_time() -> None:
    """4,096 samples on 256 ranks of 16 rows: one round holds the mean, so half of the batches need two."""
    run = Run(batch_size=4096, sample_size=10**6, steps=10, target_delta=1e-9, noise_multiplier=1.0)
    assert run.micro_batches(256 * 16) == pytest.approx(1.5, abs=0.01)
    assert run.micro_batches(256 * 18) == pytest.approx(1.0, abs=1e-6)  # 8 standard deviations more


def a_plan(largest: int | None = None) -> Plan:
    """16 samples a rank compute one second, on 256 ranks."""
    events = (PRODUCT,)
    estimate = Estimate(None, FLOP, {}, dict.fromkeys(PARTS, 0), largest, events, tuple(scaled(events, 2)))
    return Plan(Setup(model="gpt-100b", ranks=256), 16, 10**11, None, (estimate,), shard_elements=0, positions=2048)


def test_the_cheapest_micro_batch_wastes_no_round() -> None:
    plan = a_plan(largest=32)
    run = Run(batch_size=4096, sample_size=10**6, steps=3600, target_delta=1e-9, noise_multiplier=1.0)
    sixteen = run_cost(plan, plan.estimates[0], run, HARDWARE, 16)
    assert sixteen.step_seconds == pytest.approx(1.5, abs=0.01)
    assert sixteen.padding == pytest.approx(1 / 3, abs=0.01)
    assert sixteen.gpu_hours == pytest.approx(1.5 * 256, rel=0.01)
    best = best_run_cost(plan, plan.estimates[0], run, HARDWARE)
    assert best is not None
    assert best.gpu_hours < 1.1 * 256
    assert best.gpu_hours == min(
        run_cost(plan, plan.estimates[0], run, HARDWARE, size).gpu_hours for size in range(1, 18)
    )
    assert best_run_cost(a_plan(largest=0), a_plan(largest=0).estimates[0], run, HARDWARE) is None


def test_speed_counts_tokens_of_all_data_ranks_a_gpu() -> None:
    plan = a_plan(largest=32)
    assert plan.rate(plan.estimates[0], HARDWARE) == pytest.approx(16 * 2048)
    assert plan.rate(plan.estimates[0], HARDWARE, 32) == pytest.approx(16 * 2048)
    two = replace(plan, setup=replace(plan.setup, tp=2))
    assert two.rate(two.estimates[0], HARDWARE) == pytest.approx(16 * 2048 / 2)


TINY = Transformer(width=64, layers=2, heads=4, vocabulary=96, seq=16)
WHOLE = Setup(model=TINY, ranks=16, precision="fp32")


@pytest.fixture(scope="module")
def products() -> dict[tuple[str, bool], int]:
    """FLOPs of a rank by (parallelism, private)."""
    found = {}
    for name, setup in {"none": WHOLE, "tp": replace(WHOLE, tp=4), "cp": replace(WHOLE, cp=4)}.items():
        with simulated(setup) as simulation:
            found[name, False] = simulation.count(None, 4).flops
            counts = simulation.count(Clipping("layer-wise"), 4)
            found[name, True] = counts.flops
            within = [e for e in counts.events if e.waits and e.phase == "forward"]
            # A block gathers its input for attention and MLP, and scatters both outputs; or gathers keys and values.
            kinds = [e.kind for e in within]
            if name == "tp":
                assert kinds.count("all-gather") == 2 * TINY.layers + 1  # and the head's input
                assert kinds.count("reduce-scatter") == 2 * TINY.layers + 2  # and the two tables' outputs
            elif name == "cp":
                assert kinds == ["all-gather"] * 2 * TINY.layers
                assert {e.nbytes for e in within} == {4 * 4 * TINY.seq * TINY.width}
    return found


@pytest.mark.exhaustive
def test_a_model_in_parts_does_its_part_of_the_work(products: dict[tuple[str, bool], int]) -> None:
    assert products["tp", False] == products["none", False] // 4
    assert products["cp", False] == products["none", False] // 4
    for name in ("tp", "cp"):
        assert products[name, False] < products[name, True] < products["none", True] / 3


def test_meshes_that_the_engine_does_not_train_are_refused() -> None:
    for changes, message in (
        ({"tp": 3}, "cannot hold several models"),
        ({"tp": 16}, "cannot hold several models"),
        ({"tp": 2, "shard": "ddp"}, "planned with fsdp2"),
        ({"tp": 2, "cp": 2}, "not planned"),
        ({"tp": 2, "model": replace(TINY, tied=True)}, "gpt-100b"),
        ({"tp": 8, "ranks": 64}, "4 heads"),
    ):
        with pytest.raises(ConfigurationError, match=message), simulated(replace(WHOLE, **changes)):
            pass
        assert not dist.is_initialized()


def test_a_collective_without_a_count_is_an_error() -> None:
    with simulated(replace(WHOLE, shard="ddp")) as simulation, simulation.fake, simulation.meter:
        x, y = torch.zeros(16), torch.zeros(16)
        with pytest.raises(ConfigurationError, match="alltoall"):
            dist.all_to_all_single(y, x)


def test_hardware_and_budgets_are_checked() -> None:
    for changes in ({"gpu": "v100"}, {"mfu": 1.2}, {"inter": 0.0}, {"latency": -1.0}, {"node": 0}):
        with pytest.raises(ConfigurationError):
            replace(HARDWARE, **changes)  # type: ignore[arg-type]
    for text in (
        "epsilon=2",
        "epsilon=2,delta=1e-10,gpu-hours=ten,dataset=1e9",
        "",
        "epsilon=2,delta=2,gpu-hours=1,dataset=9",
    ):
        with pytest.raises(ConfigurationError):
            parse_means(text)


@pytest.mark.exhaustive
def test_the_budget_of_vaultgemma_buys_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinha et al. 2025: 1.04e9 parameters, 517,989 of 9.09e9 sequences of 1,024 tokens, 100,000 steps, sigma 0.614."""
    parameters, batch, steps, samples = 1.04e9, 517_989, 100_000, 9_090_000_000
    monkeypatch.setattr("dpshard.applications.planner.frontier.SIZES", (1e9,))
    monkeypatch.setattr("dpshard.applications.planner.frontier.BATCHES", (2**18,))
    means = Means(epsilon=2.16, delta=1.1e-10, gpu_hours=1.0, sample_size=samples)
    hours = batch * steps / means.samples(parameters, Hardware()) * means.gpu_hours
    assert replace(means, gpu_hours=hours).samples(parameters, Hardware()) == pytest.approx(batch * steps)
    near = [
        p for p in frontier(replace(means, gpu_hours=hours), Hardware()) if (p.parameters, p.batch_size) == (1e9, 2**18)
    ]
    run = Run(batch_size=batch, sample_size=samples, steps=steps, target_delta=1.1e-10, noise_multiplier=0.614)
    sigma, epsilon = run.guarantee()
    assert math.isclose(epsilon, 2.16, abs_tol=0.12)
    assert near[0].noise_per_batch > sigma / batch  # a batch of half the size, with twice the steps
    assert near[0].noise_per_batch < 2 * sigma / batch


def test_the_command_prints_times_and_a_run(tmp_path: Path, run: Callable[..., Any]) -> None:
    pytest.importorskip("transformers")
    config, path = tmp_path / "config.json", tmp_path / "plan.json"
    shape = {"vocab_size": 99, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config.write_text(json.dumps({"model_type": "gpt2", **shape}))
    of_run = ["--batch-size", 64, "--sample-size", 10**4, "--steps", 10, "--noise-multiplier", 1.0]
    options = ["--model", f"hf:{config}", "--ranks", 8, "--micro-batch", 2, "--clipping", "layer-wise", "--gpu", "a100"]
    printed = run("plan", *options, *of_run, "--json", path).stdout
    for text in ("tokens/s per GPU", "a100 at 45% of its peak", "10 steps of 64 of 10,000 samples", "GPU-hours"):
        assert text in " ".join(printed.split())
    figures = json.loads(path.read_text())
    assert figures["run"]["costs"]["layer-wise, one pass"]["gpu_hours"] > 0
    times = figures["seconds_of_a_step"]["layer-wise, one pass"]
    assert times["forward"] + times["backward"] + times["update"] >= times["computing"] > 0
    no_smaller = "epsilon=2,delta=1.2345641e-10,gpu-hours=1,dataset=1e9"  # to 6 figures it would be less
    assert "delta 1.2345641e-10" in run("plan", "--budget", no_smaller).stdout
    assert "needs --batch-size, --sample-size and --steps" in run("plan", "--batch-size", 9, exit_code=2).stderr
    assert "either --target-epsilon" in run("plan", *of_run[:-2], exit_code=2).stderr
