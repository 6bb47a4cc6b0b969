"""HostTier on SGLang's own tree cache and host pool; each case is a process of `tier_host.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from e2e_cpu.small_models import save_model

HOST = Path(__file__).parents[1] / "tier_host.py"
CASES = (
    ("write_through", "layer_first", "rust"),
    ("write_back", "page_first", "rust"),
)
MORE = (
    ("write_through_selective", "page_first_direct", "rust"),
    ("write_through", "page_first", "python"),
    ("write_back", "layer_first", "python"),
)
"""Run with SMARTGEN_TIER_CASES: each takes some seconds to import SGLang."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model("qwen3", folder)
    return folder


@pytest.mark.parametrize("case", CASES + MORE * ("SMARTGEN_TIER_CASES" in os.environ))
def test_pages_are_lent_and_kept(model: Path, case: tuple[str, str, str]) -> None:
    command = [sys.executable, str(HOST), str(model), *case]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("ok\n")
