"""The noise of a release: a function of run secret, step, sums, parameter and element.

Each rank draws the noise of its shard. Begin with `keyed.py`; `backends/grad_store.py` calls its `release_`. May import
`randomness`, `kernels` and below. Not for users.
"""

LOG2_STD = 24
"""Log2 of s, the deviation of discrete Gaussian noise in grid steps. Accounting charges for
the grid, and run secrets depend on it."""
