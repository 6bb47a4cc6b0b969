"""`smartgen demo` with real servers: what it prints, and that Ctrl-C leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

MODES = ("smartgen", "full", "stock")
PROMPT_TOKENS = 600
KV_TOKEN_BYTES = 46080  # SmolLM2 in float32
# A test run in the background ignores SIGINT, and its children inherit that.
COMMAND = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "from sglang_smartgen.cli import main; sys.exit(main())"
)


def demo(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-c", COMMAND, "demo", "--format", "json", *arguments]


@pytest.mark.usefixtures("no_pair")
def test_demo_json(model: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        demo(
            *("--prompt-tokens", str(PROMPT_TOKENS), "--max-new-tokens", "12"),
            # On loopback all blocks would fit behind the prefill.
            *("--config", json.dumps({"proactive_blocks": 8 * 1024})),
            *("--log-dir", str(tmp_path)),
        ),
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1
    report = json.loads(lines[0])
    assert set(report) == {"model", "prompt_tokens", "answer", "modes"}
    assert report["model"] == model.name
    assert report["prompt_tokens"] == PROMPT_TOKENS
    assert tuple(report["modes"]) == tuple(report["answer"]) == MODES
    for mode, row in report["modes"].items():
        assert set(row) == {
            *("ttft_s", "ttst_s", "tbt_s", "local_share_at_start", "bytes_proactive"),
            *("bytes_metadata", "bytes_on_demand", "bytes_speculative"),
        }, mode
        assert 0 < row["ttft_s"] < row["ttst_s"], mode
        assert row["tbt_s"] > 0, mode
        assert report["answer"][mode].strip(), mode
    smartgen, full, stock = (report["modes"][mode] for mode in MODES)
    whole = PROMPT_TOKENS * KV_TOKEN_BYTES
    assert 0 < smartgen["local_share_at_start"] < 1
    assert smartgen["bytes_proactive"] < whole and smartgen["bytes_metadata"] > 0
    assert smartgen["bytes_on_demand"] > 0
    assert full["local_share_at_start"] == stock["local_share_at_start"] == 1
    assert full["bytes_proactive"] == stock["bytes_proactive"] == whole
    assert full["bytes_on_demand"] == stock["bytes_on_demand"] == 0
    # One selector on the same bytes: what was local at the start must not change the answer.
    assert report["answer"]["smartgen"] == report["answer"]["full"]


@pytest.mark.usefixtures("no_pair")
def test_ctrl_c_while_servers_start(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "stderr"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            demo("--modes", "stock", "--log-dir", str(tmp_path)),
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
    try:
        started = wait_for_children(process.pid, 3)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130, log.read_text()
    finally:
        process.kill()
    assert wait_for_end(started) == []
    assert process.stdout is not None and process.stdout.read() == b""
    last = log.read_text().splitlines()[-1]
    assert last == "smartgen: interrupted; everything it started has ended"


def wait_for_end(processes: list[psutil.Process]) -> list[psutil.Process]:
    """What still runs after at most 10 s; the watchdog ends just after the demo."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        left = []
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:  # ended, but init has not reaped it
                    left.append(process)
        if not left:
            return []
        time.sleep(0.1)
    return left


def wait_for_children(pid: int, count: int) -> list[psutil.Process]:
    """All descendants of `pid`, once its `count` servers have had two seconds to spawn more."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if len(psutil.Process(pid).children()) >= count:
            time.sleep(2)
            return psutil.Process(pid).children(recursive=True)
        time.sleep(0.2)
    raise AssertionError(f"process {pid} did not start {count} servers")
