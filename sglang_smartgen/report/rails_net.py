"""Two network namespaces joined by veth pairs, one a rail, each with a token bucket of its own.

The running process moves into the first namespace with all threads it starts later; peers are
started in the second. Needs root and iproute2. What goes from the first to the second is shaped.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from sglang_smartgen.config import ConfigError
from sglang_smartgen.report.shaped import possible

BUCKET_S = 0.004  # of the rate, and at least one of the kernel's large packets
LARGEST_PACKET = 65536
MTU = 9000  # as such networks have it; of 1,500 the headers alone are 4.4 %
_CLONE_NEWNET = 0x40000000
_SBIN = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class RailsNet:
    """`count` rails; use it as a context manager. Raises ConfigError where it cannot be had."""

    def __init__(self, count: int = 2) -> None:
        if not possible():
            raise ConfigError("bench rails needs root and the program ip, to make a network")
        number = os.getpid()
        self.here, self.there = f"smartgen-a{number}", f"smartgen-b{number}"
        self.count = count

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def host(self, rail: int, there: bool) -> str:
        """Address of one end of a rail."""
        return f"10.78.{rail + 1}.{2 if there else 1}"

    def set_rate(self, rail: int, mbit: float | None) -> None:
        """Hold a rail to so many Mbit/s from now on; None: to nothing."""
        device = f"dev va{rail}"
        if mbit is None:
            _run(f"tc -n {self.here} qdisc replace {device} root noqueue")
            return
        bucket = max(LARGEST_PACKET, int(mbit * 1e6 / 8 * BUCKET_S))
        shape = f"tbf rate {int(mbit * 1000)}kbit burst {bucket} latency 200ms"
        _run(f"tc -n {self.here} qdisc replace {device} root {shape}")

    def set_link(self, rail: int, *, up: bool) -> None:
        """Cut a rail, or join it again."""
        _run(f"ip -n {self.there} link set vb{rail} {'up' if up else 'down'}")

    def inside(self, command: list[str]) -> list[str]:
        """The command that runs `command` at the far end."""
        return ["ip", "netns", "exec", self.there, *command]

    def _make(self) -> None:
        for name in (self.here, self.there):
            _run(f"ip netns add {name}")
            _run(f"ip -n {name} link set lo up")
        for rail in range(self.count):
            a, b = f"va{rail}", f"vb{rail}"
            ends = f"{a} netns {self.here} type veth peer name {b} netns {self.there}"
            _run(f"ip link add {ends}")
            for name, device, there in ((self.here, a, False), (self.there, b, True)):
                _run(f"ip -n {name} addr add {self.host(rail, there)}/24 dev {device}")
                _run(f"ip -n {name} link set {device} mtu {MTU} up")
        with open(f"/run/netns/{self.here}") as handle:
            if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), _CLONE_NEWNET) != 0:
                raise ConfigError(f"cannot enter a network: {os.strerror(ctypes.get_errno())}")

    def _remove(self) -> None:
        for name in (self.here, self.there):
            if Path(f"/run/netns/{name}").exists():
                with contextlib.suppress(ConfigError):
                    _run(f"ip netns del {name}")


def _run(line: str) -> None:
    done = subprocess.run(
        line.split(), capture_output=True, text=True, env={**os.environ, "PATH": _SBIN}
    )
    if done.returncode:
        raise ConfigError(f"{line!r} failed: {done.stderr.strip()}")
