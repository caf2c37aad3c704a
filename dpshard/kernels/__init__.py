"""Compiled code, each with a reference in plain PyTorch or numpy that computes the same.

`native/`: C for CPUs. `triton/`: Triton kernels for GPUs. `philox.py`: the random generator of GPUs, by element.
May import nothing of the package except `errors`. Not for users. Begin with `native/__init__.py`.
"""
