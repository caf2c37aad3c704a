"""`dpshard report`."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from dpshard.applications.cli import console, plots, provenance
from dpshard.applications.cli.audit import attacks
from dpshard.applications.cli.run_folder import RunFolder, intact, write_atomically
from dpshard.errors import ConfigurationError, RunFolderError

PRIVATE_NAME = "(your data)"
"""Of files, in a public report."""


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder of `dpshard train` that has finished.")],
    public: Annotated[
        bool, typer.Option("--public", help="Leave out scores, losses, norms and audits: epsilon does not cover them.")
    ] = False,
    pdf: Annotated[bool, typer.Option("--pdf", help="Write a PDF beside it, to sign (dpshard[pdf]).")] = False,
    by: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Who trained. [dim]\\[default: the login name, if not --public][/]"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write it. [dim]\\[default: RUN/report.html][/]")
    ] = None,
) -> None:
    """Write the privacy report of a run: a page for everybody, the technical part, and a place to sign.

    The report is one HTML file without external links, for a browser or a printer. It includes the
    bounds of `dpshard audit RUN`, if you ran that before.
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
    from dpshard.accounting import rounded_up  # these import torch: slow for --help
    from dpshard.applications.cli import final_report, report_page
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
            report_page.FILTERS,
            **values,
            strength=report_page.strength(privacy["epsilon"]) if private else None,
            odds=report_page.odds(privacy) if private else None,
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
