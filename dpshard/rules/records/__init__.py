"""Records: what is known, sample by sample, about the gradient of one parameter after one use of it."""

from dpshard.rules.records.convolution import Convolution
from dpshard.rules.records.gather import Gather
from dpshard.rules.records.measure import measure
from dpshard.rules.records.numerics import wide, wide_dtype
from dpshard.rules.records.offload import fetched, offloaded
from dpshard.rules.records.outer_product import OuterProduct
from dpshard.rules.records.per_sample import Bundle, PerSample
from dpshard.rules.records.record import Record
from dpshard.rules.records.routed_product import RoutedProduct

__all__ = [
    "Bundle",
    "Convolution",
    "Gather",
    "OuterProduct",
    "PerSample",
    "Record",
    "RoutedProduct",
    "fetched",
    "measure",
    "offloaded",
    "wide",
    "wide_dtype",
]
