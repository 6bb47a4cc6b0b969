"""Doctor: the transport writes to itself, in a process of its own: right bytes, and how fast.

Run as `python -m sglang_smartgen.report.doctor_loopback`: two Mooncake engines on this host's
loopback address, over TCP, each with memory of its own; prints one JSON object a step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from sglang_smartgen.report.findings import Finding, error, ok, steps_of, warning

SECTION = "transport"
MODULE = "sglang_smartgen.report.doctor_loopback"
TIMEOUT_S = 60.0
STEPS = ("start", "write")
BYTES = 64 << 20
SMALL = 4096
ROUNDS = 20
SLOW_GBIT = 0.5
WRITE_TIMEOUT_S = 20.0
FIREWALL = (
    "let this host reach itself on the ports that Mooncake takes (MC_MIN_RPC_PORT to "
    "MC_MAX_RPC_PORT, 15000 to 17000 when unset)"
)


def check() -> Iterator[Finding]:
    """What the process found out."""
    found = steps_of(MODULE, STEPS, TIMEOUT_S)
    start, write = found["start"], found["write"]
    if cause := start.get("failed"):
        mend = f"install Mooncake as pinned, with its system libraries; {FIREWALL}"
        yield error(SECTION, "mooncake", f"two engines do not start: {cause}", mend)
        return
    yield ok(SECTION, "mooncake", f"two engines start over TCP, {start['seconds']:.1f} s")
    if cause := write.get("failed"):
        yield error(SECTION, "loopback", f"a write to itself fails: {cause}", FIREWALL)
        return
    text = f"{write['gbit']:.1f} Gbit/s, {write['small_ms']:.2f} ms for {SMALL} bytes"
    if write["gbit"] < SLOW_GBIT:
        mend = "look for a busy machine or a limit on the loopback interface"
        yield warning(SECTION, "loopback", f"the bytes are right, but slow: {text}", mend)
    else:
        yield ok(SECTION, "loopback", f"the bytes are right: {text}")


# In the process --------------------------------------------------------------------------------


def main() -> int:
    """Start, write, compare; print what was found."""
    os.environ["MC_FORCE_TCP"] = "1"
    try:
        from sglang_smartgen.transfer.mooncake import MooncakeTransport
        from sglang_smartgen.transfer.region import HostRegion

        began = time.monotonic()
        sender = MooncakeTransport.create("127.0.0.1")
        receiver = MooncakeTransport.create("127.0.0.1")
        source, target = HostRegion(BYTES), HostRegion(BYTES)
        sender.register(source.region)
        receiver.register(target.region)
    except Exception as problem:
        _say("start", failed=f"{type(problem).__name__}: {problem}")
        return 1
    _say("start", seconds=time.monotonic() - began)
    try:
        _say("write", **_measure(sender, receiver.session, source, target))
    except Exception as problem:
        _say("write", failed=f"{type(problem).__name__}: {problem}")
        return 1
    return 0


def _measure(sender: Any, peer: str, source: Any, target: Any) -> dict[str, float]:
    import torch

    from sglang_smartgen.transfer.transport import Span, TransportError, WriteState

    source.bytes.copy_(torch.arange(BYTES // 8).view(torch.uint8))

    def write(length: int) -> float:
        began = time.monotonic()
        span = Span(source.region.address, target.region.address, length)
        handle = sender.write(peer, [span])
        if handle.wait(WRITE_TIMEOUT_S) is not WriteState.DONE:
            raise TransportError(handle.error or f"not complete after {WRITE_TIMEOUT_S:.0f} s")
        return time.monotonic() - began

    write(BYTES)  # connects, and touches the pages
    if not torch.equal(source.bytes, target.bytes):
        raise TransportError("other bytes arrived than were sent")
    seconds = min(write(BYTES) for _ in range(3))
    small = sorted(write(SMALL) for _ in range(ROUNDS))[ROUNDS // 2]
    return {"gbit": BYTES * 8 / seconds / 1e9, "small_ms": 1000 * small}


def _say(step: str, **found: object) -> None:
    print(json.dumps({"step": step, **found}), flush=True)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the engines' threads need not end by themselves
