"""A slow network on one machine: a network namespace whose loopback has a token bucket.

`enter` starts the running command again inside such a namespace, with the same arguments, so that
every server it starts and all their traffic with each other is held to the rate. Needs root and the
package iproute2. The bucket holds 4 ms of the rate and at least one of the kernel's large packets.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from sglang_smartgen.config import ConfigError

SHAPED_ENV = "SMARTGEN_SHAPED_MBIT"
BUCKET_S = 0.004
LARGEST_PACKET = 65536
_SBIN = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def enter(mbit: int | None) -> None:
    """Return inside a namespace of `mbit` Mbit/s, or at once for None.

    The first call does not return: it replaces this process. Raises ConfigError where the machine
    does not allow it.
    """
    if mbit is None or os.environ.get(SHAPED_ENV) == str(mbit):
        return
    if mbit < 1:
        raise ConfigError(f"--mbit is {mbit}; it must be at least 1")
    if os.geteuid() != 0:
        raise ConfigError(f"--mbit is {mbit}; to shape the network needs root")
    for tool in ("unshare", "ip", "tc"):
        if shutil.which(tool, path=_SBIN) is None:
            raise ConfigError(f"--mbit is {mbit}; to shape the network needs the program {tool}")
    os.environ[SHAPED_ENV] = str(mbit)
    inside = [sys.executable, "-P", "-m", "sglang_smartgen.report.shaped", str(mbit)]
    os.execvpe("unshare", ["unshare", "--net", *inside, *sys.argv], os.environ)


def loopback_bytes() -> int:
    """Bytes that loopback has sent so far."""
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def set_link(*, up: bool) -> None:
    """Take the namespace's loopback down, or up again. Raises ConfigError outside of one."""
    if SHAPED_ENV not in os.environ:
        raise ConfigError("the network can be cut only in a namespace of its own; give --mbit")
    state = "up" if up else "down"
    environment = {**os.environ, "PATH": _SBIN}
    subprocess.run(["ip", "link", "set", "lo", state], check=True, env=environment)


def main(argv: list[str]) -> NoReturn:
    """Inside the fresh namespace: shape loopback, then run the command line behind the rate."""
    mbit, script, *arguments = argv
    bucket = max(LARGEST_PACKET, int(int(mbit) * 1e6 / 8 * BUCKET_S))
    for line in (
        "ip link set lo mtu 1500 up",
        f"tc qdisc add dev lo root tbf rate {mbit}mbit burst {bucket} latency 200ms",
    ):
        subprocess.run(line.split(), check=True, env={**os.environ, "PATH": _SBIN})
    os.execv(sys.executable, [sys.executable, "-P", script, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
