"""Putting the diffs of `patches/` into an installed SGLang, and taking them out again.

Nothing here imports SGLang: a patched module may be one that cannot be imported yet.
"""
