"""`dpshard report`: the privacy report of a finished run, in one self-contained HTML file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Annotated, Any

import typer

from dpshard.applications.cli import console, page, plots
from dpshard.applications.cli.audit import attacks
from dpshard.applications.cli.formats import NEIGHBOURS
from dpshard.applications.cli.run_folder import RunFolder, intact, write_atomically
from dpshard.errors import RunFolderError

_CAPTIONS = {
    "loss": "Mean loss of the samples of a step, and of held-out ones.",
    "accuracy": "Share of held-out answers that the model gets right: labels, or masked bytes.",
    "perplexity": "Perplexity of held-out text.",
    "clip_fraction": "Share of samples whose gradient was longer than the clipping norm.",
    "gradient_snr": "Norm of the clipped sum over the expected norm of the noise: below 1, most of an update is noise.",
}
"""Captions of pictures; epsilon does not cover their figures."""

_NOISES = {
    "gaussian": "Gaussian",
    "discrete-gaussian": "exact discrete Gaussian on a grid of 2<sup>−24</sup> standard deviations",
}


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder of `dpshard train` that has finished.")],
    public: Annotated[
        bool, typer.Option("--public", help="Leave out scores, losses, norms and audits: epsilon does not cover them.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write it. [dim]\\[default: RUN/report.html][/]")
    ] = None,
) -> None:
    """Write the privacy report of a run: its guarantee, its mechanism, its cost, and its limits.

    The report is one HTML file without external links, for a browser or a printer. It includes the
    bounds of `dpshard audit RUN`, if you ran that before.
    """
    folder = RunFolder.open(run)
    target = out or folder.path / ("report-public.html" if public else "report.html")
    write_atomically(target, render(folder, public=public).encode())
    console.out.print(str(target))


def render(folder: RunFolder, *, public: bool = False) -> str:
    """Return the page as text. Raises RunFolderError if the run has not finished."""
    written, resume = folder.report.with_suffix(".json"), f"dpshard train --resume {folder.path}"
    if not written.exists():
        raise RunFolderError(f"{folder.path} has not finished: run {resume} first.")
    folder.settings()  # raises for a damaged config.yaml, which the page quotes
    rows = folder.read_metrics()
    with intact(folder.metrics, "restore it from a copy"):
        budget = folder.settings().target_epsilon
        pictures = plots.svgs([{"step": 0, "epsilon": 0.0}, *rows], budget)
        spent = _spent(budget, rows, pictures)
    with intact(written, f"remove it and {folder.report.name}, and {resume} writes them again"):
        report = _read(written)
        privacy = report["privacy"]
        sections = [
            _promise(report),
            _mechanism(privacy),
            spent,
            "" if public else _training(report, pictures),
            "" if public else _audit(folder),
            page.section("What epsilon does not cover", page.bullets(privacy["not_covered"])),
            _reproduce(folder, report, public=public),
        ]
        title = f"Privacy report: {report['task']}, {report['model']}"
    note = (
        "This page holds only figures that epsilon covers, and public constants."
        if public
        else "Scores, losses and norms on this page are exact functions of the data, which epsilon does not cover. "
        "To publish a report, write it with --public."
    )
    return page.document(
        title,
        subtitle=f"Run folder {folder.path.resolve().name}",
        note=note,
        sections=[text for text in sections if text],
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror or error}. Check your rights to it.") from error


def _promise(report: Mapping[str, Any]) -> str:
    from dpshard.accounting import rounded_up

    privacy = report["privacy"]
    name, epsilon = privacy["neighbouring_relation"], privacy["epsilon"]
    if epsilon is None or not math.isfinite(epsilon):
        return page.section(
            "What is promised", page.warning("Nothing: this run was trained without noise. It is not private.")
        )
    cards = page.cards(
        [
            ("ε", rounded_up(epsilon), "privacy loss, spent by the whole run"),
            ("δ", f"{privacy['delta']:g}", "probability that is left out of account"),
            ("protects", privacy["protected_unit"], f"one of {privacy['sample_size']:,}"),
        ]
    )
    odds = 1 / (1 + math.exp(-epsilon))
    meaning = (
        f"Take any result that is computed from the trained weights, or from all noisy gradients of the run. Without "
        f"one {_unit(privacy['protected_unit'])}, its probability changes by a factor of at most "
        f"e<sup>ε</sup> = {math.exp(min(epsilon, 700)):.4g}, except for a probability of δ. Suppose that an attacker "
        f"has all other samples, and starts from even odds that this one is present. The result moves this belief to "
        f"at most {odds:.1%} and at least {1 - odds:.1%}, with the same exception."
    )
    relation = f"Neighbours ({escape(name)}): {escape(NEIGHBOURS[name])}."
    caution = (
        page.warning("This epsilon is an approximation that may be too small (accountant: gdp). It is not a bound.")
        if privacy["accountant"] == "gdp"
        else ""
    )
    statement = f"<blockquote>{escape(privacy['statement'])}.</blockquote>"
    return page.section("What is promised", f"{cards}{statement}{caution}<p>{meaning}</p><p>{relation}</p>")


def _unit(protected: str) -> str:
    return escape(protected.removeprefix("one "))


def _mechanism(privacy: Mapping[str, Any]) -> str:
    cap = privacy["max_batch_size"]
    sigma, norm, quantile = privacy["noise_multiplier"], privacy["max_grad_norm"], privacy["clipping_quantile"]
    family = _NOISES[privacy.get("noise", "gaussian")]
    clipping = f"norm at most {norm:g}"
    noise = f"{family}, σ = {sigma:.6g} times the norm: standard deviation {sigma * norm:.6g} on every sum"
    counted = ""
    if quantile is not None:
        clipping += f" at first; then thresholds follow quantile {quantile:g} of the norms, by noisy counts"
        noise = (
            f"{family}, σ = {sigma:.6g} times the sensitivity of a step's sum and counts, which changes with thresholds"
        )
        counted = ", and with it noisy counts of the samples that were not clipped"
    facts = [
        ("sampling", escape(privacy["sampling"]) + (f", at most {cap:,} samples a step" if cap else "")),
        ("clipping", f"{escape(privacy['clipping_fn'])}, {escape(privacy['clipping_style'])}: {clipping}"),
        ("noise", noise),
        ("releases", f"{privacy['steps']:,} noisy sums, each divided by its public expected batch size{counted}"),
        ("accountant", escape(privacy["accountant"])),
    ]
    phases = page.table(
        ("steps", "expected batch", "sampling probability"),
        [
            (f"{p['steps']:,}", f"{p['expected_batch_size']:,}", f"{p['sampling_probability']:.6g}")
            for p in privacy["phases"]
        ],
    )
    return page.section("Mechanism", page.facts(facts) + phases)


def _spent(budget: float | None, rows: Sequence[Mapping[str, Any]], pictures: Mapping[str, str]) -> str:
    from dpshard.accounting import rounded_up

    if "epsilon" not in pictures:
        return ""
    points = [row for row in rows if row.get("epsilon") is not None]
    wanted = [points[i * (len(points) - 1) // 4] for i in range(5)] if len(points) > 5 else points
    ledger = page.table(("after step", "ε spent"), [(f"{row['step']:,}", rounded_up(row["epsilon"])) for row in wanted])
    text = f"<p>The budget was ε = {budget:g}; the noise was calibrated to it beforehand.</p>" if budget else ""
    return page.section(
        "Privacy spent", text + page.figure(pictures["epsilon"], "ε over the steps, by the ledger", ledger)
    )


def _training(report: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    from dpshard.applications.cli.final_report import result_rows

    figures = "".join(page.figure(pictures[name], caption) for name, caption in _CAPTIONS.items() if name in pictures)
    results = page.facts([(escape(name), escape(value)) for name, value in result_rows(report)])
    return page.section("Training", f"{results}<div class='grid'>{figures}</div>", badge="not covered by epsilon")


def _audit(folder: RunFolder) -> str:
    if not folder.audit.exists():
        text = "<p>No attack was tried on this configuration. Run <code>dpshard audit RUN</code> to add one.</p>"
        return page.section("Audit", text)
    with intact(folder.audit, f"dpshard audit {folder.path} writes it anew"):
        found = attacks(_read(folder.audit))
        if not found:
            raise ValueError("it holds no attack")
    text = (
        "<p>Each attack uses the same settings, with its own engine, noise and canaries. It proves a lower bound on "
        "epsilon; accounting gives an upper bound. They must not cross. A lower bound does not prove privacy.</p>"
    )
    verdict = (
        page.warning("An attack proved more than was accounted: do not rely on this report.")
        if any(attack.refuted for attack in found)
        else ""
    )
    bounds = [
        (attack.name, f"ε ≥ {attack.proved}", f"ε ≤ {attack.accounted}", attack.delta, attack.confidence, attack.how)
        if attack.proved
        else (attack.name, attack.fault or "no fault", "", "", "", attack.how)
        for attack in found
    ]
    table = page.table(("attack", "proved", "accounted", "δ", "confidence", "how"), bounds)
    return page.section("Audit", text + verdict + table)


def _reproduce(folder: RunFolder, report: Mapping[str, Any], *, public: bool) -> str:
    privacy, settings = report["privacy"], folder.config.read_text("utf-8")
    data = folder.settings().data
    if public and data is not None:  # file names may identify people
        settings = settings.replace(data, "(your data)")
    phases = ",".join(f"{p['expected_batch_size']}x{p['steps']}" for p in privacy["phases"])
    cap = f" --max-batch-size {privacy['max_batch_size']}" if privacy["max_batch_size"] else ""
    elements = privacy.get("discretized_elements")
    noise = f" --noise {privacy['noise']} --elements {elements}" if elements else ""
    commands = (
        f"# in the run folder: the same settings, with new noise and new batches\n"
        f"dpshard train --config config.yaml\n"
        f"# epsilon, only from the mechanism\n"
        f"dpshard account --sample-size {privacy['sample_size']} --phases {phases} "
        f"--noise-multiplier {privacy['noise_multiplier']!r} --delta {privacy['delta']!r}{cap}{noise} "
        f"--accountant {privacy['accountant']}\n"
        f"# attacks on the settings\ndpshard audit ."
    )
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    where = f"{report['device']}" + ("" if report["shard"] == "none" else f" x {report['ranks']}, {report['shard']}")
    text = (
        f"<pre>{escape(commands)}</pre><p>Versions: {escape(versions)}; trained on {escape(where)}.</p>"
        f"<details open><summary>config.yaml</summary><pre>{escape(settings)}</pre></details>"
    )
    return page.section("To reproduce", text)
