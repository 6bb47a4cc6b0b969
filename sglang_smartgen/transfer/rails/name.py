"""How a rail is written in the configuration: `kind` or `kind@address`."""

from __future__ import annotations

KINDS = ("mooncake", "nixl", "shm", "socket")


def split(rail: str) -> tuple[str, str]:
    """Kind and address ("" where none is given) of a configured rail. Raises ValueError."""
    kind, at, address = rail.partition("@")
    if kind not in KINDS:
        raise ValueError(
            f"rails has {rail!r}; a rail is one of {', '.join(KINDS)}, or kind@address"
        )
    if at and (not address or kind == "shm"):
        raise ValueError(f"rails has {rail!r}; the address of a {kind} rail is not given like that")
    return kind, address
