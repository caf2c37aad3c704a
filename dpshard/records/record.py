"""The kinds of records.

[Note: Records]
A use of a parameter leaves a record. B samples, G groups of a weight, T positions, R rows, C columns:

    OuterProduct     rows [B, G, T, R], cols [B, G, T, C]     gradient of sample i: sum_t rows_it (x) cols_it, [G, R, C]
    Convolution      input [B, k, ...], gradient [B, k, ...]  an OuterProduct with the windows of the input as columns
    EmbeddingRecord  ids [B, T], values [B, T, C]             values_it added to row ids_it, [V, C]
    PerSampleGrad    gradient [B, *shape]                     the gradient itself
    RoutedProduct    rows [N, R], cols [N, C]                 an OuterProduct of the rows of all samples, in any order
    RoutedReads      ids [N], values [N, C]                   an EmbeddingRecord of them
    HeadRecord       hidden [B, T, D], labels [B, T]          an OuterProduct whose rows are computed again, in chunks

    norm_sq          squared norms [B], float32 or wider
    per_sample       per-sample gradients [B, *shape]
    clipped_sum      sum_i weight_i * gradient_i, [*shape]
    without          zeros for nonfinite_B (bool [B]), whose weights are 0 in later clipped sums
    real             a complex gradient as its real and imaginary parts, [*shape, 2]; a tape keeps no other

The gradient of a parameter with several uses is the sum of its records. Records of one kind join; other kinds have
inner products, so norms include all cross terms.
"""

from dpshard.records.convolution import Convolution
from dpshard.records.embedding import EmbeddingRecord
from dpshard.records.outer_product import OuterProduct
from dpshard.records.per_sample import PerSampleGrad
from dpshard.records.routed_product import RoutedProduct
from dpshard.records.routed_reads import RoutedReads
from dpshard.records.vocabulary import HeadRecord

Record = PerSampleGrad | OuterProduct | Convolution | EmbeddingRecord | RoutedProduct | RoutedReads | HeadRecord
