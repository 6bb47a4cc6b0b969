"""A rail that is cut in the middle of a request, and returns: the same tokens, and no failure.

It starts a pair of its own and changes an address of loopback (root), so it runs only when
SMARTGEN_E2E_RAILS is set. The other tests of this folder run over rails with SMARTGEN_E2E_CONFIG.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from e2e_cpu.compare import ask

from sglang_smartgen.report.client import Answer
from sglang_smartgen.report.cluster import Cluster

if TYPE_CHECKING:
    from e2e_cpu.conftest import Pairs

pytestmark = pytest.mark.skipif(
    "SMARTGEN_E2E_RAILS" not in os.environ, reason="SMARTGEN_E2E_RAILS is not set"
)
HOST = "10.79.0.2"
RAILS = {"transport": "rails", "rails": ["mooncake", f"mooncake@{HOST}"]}
# Everything that was not pushed is fetched, step by step.
ASKED = {"mode": "smartgen", "speculative_ratio": 0, "proactive_blocks": 2048, "ratio": 0.2}
STEPS = 160
PATIENCE_S = 60.0


def address(verb: str) -> None:
    subprocess.run(["ip", "addr", verb, f"{HOST}/32", "dev", "lo"], check=verb == "add")


@pytest.fixture
def cluster(pairs: Pairs) -> Iterator[Cluster]:
    address("add")
    env = {"MC_TCP_PROGRESS_TIMEOUT_SEC": "2", "MC_TCP_STATUS_TIMEOUT_SEC": "2"}
    try:
        yield pairs.get(config={"selector": "hata", **RAILS}, env=env)
    finally:
        pairs.stop()
        address("del")


def rails(cluster: Cluster) -> list[dict[str, object]]:
    found: list[dict[str, object]] = cluster.smartgen_state("prefill")["rails"]
    return found


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_rail_cut_in_the_middle_of_a_request(cluster: Cluster, prompts: list[list[int]]) -> None:
    prompt = prompts[5]
    whole = ask(cluster.url, prompt, STEPS, smartgen=ASKED, rid="whole")
    cluster.flush_cache()
    before = cluster.smartgen_state("prefill")["fetches"]
    answers: list[Answer] = []

    def request() -> None:
        answers.append(ask(cluster.url, prompt, STEPS, smartgen=ASKED, rid="cut"))

    thread = threading.Thread(target=request)
    thread.start()
    try:
        until(lambda: cluster.smartgen_state("prefill")["fetches"] > before + 20)
        address("del")
        until(lambda: rails(cluster)[1]["state"] == "paused" or not thread.is_alive())
    finally:
        address("add")
        thread.join(PATIENCE_S)
    assert answers and answers[0].token_ids == whole.token_ids
    until(lambda: rails(cluster)[1]["state"] != "paused")
    again = ask(cluster.url, prompt, STEPS, smartgen=ASKED, rid="again")
    assert again.token_ids == whole.token_ids
    until(lambda: cluster.smartgen_state("decode")["quarantined_rooms"] == 0)
