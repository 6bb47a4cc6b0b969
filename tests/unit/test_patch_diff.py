"""The strict reader and applier of unified diffs."""

from __future__ import annotations

import pytest

from sglang_smartgen.patching import diff
from sglang_smartgen.patching.diff import DiffError

GOOD = b"why\n--- a/f\n+++ b/f\n@@ -2,2 +2,3 @@ def f\n b\n-c\n+C\n+D\n"


def test_apply_and_reverse_of_a_small_diff() -> None:
    (one,) = diff.parse(GOOD)
    assert one.path == "f"
    new = diff.apply(b"a\nb\nc\nd\n", one.hunks)
    assert new == b"a\nb\nC\nD\nd\n"
    assert diff.apply(new, diff.reverse(one.hunks)) == b"a\nb\nc\nd\n"


@pytest.mark.parametrize("text", [b"", b"a\nB\nc\nd\n", b"x\na\nb\nc\nd\n", b"a\nb\n"])
def test_a_hunk_is_never_put_elsewhere(text: bytes) -> None:
    with pytest.raises(DiffError, match="line 2 does not fit"):
        diff.apply(text, diff.parse(GOOD)[0].hunks)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"words\n",
        GOOD.rstrip(b"\n"),
        GOOD[: GOOD.index(b"+D")],
        GOOD + b" e\n",
        GOOD.replace(b"+++ b/f", b"+++ b/g"),
        GOOD.replace(b"--- a/f", b"--- /dev/null"),
        GOOD.replace(b"-2,2 +2,3", b"-2,2 +2,2"),
        GOOD.replace(b"-2,2 +2,3", b"-1,0 +2,3"),
        GOOD[: GOOD.index(b"@@")],
        b"@@ -2,2 +2,3 @@\n",
    ],
)
def test_what_is_no_diff_is_refused(text: bytes) -> None:
    with pytest.raises(DiffError):
        diff.parse(text)
