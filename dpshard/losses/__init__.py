"""Per-sample losses that do not depend on the other samples of the micro-batch: plain torch functions, for users.

Begin with `samples.py`. May import `errors`.
"""

from dpshard.losses.chunked import chunked_cross_entropy
from dpshard.losses.samples import packed_cross_entropy, sample_losses

__all__ = ["chunked_cross_entropy", "packed_cross_entropy", "sample_losses"]
