"""The state of an engine as plain values, with a digest that reveals damage."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any, NamedTuple

from dpshard.accounting.mechanism import Mechanism
from dpshard.errors import CheckpointError, ConfigurationError

FORMAT = 3
SECURE_NOISE = "sums of 4 normals"
"""Kind of secure noise; another kind would draw other noise for repeated steps."""


class Unpacked(NamedTuple):
    """A state without its mechanism."""

    secret: bytes
    account: dict[str, Any]
    """Ledger and history, see Budget."""
    facts: dict[str, Any]
    """Facts that affect the rounding of sums; see facts.py."""
    thresholds: Any
    """Adaptive thresholds, or None."""
    noise: Any
    """Keys of past noise, or None."""
    order: Any
    """Which samples took part, if their order is fixed; else None."""


def pack(
    mechanism: Mechanism,
    secret: bytes,
    account: dict[str, Any],
    *,
    facts: dict[str, Any] | None = None,
    thresholds: dict[str, Any] | None = None,
    noise: list[str] | None = None,
    order: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the fields of `Unpacked` and the mechanism as plain JSON with a digest."""
    state = {"format": FORMAT, "mechanism": _plain(mechanism), "secret": secret.hex(), **account, "facts": facts or {}}
    optional = {"thresholds": thresholds, "noise": noise, "order": order}
    state |= {name: value for name, value in optional.items() if value is not None}
    return {**state, "digest": digest_of(state)}


def unpack(state: Any, mechanism: Mechanism) -> Unpacked:
    """Return the content of a state; CheckpointError if damaged or foreign."""
    try:
        body = {key: value for key, value in state.items() if key != "digest"}
        if state["format"] != FORMAT:
            raise CheckpointError(
                f"The checkpoint has format {state['format']!r}, this version of dpshard reads format {FORMAT}. Use "
                f"the version that wrote it."
            )
        sound = state["digest"] == digest_of(body)
        secret, saved, facts = bytes.fromhex(state["secret"]), dict(state["mechanism"]), dict(state["facts"])
        account = {"ledger": state["ledger"], "history": state["history"]}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"This is not the state of a PrivacyEngine ({type(error).__name__}: {error}). Pass a result of "
            f"engine.state_dict()."
        ) from error
    if not sound or len(secret) != 32:
        raise CheckpointError(
            "The state of the privacy engine was damaged or altered: its digest does not match. It could forget spent "
            "budget or release a step twice. Resume from an older checkpoint."
        )
    own = json.loads(json.dumps(_plain(mechanism)))
    saved = {"sampling": "poisson", "noise_correlation": None} | json.loads(json.dumps(saved))  # for older states
    changed = sorted(key for key in own.keys() | saved.keys() if own.get(key) != saved.get(key))
    if changed:
        shown = "; ".join(f"{key}: saved {_short(saved.get(key))}, now {_short(own.get(key))}" for key in changed)
        hint = ""
        if changed == ["noise_correlation"] and own["noise_correlation"] and saved["noise_correlation"]:
            hint = f" (Found coefficients may differ with scipy. Those saved are {saved['noise_correlation']}.)"
        raise CheckpointError(
            f"The checkpoint belongs to another mechanism ({shown}). Make the engine with the settings of the resumed "
            f"run, or start a new run with its own budget.{hint}"
        )
    return Unpacked(secret, account, facts, state.get("thresholds"), state.get("noise"), state.get("order"))


def require_released(released: Any, account: dict[str, Any]) -> None:
    """Raise ConfigurationError unless a number of released steps is at least that of the state's account."""
    ledger = account["ledger"]
    steps = ledger.get("steps") if isinstance(ledger, dict) else None
    if not isinstance(released, int) or type(steps) is not int:
        return  # Checkpointer passes its journal; a damaged ledger is refused when it is loaded
    if type(released) is not int or released < steps:
        raise ConfigurationError(
            f"released={released!r}: give the number of steps that were released in all, at least the {steps} of the "
            f"state."
        )


def _plain(mechanism: Mechanism) -> dict[str, Any]:
    plain = asdict(mechanism)
    plain["noise_correlation"] = None if mechanism.noise_correlation is None else repr(mechanism.correlation)
    plain["schedule"] = [list(phase) for phase in mechanism.schedule.phases()]
    plain["earlier"] = [[asdict(release), count] for release, count in mechanism.earlier]
    plain["secure"] = SECURE_NOISE if mechanism.secure else False
    plain["clipping_groups"] = [list(names) for names in mechanism.clipping_groups]
    return plain


def digest_of(body: dict[str, Any]) -> str:
    """Return the SHA-256, in hex, of plain values."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
