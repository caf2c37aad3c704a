"""Every kind of parallelism, and every pair: error against one process, or the refusal; and bytes on 256 ranks.

Errors are those of the trainings of `tests/distributed`, on ranks of this machine: this file names them, and a test
refuses a pair that no row covers. Bytes are those of the planner's simulation (applications/planner/simulation.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import combinations, product
from typing import Any

from benchmarks import results_files
from dpshard.applications.planner import Clipping, Setup, Transformer
from dpshard.applications.planner.simulation import simulated
from dpshard.applications.planner.timeline import Event

PAGE = results_files.ROOT / "docs/model-parallel.md"
MARKS = {
    name: (f"<!-- {name} of parallelisms -->", f"<!-- /{name} of parallelisms -->") for name in ("errors", "traffic")
}

ZERO = ("ZeRO-1", "ZeRO-2", "ZeRO-3")
"""DeepSpeed's."""
OF_DATA = ("DDP", *ZERO, "FSDP2", "HSDP")
OF_MODEL = ("TP", "SP", "CP", "PP", "EP")
"""Tensor, sequence, context, pipeline and expert parallelism."""
KINDS = (*OF_DATA, *OF_MODEL)
STYLES = ("all-layer", "block-wise", "layer-wise", "param-wise")


@dataclass(frozen=True, slots=True)
class Exact:
    """Trainings of the tests that are compared with one process."""

    kinds: tuple[str, ...]
    """One or two of KINDS."""
    suite: str
    """Of SUITES."""
    pattern: str
    """The whole of a case without its options."""
    options: str = ""
    """The option that a case has, beside those in ASIDE."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """Kinds that are refused together: each of the first with each of the second."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    text: str
    """How the message begins."""
    ranks: int = 2
    note: str = ""

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Return all pairs of the row."""
        return list(product(self.first, self.second))


@dataclass(frozen=True, slots=True)
class Alternatives:
    """Kinds of which a training can have only one, in pairs."""

    pairs: tuple[tuple[str, str], ...]
    note: str


SUITES: dict[str, tuple[str, str]] = {
    "update": ("test_sharded_update", "ITEMS"),
    "deepspeed": ("test_deepspeed", "UPDATES"),
    "tensor_parallel": ("test_tensor_parallel", "ITEMS"),
    "declared_parts": ("test_declared_parts", "ITEMS"),
    "crossed_parts": ("test_crossed_parts", "ITEMS"),
    "experts": ("test_experts", "ITEMS"),
    "pipeline": ("test_pipeline", "ITEMS"),
}
"""Module of tests/distributed and its list of cases, by the name of the worker."""

ASIDE = {
    "verified",
    "checkpoint",
    "checkpointed",
    "by-hand",
    "nan",
    "bare",
    "unsharded",
    "loss",
    "adaptive",
    "overwritten",
    "evaluated",
    "ring",
}
"""Options that do not change which rows a case is in."""
MODE = "[a-z-]+:(auto|bk|ghost|bk-mixed-ghost|mixed-ghost|per-example)"
DECLARED = "ConfigurationError: model_parallel_parts declares parts of a model under"
BESIDE_DTENSORS = "ConfigurationError: model_parallel_parts gives 0 for a model that parallelize_module"
STAGE_IN_PARTS = "ConfigurationError: model_parallel_parts="
ROWS: tuple[Exact | Refused | Alternatives, ...] = (
    Exact(("DDP",), "update", f"ddp(-used)?:{MODE}"),
    *(Exact((zero,), "deepspeed", f"{zero[-1]}:{MODE}", note="partitions in float32") for zero in ZERO),
    Exact(("FSDP2",), "update", f"fsdp2:{MODE}"),
    Exact(("HSDP",), "update", f"hsdp:{MODE}"),
    Exact(("TP",), "tensor_parallel", f"tp:{MODE}", "plain", note="norms and head whole"),
    Exact(("TP",), "declared_parts", f"tp:alone:{MODE}", note="by hand"),
    Exact(("TP", "SP"), "tensor_parallel", f"tp:{MODE}"),
    Exact(("CP",), "declared_parts", f"(cp|ring):alone:{MODE}"),
    Exact(("PP",), "pipeline", f"(1f1b|gpipe):{MODE}"),
    Exact(("DDP", "ZeRO-1"), "update", f"zero1:{MODE}", note="ZeroRedundancyOptimizer"),
    Exact(("DDP", "TP"), "declared_parts", f"tp:ddp:{MODE}", note="by hand"),
    Exact(("DDP", "CP"), "declared_parts", f"cp:ddp:{MODE}"),
    Exact(("DDP", "PP"), "pipeline", f"(1f1b|gpipe):{MODE}", "ddp"),
    Exact(("FSDP2", "PP"), "pipeline", f"(1f1b|gpipe):{MODE}", "fsdp"),
    Exact(("DDP", "EP"), "experts", f"samples:{MODE}", note="samples of its own on each rank"),
    Exact(("FSDP2", "TP"), "declared_parts", f"tp:fsdp2:{MODE}", note="by hand"),
    Exact(("FSDP2", "SP"), "tensor_parallel", f"fsdp2:{MODE}", note="with TP"),
    Exact(("FSDP2", "CP"), "declared_parts", f"(cp|ring):(fsdp2|flat):{MODE}"),
    Exact(("HSDP", "TP"), "declared_parts", f"tp:hsdp:{MODE}", note="by hand"),
    Exact(("HSDP", "SP"), "tensor_parallel", f"hsdp:{MODE}", note="with TP"),
    Exact(("HSDP", "CP"), "declared_parts", f"(cp|ring):h(sdp|flat):{MODE}"),
    Exact(("TP", "CP"), "crossed_parts", f"(alone|flat):{MODE}", "plain", note="norms and head whole"),
    Exact(("SP", "CP"), "crossed_parts", f"(alone|fsdp2|flat|hsdp):{MODE}", note="with TP; also under FSDP2 and HSDP"),
    Exact(("TP", "EP"), "experts", f"whole:{MODE}", "columns", note="by hand, one group"),
    Exact(("CP", "EP"), "experts", f"sequence:{MODE}", note="one group"),
    Exact(("EP",), "experts", f"whole:{MODE}", note="the same samples on all ranks"),
    Refused(("DDP",), ("FSDP2", "HSDP"), "NotImplementedError: Operator c10d.broadcast_", note="by torch"),
    Refused(("FSDP2",), ("HSDP",), "AssertionError: Each distinct composable distributed API", note="by torch"),
    Refused(ZERO, ("FSDP2", "HSDP"), "RuntimeError: _apply(): Couldn't swap", note="by torch"),
    Refused(("DDP",), ("TP", "SP"), "RuntimeError: aten.cat.default got mixed torch.Tensor and DTensor",
            note="by torch, for DTensors"),
    Refused(ZERO, OF_MODEL, DECLARED),
    Refused(("HSDP",), ("PP",), "ConfigurationError: Hybrid sharding (HSDP) within a stage", ranks=4),
    Refused(("FSDP2", "HSDP"), ("EP",), "ConfigurationError: model_parallel_parts gives 'samples'", ranks=4),
    Refused(("TP", "SP", "CP"), ("PP",), STAGE_IN_PARTS),
    Refused(("TP", "SP"), ("EP",), BESIDE_DTENSORS, note="for DTensors"),
    Refused(("PP",), ("EP",), STAGE_IN_PARTS),
    Alternatives(
        (("DDP", "ZeRO-2"), ("DDP", "ZeRO-3"), *combinations(ZERO, 2)), "DeepSpeed is in DDP's place, with one stage"
    ),
)  # fmt: skip


def pairs_of(row: Exact | Refused | Alternatives) -> list[tuple[str, ...]]:
    """Return the kinds, or the pairs of kinds, that a row is about."""
    return [row.kinds] if isinstance(row, Exact) else list(row.pairs)


def cases_of(row: Exact) -> list[tuple[int, str]]:
    """Return number of ranks and case of each training of the tests that is in the row."""
    module, name = SUITES[row.suite]
    items = getattr(import_module(f"tests.distributed.{module}"), name)
    found = [(item.values[0], ":".join(item.values[1:])) for item in items]
    return [(ranks, case) for ranks, case in found if _fits(row, case)]


def _fits(row: Exact, case: str) -> bool:
    spec, *options = case.split("+")
    return re.fullmatch(row.pattern, spec) is not None and "+".join(o for o in options if o not in ASIDE) == row.options


def case_of(pair: tuple[str, str]) -> str:
    """Return the case of tests/distributed/pairs_worker.py."""
    return "+".join(kind.lower().replace("-", "") for kind in pair)


def measure(on_launch: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """Return a row per row of ROWS, as plain figures, from ranks of this machine."""
    from tests.distributed.launch import launch

    rows = []
    for row in ROWS:
        found: dict[str, Any] = {"pairs": pairs_of(row), "note": row.note}
        if isinstance(row, Exact):
            cases = cases_of(row)
            errors = {
                ranks: launch(f"{row.suite}_worker.py", ranks, *(case for r, case in cases if r == ranks), timeout=600)
                for ranks in sorted({ranks for ranks, _ in cases})
            }
            found["cases"] = [
                {"ranks": ranks, "case": case, "error": max(one["error"] for one in results)}
                for ranks, everyone in errors.items()
                for case, results in zip(
                    (case for r, case in cases if r == ranks), zip(*everyone, strict=True), strict=True
                )
            ]
        elif isinstance(row, Refused):
            messages = launch("pairs_worker.py", row.ranks, *map(case_of, row.pairs), timeout=600)[0]
            found |= {"ranks": row.ranks, "messages": [message[: len(row.text)] for message in messages]}
        rows.append(found)
        on_launch(", ".join(" x ".join(pair) for pair in pairs_of(row)))
    return rows


SHAPE = Transformer(width=1024, layers=4, heads=16, vocabulary=32000, seq=2048)
SETUPS: dict[str, tuple[Setup, int]] = {
    "DDP": (Setup(model=SHAPE, ranks=256, shard="ddp"), 1),
    "FSDP2": (Setup(model=SHAPE, ranks=256), 1),
    "HSDP, nodes of 8": (Setup(model=SHAPE, ranks=256, shard="hsdp"), 1),
    "FSDP2 and TP 8": (Setup(model=SHAPE, ranks=256, tp=8), 4),
    "FSDP2 and CP 8": (Setup(model=SHAPE, ranks=256, cp=8), 1),
}
"""Set-up and samples of a rank."""


def traffic(setups: Mapping[str, tuple[Setup, int]] = SETUPS) -> dict[str, list[dict[str, Any]]]:
    """Return a row per set-up and collective: calls, and bytes that a rank sends, not private and by style."""
    found = {}
    for name, (setup, rows) in setups.items():
        with simulated(setup) as simulation:
            by_style = {"ordinary": _sent(simulation.count(None, rows).events)}
            for style in STYLES[:3]:
                by_style[style] = _sent(simulation.count(Clipping(style), rows).events)
        collectives = sorted({key for sent in by_style.values() for key in sent})
        found[name] = [
            {
                "collective": kind, "dtype": dtype, "ranks": ranks,
                **{style: list(sent.get((kind, dtype, ranks), (0, 0))) for style, sent in by_style.items()},
            }
            for kind, dtype, ranks in collectives
        ]  # fmt: skip
    return found


def _sent(events: Iterable[Event]) -> dict[tuple[str, str, int], tuple[int, int]]:
    """Return calls, and bytes that a rank sends in a ring, by collective, dtype and ranks."""
    found: dict[tuple[str, str, int], tuple[int, int]] = {}
    for event in events:
        if event.dtype:
            key = event.kind, event.dtype, event.ranks
            calls, sent = found.get(key, (0, 0))
            times = 2 if event.kind == "all-reduce" else 1
            found[key] = calls + 1, sent + round(times * event.nbytes * (event.ranks - 1) / event.ranks)
    return found


def error_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of errors and refusals."""
    lines = ["| | ranks | clipping | largest error, or refusal |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(_cells(found))} |" for found in rows]
    return "\n".join(lines)


