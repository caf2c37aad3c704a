"""The noise of a release: a function of (run secret, step, parameter name, element), on every rank for its shard.

`keyed.py`: Gaussian and discrete Gaussian noise, and how it is added. `discrete_gaussian.py`: the exact sampler.
May import `randomness`, `kernels` and below. Not for users. Begin with `keyed.py`.
"""
