"""What the page of `dpshard report` says: the values that report.html.jinja puts between the texts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dpshard.accounting import rounded_up
from dpshard.accounting.risk import RARELY, Pair, belief, found_records, rarely_above, right_guesses
from dpshard.applications.cli import provenance
from dpshard.applications.cli.audit import Attack
from dpshard.applications.cli.final_report import mechanism_rows, result_rows
from dpshard.applications.cli.run_folder import RunFolder
from dpshard.applications.cli.settings import TrainSettings
from dpshard.applications.cli.texts import Texts

BANDS = (("strong", 1.0), ("reasonable", 10.0), ("weak", math.inf))
"""Names and largest epsilons of the bands of Ponomareva et al. 2023, "How to DP-fy ML", arXiv:2303.00654, Sec. 5.2."""
SCALE = (0.1, 100.0)
"""Epsilons at the ends of the scale, which is logarithmic."""


def fill(say: Texts, **context: Any) -> str:
    """Return the page; raise ValueError if the report lacks a value."""
    import jinja2

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    try:
        return environment.get_template("report.html.jinja").render(t=say, **context)
    except jinja2.UndefinedError as error:
        raise ValueError(str(error)) from error


def context(report: Mapping[str, Any], say: Texts, settings: TrainSettings, *, public: bool) -> dict[str, Any]:
    """Return what the report itself says, in the words of the page."""
    privacy = report["privacy"]
    private = privacy["epsilon"] is not None
    return {
        "report": report,
        "title": report["task"] if public or not settings.data else Path(settings.data).name,
        "p": privacy,
        "public": public,
        "budget": settings.target_epsilon,
        "unit_of_rows": settings.group_column is not None,
        "strength": _strength(privacy["epsilon"]) if private else None,
        "odds": _odds(privacy, say) if private else None,
        "mechanism": mechanism_rows(privacy, say),
        "results": [] if public else result_rows(report, say),
        "phases": ",".join(f"{phase['expected_batch_size']}x{phase['steps']}" for phase in privacy["phases"]),
        "sampled": _sampled(settings),
        "rounded_up": rounded_up,
        "now": datetime.now(UTC).date().isoformat(),
    }


def _sampled(settings: TrainSettings) -> str:
    """Return the options of `dpshard account` for batches that are no Poisson ones."""
    if settings.sampling == "poisson":
        return ""
    correlated = f" --correlation {settings.correlation} --bands {settings.bands}"
    if settings.correlation_momentum is not None:
        correlated += f" --correlation-momentum {settings.correlation_momentum!r}"
    return f" --sampling {settings.sampling}{'' if settings.correlation == 'none' else correlated}"


def _strength(epsilon: float) -> dict[str, Any]:
    low, high = map(math.log10, SCALE)
    place = (math.log10(max(epsilon, SCALE[0])) - low) / (high - low)
    # A band is for what is proved: 10.0001 is above 10.
    return {"band": next(name for name, most in BANDS if epsilon <= most), "place": f"{100 * min(1, place):.1f}%"}


def _odds(privacy: Mapping[str, Any], say: Texts) -> dict[str, Any]:
    epsilon, delta = privacy["epsilon"], privacy["delta"]
    recorded = [Pair(*pair) for pair in privacy.get("profile", ()) if pair[0] is not None]
    pairs = [*recorded, Pair(epsilon, delta)]
    loss, rare = rarely_above(epsilon), RARELY * delta
    guess, found, after = right_guesses(pairs), found_records(pairs), belief(loss)
    return {
        "pairs": len(pairs) if recorded else 1,
        "factor": f"{math.exp(min(epsilon, 700)):.4g}",
        "guess": say("risk.of_100", count=_of_100(guess)),
        "found": say("risk.of_100", count=_of_100(found)),
        "coin": say("risk.of_100", count=50),
        "one": say("risk.of_100", count=1),
        "even": say("risk.even", share="50%"),
        "after": say("risk.to_one", odds=_whole(math.exp(min(loss, 700))), share=rounded_up(100 * after, 1) + "%"),
        "values": {name: rounded_up(value) for name, value in (("guess", guess), ("found", found), ("belief", after))},
        "rare": f"{rare:.3g}",
        "one_in": f"{max(1, math.floor((1 + 1e-9) / rare)):,}",
        "large_delta": delta * privacy["sample_size"] >= 1,
    }


def _of_100(share: float) -> str:
    return str(min(100, math.ceil(100 * share - 1e-9)))


def _whole(value: float) -> str:
    if value < 100:
        return rounded_up(value, 1)
    return f"{math.ceil(value - 1e-6):,}" if value < 1e6 else f"{value:.1e}"


def facts(
    folder: RunFolder, report: Mapping[str, Any], say: Texts, settings: TrainSettings, by: str | None, *, public: bool
) -> list[tuple[str, str]]:
    """Return who trained what and when; without what identifies people or is a function of the data, if `public`.

    Raises RunFolderError if model.pt is not the file that training wrote.
    """
    told, unknown = provenance.read(folder), say("unknown")
    starts = told.get("starts", [])
    users = [start["by"] for start in starts if start["by"]]
    commits = [start["code"] for start in starts if start["code"]]
    when = (
        say("span", started=_minute(starts[0]["at"]), finished=_minute(told["finished"]))
        if "finished" in told
        else unknown
    )
    name = say("data.private_name") if public and settings.data else settings.data or settings.task
    versions = report["versions"] | ({"python": starts[-1]["python"]} if starts else {})
    device = report["device"]
    if report["shard"] != "none":
        device = say("software.ranks", device=device, ranks=report["ranks"], shard=report["shard"])
    software = ", ".join(f"{program} {version}" for program, version in versions.items())
    weights = provenance.weights_digest(folder, report.get("model_sha256"))
    rows = [
        ("fact.by", by or ("" if public else _several(users)) or unknown),
        ("fact.when", when),
        ("fact.data", _records(report["samples"], name, say, public=public)),
        ("fact.fingerprint", say("sha256", digest=told["data"]) if told.get("data") else unknown),
        ("fact.weights", say("weights.file", digest=weights) if weights else unknown),
        ("fact.software", say("software.on", versions=software, device=device)),
        ("fact.code", say("code.commit", commit=_several(commits)) if commits else unknown),
    ]
    if public:
        rows = [row for row in rows if row[0] != "fact.fingerprint"]
    else:
        rows.append(("fact.score", result_rows(report, say)[0][1]))
    return [(say(key), value) for key, value in rows]


def _records(samples: Mapping[str, int], name: str, say: Texts, *, public: bool) -> str:
    records = say("data.records", name=name, train=f"{samples['train']:,}")
    held_out = samples["validation"] + samples["test"]
    return records if public or not held_out else say("data.held_out", records=records, count=f"{held_out:,}")


def tested(found: Sequence[Attack] | None, say: Texts) -> tuple[str, str]:
    """Return what attacks have found, in one line."""
    if not found:
        return say("fact.tested"), say("tested.none")
    refuted = any(attack.refuted for attack in found)
    return say("fact.tested"), say("tested.refuted") if refuted else say("tested.passed", count=len(found))


def _several(values: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def _minute(moment: str) -> str:
    return datetime.fromisoformat(moment).strftime("%Y-%m-%d %H:%M")


def spent(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return at most five steps with the epsilon that was spent after them."""
    points = [(f"{row['step']:,}", rounded_up(row["epsilon"])) for row in rows if row.get("epsilon") is not None]
    return [points[i * (len(points) - 1) // 4] for i in range(5)] if len(points) > 5 else points
