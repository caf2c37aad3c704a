"""Sentences about a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dpshard.applications.planner.counts import RECORDS, Traffic
from dpshard.applications.planner.estimates import GIB, Estimate, Plan
from dpshard.applications.planner.hardware import Hardware
from dpshard.applications.planner.timeline import parallel_share

HEAVY = 0.2
NODES = (1, 2, 4, 8, 16)


def advise(plan: Plan) -> list[str]:
    """Return sentences, the most important first."""
    ordinary, *private = plan.estimates
    return [
        *_what_fits(plan, private),
        *_records(plan, private),
        *_extra_traffic(ordinary, private),
        *_extra_work(ordinary, private),
    ]


def _what_fits(plan: Plan, private: list[Estimate]) -> list[str]:
    if plan.gpu_memory is None:
        return []
    where = f"{plan.gpu_memory / GIB:g} GiB at a micro-batch of {plan.micro_batch}"
    said, fitting = [], [e for e in private if e.peak <= plan.gpu_memory]
    for verb, some in (("Fits", fitting), ("Does not fit", [e for e in private if e not in fitting])):
        if some:
            said.append(f"{verb} {where}: {'; '.join(map(_named, some))}.")
    if not fitting and plan.estimates[0].peak > plan.gpu_memory:
        said.append("Ordinary training does not fit either: take more ranks, checkpointing, or a smaller micro-batch.")
    return said


def _named(estimate: Estimate) -> str:
    return f"{estimate.label} ({estimate.peak / GIB:.1f} GiB)"


def _records(plan: Plan, private: list[Estimate]) -> list[str]:
    heavy = [e for e in private if e.parts[RECORDS] > HEAVY * e.peak]
    if not heavy:
        return []
    end = "; activation checkpointing does not shrink them." if plan.setup.checkpointing else "."
    sizes = [(e.label, e.parts[RECORDS] / GIB) for e in heavy]
    said = [
        f"{label}: its records are {size:.1f} GiB, {size / plan.micro_batch:.1f} GiB per sample. They are the input "
        f"and the output gradient of every layer, and wait for the last norm of their group{end}"
        for label, size in sizes
    ]
    lighter = sorted((e for e in private if e not in heavy and e.peak < heavy[0].peak), key=lambda e: e.peak)
    ways = [_named(e) for e in lighter if plan.gpu_memory is None or e.peak <= plan.gpu_memory]
    if plan.micro_batch > 1:
        ways.append(f"a micro-batch of 1 instead of {plan.micro_batch}")
    leaves = plan.spilled(heavy[0])
    ways.append(
        f'{heavy[0].label} with offload_records="auto" ({(heavy[0].peak - leaves) / GIB:.1f} GiB, and '
        f"{leaves / GIB:.1f} GiB of records in the host's memory)"
    )
    return [*said, f"Ways out: {'; '.join(ways)}."]


def _extra_traffic(ordinary: Estimate, private: list[Estimate]) -> list[str]:
    return [f"Sent beyond ordinary training: {line}" for line in _grouped(_sent(ordinary, e) for e in private)]


def _sent(ordinary: Estimate, estimate: Estimate) -> tuple[str, Estimate]:
    differences = []
    for key in sorted(estimate.traffic.keys() | ordinary.traffic.keys()):
        mine, theirs = (e.traffic.get(key, Traffic(0, 0)) for e in (estimate, ordinary))
        calls, nbytes = mine.calls - theirs.calls, mine.nbytes - theirs.nbytes
        if calls or nbytes:
            differences.append(f"{calls:+d} {key[0]} ({nbytes:+,} bytes of {key[1]})")
    return ", ".join(differences) or "nothing", estimate


def _grouped(said: Iterable[tuple[str, Estimate]]) -> list[str]:
    """Return each sentence once, with the labels of its estimates."""
    labels: dict[str, list[str]] = {}
    for text, estimate in said:
        labels.setdefault(text, []).append(estimate.label)
    return [f"{text} [{'; '.join(some)}]." for text, some in labels.items()]


def _extra_work(ordinary: Estimate, private: list[Estimate]) -> list[str]:
    if not private or not ordinary.flops:
        return []
    more = "; ".join(f"{e.label} {100 * (e.flops / ordinary.flops - 1):+.1f}%" for e in private)
    return [f"FLOPs beyond ordinary training: {more}."]


def advise_on_time(plan: Plan, hardware: Hardware) -> list[str]:
    """Return sentences about the time of a step."""
    return _grouped([*_what_binds(plan, hardware), *_scaling(plan, hardware)])


def _what_binds(plan: Plan, hardware: Hardware) -> Iterator[tuple[str, Estimate]]:
    for e in plan.estimates:
        times = plan.times(e, hardware)
        samples = plan.micro_batch * times.sending / times.computing
        binds = (
            f"The network binds below {samples:,.1f} samples a rank and micro-batch: a batch of B samples feeds "
            f"B / {samples:,.1f} data ranks at most"
            if samples > 1
            else f"The network does not bind: one sample computes {1 / samples:,.1f} times as long as the step sends"
        )
        yield binds, e
        if (leaves := plan.spilled(e)) > GIB:
            moves = (
                f'offload_records="auto" moves {leaves / GIB:,.1f} of {e.parts[RECORDS] / GIB:,.1f} GiB out and in '
                f"beside the products, {leaves / (hardware.pcie * 1e9):,.2g} s each way at {hardware.pcie:g} GB/s, "
                f"and needs {plan.host_gib(e):,.0f} GiB of memory in each host"
            )
            yield moves, e


def _scaling(plan: Plan, hardware: Hardware) -> Iterator[tuple[str, Estimate]]:
    own = plan.setup.ranks
    for e in plan.estimates[:2]:
        speeds = [(n, n / plan.times_on(e, hardware, n * own).total) for n in NODES]
        share = (
            f"Amdahl's law: a parallel share of {parallel_share(speeds):.2%} fits {own:,} to {NODES[-1] * own:,} ranks "
            f"with as many samples each"
        )
        yield share, e
