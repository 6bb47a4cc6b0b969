"""A peer must not fill the disk with lines about its own bad messages."""

from __future__ import annotations

import logging

import pytest

from sglang_smartgen.transfer.limited_log import LimitedLog


def test_lines_above_the_limit_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = [5.0]
    log = LimitedLog(logging.getLogger("limited"), lines=2, period_s=60, clock=lambda: now[0])
    for number in range(5):
        log.warning("bad message %d", number)
    assert caplog.messages == ["bad message 0", "bad message 1"]
    now[0] += 59.9
    log.warning("still the same minute")
    now[0] += 0.1
    log.warning("bad message %d", 5)
    assert caplog.messages[2:] == [
        "SmartGen: 4 more lines like the last were left out",
        "bad message 5",
    ]
    now[0] += 1000
    log.warning("alone")
    assert caplog.messages[4:] == ["alone"]
