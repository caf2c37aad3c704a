"""Opacus's helpers."""
