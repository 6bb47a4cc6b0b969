"""A model of SGLang in this process, with SmartGen's decode side; P is a dictionary.

`python model_host.py FOLDER` prefills prompts with SGLang's own attention, keeps a copy of their KV
as P would, overwrites with NaN in the pool what an arm says is still remote, decodes, and prints
one JSON line. Servers are not needed to see that a model's layers are served right, and two more
pairs of them would cost minutes.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STEPS = 12
LENGTHS = (230, 157)  # longer than the sliding window
CONFIG = {"selector": "hata", "ratio": 0.2, "min_prompt_len": 32}
REMOTE_FROM = 0.25  # an arm with remote entries has this share of each sparse layer at the start


def main() -> None:
    """Run every arm on the model in the folder that the command line names."""
    os.environ["SGLANG_SMARTGEN_CONFIG"] = json.dumps(CONFIG)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling Gemma's RoPE takes longer than all arms
    from sglang_smartgen.engine import cpu_host

    argv = cpu_host.prepare_environment(
        [
            *("--model-path", sys.argv[1], "--dtype", "float32", "--device", "cpu"),
            *("--attention-backend", "torch_native", "--skip-tokenizer-init"),
            *("--mem-fraction-static", "0.7", "--max-total-tokens", "2048"),
            *("--max-running-requests", "4", "--disable-overlap-schedule"),
        ]
    )
    host = Host(argv)
    every = {"ratio": 1.0}
    arms: dict[str, dict[str, Any] | None] = {
        "stock": None,
        "all": {**every, "lookahead": False},
        "all ahead": {**every, "lookahead": True},
        "hata": {"lookahead": False},
        "hata ahead": {"lookahead": True},
    }
    result: dict[str, Any] = {"sparse_layers": host.facts.geometry.sparse_layers}
    for name, overrides in arms.items():
        for share in (1.0, REMOTE_FROM) if overrides else (1.0,):
            label = name if overrides is None else f"{name}, {share} local"
            alone = [host.answer([prompt], overrides, share)[0] for prompt in host.prompts]
            result[label] = alone
            result[f"{label}, batch"] = host.answer(host.prompts, overrides, share)
    result["refusal"] = host.refusal()
    result["alarm"] = host.alarm()
    print(json.dumps(result))


class Host:
    """SGLang's model runner, its attention backend ours, and a decode side."""

    def __init__(self, argv: list[str]) -> None:
        from sglang.benchmark import one_batch
        from sglang.srt.layers.attention import attention_registry
        from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
        from sglang.srt.server_args import PortArgs, prepare_server_args

        from sglang_smartgen.engine import options, runtime
        from sglang_smartgen.engine.decode_side import DecodeSide
        from sglang_smartgen.select.registry import make_selector
        from sglang_smartgen.transfer.fake import FakeNetwork, FakeTransport
        from sglang_smartgen.transfer.messages import Endpoint, Hello

        def build(runner: Any) -> Any:
            runtime.remember_model(runner)
            self.backend = options._build_backend(runner)
            return self.backend

        attention_registry.ATTENTION_BACKENDS["torch_native"] = build
        args = prepare_server_args(argv)
        rank = spawn_world_rank(args, tp_rank=0, pp_rank=0)
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
        one_batch._init_process_global_configs()
        one_batch.get_tokenizer = lambda *args, **kwargs: None
        self.runner, _ = one_batch.load_model(args, PortArgs.init_new(args), 0, 0)
        self._new_requests = one_batch.prepare_synthetic_inputs_for_latency_test
        self.facts, config = runtime.facts(), runtime.config()
        self._endpoint = Endpoint("p", 1)
        self.side = DecodeSide(
            config=config,
            facts=self.facts,
            selector=make_selector("hata", self.facts.shape, self.facts.geometry.dtype),
            transport=FakeTransport(FakeNetwork(), "d"),
            session="d",
            reply=Endpoint("d", 1),
            send=self._to_prefill,
            rank=0,
        )
        self.side.on_message(Hello(self._endpoint.host, self._endpoint.port))
        runtime.set_decode_side(self.side)
        words = random.Random(3)
        self.prompts = [[words.randrange(3, 256) for _ in range(n)] for n in LENGTHS]
        self._numbers = itertools.count(1)
        self._kept: dict[int, Any] = {}
        self.failures: list[str | None] = []
        self.may_fail = False

    def answer(
        self, prompts: Sequence[list[int]], overrides: dict[str, Any] | None, share: float
    ) -> list[list[int]]:
        """Greedy tokens of the prompts, decoded as one batch.

        overrides: None = no SmartGen room. share: of each sparse layer's prompt, local at start.
        """
        import torch

        self.runner.clear()
        with torch.no_grad():
            requests = self._new_requests(len(prompts), 0, [list(p) for p in prompts])
            tokens, _, batch = self.runner.extend(requests)
            answers = [[int(token)] for token in tokens]
            rooms = []
            if overrides is not None:
                rooms = [self._open(request, overrides, share) for request in requests]
            for _ in range(STEPS):
                tokens, _ = self.runner.decode(tokens, batch)
                for mine, token in zip(answers, tokens.tolist(), strict=True):
                    mine.append(token)
        self.failures = [self._end(room, share) for room in rooms]
        if any(self.failures) and not self.may_fail:
            raise SystemExit(f"{overrides} {share}: {self.failures}")
        return answers

    def refusal(self) -> str:
        """What a model says whose layers lookahead does not know."""
        from sglang_smartgen.config import ConfigError
        from sglang_smartgen.engine import lookahead

        known, lookahead.KNOWN = lookahead.KNOWN, {}
        try:
            lookahead.Lookahead(
                self.runner.torch_runner.model, self.facts.geometry.sparse_layers, print
            )
        except ConfigError as error:
            return str(error)
        finally:
            lookahead.KNOWN = known
        return ""

    def alarm(self) -> list[str | None]:
        """How requests fail when a query is computed in another way than the model does."""
        ahead = self.backend._lookahead
        last = self.facts.geometry.sparse_layers[-1]
        right = ahead._queries[last]
        ahead._queries[last] = lambda *inputs: right(*inputs).flip(-1)
        ahead._unchecked.add(last)
        self.may_fail = True
        self.answer(self.prompts, {"lookahead": True}, 1.0)
        return self.failures

    def _end(self, room: int, share: float) -> str | None:
        """Close a room; the cause when it failed."""
        state = self.side.room(room)
        assert state is not None
        fetched = state.stats.entries_fetched
        if (share < 1) != bool(fetched):
            state.fail(f"{fetched} entries were fetched with {share} of each layer local")
        self.side.release(room, "stop", lambda: None)
        self.side.drain()
        return state.failure

    def _open(self, request: Any, overrides: dict[str, Any], share: float) -> int:
        """A room for a prefilled request: its KV kept for P, the remote part of the pool NaN."""
        import torch

        from sglang_smartgen.core.mask import LOCAL

        room, row, length = (
            next(self._numbers),
            request.kv.req_pool_idx,
            len(request.get_fill_ids()),
        )
        slots = self.facts.req_to_token[row, :length].long()
        pools = (self.facts.keys, self.facts.values)
        self._kept[room] = [[pool[slots] for pool in side] for side in pools]
        opened = self.side.open(
            room=room,
            rid=str(room),
            row=row,
            slots=slots,
            peer=self._endpoint,
            bootstrap_addr="p:0",
            overrides=overrides,
        )
        state = self.side.room(room)
        assert opened is not None and state is not None
        self.side._encode_here(state)
        local = int(share * length)
        for layer in range(self.facts.geometry.layers):
            stop = local if layer in self.facts.geometry.sparse_layers else length
            state.mask[layer, :stop] = LOCAL
            for side in pools:
                side[layer][slots[stop:]] = torch.nan
        self.side.commit(room)
        return room

    def _to_prefill(self, peer: Any, message: Any) -> None:
        """What P would do with a message: entries into the arena, or let go of a room."""
        import numpy as np
        import torch

        from sglang_smartgen.transfer.messages import Fetch, FetchDone, Release, Released

        if isinstance(message, Fetch):
            g = self.facts.geometry
            for item in message.items:
                at = item.arena_offset
                for head, raw in enumerate(item.positions):
                    where = torch.from_numpy(np.frombuffer(raw, np.int32).astype(np.int64))
                    rows = self.side.arena.memory.tensor(at, (len(where), 2, g.head_dim), g.dtype)
                    for n, side in enumerate(self._kept[item.room]):
                        rows[:, n] = side[message.layer][where, head]
                    at += len(where) * g.entry_bytes
            self.side.on_message(FetchDone(message.sequence, []))
        elif isinstance(message, Release):
            self.side.on_message(Released(message.room, message.generation))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    main()
