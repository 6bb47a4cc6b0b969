"""`smartgen patch apply|reverse|status`: put the series into an installed SGLang, or take it out.

Both change all files or none, do nothing when it is done already, and finish what a killed run left
half done. A file that is neither SGLang's own nor patched is refused before anything changes. A
server that runs keeps the code that it has loaded: restart it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from sglang_smartgen.output import result_stream
from sglang_smartgen.patching.change import clean, locked, replace_all
from sglang_smartgen.patching.diff import DiffError
from sglang_smartgen.patching.series import PatchError, Series
from sglang_smartgen.patching.tree import Tree, describe, find_target, look

WISHES = {"apply": "patched", "reverse": "pristine"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("action", choices=("apply", "reverse", "status"))
    parser.add_argument(
        "--target",
        metavar="DIR",
        help="folder of the package sglang (default: the one that this Python imports)",
    )
    parser.add_argument("--format", choices=("terminal", "json"), default="terminal")


def run(args: argparse.Namespace) -> int:
    """Do it and show the result; 2 and one sentence on stderr when it is refused.

    `status` ends with 1 for a tree that is neither pristine nor patched.
    """
    try:
        with result_stream(args.format) as out:
            series = Series()
            target = find_target(args.target)
            changed = [] if args.action == "status" else bring(target, series, args.action)
            tree = look(target, series)
            report = _report(args.action, tree, series, changed)
            if args.format == "json":
                print(json.dumps(report), file=out, flush=True)
            else:
                _show(report)
    except PatchError as error:
        print(f"smartgen patch: {error}", file=sys.stderr)
        return 2
    return 0 if tree.state in ("pristine", "patched") else 1


def bring(target: Path, series: Series, action: str) -> list[str]:
    """Bring `target` to what `action` wants; the paths of the files that were changed.

    Raises PatchError, and then nothing was changed.
    """
    wish = WISHES[action]
    transform = series.forward if action == "apply" else series.backward
    with locked(target):
        tree = look(target, series)
        clean({(target / path).parent for path in tree.contents})
        if tree.state == wish:
            return []
        if tree.strange:
            raise PatchError(f"{describe(tree, series.manifest.sglang)}; nothing was changed")
        todo = [path for path, state in tree.files.items() if state != wish]
        try:
            contents = {path: transform(path, tree.contents[path]) for path in todo}
        except DiffError as error:
            raise PatchError(f"the series is damaged: {error}; nothing was changed") from None
        replace_all(target, contents)
    return todo


def _report(action: str, tree: Tree, series: Series, changed: list[str]) -> dict[str, Any]:
    said = ""
    if tree.state not in ("pristine", "patched"):
        said = describe(tree, series.manifest.sglang)
    return {
        "action": action,
        "target": str(tree.target),
        "sglang": tree.version,
        "made_for": series.manifest.sglang,
        "state": tree.state,
        "text": said,
        "series": series.manifest.diffs,
        "changed": changed,
        "files": tree.files,
    }


def _show(report: dict[str, Any]) -> None:
    if report["action"] == "status":
        for path, state in report["files"].items():
            print(f"{state:<9} {path}")
    elif not report["changed"]:
        print("nothing to do")
    else:
        print(f"{len(report['changed'])} files changed; restart servers that are running")
    print(f"SGLang {report['sglang']} in {report['target']}: {report['state']}")
    if report["text"]:
        print(report["text"])
