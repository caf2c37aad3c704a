"""Compiled code, and facts about arithmetic that it shares with the records.

Each compiled function has a reference in PyTorch or numpy with the same result. `native/`: C for CPUs. `triton/`:
Triton kernels for GPUs. `philox.py`: random generator of GPUs, by element. `underflow.py`: what a sum may lose, with a
proof. `flops.py`: operations that torch's counter does not know.
May import nothing of the package except `errors`. Not for users. Begin with `native/__init__.py`.
"""
