"""A page as PDF: by WeasyPrint, or by a browser that is installed."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from dpshard.applications.cli.run_folder import write_atomically
from dpshard.errors import ConfigurationError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")
"""Programs that print a page to PDF without a window."""


def write(page: str, path: Path, *, public: bool) -> None:
    """Write the HTML `page` as a tagged PDF; only the user may read it, unless `public`.

    Raises ConfigurationError if there is neither WeasyPrint nor a browser, or if both fail; RunFolderError if `path`
    cannot be written.
    """
    write_atomically(path, content(page), public=public)


def content(page: str) -> bytes:
    """Return the bytes of the PDF; see `write`."""
    try:
        return _by_weasyprint(page)
    except ImportError as error:
        missing = "WeasyPrint is not installed"
        reason = missing if (getattr(error, "name", "") or "").partition(".")[0] == "weasyprint" else str(error)
    except OSError as error:  # it looks for Pango when it is imported
        reason = f"WeasyPrint finds no Pango ({str(error).splitlines()[0]})"
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise ConfigurationError(
            f"--pdf needs WeasyPrint or a browser: {reason}, and no {', '.join(BROWSERS)} is on PATH. pip install "
            f"'dpshard[pdf]' (on Debian with apt install libpango-1.0-0 libpangoft2-1.0-0), or print the HTML file."
        )
    return _by_browser(page, browser)


def _by_weasyprint(page: str) -> bytes:
    import weasyprint

    for name in ("weasyprint", "fontTools"):
        logging.getLogger(name).setLevel(logging.ERROR)  # it warns of rules for screens, such as box-shadow
    return weasyprint.HTML(string=page).write_pdf(pdf_variant="pdf/ua-1") or b""


def _by_browser(page: str, browser: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:  # only the user can read it
        source, target = Path(folder) / "page.html", Path(folder) / "page.pdf"
        source.write_text(page, "utf-8")
        command = [
            *(browser, "--headless", "--disable-gpu", "--disable-background-networking", "--no-first-run"),
            *("--no-pdf-header-footer", f"--user-data-dir={folder}/profile"),
            *(["--no-sandbox"] if os.geteuid() == 0 else []),  # root cannot have one
            *(f"--print-to-pdf={target}", source.as_uri()),
        ]
        try:
            subprocess.run(command, capture_output=True, timeout=120, check=True)
            return target.read_bytes()
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigurationError(
                f"{browser} did not print the report ({error.__class__.__name__}): pip install 'dpshard[pdf]', or "
                f"print the HTML file yourself."
            ) from error
