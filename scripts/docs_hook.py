"""Hook of mkdocs: entries of the navigation whose page does not exist are left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Called by mkdocs after mkdocs.yml was read."""
    config["nav"] = _existing(config["nav"], Path(config["docs_dir"]))
    return config


def _existing(entries: list[Any], docs: Path) -> list[Any]:
    kept: list[Any] = []
    for entry in entries:
        ((title, target),) = entry.items()
        if isinstance(target, list):
            kept.append({title: _existing(target, docs)})
        elif (docs / target).is_file():
            kept.append(entry)
    return kept
