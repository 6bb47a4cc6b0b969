"""The pages of the documentation, taken apart: blocks of code, links, anchors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_NEEDS = re.compile(r"<!-- needs: ([\w ]+) -->\s*\Z")


class Block(NamedTuple):
    """One fenced block; needs: what the comment right before it asks for, or nothing."""

    page: Path
    language: str
    text: str
    needs: str


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        needs = _NEEDS.search(text[: match.start()])
        found.append(Block(page, match[2], match[3], needs[1] if needs else ""))
    return found


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def code_words(page: Path) -> list[str]:
    """What stands in backticks outside of blocks."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def links(page: Path) -> list[str]:
    """Targets of links and pictures."""
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    return re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text)


def anchors(page: Path) -> set[str]:
    """Names that a link to this page may end in, as mkdocs and the usual hosts make them."""
    found = set()
    for title in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        plain = re.sub(r"[^\w\s-]", "", title.replace("`", "")).strip().lower()
        found.add(re.sub(r"[\s]+", "-", plain))
    return found
