"""`dpshard report`."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import typer

from dpshard.accounting import rounded_up
from dpshard.accounting.releases import in_figures
from dpshard.accounting.risk import RARELY, Pair, belief, found_records, mostly_below, rarely_above, right_guesses
from dpshard.applications.cli import console, plots, provenance
from dpshard.applications.cli.audit import attacks
from dpshard.applications.cli.options import described
from dpshard.applications.cli.run_folder import RunFolder, intact, write_atomically
from dpshard.errors import ConfigurationError, RunFolderError

PRIVATE_NAME = "(your data)"
"""Name that replaces those of files in a public report."""


@described("report", by={"metavar": "NAME"}, out={"metavar": "FILE"})
def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder of `dpshard train` that has finished.")],
    public: bool = False,
    pdf: bool = False,
    by: str | None = None,
    out: Path | None = None,
) -> None:
    """Write the privacy report of a run: a page for everybody, the technical part, and a place to sign.

    The report is one HTML file without external links, for a browser or a
    printer. It includes the bounds of `dpshard audit RUN`, if you ran that
    before.
    """
    folder = RunFolder.open(run)
    if (run / "plan.json").exists():
        raise RunFolderError(f"{run} is a search of dpshard tune: its guarantee is in {run / 'report.json'}.")
    target = out or folder.path / ("report-public.html" if public else "report.html")
    page = render(folder, public=public, by=by)
    write_atomically(target, page.encode(), public=public)
    console.out.print(str(target))
    if pdf:
        with console.out.status("printing ..."):
            write_atomically(target.with_suffix(".pdf"), _pdf(page), public=public)
        console.out.print(str(target.with_suffix(".pdf")))


def _pdf(page: str) -> bytes:
    try:
        import weasyprint
    except (ImportError, OSError) as error:  # it looks for Pango when it is imported
        raise ConfigurationError(
            f"--pdf needs WeasyPrint ({str(error).splitlines()[0]}): pip install 'dpshard[pdf]' (on Debian with apt "
            f"install libpango-1.0-0 libpangoft2-1.0-0), or print the HTML file by a browser."
        ) from error
    for name in ("weasyprint", "fontTools"):
        logging.getLogger(name).setLevel(logging.ERROR)  # it warns of rules for screens, such as box-shadow
    return weasyprint.HTML(string=page).write_pdf(pdf_variant="pdf/ua-1") or b""


def render(folder: RunFolder, *, public: bool = False, by: str | None = None) -> str:
    """Return the page."""
    from dpshard.applications.cli import final_report  # these import torch: slow for --help
    from dpshard.applications.cli.data import ROWS_PER_UNIT

    written, resume = folder.report.with_suffix(".json"), f"dpshard train --resume {folder.path}"
    if not written.exists():
        raise RunFolderError(f"{folder.path} has not finished: run {resume} first.")
    settings = folder.settings()  # raises for a damaged config.yaml
    quoted = folder.config.read_text("utf-8")
    if public and settings.data is not None:  # file names may identify people
        quoted = replace(settings, data=PRIVATE_NAME, columns=settings.columns and PRIVATE_NAME).to_yaml()
    rows = folder.read_metrics()
    with intact(folder.metrics, "restore it from a copy"):
        spent = [(f"{row['step']:,}", rounded_up(row["epsilon"])) for row in rows if row.get("epsilon") is not None]
        spent = [spent[i * (len(spent) - 1) // 4] for i in range(5)] if len(spent) > 5 else spent
        pictures = plots.svgs([{"step": 0, "epsilon": 0.0}, *rows], settings.target_epsilon)
    audit, told = {} if public else _audit(folder), provenance.read(folder)
    with intact(written, f"remove it and {folder.report.name}, and {resume} writes them again"):
        report = json.loads(written.read_bytes())
        privacy, (results, _, mechanism) = report["privacy"], final_report.rows(report)
        private, found = privacy["epsilon"] is not None, attacks(audit)
        values: dict[str, Any] = {"report": report, "p": privacy, "public": public, "by": by, "s": settings}
        values |= {"config": quoted, "spent": spent, "pictures": pictures, "rows": ROWS_PER_UNIT, "told": told}
        values |= {"results": results, "mechanism": mechanism, "attacks": found, "audit": audit}
        values |= {"folder": folder.path.resolve().name, "now": datetime.now(UTC).date().isoformat(), "when": ""}
        if "finished" in told:
            values["when"] = span(told["starts"][0]["at"], told["finished"], public=public)
        return final_report.rendered(
            "html",
            FILTERS,
            **values,
            strength=strength(privacy["epsilon"]) if private else None,
            odds=odds(privacy) if private else None,
            weights=provenance.weights_digest(folder, report.get("model_sha256")),
            files=(PRIVATE_NAME if public else settings.data) if settings.data else settings.task,
            in_parts=settings.data is None or not Path(settings.data).is_file(),
        )


def span(started: str, finished: str, *, public: bool) -> str:
    """Return both times, or seconds. Seconds of a `public` page would tell of the sizes of batches."""
    first, last = (datetime.fromisoformat(moment) for moment in (started, finished))
    shown, until = (f"{moment:%Y-%m-%d %H:%M}" for moment in (first, last))
    seconds = (last - first).total_seconds()
    if not public and 0 <= seconds <= 60:
        return f"{shown}, {max(1, round(seconds))} seconds"
    return shown if public and shown == until else f"{shown} to {until}"


def _audit(folder: RunFolder) -> dict[str, Any]:
    if not folder.audit.exists():
        return {}
    with intact(folder.audit, f"dpshard audit {folder.path} writes it again"):
        found = json.loads(folder.audit.read_bytes())
        if not attacks(found):
            raise ValueError("it holds no attack")
        datetime.fromisoformat(found.get("at", "2026-01-01"))
        return {"at": "", "by": ""} | found


# --- odds, rounded against us ----------------------------------------------------------------------------------------

BANDS = (("strong", 1.0), ("reasonable", 10.0), ("weak", math.inf))
"""Bands of epsilon by Ponomareva et al. 2023, "How to DP-fy ML", arXiv:2303.00654, Sec. 5.2."""
SCALE = (0.1, 100.0)
"""Ends of the logarithmic scale."""


def strength(epsilon: float) -> dict[str, str]:
    """Return the band, and the place on the scale."""
    low, high = map(math.log10, SCALE)
    place = (math.log10(max(epsilon, SCALE[0])) - low) / (high - low)
    # A band is for what is proved: 10.0001 is above 10.
    return {"band": next(name for name, most in BANDS if epsilon <= most), "place": f"{100 * min(1, place):.1f}%"}


def odds(privacy: Mapping[str, Any]) -> dict[str, float]:
    """Return bounds on what an attacker can find out.

    `of_two` is delta for two records: P(S) <= e^eps (e^eps R(S) + delta) + delta (Dwork and Roth 2014).
    """
    epsilon, delta = privacy["epsilon"], privacy["delta"]
    recorded = [Pair(*pair) for pair in privacy.get("profile", ()) if pair[0] is not None]
    pairs, factor = [*recorded, Pair(epsilon, delta)], math.exp(min(epsilon, 700))
    loss, usual = rarely_above(epsilon), mostly_below(pairs)
    found = {"pairs": len(pairs), "loss": loss, "rare": RARELY * delta, "factor": factor}
    found |= {"guess": right_guesses(pairs), "found": found_records(pairs), "of_two": min(1.0, delta * (1 + factor))}
    found |= {"half": belief(loss, 0.5), "tenth": belief(loss, 0.1)}
    return found | {"usual_half": belief(usual, 0.5), "usual_tenth": belief(usual, 0.1)}


def plain(value: float) -> str:
    """Return `value` as lay readers know it: 0.00001. It is never rounded down."""
    return f"{Decimal(in_figures(value)):f}"


def short(value: float, digits: int = 4) -> str:
    """Return `value` rounded up, without the zeros at its end."""
    shown = rounded_up(value, digits)
    return plain(float(shown)) if math.isfinite(value) else shown


def percent(share: float) -> str:
    """Return a share, rounded up."""
    return rounded_up(100 * share, 1) + "%"


def one_in(probability: float) -> str:
    """Return N of "1 in N", rounded down."""
    return f"{max(1, math.floor((1 + 1e-9) / probability)):,}"


def of_100(share: float) -> str:
    """Return a number of 100, rounded up."""
    return f"{min(100, math.ceil(100 * share - 1e-9))} of 100"


def odds_after(loss: float, prior: float) -> str:
    """Return the belief after a result: 80% (4 to 1), 40% (1 to 1.5)."""
    share, ratio = percent(belief(loss, prior)), math.exp(min(loss, 700)) * prior / (1 - prior)
    if ratio < 1:
        return f"{share} (1 to {math.floor(10 / ratio + 1e-9) / 10:g})"
    whole = f"{math.ceil(ratio - 1e-6):,}" if ratio < 1e6 else f"{ratio:.1e}"
    return f"{share} ({rounded_up(ratio, 1) if ratio < 100 else whole} to 1)"


FILTERS = {f.__name__: f for f in (plain, short, percent, one_in, of_100, odds_after)}