def _cells(found: Mapping[str, Any]) -> Iterator[str]:
    note = f" ({found['note']})" if found["note"] else ""
    yield f"{_names([tuple(pair) for pair in found['pairs']])}{note}"
    if "cases" in found:
        cases = [(one["ranks"], one["case"].partition("+")[0].split(":"), one["error"]) for one in found["cases"]]
        yield ", ".join(map(str, sorted({ranks for ranks, _, _ in cases})))
        two = {spec[-2] for _, spec, _ in cases if spec[-1] in ("ghost", "mixed-ghost")}
        styles = {spec[-2] for _, spec, _ in cases}
        yield ", ".join(f"{style}{' (also two passes)' * (style in two)}" for style in STYLES if style in styles)
        yield f"{max(error for _, _, error in cases):.0e}"
    else:
        messages = {f"`{message}…`" for message in found.get("messages", ())}
        yield str(found.get("ranks", ""))
        yield "–"
        yield ", ".join(sorted(messages)) or "one or the other"


def _names(pairs: list[tuple[str, ...]]) -> str:
    if len(pairs) == 1:
        return " × ".join(pairs[0])
    first, second = (list(dict.fromkeys(kinds)) for kinds in zip(*pairs, strict=True))
    if len(first) * len(second) == len(pairs):
        return f"{', '.join(first)} × {', '.join(second)}"
    return "; ".join(" × ".join(pair) for pair in pairs)


