"""Doctor: versions of Python and of the packages, against the pins that our own package names."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator

from sglang_smartgen.patching.series import PatchError, Series
from sglang_smartgen.patching.tree import MEND, describe, find_target, look
from sglang_smartgen.report.findings import Finding, error, ok, warning

SECTION = "versions"
LOWEST_PYTHON = (3, 11)
MOONCAKE = "mooncake-transfer-engine"
INSTALL = "install what this version of SmartGen pins: pip install 'sglang-smartgen[cpu]' or [cuda]"


def check() -> Iterator[Finding]:
    """Python, SmartGen, SGLang and what SGLang pins, Mooncake in any of its builds."""
    found = sys.version_info[:2]
    version = platform.python_version()
    if found < LOWEST_PYTHON:
        lowest = ".".join(map(str, LOWEST_PYTHON))
        yield error(SECTION, "python", version, f"use Python {lowest} or newer")
    else:
        yield ok(SECTION, "python", version)
    yield ok(
        SECTION, "sglang-smartgen", _installed("sglang-smartgen") or "not installed, a checkout"
    )
    yield from _pinned("sglang", _wanted("sglang-smartgen", "sglang"), needed=True)
    yield from _patches()
    for package in ("torch", "transformers"):
        yield from _pinned(package, _wanted("sglang", package), needed=True)
    yield from _pinned("triton", _wanted("torch", "triton"), needed=False)
    yield from _mooncake()


def _patches() -> Iterator[Finding]:
    series = Series()
    try:
        tree = look(find_target(), series)
    except PatchError:
        return  # SGLang is not installed, which has its own line
    if tree.state == "pristine":
        yield ok(SECTION, "patches", "none applied; hooks do what they would")
    elif tree.state == "patched":
        yield ok(SECTION, "patches", f"all {len(series.manifest.diffs)} applied; no hook is laid")
    elif tree.state == "other":
        text = f"none applied, and none can be: {describe(tree, series.manifest.sglang)}"
        yield warning(SECTION, "patches", text, "look at the section hooks, which do without")
    else:
        yield error(SECTION, "patches", describe(tree, series.manifest.sglang), MEND)


def _mooncake() -> Iterator[Finding]:
    builds = {
        name: version
        for suffix in ("-non-cuda", "-cuda13", "")
        if (version := _installed(name := MOONCAKE + suffix)) is not None
    }
    if not builds:
        yield error(SECTION, "mooncake", "not installed", INSTALL)
        return
    if len(builds) > 1:
        both = " and ".join(builds)
        yield warning(SECTION, "mooncake", f"{both} are both installed", "keep one of them")
    for name, version in builds.items():
        wanted = _wanted("sglang-smartgen", name)
        if wanted and version != wanted:
            text = f"{name} {version}; SmartGen is tested with {wanted}"
            yield warning(SECTION, "mooncake", text, f"pip install {name}=={wanted}")
        else:
            yield ok(SECTION, "mooncake", f"{name} {version}")


def _pinned(package: str, wanted: str | None, *, needed: bool) -> Iterator[Finding]:
    version = _installed(package)
    if version is None:
        say = error if needed else warning
        yield say(SECTION, package, "not installed", INSTALL)
    elif wanted is None or version.split("+")[0] == wanted:
        yield ok(SECTION, package, version)
    elif package == "sglang":
        text = f"{version}; SmartGen is made for {wanted} alone"
        yield error(SECTION, package, text, f"pip install sglang=={wanted}")
    else:
        text = f"{version}; this SGLang pins {wanted}"
        yield warning(SECTION, package, text, f"pip install {package}=={wanted}")


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _wanted(by: str, package: str) -> str | None:
    """The version of `package` that the package `by` pins with ==, if it does."""
    try:
        requirements = importlib.metadata.requires(by) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for requirement in requirements:
        name, pinned, rest = requirement.partition(";")[0].partition("==")
        if pinned and name.strip().partition("[")[0].lower() == package:
            return rest.strip()
    return None
