"""The values that report.html.jinja inserts into the page of `dpshard report`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from dpshard.accounting import rounded_up
from dpshard.accounting.risk import RARELY, Pair, belief, found_records, mostly_below, rarely_above, right_guesses
from dpshard.applications.cli import provenance
from dpshard.applications.cli.audit import Attack
from dpshard.applications.cli.data import ROWS_PER_UNIT
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
        "several": _several_records(privacy) if private else None,
        "rows": settings.rows_per_unit or ROWS_PER_UNIT,
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


PRIORS = (0.5, 0.1)
"""Beliefs of an attacker before the result."""


def _odds(privacy: Mapping[str, Any], say: Texts) -> dict[str, Any]:
    epsilon, delta, size = privacy["epsilon"], privacy["delta"], privacy["sample_size"]
    recorded = [Pair(*pair) for pair in privacy.get("profile", ()) if pair[0] is not None]
    pairs = [*recorded, Pair(epsilon, delta)]
    loss, usual, rare = rarely_above(epsilon), mostly_below(pairs), RARELY * delta
    guess, found = right_guesses(pairs), found_records(pairs)
    after, mostly = ([belief(bound, prior) for prior in PRIORS] for bound in (loss, usual))
    values = {"guess": guess, "found": found, "half": after[0], "tenth": after[1]}
    values |= {"usual_half": mostly[0], "usual_tenth": mostly[1]}
    return {
        "pairs": len(pairs) if recorded else 1,
        "factor": f"{math.exp(min(epsilon, 700)):.4g}",
        "guess": say("risk.of_100", count=_of_100(guess)),
        "found": say("risk.of_100", count=_of_100(found)),
        "coin": say("risk.of_100", count=50),
        "one": say("risk.of_100", count=1),
        "half": _belief(loss, PRIORS[0], say),
        "tenth": _belief(loss, PRIORS[1], say),
        "usual": {"half": _percent(mostly[0]), "tenth": _percent(mostly[1])},
        "values": {name: rounded_up(value) for name, value in values.items()},
        "rare": _short(rare, 3),
        "one_in": _one_in(rare),
        "delta": _plain(delta),
        "delta_one_in": _one_in(delta),
        "expected": _short(min(size, rare * size), 1),
        "large_delta": delta * size >= 1,
    }


def _several_records(privacy: Mapping[str, Any]) -> dict[str, str]:
    """Return epsilon and delta for one record and for two.

    A third data set between lacks one of the two. So P(S) <= e^eps (e^eps R(S) + delta) + delta: twice epsilon at (1 +
    e^epsilon) delta. See Dwork and Roth 2014, "The algorithmic foundations of differential privacy".
    """
    epsilon, delta = privacy["epsilon"], privacy["delta"]
    both = min(1.0, delta * (1 + math.exp(min(epsilon, 700))))
    return {"once": _short(epsilon), "twice": _short(2 * epsilon), "delta": _plain(delta), "deltas": _short(both, 2)}


def _short(value: float, digits: int = 4) -> str:
    """Return `value` rounded up, without the zeros at its end."""
    shown = rounded_up(value, digits)
    return _plain(float(shown)) if math.isfinite(value) else shown


def _plain(value: float) -> str:
    """Return `value` as lay readers know it: 0.00001."""
    return f"{Decimal(f'{value:.6g}'):f}"


def _percent(share: float) -> str:
    return rounded_up(100 * share, 1) + "%"


def _belief(loss: float, prior: float, say: Texts) -> str:
    """Return the belief after a result, with odds: 80% (4 to 1), 40% (1 to 1.5). Odds against are rounded down."""
    share, odds = _percent(belief(loss, prior)), math.exp(min(loss, 700)) * prior / (1 - prior)
    if odds < 1:
        return say("risk.against", share=share, odds=f"{math.floor(10 / odds + 1e-9) / 10:g}")
    return say("risk.to_one", share=share, odds=_whole(odds))


def _one_in(probability: float) -> str:
    return f"{max(1, math.floor((1 + 1e-9) / probability)):,}"


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
    name = say("data.private_name") if public and settings.data else settings.data or settings.task
    versions = report["versions"] | ({"python": starts[-1]["python"]} if starts else {})
    device = report["device"]
    if report["shard"] != "none":
        device = say("software.ranks", device=device, ranks=report["ranks"], shard=report["shard"])
    software = ", ".join(f"{program} {version}" for program, version in versions.items())
    weights = provenance.weights_digest(folder, report.get("model_sha256"))
    rows = [
        ("fact.by", by or ("" if public else _several(users)) or unknown),
        ("fact.when", _span(starts[0]["at"], told["finished"], say, public=public) if "finished" in told else unknown),
        ("fact.data", _records(report["samples"], name, say, settings, public=public)),
        ("fact.fingerprint", _fingerprint(told["data"], settings, say) if told.get("data") else unknown),
        ("fact.weights", say("weights.file", digest=weights) if weights else unknown),
        ("fact.software", say("software.on", versions=software, device=device)),
        ("fact.code", _code(commits, say) if starts else unknown),
    ]
    if public:
        rows = [row for row in rows if row[0] != "fact.fingerprint"]
    else:
        rows.append(("fact.score", result_rows(report, say)[0][1]))
    return [(say(key), value) for key, value in rows]


def _records(samples: Mapping[str, int], name: str, say: Texts, settings: TrainSettings, *, public: bool) -> str:
    of_units = settings.group_column is not None
    records = say("data.units" if of_units else "data.records", name=name, train=f"{samples['train']:,}")
    if public or not samples["validation"] + samples["test"]:
        return records
    return say("data.held_out", records=records, **{split: f"{samples[split]:,}" for split in ("test", "validation")})


def _fingerprint(digest: str, settings: TrainSettings, say: Texts) -> str:
    """Return the digest, and say so if it is not that of a file."""
    parts = settings.data is None or settings.data.startswith("hf:") or Path(settings.data).is_dir()
    return say("sha256.parts" if parts else "sha256", digest=digest)


def _code(commits: Sequence[str], say: Texts) -> str:
    return say("code.commit", commit=_several(commits)) if commits else say("code.none")


def _span(started: str, finished: str, say: Texts, *, public: bool) -> str:
    """Return both times, or within a minute one of them and the seconds.

    Without seconds, if `public`: they tell of the sizes of batches, which must stay secret.
    """
    first, last = _minute(started), _minute(finished)
    if public:
        return first if first == last else say("span", started=first, finished=last)
    seconds = (datetime.fromisoformat(finished) - datetime.fromisoformat(started)).total_seconds()
    if 0 <= seconds <= 60:
        return say("span.short", started=first, seconds=f"{max(1, round(seconds))}")
    return say("span", started=first, finished=last)


def actions(report: Mapping[str, Any], say: Texts, *, resumed: bool, public: bool) -> list[str]:
    """Return how to check the report, and what to do in some cases."""
    epsilon = report["privacy"]["epsilon"]
    values: dict[str, str] = {name: say(f"fact.{name}") for name in ("weights", "fingerprint")}
    values |= {name: say(name) for name in ("facts", "reproduce", "risk")}
    values["epsilon"] = "" if epsilon is None else rounded_up(epsilon)
    others = {"action.files": "public.files"} if public else {}
    if resumed:
        others["action.figures"] = "resumed.figures"
    keys = [f"action.{name}" for name in say.under("action.")]
    return [say(others.get(key, key), **values) for key in keys]


def tested(found: Sequence[Attack] | None, audit: Mapping[str, Any], say: Texts) -> tuple[str, str]:
    """Return what attacks have found, and who tried them when, in one line."""
    if not found:
        return say("fact.tested"), say("tested.none")
    if any(attack.refuted for attack in found):
        return say("fact.tested"), say("tested.refuted")
    who = say("tested.unknown")
    if audit.get("at"):
        date = datetime.fromisoformat(audit["at"]).date().isoformat()
        who = say("tested.who", by=audit.get("by") or say("unknown"), date=date)
    return say("fact.tested"), say("tested.passed", count=len(found), who=who)


def _several(values: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def _minute(moment: str) -> str:
    return datetime.fromisoformat(moment).strftime("%Y-%m-%d %H:%M")


def spent(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return at most five steps with the epsilon that was spent after them."""
    points = [(f"{row['step']:,}", rounded_up(row["epsilon"])) for row in rows if row.get("epsilon") is not None]
    return [points[i * (len(points) - 1) // 4] for i in range(5)] if len(points) > 5 else points
