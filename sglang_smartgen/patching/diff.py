"""Unified diffs: read, applied to a text that must fit exactly, and reversed.

`patch` and `git apply` would do this too, but a machine that serves models often has neither, and
both search for a place where a hunk nearly fits. Here every file is pinned by its hash, so a hunk
has one line to stand on; the caller compares the hash of the result. No new, deleted or renamed
files, and no text without a newline at its end: the series has none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class DiffError(ValueError):
    """A diff that cannot be read, or that does not fit a text; one sentence."""


class Hunk(NamedTuple):
    """One change: from line `old_start` the lines `old` become `new` at `new_start` (from 1)."""

    old_start: int
    old: list[bytes]
    new_start: int
    new: list[bytes]


class FileDiff(NamedTuple):
    """All changes of one file, in order; `path` is relative to the package."""

    path: str
    hunks: list[Hunk]


def parse(text: bytes) -> list[FileDiff]:
    """The files of a unified diff; lines before the first `---` are its header.

    Raises DiffError with the number of a line that cannot be read.
    """
    lines = text.split(b"\n")
    if lines[-1] != b"":
        raise DiffError("a diff must end with a newline")
    numbered = enumerate(lines[:-1], 1)
    files: list[FileDiff] = []
    for number, line in numbered:
        if line.startswith(b"--- "):
            files.append(_file(number, line, numbered))
        elif heading := _HUNK.match(line):
            if not files:
                raise DiffError(f"line {number}: a hunk without a file")
            files[-1].hunks.append(_hunk(number, heading, numbered))
        elif files:
            raise DiffError(f"line {number} belongs to no hunk")
    if not files or not all(one.hunks for one in files):
        raise DiffError("a diff must change something in every file it names")
    return files


def _file(number: int, line: bytes, rest: Iterator[tuple[int, bytes]]) -> FileDiff:
    old = line.removeprefix(b"--- a/")
    new = next(rest, (number, b""))[1].removeprefix(b"+++ b/")
    if not old or old != new or line == old:
        raise DiffError(f"line {number}: expected `--- a/PATH` and `+++ b/PATH` of one path")
    return FileDiff(old.decode(), [])


def _hunk(number: int, heading: re.Match[bytes], rest: Iterator[tuple[int, bytes]]) -> Hunk:
    old_count, new_count = (int(heading[group] or 1) for group in (2, 4))
    if not old_count or not new_count:
        raise DiffError(f"line {number}: a hunk needs lines around its change")
    hunk = Hunk(int(heading[1]), [], int(heading[3]), [])
    while len(hunk.old) < old_count or len(hunk.new) < new_count:
        at, line = next(rest, (number, b"\\"))
        if line[:1] not in (b" ", b"-", b"+"):
            raise DiffError(f"line {at}: the hunk of line {number} ends too early")
        if line[:1] != b"+":
            hunk.old.append(line[1:])
        if line[:1] != b"-":
            hunk.new.append(line[1:])
    if (len(hunk.old), len(hunk.new)) != (old_count, new_count):
        raise DiffError(f"line {number}: the hunk has other lines than its heading says")
    return hunk


def apply(text: bytes, hunks: Sequence[Hunk]) -> bytes:
    """`text` with all `hunks`; DiffError where one does not fit to the letter."""
    old, new = text.split(b"\n"), list[bytes]()
    done = 0
    for hunk in hunks:
        start = hunk.old_start - 1
        new += old[done:start]
        done = start + len(hunk.old)
        if old[start:done] != hunk.old or len(new) != hunk.new_start - 1:
            raise DiffError(f"the change at line {hunk.old_start} does not fit")
        new += hunk.new
    return b"\n".join(new + old[done:])


def reverse(hunks: Sequence[Hunk]) -> list[Hunk]:
    """The hunks that undo `hunks`."""
    return [Hunk(one.new_start, one.new, one.old_start, one.old) for one in hunks]
