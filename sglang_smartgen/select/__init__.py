"""Selectors: which k entries of a layer a decode step needs."""

from __future__ import annotations

from sglang_smartgen.select.artifact import (
    Artifact,
    ArtifactError,
    Manifest,
    check_artifact,
    model_hash,
    read_artifact,
    write_artifact,
)
from sglang_smartgen.select.base import KVShape, LayerSample, Selector, budget, top_k
from sglang_smartgen.select.registry import make_selector, register, selector_class

__all__ = [
    "Artifact",
    "ArtifactError",
    "KVShape",
    "LayerSample",
    "Manifest",
    "Selector",
    "budget",
    "check_artifact",
    "make_selector",
    "model_hash",
    "read_artifact",
    "register",
    "selector_class",
    "top_k",
    "write_artifact",
]
