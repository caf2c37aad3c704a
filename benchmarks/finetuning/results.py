"""The results, as docs/integrations.md shows them."""

from __future__ import annotations

from typing import Any


def table(results: dict[str, Any]) -> str:
    """Return the results in Markdown."""
    lines = [
        "| model | trained | ε | held-out loss: before | private | without privacy | accuracy: before | private "
        "| without privacy | time of a step, to that without privacy |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results["runs"]:
        loss, right = row["loss"], row["accuracy"]
        lines.append(
            f"| {row['model']} | {row['trained']}, {row['parameters']:,} | {row['epsilon']:.2f} "
            f"| {loss['before']:.2f} | **{loss['private']:.2f}** | {loss['ordinary']:.2f} "
            f"| {right['before']:.1%} | **{right['private']:.1%}** | {right['ordinary']:.1%} "
            f"| {row['time_ratio']:.2f} |"
        )
    return "\n".join(lines)
