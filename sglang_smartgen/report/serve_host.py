"""The prefill node of `smartgen bench serve`: a store with its server, and a model that prefills.

Run as `python -P -m sglang_smartgen.report.serve_host thread|process`. One JSON object a line on
stdin (`peer`, `run`), one on stdout for each. Its interpreter has what the scheduler's has that
matters here: a thread that prefills a real model layer by layer, SGLang's thread that receives
messages, and, in thread mode, the serve thread.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import msgspec
import torch
import zmq

from sglang_smartgen.core.geometry import KVGeometry
from sglang_smartgen.report.model_cache import ensure_model
from sglang_smartgen.select.base import KVShape
from sglang_smartgen.select.exact import ExactSelector
from sglang_smartgen.transfer.messages import (
    Endpoint,
    Fetch,
    Grant,
    Message,
    Registration,
    Release,
    from_frames,
    to_frames,
)
from sglang_smartgen.transfer.mooncake import MooncakeTransport
from sglang_smartgen.transfer.push_room import Peer
from sglang_smartgen.transfer.serve_channel import TransportSpec
from sglang_smartgen.transfer.store import PrefillStore
from sglang_smartgen.transfer.store_server import StoreServer

HOST = "127.0.0.1"
GEOMETRY = KVGeometry(layers=30, kv_heads=3, head_dim=64, dtype=torch.float32)  # SmolLM2-135M
ROOM, PROMPT_LEN = 1, 1024
CHUNK_TOKENS = 64
"""Tokens of one prefill: few, so that the interpreter launches much, as it does for a GPU."""
SWITCH_INTERVAL_S = 0.0005  # as in the scheduler (engine/scheduler_hooks.py)


def value_of(layer: int, side: int, token: int, head: int) -> float:
    """What every number of an entry's K (side 0) or V is, so that D can check what it gets."""
    return float(layer + 100 * side + 1000 * head + token)


def _filled_store() -> PrefillStore:
    g = GEOMETRY
    selector = ExactSelector(KVShape(g.layers, g.kv_heads, g.kv_heads, g.head_dim, 1.0))
    bytes_ = PROMPT_LEN * g.token_bytes
    store = PrefillStore(g, selector, 3 * bytes_)
    entry = store.open(ROOM, 1, PROMPT_LEN)
    assert entry is not None
    parts = [
        torch.arange(g.layers)[:, None, None, None] * 1.0,
        torch.arange(2)[None, :, None, None] * 100.0,
        torch.arange(PROMPT_LEN)[None, None, :, None] * 1.0,
        torch.arange(g.kv_heads)[None, None, None, :] * 1000.0,
    ]
    entry.kv.copy_(sum(parts, torch.zeros(()))[..., None].expand(entry.kv.shape))
    entry.captured = [PROMPT_LEN] * g.layers
    return store


class Host:
    """Store, server, and the sockets that stand for SGLang's."""

    def __init__(self, as_process: bool) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self.bootstrap = Endpoint(HOST, self._pull.bind_to_random_port(f"tcp://{HOST}"))
        self._pushes: dict[Endpoint, zmq.Socket[bytes]] = {}
        self._peers: dict[str, Peer] = {}
        self._store = _filled_store()
        self.server = StoreServer(
            MooncakeTransport.create(HOST),
            self._store,
            process=TransportSpec("mooncake", HOST) if as_process else None,
            peer_of=self._peers.get,
            reply=self._reply,
            settle=lambda _: True,
            released=lambda *_: None,
            doubt=lambda room, generation: None,
            moved=lambda: os._exit(1),
            timeout_s=5.0,
            busy=lambda: False,
        )
        entry = self._store.acquire(ROOM, 1)
        assert entry is not None
        self.server.hand_over(entry)
        threading.Thread(target=self._receive, name="bootstrap", daemon=True).start()

    def add_peer(self, registration: Registration) -> Endpoint:
        """D's addresses; where it is to send its fetches."""
        self._peers[registration.session] = Peer(registration, [], [])
        self.server.add_peer(registration)
        return self.server.endpoint or self.bootstrap

    def _receive(self) -> None:
        while True:
            message = from_frames(self._pull.recv_multipart())
            assert isinstance(message, Fetch | Grant | Release)
            self.server.submit(message)

    def _reply(self, endpoint: Endpoint, message: Message) -> None:
        push = self._pushes.get(endpoint)
        if push is None:
            push = self._pushes[endpoint] = self._context.socket(zmq.PUSH)
            push.connect(f"tcp://{endpoint.host}:{endpoint.port}")
        push.send_multipart(to_frames(message))


def _prefiller() -> Any:
    """A function that prefills one chunk of random tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(ensure_model(), dtype=torch.float32).eval()
    tokens = torch.randint(0, model.config.vocab_size, (1, CHUNK_TOKENS))

    @torch.inference_mode()
    def prefill() -> None:
        model.model(tokens, use_cache=False)

    return prefill


def _run(prefill: Any, seconds: float) -> dict[str, float]:
    """Prefill on a thread of its own, on the first core, for `seconds` or a little more."""
    result: dict[str, float] = {}

    def work() -> None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[0]})  # of this thread alone
        prefill()
        began, chunks = time.monotonic(), 0
        while (spent := time.monotonic() - began) < seconds:
            prefill()
            chunks += 1
        result.update(tokens=float(chunks * CHUNK_TOKENS), seconds=spent)

    thread = threading.Thread(target=work, name="scheduler")
    thread.start()
    thread.join()
    return result


def main() -> None:
    """Answer commands until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    host = Host(sys.argv[1] == "process")
    prefill = _prefiller()
    for line in sys.stdin:
        command = json.loads(line)
        if "peer" in command:
            serve = host.add_peer(msgspec.convert(command["peer"], Registration))
            answer: dict[str, Any] = {"host": serve.host, "port": serve.port}
        else:
            answer = _run(prefill, command["run"])
        answers.write(json.dumps(answer) + "\n")
    host.server.close()
    os._exit(0)


if __name__ == "__main__":
    main()
