"""Unified diffs for the pinned SGLang; see README.md beside this file."""
