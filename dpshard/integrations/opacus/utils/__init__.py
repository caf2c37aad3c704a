"""Helpers under the names that they have in Opacus."""
