"""Stands for the server process, as the variable STUB says; starts at once, for it has no torch."""

from __future__ import annotations

import os
import socket
import sys
import time

from sglang_smartgen.transfer.messages import Endpoint
from sglang_smartgen.transfer.serve_channel import Beat, Channel, Refused, Serving

PATIENCE_S = 60.0


def main() -> None:
    channel = Channel(socket.socket(fileno=int(sys.argv[sys.argv.index("--channel-fd") + 1])))
    if os.environ["STUB"] == "exit":
        sys.exit(7)
    channel.receive(PATIENCE_S)
    if os.environ["STUB"] == "refuse":
        channel.send(Refused("no engine today"))
        return
    channel.send(Serving(Endpoint("127.0.0.1", 9)))
    for number in range(3):
        channel.send(Beat(number, 0, 0))
    time.sleep(PATIENCE_S)  # deaf and dumb from here on


main()
