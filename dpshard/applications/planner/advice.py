"""Sentences about a plan."""

from __future__ import annotations

from dpshard.applications.planner.counts import RECORDS, Traffic
from dpshard.applications.planner.estimates import GIB, Estimate, Plan

HEAVY = 0.2


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
    fitting = [e for e in private if e.peak <= plan.gpu_memory]
    too_large = [e for e in private if e.peak > plan.gpu_memory]
    said = []
    if fitting:
        said.append(f"Fits {where}: {'; '.join(_named(e) for e in fitting)}.")
    if too_large:
        said.append(f"Does not fit {where}: {'; '.join(_named(e) for e in too_large)}.")
    if not fitting and plan.estimates[0].peak > plan.gpu_memory:
        said.append("Ordinary training does not fit either: take more ranks, checkpointing, or a smaller micro-batch.")
    return said


def _named(estimate: Estimate) -> str:
    return f"{estimate.label} ({estimate.peak / GIB:.1f} GiB)"


def _records(plan: Plan, private: list[Estimate]) -> list[str]:
    heavy = [e for e in private if e.parts[RECORDS] > HEAVY * e.peak]
    said = []
    for estimate in heavy:
        size = estimate.parts[RECORDS] / GIB
        line = (
            f"{estimate.label}: its records are {size:.1f} GiB, {size / plan.micro_batch:.1f} GiB per sample. They are "
            f"the input and the output gradient of every layer, and wait for the last norm of their group"
        )
        end = "; activation checkpointing does not shrink them." if plan.setup.checkpointing else "."
        said.append(line + end)
    if not heavy:
        return []
    lighter = sorted((e for e in private if e not in heavy), key=lambda e: e.peak)
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
    extras: dict[str, list[str]] = {}
    for estimate in private:
        differences = []
        for key in sorted(estimate.traffic.keys() | ordinary.traffic.keys()):
            mine, theirs = (e.traffic.get(key, Traffic(0, 0)) for e in (estimate, ordinary))
            calls, nbytes = mine.calls - theirs.calls, mine.nbytes - theirs.nbytes
            if calls or nbytes:
                differences.append(f"{calls:+d} {key[0]} ({nbytes:+,} bytes of {key[1]})")
        extras.setdefault(", ".join(differences) or "nothing", []).append(estimate.label)
    return [f"Sent beyond ordinary training: {extra} [{'; '.join(labels)}]." for extra, labels in extras.items()]


def _extra_work(ordinary: Estimate, private: list[Estimate]) -> list[str]:
    if not private or not ordinary.flops:
        return []
    more = "; ".join(f"{e.label} {100 * (e.flops / ordinary.flops - 1):+.1f}%" for e in private)
    return [f"FLOPs beyond ordinary training: {more}."]
