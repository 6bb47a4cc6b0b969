"""The far end of `smartgen bench rails`: registers a file's memory and waits for its end.

    python -m sglang_smartgen.report.rails_peer FILE RAIL...

FILE `-` is private memory, as a KV pool is.

RAIL is `kind@address` as in the configuration. Prints one line of JSON: its session (its card,
packed) and the address of the memory. With `direct` as the first rail the second is used alone, as
the transport that it is.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from sglang_smartgen.transfer.rails.make import make_rails
from sglang_smartgen.transfer.transport import Region

ANONYMOUS = "-"
ANONYMOUS_BYTES = 256 << 20


def main(argv: list[str]) -> int:
    """Serve until the standard input is closed."""
    path, *rails = argv
    if path == ANONYMOUS:
        memory = np.zeros(ANONYMOUS_BYTES, np.uint8)
    else:
        memory = np.memmap(path, np.uint8, "r+")
    direct = rails[0] == "direct"
    if direct:
        rails = rails[1:]
    transport = make_rails(rails, "127.0.0.1")
    transport.register(Region(memory.ctypes.data, memory.nbytes))
    session = transport.rails[0].transport.session if direct else transport.session
    print(json.dumps([session, memory.ctypes.data]), flush=True)
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
