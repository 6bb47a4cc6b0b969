"""Every command of the documentation is run by a test, or says what it needs; all are parsed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import command_lines
import pytest
from docs_pages import IDS, PAGES, ROOT, Block, blocks, code_words

from sglang_smartgen.config import SmartGenConfig, load_config

SHELL = ("bash", "sh", "shell", "console", "")
NEEDS = {
    "a GPU",
    "two machines",
    "root",
    "time",
    "a machine with systemd",
    "a Kubernetes cluster",
}
# Whole pages that need something: no test runs their blocks, all the same they are parsed.
WHOLE_PAGES = {"gpu-status.md": "a GPU", "upgrading.md": "another release of SGLang"}
# A command of a block without `needs` -> what runs it.
RUN_BY = {
    r"scripts/demo\.sh\b": "tests/e2e_cpu/test_demo.py",
    r"scripts/run_tests\.sh$": ".ci/run",
    r"scripts/run\.sh python -m pytest tests/": ".ci/run",
    r"scripts/run\.sh (scripts/typecheck\.sh|ruff format)": "scripts/run_tests.sh",
    r"scripts/run\.sh (python scripts/make_docs\.py|mkdocs build)": "tests/unit/test_docs.py",
    r"(scripts/run\.sh )?smartgen doctor\b": "tests/unit/test_doctor.py",
    r"smartgen bench kernels --quick": "tests/kernels/test_bench.py",
    r"smartgen bench select --quick": "tests/unit/test_bench_select.py",
    r"smartgen calibrate\b": "tests/unit/test_calibrate_run.py",
    r"smartgen patch\b": "tests/unit",
    r"export \w+=": "nothing",  # a setting of the reader's shell
}


def shell_blocks() -> list[Block]:
    return [b for path in PAGES for b in blocks(path) if b.language in SHELL]


def test_there_are_some() -> None:
    assert len(shell_blocks()) > 20
    assert {b.needs for b in shell_blocks()} - {""} <= NEEDS


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_every_command_is_run_or_says_what_it_needs(path: Path) -> None:
    for block in blocks(path):
        if block.language not in SHELL or block.needs or path.name in WHOLE_PAGES:
            continue
        for words in command_lines.commands(block.text):
            line = " ".join(words)
            runner = [who for pattern, who in RUN_BY.items() if re.match(pattern, line)]
            assert runner, (
                f"{path.name}: {line!r}: add what runs it to RUN_BY, or a comment "
                "<!-- needs: ... --> before its block"
            )
            assert runner[0] == "nothing" or (ROOT / runner[0]).exists(), runner


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_every_command_of_ours_parses(path: Path) -> None:
    for block in blocks(path):
        if block.language in SHELL:
            for words in command_lines.commands(block.text):
                try:
                    command_lines.check(words)
                except (AssertionError, ValueError) as error:
                    pytest.fail(f"{path.name}: {' '.join(words)}: {error}")


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_commands_in_the_text_have_real_flags(path: Path) -> None:
    for word in code_words(path):
        if not re.match(r"(smartgen|scripts/\w+\.(sh|py)) ", word):
            continue
        (words,) = command_lines.commands(word)
        shape = words[1] in ("COMMAND", "CMD...") or words[2:3] == ["NAME"]
        if shape or words[1] == "config:":  # the beginning of a sentence that a program says
            continue
        try:
            command_lines.check(words)
        except command_lines.WrongCommand as error:  # in running text an argument may be left out
            assert "are required" in str(error) or "expected" in str(error), f"{word}: {error}"


def configurations(path: Path) -> list[dict[str, Any]]:
    """Objects in the page that are configurations: of a JSON block, or in running text."""
    texts = [b.text for b in blocks(path) if b.language == "json"]
    texts += [word for word in code_words(path) if word.startswith('{"')]
    found = []
    for text in texts:
        try:
            found.append(json.loads(text))
        except ValueError as error:
            if '": {mode' not in text and "..." not in text:
                pytest.fail(f"{path.name}: {text!r} is no JSON: {error}")
    return found


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_every_configuration_can_be_read(path: Path) -> None:
    for value in configurations(path):
        if value.get("selector") == "signs":
            continue  # the example of docs/selectors.md, which a test of its own runs
        sampling = value.get("sampling_params")
        if sampling is not None:
            SmartGenConfig().for_request(sampling["custom_params"]["smartgen"])
        else:
            load_config(json.dumps(value))


def test_the_readmes_keys_and_defaults_are_those_of_the_code() -> None:
    text = (ROOT / "README.md").read_text()
    table = text.split("| key | default | meaning |")[1].split("\n\n")[0]
    defaults = {f: getattr(SmartGenConfig(), f) for f in SmartGenConfig.__struct_fields__}
    for line in table.splitlines()[2:]:
        keys, given = line.split("|")[1:3]
        names = re.findall(r"`(\w+)`", keys)
        for name, value in zip(names, given.split(","), strict=True):
            value, known = value.strip().strip("`"), defaults[name]
            if known in (None, "", [], {}):
                assert not value[0].isdecimal() and value not in ("true", "false"), name
            elif isinstance(known, bool):
                assert value == str(known).lower(), name
            else:
                assert float(value) == known if isinstance(known, (int, float)) else value == known


def test_a_renamed_flag_would_be_seen() -> None:
    for line in (
        "smartgen bench network --quickly",
        "smartgen bench nettwork",
        "scripts/demo.sh --mbits 50",
        "scripts/run.sh smartgen doctor --fast",
        "python scripts/gpu_check.py --output x",
        "python -m pytest tests/unit/test_nothing.py",
        "python -m sglang_router.launch_router --pd-disaggregated",
        "python -m sglang_smartgen.launch_server --model-path M --disaggregation-mode both",
        "python -m sglang_smartgen.launch_server --model-path M --disaggregation-mod prefill",
    ):
        with pytest.raises((AssertionError, ValueError)):
            command_lines.check(line.split())
    for config in ('{"ration": 0.2}', '{"ratio": 7}'):
        with pytest.raises(ValueError, match="ratio"):
            command_lines.check(["smartgen", "demo", "--config", config])
