"""`dpshard report`: the privacy report of a finished run, as one HTML file, and as PDF."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from dpshard.applications.cli import console, plots, provenance, texts
from dpshard.applications.cli.audit import attacks
from dpshard.applications.cli.run_folder import RunFolder, intact, write_atomically
from dpshard.errors import RunFolderError


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder of `dpshard train` that has finished.")],
    public: Annotated[
        bool, typer.Option("--public", help="Leave out scores, losses, norms and audits: epsilon does not cover them.")
    ] = False,
    pdf: Annotated[
        bool, typer.Option("--pdf", help="Write a PDF beside it, to sign: by WeasyPrint, or an installed browser.")
    ] = False,
    by: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Who trained. [dim]\\[default: the login name, if not --public][/]"),
    ] = None,
    words: Annotated[
        Path | None, typer.Option("--texts", metavar="FILE", help="Translation of the page's texts, as YAML.")
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
    page = render(folder, public=public, by=by, say=texts.load(words))
    write_atomically(target, page.encode(), public=public)
    console.out.print(str(target))
    if pdf:
        from dpshard.applications.cli import pdf as printer

        with console.out.status("printing ..."):
            printer.write(page, target.with_suffix(".pdf"), public=public)
        console.out.print(str(target.with_suffix(".pdf")))


def render(folder: RunFolder, *, public: bool = False, by: str | None = None, say: texts.Texts | None = None) -> str:
    """Return the page, in English without `say`; raise RunFolderError if the run has not finished."""
    from dpshard.applications.cli import report_page

    say = say or texts.english()
    written, resume = folder.report.with_suffix(".json"), f"dpshard train --resume {folder.path}"
    if not written.exists():
        raise RunFolderError(f"{folder.path} has not finished: run {resume} first.")
    settings = folder.settings()  # raises for a damaged config.yaml
    quoted = folder.config.read_text("utf-8")
    if public and settings.data is not None:  # file names may identify people
        name = say("data.private_name")
        quoted = replace(settings, data=name, columns=settings.columns and name).to_yaml()
    rows = folder.read_metrics()
    with intact(folder.metrics, "restore it from a copy"):
        spent = report_page.spent(rows)
        pictures = plots.svgs([{"step": 0, "epsilon": 0.0}, *rows], settings.target_epsilon)
    audit = {} if public else _audit(folder)
    with intact(written, f"remove it and {folder.report.name}, and {resume} writes them again"):
        report = _read(written)
        facts = report_page.facts(folder, report, say, settings, by, public=public)
        found = attacks(audit) or None
        if not public:
            facts.append(report_page.tested(found, audit, say))
        context = report_page.context(report, say, settings, public=public)
        resumed = len(provenance.read(folder).get("starts", ())) > 1
        actions = report_page.actions(report, say, resumed=resumed, public=public)
        run = {"folder": folder.path.resolve().name, "settings": quoted, "facts": facts, "attacks": found}
        run |= {"actions": actions}
        return report_page.fill(say, **context, **run, spent=spent, pictures=pictures)


def _audit(folder: RunFolder) -> dict[str, Any]:
    """Return the content of audit.json, {} without one; raise RunFolderError if it is damaged."""
    if not folder.audit.exists():
        return {}
    with intact(folder.audit, f"dpshard audit {folder.path} writes it again"):
        found = _read(folder.audit)
        if not attacks(found):
            raise ValueError("it holds no attack")
        if "at" in found:
            datetime.fromisoformat(found["at"])
        return found


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror or error}. Check your permissions.") from error
