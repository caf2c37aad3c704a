"""Records: what is known, sample by sample, about the gradient of one parameter after one use of it."""

from dpshard.records.convolution import Convolution
from dpshard.records.gather import Gather
from dpshard.records.measure import measure
from dpshard.records.numerics import as_complex, as_real, wide, wide_dtype
from dpshard.records.of_samples import of_samples
from dpshard.records.offload import fetched, offloaded
from dpshard.records.outer_product import OuterProduct
from dpshard.records.per_sample import Bundle, PerSample
from dpshard.records.record import Record
from dpshard.records.routed_product import RoutedProduct

__all__ = [
    "Bundle",
    "Convolution",
    "Gather",
    "OuterProduct",
    "PerSample",
    "Record",
    "RoutedProduct",
    "as_complex",
    "as_real",
    "fetched",
    "measure",
    "of_samples",
    "offloaded",
    "wide",
    "wide_dtype",
]
