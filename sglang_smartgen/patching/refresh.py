"""`python -m sglang_smartgen.patching.refresh PRISTINE PATCHES`: make the manifest anew.

For whoever changes a diff or moves the pin (docs/upgrading.md). PRISTINE is the folder of an
untouched package `sglang`, PATCHES the folder of the diffs; every `*.diff` there, in the order of
their names, is the series.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sglang_smartgen.patching import diff
from sglang_smartgen.patching.series import MANIFEST, PatchError, read_diff, sha256
from sglang_smartgen.patching.tree import MARK, sglang_version


def refresh(pristine: Path, patches: Path) -> dict[str, object]:
    """Apply the series in memory and write what it makes of each file into the manifest.

    Raises PatchError when a diff does not fit, or leaves a file without our mark.
    """
    names = sorted(file.name for file in patches.glob("*.diff"))
    before: dict[str, bytes] = {}
    after: dict[str, bytes] = {}
    for name in names:
        for one in read_diff(patches / name):
            if one.path not in before:
                before[one.path] = after[one.path] = (pristine / one.path).read_bytes()
            try:
                after[one.path] = diff.apply(after[one.path], one.hunks)
            except diff.DiffError as error:
                raise PatchError(f"{name}, {one.path}: {error}") from None
    for path, content in after.items():
        if MARK not in content:
            raise PatchError(f"{path} must name {MARK.decode()} somewhere when it is patched")
    manifest: dict[str, object] = {
        "sglang": sglang_version(pristine),
        "diffs": names,
        "files": {
            path: {"before": sha256(before[path]), "after": sha256(after[path])}
            for path in sorted(before)
        },
    }
    (patches / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


if __name__ == "__main__":
    try:
        refresh(Path(sys.argv[1]), Path(sys.argv[2]))
    except (IndexError, OSError, PatchError) as problem:
        sys.exit(f"refresh: {problem}" if len(sys.argv) == 3 else __doc__)
