"""What a measurement ran on: the header of every JSONL file of `smartgen bench`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

PACKAGES = ("sglang", "torch", "transformers", "triton", "numpy")


def machine_facts() -> dict[str, Any]:
    """Processor, cores, memory in GB (10**9 bytes), threads and versions, JSON-ready."""
    import torch

    import sglang_smartgen

    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {
            "python": platform.python_version(),
            "sglang-smartgen": sglang_smartgen.__version__,
            **{name: _version(name) for name in PACKAGES},
        },
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
