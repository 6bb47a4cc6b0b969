"""P with a hierarchical cache: a prefix that comes back from the host tier, beside stock SGLang.

It starts three pairs of a tiny model, which the rest of the suite has no use for, so it runs only
when SMARTGEN_E2E_TIER is set.
"""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest
from e2e_cpu.compare import EVERYTHING, ask, assert_same_as_stock
from e2e_cpu.small_models import VOCABULARY, save_model

from sglang_smartgen.report.client import Answer
from sglang_smartgen.report.cluster import Cluster

pytestmark = pytest.mark.skipif(
    "SMARTGEN_E2E_TIER" not in os.environ, reason="SMARTGEN_E2E_TIER is not set"
)
LENGTH, STEPS, POOL = 400, 64, 900
TIER = ["--enable-hierarchical-cache", "--hicache-ratio", "4", "--max-total-tokens", str(POOL)]
LAYOUTS = {"layer_first": [], "page_first": ["--hicache-mem-layout", "page_first"]}


def words(seed: int, count: int) -> list[int]:
    """Token ids of a prompt that means nothing."""
    chance = random.Random(seed)
    return [chance.randrange(3, VOCABULARY) for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tier") / "qwen3"
    save_model("qwen3", made)
    return made


def pair(folder: Path, logs: Path, config: dict[str, object] | None, *prefill: str) -> Cluster:
    plain = ["--skip-tokenizer-init"]
    return Cluster(
        folder,
        config=config,
        log_dir=logs,
        prefill_args=[*plain, *prefill],
        decode_args=plain,
        max_total_tokens=4000,
    )


@pytest.fixture(scope="module")
def stock(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Answer:
    with pair(folder, tmp_path_factory.mktemp("stock"), None) as cluster:
        return ask(cluster.url, words(1, LENGTH), STEPS, top_logprobs=2)


def watched(cluster: Cluster, prompt: list[int], rid: str) -> tuple[Answer, int]:
    """An answer, and what the store had of its own before it let go of the prompt."""
    used, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            used.append(cluster.smartgen_state("prefill")["store_used_bytes"] or used[-1])

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        return ask(cluster.url, prompt, STEPS, rid=rid), used[-1]
    finally:
        over.set()
        thread.join()


@pytest.mark.usefixtures("no_pair")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prefix_from_the_host_tier(
    folder: Path, tmp_path: Path, stock: Answer, layout: str
) -> None:
    prompt = words(1, LENGTH)
    with pair(folder, tmp_path, EVERYTHING, *TIER, *LAYOUTS[layout]) as cluster:
        first, whole = watched(cluster, prompt, "first")
        assert cluster.smartgen_state("prefill")["tier_tokens"] == 0
        for seed in (2, 3, 6):  # more than the pool holds
            ask(cluster.url, words(seed, POOL // 2), 2)
        again, own = watched(cluster, prompt, "again")
        state = cluster.smartgen_state("prefill")
        assert state["tier_tokens"] == LENGTH - 1 and state["fallbacks"] == {}
        assert again.cached_tokens == LENGTH - 1
        assert 0 < own < whole / 2
        for answer in (first, again):
            assert_same_as_stock(cluster.url, prompt, answer.token_ids, stock)
        half = [*prompt[: LENGTH // 2], *words(5, LENGTH // 2)]
        ask(cluster.url, half, 4)
        assert cluster.smartgen_state("prefill")["tier_tokens"] >= LENGTH - 1 + LENGTH // 2
        cluster.flush_cache()  # both tiers
        answer = ask(cluster.url, prompt, STEPS)
        assert answer.cached_tokens == 0
        assert_same_as_stock(cluster.url, prompt, answer.token_ids, stock)
