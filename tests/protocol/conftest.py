"""Mooncake's limits for this folder: quick ones, and only while a module of it runs.

Mooncake reads its environment when the first engine of a process starts. Servers of the end-to-end
tests are children of this process and must run with the limits that users get.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def quick_mooncake() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MC_FORCE_TCP", "1")
        patch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "2")
        patch.setenv("MC_TCP_STATUS_TIMEOUT_SEC", "2")
        yield
