"""A shaped network: what is refused, how the command starts again, how busy a link was."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

import pytest

from sglang_smartgen.config import ConfigError
from sglang_smartgen.report import shaped
from sglang_smartgen.report.bench_fill import LinkMeter
from sglang_smartgen.report.cluster import PORTS


def test_no_rate_and_the_rate_that_holds_already_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("started again"))
    shaped.enter(None)
    monkeypatch.setenv(shaped.SHAPED_ENV, "50")
    shaped.enter(50)


def test_what_a_machine_does_not_allow_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--mbit is 0; it must be at least 1"):
        shaped.enter(0)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="--mbit is 20; to shape the network needs root"):
        shaped.enter(20)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shaped.shutil, "which", lambda tool, path: None)
    with pytest.raises(ConfigError, match="needs the program unshare"):
        shaped.enter(20)


def test_the_command_starts_again_inside_with_its_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shaped.shutil, "which", lambda tool, path: tool)
    monkeypatch.setattr(os, "execvpe", lambda file, line, env: started.append(line))
    monkeypatch.setattr(sys, "argv", ["smartgen", "demo", "--mbit", "20"])
    monkeypatch.setenv(shaped.SHAPED_ENV, "")
    shaped.enter(20)
    (line,) = started
    assert line[:3] == ["unshare", "--net", sys.executable]
    assert line[-5:] == ["20", "smartgen", "demo", "--mbit", "20"]
    assert os.environ[shaped.SHAPED_ENV] == "20"


def test_how_busy_a_link_was() -> None:
    meter = LinkMeter()
    # One second of nothing but a request, then 1 MB a second.
    meter._samples = [(0.0, 0), (1.0, 1000), (2.0, 1_001_000), (3.0, 2_001_000), (4.0, 2_001_000)]
    assert meter.busy(8, 3.0) == pytest.approx(1.0)
    assert meter.busy(8, 4.0) == pytest.approx(0.5)
    assert meter.busy(None, 3.0) is None and meter.busy(8, None) is None


class Ran(NamedTuple):
    returncode: int
    stderr: str


def test_a_rate_is_one_bucket_or_one_for_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[list[str]] = []

    def ran(line: list[str], **_: object) -> Ran:
        lines.append(line)
        return Ran(0, "")

    monkeypatch.setenv(shaped.SHAPED_ENV, shaped.ADJUSTABLE)
    monkeypatch.setattr(shaped.subprocess, "run", ran)
    shaped.set_rate(20)
    shaped.set_rate(None, duplex=True)
    assert [line[6:] for line in lines] == [
        ["tbf", "rate", "20mbit", "burst", "65536", "latency", "200ms"],
        ["noqueue"],
    ]
    lines.clear()
    shaped.set_rate(20, duplex=True)
    classes = [line[line.index("rate") + 1] for line in lines if line[1] == "class"]
    assert classes == ["100gbit", "20mbit", "20mbit"]
    assert f"{shaped.DECODE_HOST}/32" in lines[-1] and lines[-1][-1] == "1:20"
    assert {int(value, 16) & int(mask, 16) for value, mask in shaped.HTTP_PORTS} == {
        PORTS.start & 0xF000,
        PORTS[-1] & 0xE000,
    }
    monkeypatch.setattr(shaped.subprocess, "run", lambda *_, **__: Ran(2, "unknown qdisc\n"))
    with pytest.raises(ConfigError, match=r"--mbit is 20; 'tc qdisc .* failed: unknown qdisc"):
        shaped.set_rate(20)
