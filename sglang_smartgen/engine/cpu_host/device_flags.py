"""Obstacle 6: the defaults for device, attention backend and overlap schedule want a GPU."""

from __future__ import annotations

from . import arguments

NAME = "device flags"
BACKENDS = ("--attention-backend", "--prefill-attention-backend", "--decode-attention-backend")


def prepare(argv: list[str]) -> tuple[list[str], str]:
    """Add the flags that a CPU needs and the user did not give; returns arguments and status."""
    missing: list[str] = []
    if not arguments.given(argv, "--device"):
        missing += ["--device", "cpu"]
    if not arguments.given(argv, *BACKENDS):
        missing += ["--attention-backend", "torch_native"]
    if not arguments.given(argv, "--disable-overlap-schedule"):
        missing += ["--disable-overlap-schedule"]
    return [*argv, *missing], "applied" if missing else "not needed"
