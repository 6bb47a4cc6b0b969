"""Obstacle 4: Mooncake's sender asks for slot indices in pinned memory and a CUDA event."""

from __future__ import annotations

from typing import Any

from .hook import Hook

NAME = "sender indices"


def refuse_host_tensor_indices(sender: Any, *args: Any, **kwargs: Any) -> None:
    """Make the prefill scheduler hand this sender a numpy array, as it does to other transports."""
    sender.supports_host_tensor_indices = False


HOOK = Hook(
    "sglang.srt.disaggregation.mooncake.conn.MooncakeKVSender.__init__",
    refuse_host_tensor_indices,
    "before",
)
