"""What a logical batch looked like from inside: for tuning and debugging. None of it is covered by epsilon."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dpshard.clipping import ClippingGroup

FIGURES = (
    "samples",
    "samples without a finite gradient",
    "samples above the threshold",
    "sum of norms",
    "largest norm",
)
"""Of a group and a micro-batch. All are sums over samples, but for the last one."""


class BatchMetrics:
    """Sums over the samples of one logical batch, kept on the device and read only when they are asked for."""

    def __init__(self) -> None:
        self._groups: dict[str, list[Tensor]] = {}
        self._signal: Tensor | None = None
        self._noise = 0.0
        self._losses: list[tuple[Tensor, float]] = []

    def observe(self, group: ClippingGroup, norm_B: Tensor, factor_B: Tensor, is_padding_B: Tensor | None) -> None:
        """Take the norms and factors [B] of one group and micro-batch."""
        real_B = torch.ones_like(norm_B, dtype=torch.bool) if is_padding_B is None else ~is_padding_B
        finite_B = real_B & torch.isfinite(norm_B)
        norm_B = norm_B.double()
        totals = torch.stack(  # FIGURES
            [
                real_B.sum().double(),
                (real_B & ~finite_B).sum().double(),
                (finite_B & (norm_B > group.threshold)).sum().double(),
                torch.where(finite_B, norm_B, 0).sum(),
                torch.where(finite_B, norm_B, 0).max(),
            ]
        )
        self._groups.setdefault(group.label, []).append(totals)

    def add_loss(self, loss: Tensor, is_padding_B: Tensor | None) -> None:
        """Take the loss of one micro-batch: a mean over its rows, or one value a row, of which finite ones count."""
        if loss.dim() == 0:
            rows = 1 if is_padding_B is None else int((~is_padding_B).sum())
            total = loss * rows
        else:
            real = loss if is_padding_B is None else loss[~is_padding_B.to(loss.device)]
            real = real[real.isfinite()]  # the other samples are dropped, and counted
            rows, total = len(real), real.sum()
        if rows:  # the loss of padding alone may be NaN
            self._losses.append((total, float(rows)))

    def observe_sum(self, signal_norm: Tensor, noise_norm: float) -> None:
        """Take the norms of the clipped sum (a scalar tensor) and, expected, of its noise; both before the division."""
        self._signal, self._noise = signal_norm, noise_norm

    def over_ranks(self, labels: Sequence[str], stack: Callable[[Tensor], Tensor]) -> None:
        """Make these the figures of all ranks: `stack` gives the vectors of all of them as rows.

        All ranks hand over the same `labels`, those of all groups, for some may not have met a group at all.
        """
        nothing = torch.zeros(len(FIGURES), dtype=torch.float64)
        rows = []
        for label in labels:
            stacked = torch.stack(self._groups.get(label, [nothing]))
            seen = torch.full_like(stacked[0, :1], len(self._groups.get(label, [])))
            rows.append(torch.cat([stacked[:, :-1].sum(0), stacked[:, -1:].max(0).values, seen]).cpu())
        own = torch.stack(
            [torch.as_tensor(total, dtype=torch.float64).cpu() for total, _ in self._losses] or [nothing[0]]
        )
        losses = torch.stack([own.sum(), torch.tensor(sum((n for _, n in self._losses), 0.0), dtype=torch.float64)])
        ranks_WX = stack(torch.cat([*rows, losses])).cpu()
        groups_WGF = ranks_WX[:, :-2].view(len(ranks_WX), len(labels), -1)
        for label, ranks_WF in zip(labels, groups_WGF.unbind(1), strict=True):
            if ranks_WF[:, -1].any():
                self._groups[label] = [torch.cat([ranks_WF[:, :-2].sum(0), ranks_WF[:, -2:-1].max(0).values])]
        total, count = ranks_WX[:, -2:].sum(0)
        self._losses = [(total, float(count))] if count else []

    def summary(self) -> dict[str, float]:
        """See PrivacyEngine.metrics."""
        samples = dropped = clipped = counted = 0.0
        norms: dict[str, float] = {}
        for label, totals in self._groups.items():
            stacked = torch.stack(totals)
            real, nonfinite, above, norm_sum = (float(x) for x in stacked[:, :4].sum(0))
            samples, dropped = max(samples, real), max(dropped, nonfinite)
            clipped, counted = clipped + above, counted + real
            norms[f"grad_norm/{label}"] = norm_sum / max(1.0, real - nonfinite)
            norms[f"grad_norm_max/{label}"] = float(stacked[:, 4].max())
        signal = 0.0 if self._signal is None else float(self._signal)
        rows = sum(count for _, count in self._losses)
        loss = {"loss": float(sum(total for total, _ in self._losses)) / rows} if rows else {}
        return {
            **loss,
            "realised_batch_size": samples,
            "nonfinite_samples": dropped,
            "clip_fraction": clipped / max(1.0, counted),
            "gradient_snr": signal / self._noise if self._noise > 0 else float("inf") if signal else 0.0,
            "clipped_sum_norm": signal,
            **norms,
        }
