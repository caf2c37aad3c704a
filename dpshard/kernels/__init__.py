"""Compiled code, with references in PyTorch or numpy. Not for users. Begin with `native/__init__.py`.

May import `losses`, `names`, `config` and `errors`.
"""
