"""Two ranks on each side: the answers of one model, and both ranks end and free alike.

One pair of servers with a tiny random model serves all of it.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from e2e_cpu.compare import NEAR_TIE, ask
from e2e_cpu.small_models import VOCABULARY, save_model

from sglang_smartgen.report.client import Answer, Client
from sglang_smartgen.report.cluster import Cluster
from sglang_smartgen.report.idle import wait_until_idle
from sglang_smartgen.report.processes import session_members

if TYPE_CHECKING:
    from e2e_cpu.conftest import Pairs

RANKS, LAYERS, BLOCKS, TOKENS = 2, 8, 64, 24
CONFIG = {
    "selector": "hata",
    "store_gb": 0.05,
    "min_prompt_len": 64,
    "blocks_per_layer": BLOCKS,
    "fetch_timeout_s": 10,  # four schedulers share what cores there are
}
SHARE = {"mode": "smartgen", "ratio": 0.1, "speculative_ratio": 0}
ONLY_DENSE = {**SHARE, "proactive_blocks": 2 * BLOCKS}
FILLED = {**ONLY_DENSE, "speculative_ratio": 0.05}
FULL = {**SHARE, "mode": "full"}
FETCHES = {"mode": "partial", "ratio": 0.2}
HUNGRY = {"mode": "partial", "ratio": 0.02}  # few entries a step: there are always new ones
PATIENCE_S = 60.0


def prompt_of(number: int, tokens: int) -> list[int]:
    made = torch.Generator().manual_seed(number)
    return torch.randint(3, VOCABULARY, (tokens,), generator=made).tolist()


PROMPTS = [prompt_of(number, 300 + 50 * number) for number in range(4)]
LONG = prompt_of(4, 1200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tp") / "qwen3"
    save_model("qwen3", made)
    return made


@pytest.fixture
def cluster(pairs: Pairs, folder: Path) -> Cluster:
    return pairs.get(
        model=folder,
        config=CONFIG,
        prefill_args=["--skip-tokenizer-init"],
        decode_args=["--skip-tokenizer-init"],
        max_total_tokens=4000,
        env={"TORCHDYNAMO_DISABLE": "1"},  # compiling the embedding of a rank takes long
        tp_size=RANKS,
    )


def ranks(cluster: Cluster, role: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = cluster.smartgen_state(role)["ranks"]
    assert len(found) == RANKS
    return found


def free(cluster: Cluster) -> list[tuple[int, int]]:
    """Free slots and rows of D, rank by rank, once nothing is open on any rank."""
    wait_until_idle(cluster)
    return [(rank["free_slots"], rank["free_rows"]) for rank in ranks(cluster, "decode")]


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def fetching(cluster: Cluster, before: float) -> bool:
    return bool(cluster.smartgen_state("decode")["fetch_wait_s"] > before)


class Request(threading.Thread):
    """A request that fetches for as long as it runs; `answer` once it is over."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self._cluster = cluster
        self.answer: Answer | None = None
        before = cluster.smartgen_state("decode")["fetch_wait_s"]
        self.start()
        until(lambda: fetching(cluster, before))

    def run(self) -> None:
        self.answer = Client(self._cluster.url).generate(
            LONG, max_new_tokens=800, ignore_eos=True, smartgen=HUNGRY
        )

    def error(self) -> str:
        self.join(PATIENCE_S)
        assert self.answer is not None and self.answer.error is not None
        return self.answer.error


@torch.no_grad()
def assert_greedy(folder: Path, prompt: list[int], answer: list[int]) -> None:
    """Each token is the best of the whole model with dense attention, or nearly so."""
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert bool((logits.max(dim=1).values - chosen < NEAR_TIE).all())


def test_everything_is_dense_attention(cluster: Cluster, folder: Path) -> None:
    for prompt in PROMPTS:
        arm = {"mode": "partial", "ratio": 1.0}
        answer = ask(cluster.url, prompt, TOKENS, smartgen=arm).token_ids
        assert len(set(answer)) > 4  # else nothing could be seen in it
        assert_greedy(folder, prompt, answer)


