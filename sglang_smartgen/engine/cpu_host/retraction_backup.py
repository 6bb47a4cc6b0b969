"""Obstacle 5: the decode side backs retracted requests up in a pinned host pool by default."""

from __future__ import annotations

from . import arguments

NAME = "retraction backup"
FLAG = "--disaggregation-decode-retraction-backup"


def prepare(argv: list[str]) -> tuple[list[str], str]:
    """Switch the backup off on a decode server; returns the arguments and the status."""
    if arguments.value(argv, "--disaggregation-mode") != "decode":
        return argv, "not needed"
    if arguments.given(argv, FLAG):
        return argv, f"skipped: {FLAG} {arguments.value(argv, FLAG)} was given"
    return [*argv, FLAG, "none"], "applied"
