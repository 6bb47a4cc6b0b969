"""The documentation: it builds, its links lead somewhere, and what it names is in the code."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs_pages import IDS, PAGES, ROOT, anchors, code_words, links, prose

from sglang_smartgen.config import SmartGenConfig
from sglang_smartgen.report.bench import BENCHMARKS

DOCS = ROOT / "docs"
# Never fetched; a new one is added here by hand.
EXTERNAL: set[str] = set()
CODE = [path for top in ("sglang_smartgen", "scripts") for path in (ROOT / top).rglob("*.py")]
TOPS = ("sglang_smartgen", "scripts", "tests", "docs", "deploy", "triton_kernels", "patches")
NEAR = ("", "sglang_smartgen", "sglang_smartgen/engine")


def page(name: str) -> Path:
    return DOCS / f"{name}.md"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "WARNING" not in said, said
    assert (tmp_path / "site/pictures/life.svg").is_file()
    for source in DOCS.glob("*.md"):  # the navigation has every page: mkdocs.yml asks for it
        assert (tmp_path / "site" / f"{source.stem}.html").is_file()


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_links_lead_somewhere(path: Path) -> None:
    for link in links(path):
        if re.match(r"\w+:", link):
            assert link in EXTERNAL, f"{link} is not in the list of external links"
            continue
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"{link}: there is no {target}"
        assert file.is_relative_to(ROOT), link
        if DOCS in path.parents:  # the site has nothing outside of docs/
            assert file.is_relative_to(DOCS), link
        if anchor:
            assert anchor in anchors(file), f"{link}: {target or 'the page'} has no such heading"


def test_external_links_are_used() -> None:
    assert {link for path in PAGES for link in links(path)} >= EXTERNAL


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_files_and_tests_that_are_named_exist(path: Path) -> None:
    for word in code_words(path):
        if match := re.fullmatch(r"(tests/[\w/]+\.py)::(\w+)", word):
            file = ROOT / match[1]
            assert file.is_file() and f"def {match[2]}(" in file.read_text(), word
        elif re.fullmatch(r"[\w./@-]+\.(py|sh|md|ya?ml|json|service|timer)", word):
            if "/" not in word and word.endswith((".yaml", ".json", ".service", ".timer")):
                assert list((ROOT / "deploy").rglob(word)) or path.name not in ("cluster.md",), word
            elif word.split("/")[0] in TOPS or path.name == "architecture.md":
                assert any((ROOT / near / word).exists() for near in NEAR), word


def test_pictures_and_tables_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    make_docs = importlib.import_module("make_docs")
    outdated = [path.name for path in make_docs.outdated()]
    assert not outdated, "run: scripts/run.sh python scripts/make_docs.py"
    tables = importlib.import_module("docs_tables")
    states = importlib.import_module("docs_states")
    # Each mark is used once, and the machines have the phases of their enumerations.
    marks = re.findall(r"<!-- from the code: ([\w-]+) -->\n", "".join(map(Path.read_text, PAGES)))
    assert sorted(marks) == sorted(tables.tables())
    from sglang_smartgen.core.decode_room import DecodePhase
    from sglang_smartgen.core.prefill_room import PrefillPhase

    for edges, phases in (
        (states.prefill_edges(), PrefillPhase),
        (states.decode_edges(), DecodePhase),
    ):
        assert {name for edge in edges for name in edge} == {phase.value for phase in phases}


def test_every_key_has_its_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    said = importlib.import_module("docs_tables").meanings()
    assert tuple(said) == SmartGenConfig.__struct_fields__
    assert all(text.endswith(".") for text in said.values())


def test_every_benchmark_has_a_section_and_every_result_a_line() -> None:
    text = page("benchmarks").read_text()
    for name in BENCHMARKS:
        section = re.search(rf"^## {name}\n(.*?)(?=^## )", text, re.DOTALL | re.MULTILINE)
        assert section and f"smartgen bench {name}" in section[1] and "rints" in section[1], name
    for result in (DOCS / "results").iterdir():
        assert f"results/{result.name}" in text, result.name


def test_deadlines_are_those_of_the_code() -> None:
    from sglang_smartgen import plugin
    from sglang_smartgen.engine import decode_side, heartbeat, prefill_peers, prefill_side
    from sglang_smartgen.transfer import serve_parent

    rows = dict(
        re.findall(r"^\| ([^|]+) \| ([^|]+) \| [^|]+ \|$", page("protocol").read_text(), re.M)
    )
    limits = prefill_side.LIMITS
    assert rows["lease of a room"] == f"{limits.lease_s:g} s after D last named it"
    assert rows["a write that was never fenced"] == f"{limits.doubt_s:g} s"
    assert rows["one fetch"] == f"`fetch_timeout_s` ({SmartGenConfig().fetch_timeout_s:g} s)"
    assert rows["no Hello of a peer"] == f"{prefill_peers.HELLO_LIMIT_S:g} s"
    stalled = f"{plugin.STALL_LIMIT_S} s (`{plugin.STALL_LIMITS[0]}`)"
    assert rows["a stalled write in Mooncake"] == stalled
    assert decode_side.RESEND_S == 1
    quarantine = f"repeated every second; {decode_side.QUARANTINE_LIMIT_S:g} s"
    assert rows["Release without an answer"] == quarantine
    hung = rows["a store server process without a sign of life"]
    assert hung == f"{serve_parent.HUNG_S:g} s"
    assert f"every {heartbeat.BEAT_S:g} s (Alive)" in page("protocol").read_text()


def test_every_thread_has_its_row() -> None:
    """Of the folders themselves; what has a folder of its own has a page of its own."""
    text = page("architecture").read_text()
    named = set()
    for path in (ROOT / "sglang_smartgen").glob("*/*.py"):
        named |= set(re.findall(r'name ?= ?f?"(smartgen-[\w-]*[a-z])', path.read_text()))
    assert len(named) >= 10
    for name in named:
        assert f"`{name}" in text, f"the page on architecture does not name the thread {name}"


def test_variables_and_fallbacks_that_are_named_exist() -> None:
    code = "".join(path.read_text() for path in [*CODE, *(ROOT / "scripts").glob("*.sh")])
    foreign = {"SGLANG_HOST_IP", "MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT"}
    for name in re.findall(
        r"`((?:SMARTGEN|MC|SGLANG)_[A-Z_]+)`", page("configuration").read_text()
    ):
        assert name in foreign or name in code, name
    from sglang_smartgen.core.counts import CAUSES
    from sglang_smartgen.engine.metrics_feed import REASONS

    text = prose(page("troubleshooting"))
    for reason in REASONS:
        assert f"`{reason.replace(' ', '_')}`" in text, reason
    causes = re.search(r"^\| cause \|.*?\n\n", text, re.DOTALL | re.MULTILINE)
    assert causes
    first_cells = [line.split("|")[1] for line in causes[0].strip().splitlines()]
    named = {cause for cell in first_cells for cause in re.findall(r"`(\w+)`", cell)}
    assert named and named <= set(CAUSES.values())


def test_every_folder_is_on_the_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    folders = {path.parent.name for path in (ROOT / "sglang_smartgen").glob("*/__init__.py")}
    assert set(importlib.import_module("docs_pictures").FOLDERS) == folders | {"triton_kernels"}
    text = page("architecture").read_text()
    assert all(f"| `{folder}` |" in text for folder in folders)
