"""The final report of a run: results, and the exact privacy guarantee."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

import dpshard
from dpshard.accounting import Mechanism, rounded_up
from dpshard.accounting.risk import profile
from dpshard.applications.cli.data import size
from dpshard.applications.cli.run_folder import RunFolder, write_atomically, write_json
from dpshard.applications.cli.texts import Texts, english
from dpshard.applications.cli.training import Run

NOT_COVERED = (
    "metrics.jsonl and the plots (loss, clip fraction, norms, gradient-SNR, realised batch sizes): computed from the "
    "training samples, without noise.",
    "checkpoints: they hold the run secret, with which a reader can subtract the noise. Protect them like the data, "
    "and publish only model.pt.",
    "the validation and test samples and their scores: not trained on, but not protected either.",
    "choices between runs on the same data: each of the other runs costs epsilon, too.",
    "the number of training samples, the set of labels, and the names and kinds of columns: public by assumption.",
)


_OF_MECHANISM = (
    "target_epsilon max_batch_size noise_multiplier noise discretized_elements max_grad_norm sample_size accountant"
).split()


def collect(run: Run, scores: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return the report as plain values; `scores` are of the test split, "before" and "after"."""
    data, engine, mechanism = run.data, run.engine, run.engine.mechanism
    poisson = mechanism.sampling == "poisson"
    return {
        "task": run.settings.task,
        "model": run.settings.model,
        "parameters": run.sharded.parameters,
        "samples": {"train": size(data.train), "validation": size(data.validation), "test": size(data.test)},
        "test": dict(scores) | ({} if data.guessing is None else {"guessing": data.guessing}),
        "privacy": {
            "epsilon": engine.epsilon(),
            "delta": mechanism.target_delta,
            "profile": profile(engine.epsilon) if mechanism.noise_multiplier else [],
            "protected_unit": data.sample,
            "neighbouring_relation": mechanism.relation,
            "sampling": _sampling(mechanism),
            "sensitivity": mechanism.sensitivity,
            "noise_correlation": None if mechanism.noise_correlation is None else repr(mechanism.noise_correlation),
            **{name: getattr(mechanism, name) for name in _OF_MECHANISM},
            **{name: getattr(run.settings, name) for name in ("clipping_fn", "clipping_style", "clipping_quantile")},
            "phases": [
                {
                    "expected_batch_size": batch,
                    "sampling_probability": batch / mechanism.sample_size if poisson else None,
                    "steps": steps,
                }
                for batch, steps in mechanism.schedule.phases()
            ],
            "steps": engine.step,
            "earlier": [[release.noise_multiplier, count] for release, count in mechanism.earlier],
            "statement": engine.statement(),
            "not_covered": list(NOT_COVERED),
        },
        "versions": {"dpshard": dpshard.__version__, "torch": torch.__version__},
        "device": run.device.type,
        "ranks": run.ranks.size,
        "shard": run.settings.shard,
    }


def write(folder: RunFolder, report: Mapping[str, Any]) -> None:
    """Write report.json and report.md."""
    write_json(folder.report.with_suffix(".json"), report)
    write_atomically(folder.report, _markdown(report).encode())


def show(console: Console, folder: RunFolder, report: Mapping[str, Any]) -> None:
    """Print results, guarantee, and paths."""
    table = Table.grid(padding=(0, 2))
    for name, value in [*result_rows(report), *_privacy_rows(report["privacy"])]:
        table.add_row(f"[bold]{name}[/]", value)
    console.print(Panel(table, title=f"{report['task']} · {report['model']}", title_align="left", expand=False))
    console.print(f"Report, plots and weights: {folder.path}  (what epsilon does not cover: {folder.report})")


def result_rows(report: Mapping[str, Any], texts: Texts | None = None) -> list[tuple[str, str]]:
    """Return results as names and values, in English without `texts`."""
    say = texts or english()

    def shown(scores: Mapping[str, float]) -> str:
        if "rmse" in scores:
            return say("result.numbers", r2=f"{scores['r2']:.3f}", rmse=f"{scores['rmse']:.4g}")
        if "perplexity" in scores:
            return say("result.perplexity", value=f"{scores['perplexity']:.2f}")
        return say("result.right", share=f"{scores['accuracy']:.1%}")

    test, samples = report["test"], report["samples"]
    after, guessing = test["after"], test.get("guessing")
    guess = "" if guessing is None else say("result.guess", share=f"{guessing:.1%}")
    result = say("result.none")
    if after:
        result = say("result.change", after=shown(after), before=shown(test["before"]), guess=guess)
    failed = bool(after) and guessing is not None and after["accuracy"] <= guessing
    return [
        (say("row.test"), say("result.held_out", result=result, count=samples["test"])),
        *([(say("row.hint"), say("result.hint"))] if failed else []),
        (say("row.trained"), say("result.trained", count=samples["train"], parameters=f"{report['parameters']:,}")),
    ]


