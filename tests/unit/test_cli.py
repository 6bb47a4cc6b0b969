"""The command `smartgen`: its table of subcommands, its exit codes, what it imports."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import types

import pytest

from sglang_smartgen import cli
from sglang_smartgen.config import ConfigError
from sglang_smartgen.report import bench


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A subcommand `probe`, whose `run` a test sets."""
    module = types.ModuleType("smartgen_probe")
    module.add_arguments = lambda parser: parser.add_argument("--number", type=int)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "smartgen_probe", module)
    monkeypatch.setitem(cli.COMMANDS, "probe", cli.Command("smartgen_probe", "a probe"))
    before = signal.getsignal(signal.SIGTERM)
    yield module
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    "words", [(name,) for name in cli.COMMANDS] + [("bench", name) for name in bench.BENCHMARKS]
)
def test_every_command_shows_its_flags(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--help"])
    assert ended.value.code == 0 and "options:" in capsys.readouterr().out


def test_a_command_gets_its_arguments(command: types.ModuleType) -> None:
    def run(args: argparse.Namespace) -> int:
        return int(args.number)

    command.run = run  # type: ignore[attr-defined]
    assert cli.main(["probe", "--number", "7"]) == 7


def test_user_errors_are_one_sentence(
    command: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise ConfigError("ratio is 7; allowed is 0 < ratio <= 1")

    command.run = run  # type: ignore[attr-defined]
    assert cli.main(["probe"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "smartgen probe: ratio is 7; allowed is 0 < ratio <= 1\n"


def test_other_errors_keep_their_traceback(command: types.ModuleType) -> None:
    def run(args: argparse.Namespace) -> int:
        raise ZeroDivisionError

    command.run = run  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])


def test_an_interrupt_exits_130_with_one_line(
    command: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    command.run = run  # type: ignore[attr-defined]
    assert cli.main(["probe"]) == 130
    assert capsys.readouterr().err.count("\n") == 1


def test_sigterm_unwinds_the_command(command: types.ModuleType) -> None:
    unwound = []

    def run(args: argparse.Namespace) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            unwound.append(True)
        return 0

    command.run = run  # type: ignore[attr-defined]
    with pytest.raises(SystemExit) as ended:
        cli.main(["probe"])
    assert ended.value.code == 143 and unwound == [True]


@pytest.mark.parametrize("argv", [[], ["no-such-command"]])
def test_wrong_use_exits_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--modes", "smartgen,sglang"], "sglang"),
        (["--modes", "full,full"], "full,full"),
        (["--config", '{"ratio": 7}'], "ratio"),
        (["--max-new-tokens", "1"], "--max-new-tokens"),
        (["--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_demo_refuses_before_it_starts_anything(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", "--format", "json", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert named in captured.err.splitlines()[-1]


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from sglang_smartgen import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'sglang', 'torch', 'transformers', 'msgspec', 'rich', 'requests', 'psutil'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert "demo" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
