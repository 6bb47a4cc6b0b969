"""The decode node of `smartgen bench serve`: it asks at a fixed rate and times every answer.

One thread does it all, so what is measured is P and not this process: it sends what is due and
reads what has come. A latency runs from the moment a fetch was due, so a late sender cannot hide
what a slow server does to the fetches behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

import msgspec
import numpy as np
import torch
import zmq

from sglang_smartgen.config import ConfigError
from sglang_smartgen.report.serve_host import GEOMETRY, PROMPT_LEN, ROOM, value_of
from sglang_smartgen.transfer.messages import (
    VERSION,
    Endpoint,
    Fetch,
    FetchDone,
    FetchItem,
    Registration,
    from_frames,
    to_frames,
)
from sglang_smartgen.transfer.mooncake import MooncakeTransport
from sglang_smartgen.transfer.region import HostRegion

SLOTS = 256
"""Fetches that may be under way before their landing areas are used again."""
ANSWER_TIMEOUT_S = 300.0
LAST_ANSWER_S = 10.0


class Host:
    """A prefill node in a process of its own."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "sglang_smartgen.report.serve_host", mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def command(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send a command and wait for its answer. ConfigError when the host has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass
        line = self._process.stdout.readline()
        if not line:
            raise ConfigError(f"the prefill host ({self.mode}) ended; its messages are on stderr")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


class Load:
    """Fetches of `size` bytes (whole entries, spread over the KV heads) at `rate` a second."""

    def __init__(self, size: int, rate: float) -> None:
        self._rate = rate
        self._count = max(1, size // GEOMETRY.entry_bytes)
        self._size = self._count * GEOMETRY.entry_bytes
        self._arena = HostRegion(SLOTS * self._size)
        self._other = HostRegion(8192)
        self._transport = MooncakeTransport.create("127.0.0.1")
        for memory in (self._arena, self._other):
            self._transport.register(memory.region)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._here = Endpoint("127.0.0.1", self._pull.bind_to_random_port("tcp://127.0.0.1"))
        self._pushes: dict[Endpoint, zmq.Socket[bytes]] = {}
        self._number = 0
        self._random = np.random.default_rng(1)

    def meet(self, host: Host) -> Endpoint:
        """Register with a host; where its fetches go. Checks the bytes of a first fetch."""
        answer = host.command({"peer": msgspec.to_builtins(self._registration())})
        serve = Endpoint(answer["host"], answer["port"])
        push = self._pushes[serve] = self._context.socket(zmq.PUSH)
        push.connect(f"tcp://{serve.host}:{serve.port}")
        heads = self._ask(serve, layer=7)
        if not self._pull.poll(int(1000 * LAST_ANSWER_S)):
            raise ConfigError(f"the prefill host ({host.mode}) does not answer a fetch")
        done = from_frames(self._pull.recv_multipart())
        rows = self._landed(self._number)
        wanted = [
            [value_of(7, side, token, head) for side in (0, 1)]
            for head, tokens in enumerate(heads)
            for token in tokens.tolist()
        ]
        assert isinstance(done, FetchDone)
        if done.failures or rows[:, :, 0].tolist() != wanted:
            raise ConfigError(f"a fetch from the {host.mode} brought other bytes: {done.failures}")
        return serve

    def ask_until(self, serve: Endpoint, over: threading.Event) -> tuple[list[float], int]:
        """Fetch at the rate until `over`; seconds that each took, and how many failed."""
        due_at: dict[int, float] = {}
        took: list[float] = []
        failed = 0
        began = time.monotonic()
        asked = 0
        while not over.is_set():
            now = time.monotonic()
            while (due := began + asked / self._rate) <= now:
                self._ask(serve, layer=2 + asked % (GEOMETRY.layers - 2))
                due_at[self._number] = due
                asked += 1
            failed += self._read(due_at, took)
            time.sleep(max(0.0, min(2e-4, due - time.monotonic())))
        deadline = time.monotonic() + LAST_ANSWER_S
        while due_at and time.monotonic() < deadline:
            self._pull.poll(100)
            failed += self._read(due_at, took)
        return took, failed + len(due_at)

    def close(self) -> None:
        """Free sockets and transport."""
        self._context.destroy(linger=0)
        self._transport.close()

    def _ask(self, serve: Endpoint, layer: int) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
        g = GEOMETRY
        self._number += 1
        tokens = self._random.integers(0, PROMPT_LEN, self._count, dtype=np.int32)
        heads = np.array_split(tokens, g.kv_heads)
        offset = self._number % SLOTS * self._size
        item = FetchItem(ROOM, 1, offset, [head.tobytes() for head in heads])
        fetch = Fetch(self._number, self._transport.session, self._here, layer, [item])
        self._pushes[serve].send_multipart(to_frames(fetch))
        return heads

    def _read(self, due_at: dict[int, float], took: list[float]) -> int:
        """Take the answers that have come; how many of them are failures."""
        failed = 0
        while True:
            try:
                done = from_frames(self._pull.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                return failed
            assert isinstance(done, FetchDone)
            due = due_at.pop(done.sequence, None)
            if due is not None:
                took.append(time.monotonic() - due)
                failed += bool(done.failures)

    def _landed(self, number: int) -> torch.Tensor:
        shape = (self._count, 2, GEOMETRY.head_dim)
        return self._arena.tensor(number % SLOTS * self._size, shape, GEOMETRY.dtype)

    def _registration(self) -> Registration:
        other = self._other.region.address
        return Registration(
            version=VERSION,
            session=self._transport.session,
            epoch=1,
            fingerprint="",
            layers=GEOMETRY.layers,
            kv_row_bytes=GEOMETRY.row_bytes,
            mask=0,
            mask_rows=0,
            mask_width=0,
            metadata=[],
            metadata_row_bytes=0,
            arena=self._arena.region.address,
            arena_bytes=self._arena.region.length,
            fill=other,
            fill_bytes=4096,
            scratch=other + 4096,
            tp_size=1,
        )


def leave_first_core() -> None:
    """Keep this process off the core that the hosts prefill on, where there is another."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, cores[1:])
