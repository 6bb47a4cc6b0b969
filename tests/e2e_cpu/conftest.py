"""Real servers on this machine, one pair at a time.

A test (or its module) names the pair it wants with `pytest.mark.pair(config=..., ...)`, keywords
as of `Cluster`; the fixture `cluster` is that pair, running. A pair is kept for the next test that
wants the same one and stopped before another starts; tests are ordered so that each starts once.

SMARTGEN_E2E_CONFIG: JSON of configuration keys for every pair with SmartGen, such as
`{"transport": "rails", "rails": ["mooncake", "mooncake@127.0.0.2"]}`.
"""

from __future__ import annotations

import argparse
import heapq
import inspect
import json
import os
import textwrap
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from e2e_cpu.compare import ask_together

from sglang_smartgen.report.client import Answer
from sglang_smartgen.report.cluster import Cluster, ClusterError
from sglang_smartgen.report.model_cache import ensure_model
from sglang_smartgen.report.prompts import demo_text, load_tokenizer, text_prompt

HERE = Path(__file__).parent
TIMEOUT_S = 900  # the first test of a pair waits for its start


class Pairs:
    """Keeps the pair that was used last."""

    def __init__(self, model: Path, logs: pytest.TempPathFactory) -> None:
        self._model, self._logs = model, logs
        self._key = ""
        self.running: Cluster | None = None

    def get(self, *, model: Path | None = None, **named: Any) -> Cluster:
        """The running pair of these keywords of `Cluster`; another one is stopped first.

        model: another one than the small real model.
        """
        key = repr((model, named))
        if self.running is not None and self._key == key:
            try:
                self.running.check()
                return self.running
            except ClusterError:
                pass  # a test killed it
        self.stop()
        if named.get("config") is not None:
            more = json.loads(os.environ.get("SMARTGEN_E2E_CONFIG", "{}"))
            named = {**named, "config": {**more, **named["config"]}}
            if named.get("decode_config") is not None:
                named["decode_config"] = {**more, **named["decode_config"]}
        cluster = Cluster(model or self._model, log_dir=self._logs.mktemp("pair"), **named)
        cluster.start()
        self._key, self.running = key, cluster
        return cluster

    def stop(self) -> None:
        """No pair runs after this; a test that breaks its pair calls it at its end."""
        if self.running is not None:
            self.running.stop()
            self.running = None


@pytest.fixture(scope="session")
def model() -> Path:
    """Folder of the small real model."""
    return ensure_model()


@pytest.fixture(scope="session")
def prompts(model: Path) -> list[list[int]]:
    """Token ids of eight prompts from real texts: prose, a licence, documentation and code."""
    tokenizer = load_tokenizer(model)
    licence = distribution("requests").read_text("licenses/LICENSE")
    assert licence is not None
    cuts = (
        (demo_text(), 256, 0),
        (topics["calls"], 384, 0),
        (inspect.getsource(heapq), 512, 0),
        (topics["specialnames"], 700, 300),
        (inspect.getsource(textwrap), 850, 0),
        (licence, 1000, 100),
        (inspect.getsource(argparse), 1200, 0),
        (demo_text(), 1500, 500),
    )
    return [text_prompt(tokenizer, *cut) for cut in cuts]


@pytest.fixture(scope="session")
def pairs(
    model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Pairs]:
    """All pairs of the session; for tests that start a pair by hand."""
    keeper = Pairs(model, tmp_path_factory)
    request.config.stash[_PAIRS] = keeper
    yield keeper
    keeper.stop()


@pytest.fixture(scope="session")
def stock(pairs: Pairs, prompts: list[list[int]]) -> list[Answer]:
    """Stock SGLang's answers under full transfer, with its two best candidates a token."""
    url = pairs.get(config=None).url
    halves = (prompts[: len(prompts) // 2], prompts[len(prompts) // 2 :])
    return [answer for half in halves for answer in ask_together(url, half, top_logprobs=2)]


@pytest.fixture
def cluster(pairs: Pairs, request: pytest.FixtureRequest) -> Cluster:
    """The running pair that the test's mark `pair` names."""
    return pairs.get(**_pair_of(request.node))


@pytest.fixture
def no_pair(pairs: Pairs) -> None:
    """Stops the running pair, for tests that start servers of their own."""
    pairs.stop()


_PAIRS = pytest.StashKey[Pairs]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "pair(config, ...): the pair of servers that a test wants")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one pair follow each other; those without a pair come last."""
    places = [place for place, item in enumerate(items) if HERE in item.path.parents]
    ours = [items[place] for place in places]
    keys = {repr(_pair_of(item)): None for item in ours if item.get_closest_marker("pair")}
    order = {key: number for number, key in enumerate(keys)}
    ours.sort(key=lambda item: order.get(repr(_pair_of(item)), len(order)))
    for place, item in zip(places, ours, strict=True):
        items[place] = item
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A failure shows the last log lines of the pair that was running."""
    report: Any = yield
    keeper = item.config.stash.get(_PAIRS, None)
    if report.failed and keeper is not None and keeper.running is not None:
        for role, tail in keeper.running.log_tails(30).items():
            report.sections.append((f"{role} log", "\n".join(tail)))
    return report


def _pair_of(item: pytest.Item) -> dict[str, Any]:
    mark = item.get_closest_marker("pair")
    return {} if mark is None else dict(mark.kwargs)
