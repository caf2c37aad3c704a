"""Compiled code, and facts about arithmetic that it shares with the records.

Each compiled function has a reference in PyTorch or numpy with the same result. Not for users. Begin with
`native/__init__.py`.
"""
