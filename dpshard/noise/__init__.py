"""The noise of a release: a function of run secret, step, sums, parameter and element, on every rank for its shard.

`keyed.py`: Gaussian and discrete Gaussian noise, and how it is added. `discrete_gaussian.py`: the exact sampler.
`digest.py`: the digest of the sums that noise is keyed by. `correlation.py`: noise that is correlated over steps.
May import `randomness`, `kernels` and below. Not for users. Begin with `keyed.py`.
"""

LOG2_STD = 24
"""Log2 of s, the standard deviation of discrete Gaussian noise in steps of its grid. Accounting charges for it. Part
of the meaning of a run secret."""
