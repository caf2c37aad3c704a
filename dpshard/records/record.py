"""The kinds of records, which docs/architecture.md lists.

[Note: Records]

    norm_sq          squared norms [B], float32 or wider
    per_sample       per-sample gradients [B, *shape]
    clipped_sum      sum_i weight_i * gradient_i, [*shape]
    without          zeros for nonfinite_B (bool [B]), whose weights are 0 in later clipped sums
    real             a complex gradient as its real and imaginary parts, [*shape, 2]; a tape keeps no other

A gradient is the sum of its records. Records of one kind are joined. Norms include the inner products of different
kinds, so all cross terms.
"""

from dpshard.records.convolution import Convolution
from dpshard.records.embedding import EmbeddingRecord
from dpshard.records.outer_product import OuterProduct
from dpshard.records.per_sample import PerSampleGrad
from dpshard.records.routed_product import RoutedProduct
from dpshard.records.routed_reads import RoutedReads
from dpshard.records.vocabulary import HeadRecord

Record = PerSampleGrad | OuterProduct | Convolution | EmbeddingRecord | RoutedProduct | RoutedReads | HeadRecord
