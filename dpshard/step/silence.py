"""Micro-batches without any gradient, while all samples of other micro-batches have one.

[Note: Silent micro-batches] `0 * loss`, `loss.clamp(max=...)` and `torch.nan_to_num(loss)` switch off a whole
micro-batch because of one sample. Single samples may have no gradient (a hinge, a dead unit), but some of these share a
micro-batch with others. So a run is suspect if it never had such a mixed micro-batch, and chance does not explain that.
By chance, Z silent samples of n fill m of K micro-batches with probability at most C(K, m) / C(n, Z). Only this
step's silent samples count: the same ones may be silent together repeatedly.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dpshard.clipping.groups import ClippingGroup
from dpshard.interception import Doubt, Doubts
from dpshard.records.host import arrays_of, is_at_hand, total

NOTHING = 1e-8
"""Share of the threshold below which a gradient counts as zero."""
BY_CHANCE = 1e-8
"""Probability below which silence is not chance, if data order is independent of the samples."""


class Silence:
    """Counts samples without a gradient, without synchronising with the device."""

    def __init__(self) -> None:
        # By mask: the padding, and norms by threshold.
        self._norms: dict[int, tuple[Tensor, dict[float, list[Tensor]]]] = {}
        self._sound: Tensor | None = None  # sound samples, their micro-batches, steps with mixed ones

    def begin(self) -> None:
        """Begin a logical batch."""
        self._norms.clear()

    def observe(self, group: ClippingGroup, norm_B: Tensor, is_padding_B: Tensor) -> None:
        """Take a group's norms in the micro-batch with this mask."""
        if id(is_padding_B) not in self._norms:
            for _, earlier in self._norms.values():
                shares_B = _shares(earlier)
                earlier.clear()
                earlier[1.0] = [shares_B]
        _, norms = self._norms.setdefault(id(is_padding_B), (is_padding_B, {}))
        norms.setdefault(group.threshold, []).append(norm_B.detach())

    def end(self, doubts: Doubts) -> None:
        """Note silence that is not chance."""
        if not self._norms:
            return
        totals = [_shares(norms).masked_fill(mask, math.nan) for mask, norms in self._norms.values()]
        norm_KB = pad_sequence(totals, batch_first=True, padding_value=math.nan)
        xp, (array_KB,) = arrays_of(norm_KB)
        with np.errstate(invalid="ignore"):
            now, lonely_K = _tally(xp, array_KB)
        now, lonely_K = torch.as_tensor(now), torch.as_tensor(lonely_K)
        first, self._sound = self._sound is None, now if self._sound is None else self._sound + now
        if first or (is_at_hand(lonely_K) and not lonely_K.numpy().any()):
            return  # an unusual order of the data may group silent samples once
        alone = lonely_K > 0
        z, m, (n, k, ever_mixed) = lonely_K.sum(), alone.sum(), self._sound
        unlikely = _log_choose(k + m, m) - _log_choose(n + z, z) < math.log(BY_CHANCE)
        doubts.note(Doubt.SILENT, alone.any() & (ever_mixed == 0) & unlikely, wait=True)


def _tally(xp: Any, norm_KB: Any) -> tuple[Any, Any]:
    silent_K = (norm_KB <= NOTHING).sum(1)
    sound_K = ((norm_KB > NOTHING) & (norm_KB < math.inf)).sum(1)  # NaN says nothing
    silent, sound = silent_K > 0, sound_K > 0
    trains = sound.any()  # an all-silent step may have a public weight of 0
    mixed = (silent & sound).any()
    now = xp.stack([(sound_K * ~silent).sum(), (sound & ~silent).sum(), mixed * 1]) * trains
    return now, silent_K * (silent & ~sound & trains)


def _shares(norms: dict[float, list[Tensor]]) -> Tensor:
    return total([total(of_one) / threshold for threshold, of_one in norms.items()])


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    wide = torch.float32 if n.device.type == "mps" else torch.float64
    n, k = n.to(wide), k.to(wide)
    return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
