"""Records: per-sample facts about the gradient of one parameter after one use of it.

One file per kind of record. `measure.py`: norms of several records. `numerics.py`: dtypes and rounding floors.
`cost.py`: which way to a norm is cheaper. `offload.py`: records in host memory.
May import `kernels` and below. Not for users. Begin with `record.py`.
"""

from dpshard.records.convolution import Convolution
from dpshard.records.embedding import EmbeddingRecord
from dpshard.records.measure import measure
from dpshard.records.numerics import WIDE, accum_dtype, as_complex, as_real, wide
from dpshard.records.of_samples import of_samples
from dpshard.records.offload import fetched, offloaded
from dpshard.records.outer_product import OuterProduct
from dpshard.records.per_sample import FusedGrads, PerSampleGrad
from dpshard.records.record import Record
from dpshard.records.routed_product import RoutedProduct

__all__ = [
    "WIDE",
    "Convolution",
    "EmbeddingRecord",
    "FusedGrads",
    "OuterProduct",
    "PerSampleGrad",
    "Record",
    "RoutedProduct",
    "accum_dtype",
    "as_complex",
    "as_real",
    "fetched",
    "measure",
    "of_samples",
    "offloaded",
    "wide",
]
