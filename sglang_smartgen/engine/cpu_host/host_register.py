"""Obstacle 3: host memory pools are page-locked through `torch.cuda.cudart()`, which needs CUDA."""

from __future__ import annotations

from typing import Any

from .hook import Hook

NAME = "host memory registration"


def leave_pageable(buffer: Any, registration_granularity_bytes: int | None = None) -> None:
    """Do nothing: without a GPU no device copy ever reads the buffer."""


HOOK = Hook("sglang.srt.mem_cache.pool_host.common._cuda_host_register", leave_pageable, "replace")