def test_transfer_changes_nothing(cluster: Cluster) -> None:
    for prompt in PROMPTS:
        cluster.flush_cache()  # a prefix hit sums in another order on P
        full = ask(cluster.url, prompt, TOKENS, smartgen=FULL).token_ids
        fetches = [rank["fetches"] for rank in ranks(cluster, "prefill")]
        for arm in (ONLY_DENSE, FILLED):
            cluster.flush_cache()
            assert ask(cluster.url, prompt, TOKENS, smartgen=arm).token_ids == full
        after = [rank["fetches"] for rank in ranks(cluster, "prefill")]
        assert all(late > early for early, late in zip(fetches, after, strict=True))


def test_random_aborts_leave_nothing(cluster: Cluster) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    before = free(cluster)
    threads = []
    for number in range(20):
        rid = f"abort-{seed}-{number}"
        request = threading.Thread(
            target=Client(cluster.url, timeout_s=PATIENCE_S).generate,
            args=(chance.choice(PROMPTS),),
            kwargs={
                "max_new_tokens": 40,
                "ignore_eos": True,
                "smartgen": chance.choice((FETCHES, FILLED)),
                "rid": rid,
                "stream": False,
            },
        )
        request.start()
        threads.append(request)
        time.sleep(chance.uniform(0.0, 0.4))
        threading.Timer(chance.uniform(0.0, 1.5), abort, (cluster, rid)).start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
        assert not thread.is_alive()
    cluster.flush_cache()
    assert free(cluster) == before


def abort(cluster: Cluster, rid: str) -> None:
    import requests

    for role in ("prefill", "decode"):
        requests.post(f"{cluster.urls[role]}/abort_request", json={"rid": rid}, timeout=30)


def test_one_rank_of_prefill_that_hangs_ends_the_request_on_both(cluster: Cluster) -> None:
    before = free(cluster)
    failures = [rank["counters"]["failures"] for rank in ranks(cluster, "decode")]
    expected = ask(cluster.url, PROMPTS[1], TOKENS, smartgen=FETCHES).token_ids
    request = Request(cluster)
    scheduler = rank_process(cluster, "prefill", 1)
    hung = [*scheduler.children(), scheduler]  # the process that serves its store is a child
    for process in hung:
        process.send_signal(signal.SIGSTOP)
    try:
        error = request.error()
        assert "decode rank 1" in error and "no answer from prefill within" in error
    finally:
        for process in hung:
            process.send_signal(signal.SIGCONT)
    cluster.flush_cache()
    assert ask(cluster.url, PROMPTS[1], TOKENS, smartgen=FETCHES).token_ids == expected
    assert free(cluster) == before
    ended = [rank["counters"]["failures"] for rank in ranks(cluster, "decode")]
    assert ended == [count + 1 for count in failures]


def rank_process(cluster: Cluster, role: str, rank: int) -> psutil.Process:
    """The scheduler process of one rank, which SGLang titles so."""
    members = map(psutil.Process, session_members(cluster.pids[role]))
    (found,) = [m for m in members if f"scheduler_TP{rank}" in " ".join(m.cmdline())]
    return found


def test_killed_prefill(cluster: Cluster) -> None:
    expected = ask(cluster.url, PROMPTS[1], TOKENS, smartgen=FETCHES).token_ids
    before = free(cluster)
    request = Request(cluster)
    cluster.kill_prefill()
    told, _, cause = request.error().partition("): ")
    assert "SmartGen fetch failed for room" in told and "decode rank" in told and cause
    print(cause)
    assert free(cluster) == before

    cluster.restart_prefill()
    assert ask(cluster.url, PROMPTS[1], TOKENS, smartgen=FETCHES).token_ids == expected
    assert free(cluster) == before