def _privacy_rows(privacy: Mapping[str, Any]) -> list[tuple[str, str]]:
    say, name = english(), privacy["neighbouring_relation"]
    target = f" (budget {privacy['target_epsilon']:g})" if privacy["target_epsilon"] else ""
    return [
        (say("row.epsilon"), f"{rounded_up(privacy['epsilon'])}{target} at delta = {privacy['delta']:g}"),
        (say("row.protects"), privacy["protected_unit"]),
        (say("row.neighbours"), f"{name}: {say(f'neighbours.{name}')}"),
        *mechanism_rows(privacy),
    ]


def mechanism_rows(privacy: Mapping[str, Any], texts: Texts | None = None) -> list[tuple[str, str]]:
    """Return sampling, clipping, noise, releases and accountant as names and values, in English without `texts`."""
    say = texts or english()
    sigma, norm, quantile = privacy["noise_multiplier"], privacy["max_grad_norm"], privacy["clipping_quantile"]
    capped, named = privacy["max_batch_size"], privacy["sampling"]
    named = {"Poisson": say("sampling.poisson"), "truncated Poisson": say("sampling.truncated")}.get(named, named)
    cap = say("sampling.cap", cap=f"{capped:,}") if capped else ""
    phases = "; ".join(
        say(
            "sampling.steps" if phase["sampling_probability"] is None else "sampling.phase",
            steps=f"{phase['steps']:,}",
            q=f"{phase['sampling_probability'] or 0:.6g}",
            batch=f"{phase['expected_batch_size']:,}",
            size=f"{privacy['sample_size']:,}",
        )
        for phase in privacy["phases"]
    )
    noise = say("noise.discrete" if privacy.get("noise") == "discrete-gaussian" else "noise.gaussian")
    unit, moves, counts = _noise_unit(privacy, say), "", ""
    if quantile is not None:
        unit, counts = say("noise.moving"), say("releases.counts")
        moves = say("clipping.moves", quantile=f"{quantile:g}")
    released = say("releases.sums", steps=f"{privacy['steps']:,}")
    caution = say("accountant.caution") if privacy["accountant"] == "gdp" else ""
    clipped = {"function": privacy["clipping_fn"], "style": privacy["clipping_style"], "norm": f"{norm:g}"}
    earlier = [say("earlier.bounds", sigma=f"{noise:.6g}") for noise, _ in privacy.get("earlier", ())]
    return [
        *((say("row.earlier"), row) for row in earlier),
        (say("row.sampling"), f"{named}{cap}: {phases}"),
        (say("row.clipping"), f"{say('clipping.norm', **clipped)}{moves}"),
        (say("row.noise"), say("noise.sigma", kind=noise, sigma=f"{sigma:.6g}", unit=unit)),
        (say("row.releases"), f"{released}{counts}"),
        (say("row.accountant"), f"{privacy['accountant']}{caution}"),
    ]


def _sampling(mechanism: Mechanism) -> str:
    if mechanism.sampling != "poisson":
        return mechanism.sampling
    return "truncated Poisson" if mechanism.max_batch_size else "Poisson"


def _noise_unit(privacy: Mapping[str, Any], say: Texts) -> str:
    sensitivity, correlation = privacy.get("sensitivity", 1.0), privacy.get("noise_correlation")
    deviation = f"{privacy['noise_multiplier'] * privacy['max_grad_norm'] * sensitivity:.6g}"
    if sensitivity == 1 and correlation is None:
        return say("noise.fixed", deviation=deviation)
    vectors = say("noise.every_sum") if correlation is None else say("noise.vectors", correlation=correlation)
    of = say("noise.turn" if privacy.get("sampling") == "cyclic-poisson" else "noise.whole_run")
    return say("noise.of_run", of=of, sensitivity=f"{sensitivity:.6g}", deviation=deviation, vectors=vectors)


def _markdown(report: Mapping[str, Any]) -> str:
    def table(rows: list[tuple[str, str]]) -> str:
        return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])

    privacy = report["privacy"]
    not_covered = "\n".join(f"- {item}" for item in privacy["not_covered"])
    ranks = f" x {report['ranks']} ({report['shard']})" if report["shard"] != "none" else ""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return (
        f"# Report: {report['task']}, model {report['model']}\n\n{table(result_rows(report))}\n\n"
        f"![metrics](plots/overview.png)\n\n"
        f"## What is promised\n\n{privacy['statement']}.\n\n{table(_privacy_rows(privacy))}\n\n"
        f"The promise is about the weights in model.pt.\n\n"
        f"## What epsilon does not cover\n\n{not_covered}\n\n"
        f"---\n{versions}, {report['device']}{ranks}\n"
    )
