"""The noise of a release: a function of run secret, step, sums, parameter and element. Each rank draws its shard's.

`keyed.py`: Gaussian and discrete Gaussian noise. `discrete_gaussian.py`: the exact sampler. `digest.py`: the digest of
the sums that keys the noise. `pieces.py`: shards cut by keys. `correlation.py`, `workloads.py`, `buffers.py`: noise
correlated over steps.
May import `randomness`, `kernels` and below. Not for users. Begin with `keyed.py`.
"""

LOG2_STD = 24
"""Log2 of s, the standard deviation of discrete Gaussian noise in grid steps. Accounting charges for it. Part of the
meaning of a run secret."""
