"""Compiled C for the CPU, where numpy and torch leave much to gain; they do the same wherever it was not built.

[Note: Native code]
    box_muller, release_  normals of random words, and their addition to a sum (normals.c). In numpy they are seven
                          passes over the cache, compiled one. Random bits still come from OpenSSL's cipher: no
                          cryptography is of our own.
    add_digest_           a digest of the bits of sums under secret weights (digest.c). In torch every product is
                          written and read again, in 64 bits.
    floored_ghost_norm_sq norms by Gram matrices, float32 (gram.c), on x86-64 with AVX2. In torch every product of a
                          block of positions is a call, on matrices too small for its libraries, and what they make is
                          written and read again; compiled, half of the products are made, and stay in the cache.
    per_sample_gradients_ of convolutions, and norms alone, float32, on the same processors (convolution.c). In torch
                          samples are groups of one convolution, which takes memory several times theirs, fresh from
                          the system, to rearrange them in.
    normalization_gradients
                          of weights and biases, sample by sample, float32 (normalization.c). In torch the input is
                          normalised again, written, multiplied, and read by two sums; compiled, a row or a group of
                          rows stays in the cache from its mean to its gradients.

Threads are those of torch: a pool of another kind would compete with them for the cores, on which OpenMP's threads wait
for more work for milliseconds after the last operator. GOMP_parallel is what compilers call for `#pragma omp parallel`,
and torch's build for Linux brings the library that has it; where it is not found, one thread does the work. How many
there are changes no bit.

setuptools builds it with the package if there is a C compiler, and goes on without if there is none. What is drawn does
not depend on it but for the last bits of a logarithm or a cosine. DPSHARD_NATIVE=0 switches it off.
"""

from dpshard.kernels.native.convolution import gradient_norm_sq, per_sample_gradients_, takes_convolution
from dpshard.kernels.native.digest import add_digest_, takes_digest
from dpshard.kernels.native.gram import floored_ghost_norm_sq, ghost_flops, takes_ghost_norm
from dpshard.kernels.native.library import is_built
from dpshard.kernels.native.normalization import normalization_gradients, takes_normalization
from dpshard.kernels.native.normals import box_muller, release_

__all__ = [
    "add_digest_",
    "box_muller",
    "floored_ghost_norm_sq",
    "ghost_flops",
    "gradient_norm_sq",
    "is_built",
    "normalization_gradients",
    "per_sample_gradients_",
    "release_",
    "takes_convolution",
    "takes_digest",
    "takes_ghost_norm",
    "takes_normalization",
]
