"""Growing batch sizes and decaying learning rates."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dpshard.config import is_count
from dpshard.errors import ConfigurationError


def stepped_batches(first: int, last: int, *, levels: int, ramp_steps: int, steps: int) -> list[tuple[int, int]]:
    """Return phases [(expected batch size, steps), ...] for `PrivacyEngine(batch_size=)`.

    `levels` equally spaced sizes from `first` to `last` share the first `ramp_steps` steps, to rounding. Then `last`
    holds up to `steps`. Larger batches keep shrinking gradients above the noise: Anil et al. 2021, arXiv:2108.01624,
    Sec. 5.2.2. Raises ConfigurationError for impossible sizes.
    """
    if not all(map(is_count, (first, last, levels, ramp_steps, steps))) or not (levels <= ramp_steps <= steps):
        raise ConfigurationError(
            f"stepped_batches({first}, {last}, levels={levels}, ramp_steps={ramp_steps}, steps={steps}): pass "
            f"positive ints, with levels <= ramp_steps <= steps."
        )
    sizes = [round(first + (last - first) * k / max(1, levels - 1)) for k in range(levels - 1)] + [last]
    starts = [round(ramp_steps * k / levels) for k in range(levels)] + [steps]
    return [(size, end - start) for size, start, end in zip(sizes, starts, starts[1:], strict=False)]


def warmup_quadratic_decay(optimizer: Optimizer, *, warmup_steps: int, steps: int) -> LambdaLR:
    """Return a schedule with factor (t + 1) / W in W warm-up steps, then ((T - t) / (T - W))^2.

    t is the step from 0, T = `steps`; past the end the factor is 0. Call `.step()` after each optimizer step. Raises
    ConfigurationError unless 0 <= W < T.
    """
    if not (is_count(steps) and isinstance(warmup_steps, int) and 0 <= warmup_steps < steps):
        raise ConfigurationError(
            f"warmup_steps={warmup_steps!r}, steps={steps!r}: warm-up ends before the run does; pass whole numbers."
        )

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return (max(0, steps - step) / (steps - warmup_steps)) ** 2

    return LambdaLR(optimizer, factor)
