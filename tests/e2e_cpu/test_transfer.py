"""What was local, remote or late changes no token; partial is partial; fallbacks are whole."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from e2e_cpu.compare import EVERYTHING, ask, assert_same_as_stock, finished

from sglang_smartgen.report.client import Answer, Client
from sglang_smartgen.report.cluster import Cluster

if TYPE_CHECKING:
    from e2e_cpu.conftest import Pairs

LAYERS, BLOCKS = 30, 1024
KV_TOKEN_BYTES = 46080  # SmolLM2 in float32
# Without fill: what was not pushed is fetched, entry by entry.
DEMAND = {"mode": "smartgen", "speculative_ratio": 0}
HALF = {**DEMAND, "proactive_blocks": LAYERS * BLOCKS // 2}
ONLY_DENSE = {**DEMAND, "proactive_blocks": 2 * BLOCKS}
PROMPT_OF = {0.1: 5, 0.2: 2}  # ratio -> number of the prompt
SHARES = {"full": 1.0, "half": 1 / 2, "dense": 2 / LAYERS}

# The store holds one long prompt, not two.
HATA = {"selector": "hata", "store_gb": 0.08}
hata = pytest.mark.pair(config=HATA)
exact = pytest.mark.pair(config=EVERYTHING)
SELECTORS = [pytest.param("exact", marks=exact), pytest.param("hata", marks=hata)]
stock_prefill = pytest.mark.pair(
    config=None, decode_config={"selector": "hata"}, max_total_tokens=1400
)


@pytest.mark.parametrize("ratio", PROMPT_OF)
@pytest.mark.parametrize("selector", SELECTORS)
def test_transfer_changes_nothing(
    selector: str, ratio: float, cluster: Cluster, prompts: list[list[int]]
) -> None:
    arms = {"full": {"mode": "full"}, "half": HALF, "dense": ONLY_DENSE}
    prompt, answers = prompts[PROMPT_OF[ratio]], {}
    for name, arm in arms.items():
        rid = f"{selector}-{ratio}-{name}"
        cluster.flush_cache()  # a prefix hit sums in another order on P
        answer = ask(cluster.url, prompt, 32, smartgen={**arm, "ratio": ratio}, rid=rid)
        answers[name] = answer.token_ids
        share = finished(cluster, rid)["local_share_at_start"]
        assert share == pytest.approx(SHARES[name], abs=0.01)
    assert answers["half"] == answers["full"]
    assert answers["dense"] == answers["full"]


@hata
@pytest.mark.parametrize("credit", ["adaptive", "fixed"])
def test_fill_ends_local_and_changes_nothing(
    credit: str, cluster: Cluster, prompts: list[list[int]]
) -> None:
    """Observed blocks first, the rest in silence: the same tokens, and nothing is sent twice."""
    prompt = prompts[6]
    cluster.flush_cache()
    expected = ask(cluster.url, prompt, 24, smartgen={"mode": "full"}).token_ids
    cluster.flush_cache()
    arm = {"proactive_blocks": 4 * BLOCKS, "order": "observed", "credit": credit}
    answer = ask(cluster.url, prompt, 24, smartgen=arm, rid=f"fill-{credit}")
    record = finished(cluster, f"fill-{credit}")
    assert answer.token_ids == expected
    assert record["local_share_at_start"] < 0.2
    assert record["steps_until_local"] is not None
    sent = sum(record[f"bytes_{kind}"] for kind in ("proactive", "on_demand", "speculative"))
    assert len(prompt) * KV_TOKEN_BYTES <= sent <= 1.05 * len(prompt) * KV_TOKEN_BYTES
    assert cluster.smartgen_state("decode")["granted_bytes"] == 0


@hata
def test_partial_really_is_partial(cluster: Cluster, prompts: list[list[int]]) -> None:
    prompt = prompts[6]
    ask(cluster.url, prompt, 8, smartgen=ONLY_DENSE, rid="partial")
    record = finished(cluster, "partial")
    at_start = record["bytes_proactive"] + record["bytes_metadata"]
    print(f"at start {at_start / len(prompt) / KV_TOKEN_BYTES:.3f} of the KV")
    assert at_start <= 0.2 * len(prompt) * KV_TOKEN_BYTES
    assert record["bytes_proactive"] == 2 * len(prompt) * KV_TOKEN_BYTES // LAYERS
    assert record["fetched_layers"] == list(range(2, LAYERS))


@hata
def test_short_prompt_is_stock(cluster: Cluster, prompts: list[list[int]]) -> None:
    """Below min_prompt_len no room is opened: full transfer and dense attention."""
    before = cluster.smartgen_state("decode")["counters"]["rooms"]
    ask(cluster.url, prompts[0][:200], 8)
    assert cluster.smartgen_state("decode")["counters"]["rooms"] == before


@hata
def test_full_store_falls_back(
    stock: list[Answer], cluster: Cluster, prompts: list[list[int]]
) -> None:
    """While one long prompt fills the store, the next is sent whole and answered right."""
    before = cluster.smartgen_state("prefill")["fallbacks"].get("prefill store full", 0)
    streams = threading.Event()

    def fill() -> None:
        Client(cluster.url).generate(
            prompts[7],
            max_new_tokens=48,
            ignore_eos=True,
            smartgen=ONLY_DENSE,
            on_text=lambda text: streams.set(),
        )

    filler = threading.Thread(target=fill)
    filler.start()
    assert streams.wait(120)
    answer = ask(cluster.url, prompts[5], smartgen={"ratio": 1.0}, rid="full-store")
    filler.join(120)
    assert cluster.smartgen_state("prefill")["fallbacks"]["prefill store full"] == before + 1
    assert finished(cluster, "full-store")["fallback"] == "full transfer"
    assert_same_as_stock(
        cluster.url, prompts[5], answer.token_ids, stock[5], smartgen={"ratio": 1.0}
    )


@pytest.fixture(scope="session")
def selected(pairs: Pairs, prompts: list[list[int]]) -> list[int]:
    """What a SmartGen pair with `hata` answers to prompt 4."""
    cluster = pairs.get(config=HATA)
    cluster.flush_cache()
    return ask(cluster.url, prompts[4], 24).token_ids


@stock_prefill
def test_stock_peer_falls_back(
    selected: list[int], cluster: Cluster, prompts: list[list[int]]
) -> None:
    """A P without SmartGen sends everything; D selects all the same, from metadata of its own."""
    answer = ask(cluster.url, prompts[4], 24, rid="stock-peer")
    record = finished(cluster, "stock-peer")
    assert record["fallback"] == "full transfer"
    assert record["local_share_at_start"] == 1
    assert 0 < record["entries_selected"] < 0.25 * len(prompts[4]) * 3 * (LAYERS - 2) * 23
    assert answer.token_ids == selected


@stock_prefill
def test_prompt_longer_than_the_pool(cluster: Cluster, prompts: list[list[int]]) -> None:
    answer = Client(cluster.url).generate(prompts[7], max_new_tokens=8)
    assert answer.error is not None
    print(answer.error)
    assert "1500 tokens" in answer.error


@hata
def test_hooks_fired(cluster: Cluster, prompts: list[list[int]]) -> None:
    ask(cluster.url, prompts[1], 4)
    for role in ("prefill", "decode"):
        fired = cluster.smartgen_state(role)["hooks_fired"]
        expected = expected_hooks(role)
        assert expected and expected <= set(fired), expected - set(fired)


def expected_hooks(role: str) -> set[str]:
    """Targets of the table that serve this role."""
    from sglang_smartgen.plugin import HOOKS

    return {hook.target for hook in HOOKS if role in hook.roles}