def traffic_table(setups: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return the table of bytes, a line per collective."""
    styles = ("ordinary", *STYLES[:3])
    lines = [f"| | {' | '.join(['not private', *styles[1:]])} |", "|---|---:|---:|---:|---:|"]
    for name, rows in setups.items():
        lines.append(f"| **{name}** | | | | |")
        for row in rows:
            cells = [f"{row[style][0]}: {_bytes(row[style][1])}" if row[style][0] else "–" for style in styles]
            lines.append(f"| {row['collective']}, {row['dtype']}, {row['ranks']} ranks | {' | '.join(cells)} |")
        totals = [sum(row[style][1] for row in rows) for style in styles]
        cells = [_bytes(totals[0]), *(f"{_bytes(n)}, {n / totals[0]:.4f}" for n in totals[1:])]
        lines.append(f"| sum, over ordinary | {' | '.join(cells)} |")
    return "\n".join(lines)


def _bytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB" if count >= 1e3 else f"{count} B"


def page(before: str, figures: Mapping[str, Any]) -> str:
    """Return docs/model-parallel.md with both tables."""
    tables = {"errors": error_table(figures["rows"]), "traffic": traffic_table(figures["traffic"])}
    for name, (begin, end) in MARKS.items():
        head, _, rest = before.partition(begin)
        before = f"{head}{begin}\n\n{tables[name]}\n\n{end}{rest.partition(end)[2]}"
    return before
