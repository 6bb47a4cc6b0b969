"""Start and end of the server process: refusals, silence, a deaf one, and no orphan."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import sglang_smartgen.transfer.serve_channel as serve_channel
from sglang_smartgen.core.geometry import KVGeometry
from sglang_smartgen.select.base import KVShape
from sglang_smartgen.select.exact import ExactSelector
from sglang_smartgen.transfer import serve_parent
from sglang_smartgen.transfer.messages import Endpoint, Release
from sglang_smartgen.transfer.serve_channel import TransportSpec
from sglang_smartgen.transfer.serve_parent import ServeError, ServerProcess
from sglang_smartgen.transfer.store import PrefillStore

PATIENCE_S = 60.0
STUBS = str(Path(__file__).parents[1])


class Deaths:
    """Notes how a process has died."""

    def __init__(self) -> None:
        self.told = threading.Event()
        self.cause = ""
        self.lost: list[tuple[int, int]] = []

    def __call__(self, cause: str, lost: list[tuple[int, int]]) -> None:
        self.cause, self.lost = cause, lost
        self.told.set()


def store() -> PrefillStore:
    geometry = KVGeometry(3, 2, 4, torch.float32)
    return PrefillStore(geometry, ExactSelector(KVShape(3, 2, 2, 4, 1.0)), 1 << 20)


def start(monkeypatch: pytest.MonkeyPatch, stub: str, deaths: Deaths) -> ServerProcess:
    monkeypatch.setattr(serve_parent, "MODULE", "serve_stub")
    monkeypatch.setenv("PYTHONPATH", STUBS)
    monkeypatch.setenv("STUB", stub)
    spec = TransportSpec("socket", "127.0.0.1", token=bytes(16))
    return ServerProcess(spec, store(), 1.0, settled=lambda _: None, died=deaths)


@pytest.mark.parametrize(
    ("stub", "sentence"),
    [
        ("exit", "the store server ended at once, exit code 7"),
        ("refuse", "the store server refuses to start: no engine today"),
    ],
)
def test_a_process_that_does_not_start_is_named(
    monkeypatch: pytest.MonkeyPatch, stub: str, sentence: str
) -> None:
    threads = set(threading.enumerate())  # those of earlier tests may end meanwhile
    deaths = Deaths()
    with pytest.raises(ServeError, match=f"^{sentence}$"):
        start(monkeypatch, stub, deaths)
    assert set(threading.enumerate()) <= threads and not deaths.told.is_set()


def test_a_process_without_a_sign_of_life_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_parent, "HUNG_S", 1.0)
    deaths = Deaths()
    process = start(monkeypatch, "hang", deaths)
    entry = process._store.open(11, 1, 5)
    assert entry is not None and process.hand_over(entry)
    process._store.drop(11, 1)
    assert process._store.used_bytes > 0  # it may still read there
    assert deaths.told.wait(PATIENCE_S)
    assert deaths.cause == f"store server {process.pid}: killed: no sign of life for 1 s"
    assert deaths.lost == [(11, 1)]
    assert process.served.fetches == 2
    assert not Path(f"/proc/{process.pid}").exists()
    process._thread.join(PATIENCE_S)
    assert process._store.used_bytes == 0
    other = process._store.open(12, 1, 5)
    assert other is not None and not process.hand_over(other)


def test_a_process_that_does_not_read_counts_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_channel.Channel.send, "__defaults__", (0.2,))
    deaths = Deaths()
    process = start(monkeypatch, "hang", deaths)
    release = Release(1, 1, "s" * 10_000, Endpoint("d", 1))
    deadline = time.monotonic() + PATIENCE_S
    while not deaths.told.is_set():
        process.forward(release)
        assert time.monotonic() < deadline
    assert "killed by signal 9" in deaths.cause


def test_a_closed_process_ends_without_being_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    deaths = Deaths()
    process = start(monkeypatch, "hang", deaths)
    process.close()
    assert not Path(f"/proc/{process.pid}").exists() and not deaths.told.is_set()


PARENT = """
import os, socket, subprocess, sys, time
from sglang_smartgen.transfer.serve_channel import Channel, Setup, TransportSpec
ours, theirs = socket.socketpair()
store, status = (os.memfd_create(name) for name in ("store", "status"))
os.ftruncate(store, 1 << 20)
os.ftruncate(status, 4096)
child = subprocess.Popen(
    [sys.executable, "-P", "-m", "sglang_smartgen.transfer.serve_process",
     "--channel-fd", str(theirs.fileno()), "--parent", str(os.getpid())],
    pass_fds=(theirs.fileno(), store, status),
)
channel = Channel(ours)
spec = TransportSpec("socket", "127.0.0.1", token=bytes(16))
channel.send(Setup(spec, store, 1 << 20, status, 3, 2, 4, "float32", [], 1.0))
(serving,) = channel.receive(120)
print(child.pid, serving.serve.port, flush=True)
time.sleep(600)
"""


def test_no_orphan_when_the_scheduler_is_killed() -> None:
    """Not even a stopped one, which cannot read the end of the channel: the kernel kills it."""
    names = set(os.listdir("/dev/shm"))
    parent = subprocess.Popen([sys.executable, "-P", "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline().split()[0])
    os.kill(child, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + PATIENCE_S
    while _runs(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert set(os.listdir("/dev/shm")) <= names


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
