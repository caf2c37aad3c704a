"""Compiled code; each function has a reference in plain PyTorch or numpy with the same result.

`native/`: C for CPUs. `triton/`: Triton kernels for GPUs. `philox.py`: the random generator of GPUs, by element. May
import nothing of the package except `errors`. Not for users. Begin with `native/__init__.py`.
"""
