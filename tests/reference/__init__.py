"""Slow, obvious versions of what the package computes fast."""
