"""The launcher's own flags; SGLang is never started here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_smartgen import launch_server
from sglang_smartgen.launch_server import ArgumentError, Arguments, main, split_arguments


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Collects the arguments that SGLang would have been started with; no host help."""
    from sglang_smartgen.engine import cpu_host

    calls: list[list[str]] = []
    monkeypatch.setattr(launch_server, "run_sglang", calls.append)
    monkeypatch.setattr(cpu_host, "prepare_environment", lambda argv: [*argv, "--prepared"])
    monkeypatch.setenv(launch_server.CONFIG_ENV, "")
    return calls


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], Arguments([], False, None)),
        (["--port", "1"], Arguments(["--port", "1"], False, None)),
        (["--enable-smartgen", "--port", "1"], Arguments(["--port", "1"], True, None)),
        (["--port", "1", "--smartgen-config", "{}"], Arguments(["--port", "1"], True, "{}")),
        (["--smartgen-config={}", "-x"], Arguments(["-x"], True, "{}")),
        (['--smartgen-config={"a": "b=c"}'], Arguments([], True, '{"a": "b=c"}')),
        (["--smartgen-config", "a", "--smartgen-config", "b"], Arguments([], True, "b")),
    ],
)
def test_split_arguments(argv: list[str], expected: Arguments) -> None:
    assert split_arguments(argv) == expected


@pytest.mark.parametrize(
    "argv",
    [
        ["--smartgen-config"],
        ["--smartgen-config="],
        ["--smartgen-config", "--port"],
        ["--enable-smartgen=yes"],
    ],
)
def test_wrong_flags_are_refused(argv: list[str]) -> None:
    with pytest.raises(ArgumentError):
        split_arguments(argv)


def test_stock_without_our_flags(started: list[list[str]]) -> None:
    assert main(["--port", "1"]) == 0
    assert started == [["--port", "1", "--prepared"]]
    assert os.environ[launch_server.CONFIG_ENV] == ""


def test_config_reaches_spawned_processes(started: list[list[str]], tmp_path: Path) -> None:
    file = tmp_path / "smartgen.json"
    file.write_text('{"selector": "exact", "ratio": 0.5}')
    for given in (str(file), file.read_text()):
        assert main(["--smartgen-config", given, "--port", "1"]) == 0
        exported = json.loads(os.environ[launch_server.CONFIG_ENV])
        assert (exported["selector"], exported["ratio"]) == ("exact", 0.5)
    assert started == [["--port", "1", "--prepared"]] * 2


def test_enable_alone_means_the_defaults_or_the_environment(started: list[list[str]]) -> None:
    from sglang_smartgen.config import SmartGenConfig

    assert main(["--enable-smartgen"]) == 0
    exported = json.loads(os.environ[launch_server.CONFIG_ENV])
    assert exported["ratio"] == SmartGenConfig().ratio
    os.environ[launch_server.CONFIG_ENV] = '{"ratio": 0.75}'
    assert main(["--enable-smartgen"]) == 0
    assert json.loads(os.environ[launch_server.CONFIG_ENV])["ratio"] == 0.75


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ('{"ratio": 2}', "ratio"),
        ('{"no_such_key": 1}', "no_such_key"),
        ("{broken", "JSON"),
        ("/no/such/file.json", "/no/such/file.json"),
    ],
)
def test_bad_config_starts_nothing(
    started: list[list[str]], capsys: pytest.CaptureFixture[str], config: str, named: str
) -> None:
    assert main(["--smartgen-config", config, "--port", "1"]) == 2
    assert started == []
    out, error = capsys.readouterr()
    assert out == ""
    assert named in error
    assert error.count("\n") == 1 and error.endswith("\n")


def test_bad_config_in_the_environment_is_refused_too(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(launch_server.CONFIG_ENV, '{"ratio": 0}')
    assert main([]) == 2
    assert started == []


def test_exit_code_of_the_command() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "sglang_smartgen.launch_server",
            "--smartgen-config",
            '{"ratio": 9}',
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and "ratio" in done.stderr


def test_importing_the_launcher_does_not_import_sglang_or_torch() -> None:
    """Spawned processes import it, and obstacle 2 must be met before SGLang is imported."""
    code = (
        "import sys, sglang_smartgen.launch_server, sglang_smartgen.engine.cpu_host;"
        "print(sorted({'sglang', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
