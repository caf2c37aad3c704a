"""One logical batch, from its first forward to its release. Begin with `collector.py`.

May import `backends`, `clipping`, `sampling` and below.
"""
