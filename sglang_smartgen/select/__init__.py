"""Selectors: which k entries of a layer a decode step needs."""

from __future__ import annotations

from sglang_smartgen.select.base import KVShape, Selector, budget, top_k
from sglang_smartgen.select.registry import make_selector

__all__ = ["KVShape", "Selector", "budget", "make_selector", "top_k"]
