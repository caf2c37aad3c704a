"""Per-sample losses that do not depend on the other samples of the micro-batch.

Plain torch functions, for users. May import `errors` and below. `head.py` has the arithmetic of `chunked.py`.
"""

from dpshard.losses.chunked import chunked_cross_entropy
from dpshard.losses.samples import packed_cross_entropy, sample_losses

__all__ = ["chunked_cross_entropy", "packed_cross_entropy", "sample_losses"]
