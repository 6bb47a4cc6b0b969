"""Obstacle 1: SGLang decides by an environment variable, not by `--device`, that it runs on a CPU.

Without it `RotaryEmbedding` imports vllm. Mooncake needs to be told too that there is no RDMA, and
the ranks of `--tp-size` that there is no NCCL: they find that of the CUDA wheels and ask for a GPU.
Without it they use gloo.
"""

from __future__ import annotations

from collections.abc import MutableMapping

NAME = "cpu engine"
SETTINGS = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "MC_FORCE_TCP": "1",
    "MOONCAKE_PROTOCOL": "tcp",
    "SGLANG_NCCL_SO_PATH": "no-nccl-without-a-gpu",
}


def prepare(environ: MutableMapping[str, str]) -> str:
    """Set what the user has not set; returns the status."""
    for key, setting in SETTINGS.items():
        environ.setdefault(key, setting)
    if environ["SGLANG_USE_CPU_ENGINE"] != "1":
        return f"skipped: SGLANG_USE_CPU_ENGINE={environ['SGLANG_USE_CPU_ENGINE']} is set"
    return "applied"
