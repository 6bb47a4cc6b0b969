"""An installed SGLang, looked at: which files are pristine, which are patched, and what it is then.

A process that serves asks `carried` once at its start, and with that either uses the places that
the patches made or lays its hooks.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from sglang_smartgen.patching.series import PatchError, Series, sha256

FileState = Literal["pristine", "patched", "changed", "missing"]
State = Literal["pristine", "patched", "partly patched", "other series", "other"]
MARK = b"SmartGen"
"""A word that every patched file has, and no file of SGLang's own."""

MEND = "run `smartgen patch reverse` or `smartgen patch apply`, or install SGLang again"


class Tree(msgspec.Struct):
    """The files of the series in one SGLang.

    version: what SGLang calls itself, "unknown" where it does not say. contents: of those files
    that are there, by path. marked: files that are neither and yet have our mark.
    """

    target: Path
    version: str
    files: dict[str, FileState]
    contents: dict[str, bytes]
    marked: list[str]

    @property
    def state(self) -> State:
        """What the files are together; `other`: none is patched and some are not SGLang's own."""
        found = set(self.files.values())
        if found == {"pristine"}:
            return "pristine"
        if found == {"patched"}:
            return "patched"
        if "patched" in found:
            return "partly patched"
        return "other series" if self.marked else "other"

    @property
    def strange(self) -> list[str]:
        """Files that are neither pristine nor patched."""
        return [path for path, state in self.files.items() if state in ("changed", "missing")]


def find_target(given: str | None = None) -> Path:
    """The folder of the package: `given` (or its `sglang`), else the one that is imported here.

    Raises PatchError when there is none.
    """
    if given:
        folder = Path(given)
        if not (folder / "srt").is_dir() and (folder / "sglang").is_dir():
            folder /= "sglang"
        if not (folder / "srt").is_dir():
            raise PatchError(f"--target {given} is no folder of the package sglang")
        return folder.resolve()
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise PatchError("SGLang is not installed here; name its folder with --target")
    return Path(spec.submodule_search_locations[0])


def look(target: Path, series: Series) -> Tree:
    """Read every file of the series in `target`."""
    tree = Tree(target, sglang_version(target), {}, {}, [])
    for path, hashes in series.manifest.files.items():
        try:
            content = (target / path).read_bytes()
        except FileNotFoundError:
            tree.files[path] = "missing"
            continue
        except OSError as error:
            raise PatchError(f"{target / path} cannot be read: {error.strerror}") from None
        found = sha256(content)
        tree.contents[path] = content
        tree.files[path] = (
            "pristine"
            if found == hashes.before
            else "patched"
            if found == hashes.after
            else "changed"
        )
        if tree.files[path] == "changed" and MARK in content:
            tree.marked.append(path)
    return tree


def describe(tree: Tree, made_for: str) -> str:
    """One sentence on a tree that is neither pristine nor patched."""
    if tree.state == "other series":
        return (
            f"{tree.target} was patched by another version of SmartGen "
            f"({', '.join(tree.marked)}); reverse it with that version, or install SGLang again"
        )
    names = ", ".join(tree.strange)
    if tree.state == "partly patched":
        also = f", and {names} is neither patched nor SGLang's own" if names else ""
        return f"{tree.target} is partly patched{also}; {MEND}"
    if tree.version != made_for:
        age = "newer than" if _key(tree.version) > _key(made_for) else "not"
        return (
            f"SGLang {tree.version} in {tree.target} is {age} {made_for}, the only version that "
            "these patches fit; docs/upgrading.md says how to move the pin"
        )
    verb = "is" if len(tree.strange) == 1 else "are"
    return f"{names} in {tree.target} {verb} not SGLang {made_for}'s: somebody has changed it"


@cache
def state_here() -> State:
    """The state of the SGLang of this process; `other` where there is none."""
    try:
        return look(find_target(), Series()).state
    except PatchError:
        return "other"


def carried() -> bool:
    """Whether the SGLang of this process has the whole series in it.

    Raises PatchError for one that has it in part, or another series: neither the places that the
    patches make nor SGLang's own code can be relied on there.
    """
    state = state_here()
    if state in ("partly patched", "other series"):
        series = Series()
        raise PatchError(
            "refuses to start: " + describe(look(find_target(), series), series.manifest.sglang)
        )
    return state == "patched"


def sglang_version(target: Path) -> str:
    """What the package in `target` calls itself, "unknown" where it does not say."""
    try:
        text = (target / "_version.py").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"^__version__ = (?:version = )?['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found[1] if found else "unknown"


def _key(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]
