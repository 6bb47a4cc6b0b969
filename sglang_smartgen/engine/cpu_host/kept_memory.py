"""Not an obstacle but a delay: a large tensor's memory goes back to the system with the tensor.

glibc maps each block of some megabytes anew, so an operator of a prefill first waits for thousands
of page faults; without them a norm of 2,048 tokens takes a quarter of the time. Freed blocks are
kept for the next tensor instead, in huge pages where the kernel grants those on request.
"""

from __future__ import annotations

import platform
from collections.abc import MutableMapping

NAME = "kept memory"
VARIABLE = "GLIBC_TUNABLES"
_NEVER = 2**32 - 1  # bytes: no block is too large, no free end large enough to be given back
SETTING = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in {
        "mmap_threshold": _NEVER,
        "trim_threshold": _NEVER,
        "top_pad": 64 << 20,
        "hugetlb": 1,
    }.items()
)


def prepare(environ: MutableMapping[str, str]) -> str:
    """Tell spawned processes, whose glibc reads it when they start; returns the status."""
    if platform.libc_ver()[0] != "glibc":
        return "not needed"
    if environ.setdefault(VARIABLE, SETTING) != SETTING:
        return f"skipped: {VARIABLE}={environ[VARIABLE]} is set"
    return "applied"
