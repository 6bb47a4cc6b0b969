"""The selector of this rank: by name, with its artifact when the configuration names one."""

from __future__ import annotations

import logging
from pathlib import Path

from sglang_smartgen.config import ConfigError, SmartGenConfig
from sglang_smartgen.engine.model_facts import ModelFacts
from sglang_smartgen.select.artifact import (
    Artifact,
    ArtifactError,
    check_artifact,
    model_hash,
    read_artifact,
)
from sglang_smartgen.select.base import KVShape, Selector
from sglang_smartgen.select.registry import make_selector, selector_class

logger = logging.getLogger(__name__)

WIDE_HEAD = 128
"""Above it, random hash codes of 128 bits have been seen to fail."""


def load_selector(config: SmartGenConfig, facts: ModelFacts, model_path: str) -> Selector:
    """The selector that both sides of this configuration use.

    model_path: what SGLang was started with, a folder or a name on the hub. Raises ConfigError with
    one sentence for an artifact that is missing, damaged or made for another model.
    """
    artifact: Artifact | None = None
    if config.artifact:
        try:
            artifact = read_artifact(Path(config.artifact))
            whole = KVShape(
                layers=facts.shape.layers,
                q_heads=facts.shape.q_heads * facts.tp_size,
                kv_heads=facts.shape.kv_heads * facts.tp_size,
                head_dim=facts.shape.head_dim,
                scaling=facts.shape.scaling,
            )
            check_artifact(
                artifact,
                selector=config.selector,
                shape=whole,
                model_hash=model_hash(_folder(model_path)),
                needed_layers=facts.geometry.sparse_layers,
            )
        except ArtifactError as error:
            raise ConfigError(f"artifact is {config.artifact}: {error}") from None
    elif selector_class(config.selector).needs_artifact:
        raise ConfigError(
            f"selector is {config.selector}; it needs the key artifact, a file of "
            f"`smartgen calibrate --selector {config.selector}`"
        )
    try:
        selector = make_selector(
            config.selector,
            facts.shape,
            facts.geometry.dtype,
            artifact=artifact,
            first_kv_head=facts.first_kv_head,
            options=config.selector_options,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    logger.info("SmartGen selects with %s", selector.describe())
    if artifact is None and config.selector == "hata" and facts.shape.head_dim > WIDE_HEAD:
        # Gemma-3, head_dim 256: half the attention mass of trained codes (docs/selectors.md).
        logger.warning(
            "hata has no artifact and this model has head_dim %d: random codes select badly there; "
            "make one with `smartgen calibrate --selector hata`",
            facts.shape.head_dim,
        )
    return selector


def _folder(model_path: str) -> Path:
    """The model's files; a name on the hub is looked up in the local cache, which SGLang filled."""
    if Path(model_path).is_dir():
        return Path(model_path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model_path, local_files_only=True))
