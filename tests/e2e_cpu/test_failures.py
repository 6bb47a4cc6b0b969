"""Aborts and a killed prefill node: requests end with a cause, everything is freed, D serves on."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import requests
from e2e_cpu.compare import ask, finished

from sglang_smartgen.report.client import Answer, Client
from sglang_smartgen.report.cluster import Cluster
from sglang_smartgen.report.idle import wait_until_idle

hata = pytest.mark.pair(config={"selector": "hata", "store_gb": 0.08})
PARTIAL = {"mode": "partial", "ratio": 0.2}
FILLED = {"proactive_blocks": 2048, "credit": "fixed", "speculative_ratio": 0.05}


@hata
def test_random_aborts_leave_nothing(cluster: Cluster, prompts: list[list[int]]) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    ask(cluster.url, prompts[1], 4, smartgen=PARTIAL)
    cluster.flush_cache()
    before = wait_until_idle(cluster)
    threads = []
    for number in range(20):
        prompt = prompts[chance.randrange(len(prompts))]
        rid = f"abort-{seed}-{number}"
        arm = PARTIAL if number % 2 else FILLED
        threads.append(threading.Thread(target=request, args=(cluster, prompt, rid, arm)))
        threads[-1].start()
        time.sleep(chance.uniform(0.0, 1.0))
        threading.Timer(chance.uniform(0.0, 4.0), abort, (cluster, rid)).start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    cluster.flush_cache()
    assert wait_until_idle(cluster) == before
    ask(cluster.url, prompts[1], 8, smartgen=PARTIAL)


@hata
def test_killed_prefill(cluster: Cluster, prompts: list[list[int]]) -> None:
    prompt = prompts[7]
    expected = ask(cluster.url, prompt, 16, smartgen=PARTIAL).token_ids
    cluster.flush_cache()
    before = wait_until_idle(cluster)["decode"]

    streams = threading.Event()
    answers: list[Answer] = []

    def run() -> None:
        answers.append(
            Client(cluster.url).generate(
                prompt,
                max_new_tokens=400,
                ignore_eos=True,
                smartgen=PARTIAL,
                rid="killed",
                on_text=lambda text: streams.set(),
            )
        )

    thread = threading.Thread(target=run)
    thread.start()
    assert streams.wait(120)
    cluster.kill_prefill()
    killed = time.monotonic()
    thread.join(60)
    took = time.monotonic() - killed
    print(f"the client had its error {took:.1f} s after the kill")
    record = finished(cluster, "killed")
    assert answers[0].error is not None and f"room {record['room']}" in answers[0].error
    assert took < 10
    assert requests.get(f"{cluster.urls['decode']}/health", timeout=30).status_code == 200

    cluster.restart_prefill()
    again = ask(cluster.url, prompt, 16, smartgen=PARTIAL)
    assert again.token_ids == expected
    assert wait_until_idle(cluster)["decode"] == before


def request(cluster: Cluster, prompt: list[int], rid: str, arm: dict[str, Any]) -> None:
    Client(cluster.url, timeout_s=60).generate(
        prompt, max_new_tokens=24, ignore_eos=True, smartgen=arm, rid=rid
    )


def abort(cluster: Cluster, rid: str) -> None:
    for role in ("prefill", "decode"):
        requests.post(f"{cluster.urls[role]}/abort_request", json={"rid": rid}, timeout=30)
