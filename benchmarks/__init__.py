"""dpshard beside ordinary training and its peers: `python -m benchmarks --help`; see docs/benchmarks.md.

Run it from the root of the repository: Opacus installs a package `benchmarks` of its own.
"""
