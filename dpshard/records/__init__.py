"""Records: facts about the gradient of one parameter after one use of it. Begin with `record.py`.

May import `randomness`, `kernels` and below. Not for users.
"""

from dpshard.records.bundle import Bundle, Small, bundles, is_small, pays_to_join, small_bytes
from dpshard.records.convolution import Convolution
from dpshard.records.embedding import EmbeddingRecord
from dpshard.records.measure import measure
from dpshard.records.numerics import WIDE, accum_dtype, add_rows, as_complex, as_real, checksum, gram, wide
from dpshard.records.of_samples import Owners, of_samples
from dpshard.records.offload import Offload, Waiting
from dpshard.records.outer_product import OuterProduct
from dpshard.records.owned import OwnMemory
from dpshard.records.per_sample import PerSampleGrad
from dpshard.records.record import Record
from dpshard.records.routed_product import RoutedProduct
from dpshard.records.stacked import Stacked
from dpshard.records.vocabulary import HeadRecord
