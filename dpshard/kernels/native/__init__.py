"""Compiled C for the CPU. Where it is not built, numpy and torch do the same, more slowly.

[Note: Native code]

- normals.c: box_muller, release_, release_pieces_: normals from random words, added to sums. The words are the output
  of OpenSSL's cipher. Short pieces need few words, so cipher.h makes them with the processor's AES instructions.
- sums.c: checksums, norms_sq: a number for each of many tensors at once.
- digest.c: add_digests_: a digest of the bits of sums under secret weights.
- gram.c: floored_ghost_norm_sq: norms by Gram matrices, float32, on x86-64 with AVX2.
- convolution.c: per_sample_gradients_: gradients of convolutions, or their norms, on the same processors.
- normalization.c: normalization_gradients: per-sample gradients of weights and biases, float32.

Threads of its own would compete for the cores with torch's, which spin for milliseconds after an operator. So the code
runs on torch's, by GOMP_parallel of torch's build for Linux, else on one thread. Their number changes no bit. Another
build may change the last bits of the noise, in logarithms and cosines. DPSHARD_NATIVE=0 switches the code off.
"""

from dpshard.kernels.native.convolution import gradient_norm_sq, per_sample_gradients_, supports_convolution
from dpshard.kernels.native.digest import Stretches, add_digests_, supports_digest
from dpshard.kernels.native.gram import floored_ghost_norm_sq, ghost_flops, supports_ghost_norm
from dpshard.kernels.native.library import is_built
from dpshard.kernels.native.normalization import normalization_gradients, supports_normalization
from dpshard.kernels.native.normals import Pieces, box_muller, release_, release_pieces_
from dpshard.kernels.native.sums import checksums, norms_sq, supports_sums
