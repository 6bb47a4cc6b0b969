"""The series of `patches/`: its diffs in order, and each file's hash before and after them."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from importlib.resources.abc import Traversable

import msgspec

from sglang_smartgen.patching import diff
from sglang_smartgen.patching.diff import DiffError, FileDiff

MANIFEST = "manifest.json"


class PatchError(ValueError):
    """What keeps a patch from being applied, reversed or used; one sentence for the user."""


class Hashes(msgspec.Struct, frozen=True):
    """SHA-256 of one file as SGLang ships it, and with the whole series in it."""

    before: str
    after: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`manifest.json`: the version of SGLang, the diffs in order, the files by their path."""

    sglang: str
    diffs: list[str]
    files: dict[str, Hashes]


class Series:
    """A manifest with its diffs, read. Raises PatchError when the two do not belong together."""

    def __init__(self, folder: Traversable | None = None) -> None:
        """folder: where manifest and diffs are; by default those that SmartGen ships."""
        folder = folder or files("sglang_smartgen.patches")
        self.manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
        self._diffs = [read_diff(folder / name) for name in self.manifest.diffs]
        if {one.path for each in self._diffs for one in each} != set(self.manifest.files):
            raise PatchError(f"{MANIFEST} names other files than the diffs; make it anew")

    def forward(self, path: str, text: bytes) -> bytes:
        """The patched content of `path` from SGLang's own."""
        for each in self._diffs:
            for one in each:
                if one.path == path:
                    text = diff.apply(text, one.hunks)
        return self._checked(path, text, self.manifest.files[path].after)

    def backward(self, path: str, text: bytes) -> bytes:
        """SGLang's own content of `path` from the patched one."""
        for each in reversed(self._diffs):
            for one in each:
                if one.path == path:
                    text = diff.apply(text, diff.reverse(one.hunks))
        return self._checked(path, text, self.manifest.files[path].before)

    @staticmethod
    def _checked(path: str, text: bytes, wanted: str) -> bytes:
        if sha256(text) != wanted:
            raise PatchError(f"the diffs make another {path} than {MANIFEST} says; make it anew")
        return text


def read_diff(file: Traversable) -> list[FileDiff]:
    """The files of one diff. Raises PatchError naming the diff when it cannot be read."""
    try:
        return diff.parse(file.read_bytes())
    except (DiffError, OSError) as error:
        raise PatchError(f"{file.name}: {error}") from None


def sha256(content: bytes) -> str:
    """The hash of a file's content, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()
