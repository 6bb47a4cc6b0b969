"""`smartgen patch` on copies of the installed SGLang's files; the installed ones are only read."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_smartgen.patching import change, command, refresh, tree
from sglang_smartgen.patching.series import PatchError, Series, sha256

ROOT = Path(__file__).parents[2]
PATCHES = ROOT / "patches"
SERIES = Series()
FILES = sorted(SERIES.manifest.files)
SCHEDULER = "srt/managers/scheduler.py"


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SGLang's own files as they are installed here, also when the installed ones are patched."""
    source = tree.find_target()
    looked = tree.look(source, SERIES)
    folder: Path = tmp_path_factory.mktemp("pristine") / "sglang"
    for path in (*FILES, "_version.py"):
        content = (source / path).read_bytes()
        if looked.files.get(path) == "patched":
            content = SERIES.backward(path, content)
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


@pytest.fixture
def copy(installed: Path, tmp_path: Path) -> Path:
    """A copy of those files that a test may change."""
    shutil.copytree(installed, tmp_path / "sglang")
    return tmp_path / "sglang"


@pytest.fixture(autouse=True)
def no_waiting_for_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of fsyncs are the only slow thing here, on a busy machine."""
    monkeypatch.setattr(change.os, "fsync", lambda descriptor: None)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`, whatever its name."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def bring(folder: Path, action: str) -> list[str]:
    return command.bring(folder, SERIES, action)


def refusal(folder: Path, action: str = "apply") -> str:
    """The sentence of a refusal that has changed nothing."""
    before = contents(folder)
    with pytest.raises(PatchError) as caught:
        bring(folder, action)
    assert contents(folder) == before
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


# The series.


def test_the_series_fits_the_installed_sglang(copy: Path) -> None:
    assert tree.look(copy, SERIES).state == "pristine"
    assert sorted(bring(copy, "apply")) == FILES
    assert tree.look(copy, SERIES).state == "patched"
    for path in FILES:
        ast.parse((copy / path).read_bytes(), path)


def test_reverse_restores_every_byte(copy: Path) -> None:
    before = contents(copy)
    modes = {path: (copy / path).stat().st_mode for path in FILES}
    bring(copy, "apply")
    patched = contents(copy)
    assert patched.keys() == before.keys()
    assert all(patched[path] != before[path] for path in FILES)
    assert sorted(bring(copy, "reverse")) == FILES
    assert contents(copy) == before
    assert {path: (copy / path).stat().st_mode for path in FILES} == modes


def test_a_second_time_is_a_no_op(copy: Path) -> None:
    assert bring(copy, "reverse") == []
    bring(copy, "apply")
    stamps = {path: (copy / path).stat() for path in FILES}
    assert bring(copy, "apply") == []
    for path, before in stamps.items():
        after = (copy / path).stat()
        assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_no_compiled_file_of_the_other_state_can_be_taken(installed: Path) -> None:
    """Python tells a stale one by time and size; the times may be the same."""
    for path in FILES:
        own = (installed / path).read_bytes()
        assert len(own) != len(SERIES.forward(path, own)), path


def test_the_manifest_is_what_the_diffs_make(installed: Path, tmp_path: Path) -> None:
    for file in PATCHES.glob("*.diff"):
        shutil.copy(file, tmp_path)
    refresh.refresh(installed, tmp_path)
    assert (tmp_path / "manifest.json").read_text() == (PATCHES / "manifest.json").read_text()


def test_git_reads_the_diffs_alike(copy: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("no git here")
    subprocess.run(["git", "init", "-q"], cwd=copy, check=True)
    for name in SERIES.manifest.diffs:
        subprocess.run(["git", "apply", str(PATCHES / name)], cwd=copy, check=True)
    assert tree.look(copy, SERIES).state == "patched"


def test_only_patched_files_carry_the_mark(installed: Path) -> None:
    for path in FILES:
        own = (installed / path).read_bytes()
        assert tree.MARK not in own and tree.MARK in SERIES.forward(path, own)


@pytest.mark.parametrize("name", SERIES.manifest.diffs)
def test_a_diff_says_what_why_and_when_to_drop_it(name: str) -> None:
    header = (PATCHES / name).read_text().partition("\n--- a/")[0]
    for key in ("What: ", "Why: ", "Replaces: ", "Drop when: "):
        assert f"\n{key}" in header, key
    assert name in (PATCHES / "README.md").read_text()


def test_every_hook_is_replaced_by_a_diff_and_every_diff_is_in_the_series() -> None:
    from sglang_smartgen.engine import cpu_host
    from sglang_smartgen.plugin import HOOKS

    texts = [(PATCHES / name).read_text() for name in SERIES.manifest.diffs]
    replaced = {target for text in texts for target in re.findall(r"^Replaces: (\S+)", text, re.M)}
    hooks = {hook.target for hook in HOOKS} | {
        obstacle.HOOK.target for obstacle in cpu_host._HOOKED
    }
    assert hooks <= replaced
    assert sorted(file.name for file in PATCHES.glob("*.diff")) == SERIES.manifest.diffs


# Refusals.


def test_a_modified_file_is_refused_before_anything_changes(copy: Path) -> None:
    with (copy / SCHEDULER).open("a") as file:
        file.write("# mine\n")
    sentence = refusal(copy)
    assert sentence.startswith(f"{SCHEDULER} in {copy} is not SGLang 0.5.23's")
    assert sentence.endswith("nothing was changed")


def test_a_modified_file_of_a_patched_tree_is_not_reversed(copy: Path) -> None:
    bring(copy, "apply")
    with (copy / SCHEDULER).open("a") as file:
        file.write("# mine\n")
    for action in ("reverse", "apply"):
        assert f"and {SCHEDULER} is neither patched nor SGLang's own" in refusal(copy, action)


def test_a_missing_file_is_refused(copy: Path) -> None:
    (copy / SCHEDULER).unlink()
    assert SCHEDULER in refusal(copy)


@pytest.mark.parametrize(
    ("version", "said"), [("0.6.0", "newer than 0.5.23"), ("0.5.9", "not 0.5.23")]
)
def test_another_version_is_told(copy: Path, version: str, said: str) -> None:
    (copy / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    (copy / SCHEDULER).write_text("# another\n")
    sentence = refusal(copy)
    assert f"SGLang {version} in {copy} is {said}, the only version" in sentence
    assert "docs/upgrading.md" in sentence


def test_a_tree_of_another_series_is_told(copy: Path) -> None:
    with (copy / SCHEDULER).open("a") as file:
        file.write("# SmartGen 0.0.9\n")
    assert f"patched by another version of SmartGen ({SCHEDULER})" in refusal(copy)


def test_a_damaged_series_changes_nothing(copy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "patches"
    shutil.copytree(PATCHES, folder)
    name = folder / SERIES.manifest.diffs[-1]
    text = name.read_text()
    assert text.count("\n+        get_scheduler_observer().before_batch(batch)\n") == 1
    name.write_text(text.replace("before_batch(batch)\n", "before_batch(other)\n"))
    before = contents(copy)
    with pytest.raises(PatchError, match=r"the diffs make another srt/managers/scheduler\.py than"):
        command.bring(copy, Series(folder), "apply")
    assert contents(copy) == before


# All or nothing.


@pytest.mark.parametrize("action", ["apply", "reverse"])
@pytest.mark.parametrize("at", [0, 1, len(FILES) // 2, len(FILES) - 1])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_in_the_middle_leaves_the_tree_as_it_was(
    copy: Path, monkeypatch: pytest.MonkeyPatch, action: str, at: int, error: BaseException
) -> None:
    if action == "reverse":
        bring(copy, "apply")
    before = contents(copy)
    inodes = {path: (copy / path).stat().st_ino for path in FILES}
    real, calls = os.replace, []

    def replace(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == at + 1:
            raise error
        real(source, target)

    monkeypatch.setattr(change.os, "replace", replace)
    with pytest.raises(PatchError if isinstance(error, OSError) else KeyboardInterrupt):
        bring(copy, action)
    monkeypatch.undo()
    assert len(calls) > at
    assert contents(copy) == before
    assert {path: (copy / path).stat().st_ino for path in FILES} == inodes


def killed(folder: Path, at: int) -> None:
    """Apply in a process that ends for good when it has renamed `at` files."""
    code = f"""
import os
from pathlib import Path
from sglang_smartgen.patching import change, command
from sglang_smartgen.patching.series import Series
real, calls = os.replace, []
def replace(source, target):
    if len(calls) == {at}:
        os._exit(9)
    calls.append(target)
    real(source, target)
change.os.replace = replace
command.bring(Path({str(folder)!r}), Series(), "apply")
"""
    ended = subprocess.run([sys.executable, "-P", "-c", code], check=False)
    assert ended.returncode == 9


def test_what_a_killed_run_left_is_finished_or_undone(copy: Path, installed: Path) -> None:
    for action, state in (("reverse", "pristine"), ("apply", "patched")):
        killed(copy, 5)
        looked = tree.look(copy, SERIES)
        assert looked.state == "partly patched"
        assert sum(found == "patched" for found in looked.files.values()) == 5
        assert any(file.name.startswith(change.PREFIX) for file in copy.rglob("*"))
        assert bring(copy, action)
        assert tree.look(copy, SERIES).state == state
        assert contents(copy).keys() == contents(installed).keys()


def test_a_file_system_without_hard_links_will_do(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(change.os, "link", link)
    before = contents(copy)
    real, calls = os.replace, []

    def replace(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 3:
            raise OSError(5, "Input/output error", str(target))
        real(source, target)

    monkeypatch.setattr(change.os, "replace", replace)
    assert "Input/output error" in refusal(copy)
    monkeypatch.setattr(change.os, "replace", real)
    bring(copy, "apply")
    bring(copy, "reverse")
    assert contents(copy) == before


def test_a_file_that_cannot_be_written_is_named(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def open_(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT and "scheduler.py" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, flags, mode)

    monkeypatch.setattr(change.os, "open", open_)
    before = contents(copy)
    with pytest.raises(PatchError, match=r"scheduler\.py cannot be written, so nothing was"):
        bring(copy, "apply")
    assert contents(copy) == before


# Links.


def test_a_hard_link_is_not_written_through(copy: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for path in FILES:
        (cache / path).parent.mkdir(parents=True, exist_ok=True)
        os.link(copy / path, cache / path)
    before = contents(cache)
    bring(copy, "apply")
    assert contents(cache) == before
    bring(copy, "reverse")
    assert contents(cache) == before


def test_a_symbolic_link_is_replaced_and_not_followed(copy: Path, tmp_path: Path) -> None:
    cached = tmp_path / "cached.py"
    own = (copy / SCHEDULER).read_bytes()
    shutil.move(copy / SCHEDULER, cached)
    (copy / SCHEDULER).symlink_to(cached)
    bring(copy, "apply")
    assert cached.read_bytes() == own
    assert not (copy / SCHEDULER).is_symlink()
    bring(copy, "reverse")
    assert (copy / SCHEDULER).read_bytes() == own


def test_a_folder_that_is_a_link_is_refused(copy: Path, tmp_path: Path) -> None:
    shutil.move(copy / "srt/managers", tmp_path / "managers")
    (copy / "srt/managers").symlink_to(tmp_path / "managers")
    assert f"{copy / 'srt/managers'} is a link to" in refusal(copy)


# The command.


def call(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    from sglang_smartgen.cli import main

    code = main(["patch", *argv])
    out, error = capsys.readouterr()
    return code, out, error


def test_the_command(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = ("--target", str(copy.parent))  # the folder above is understood too
    code, out, _ = call(capsys, "apply", *target, "--format", "json")
    report = json.loads(out)
    assert (code, report["state"], sorted(report["changed"])) == (0, "patched", FILES)
    assert (report["target"], report["sglang"]) == (str(copy), "0.5.23")
    code, out, _ = call(capsys, "apply", *target)
    assert (code, out.splitlines()[0]) == (0, "nothing to do")
    code, out, _ = call(capsys, "status", *target)
    assert code == 0 and out.count("patched") == len(FILES) + 1
    (copy / SCHEDULER).write_text("# mine\n")
    code, out, _ = call(capsys, "status", *target, "--format", "json")
    report = json.loads(out)
    assert (code, report["state"], report["files"][SCHEDULER]) == (1, "partly patched", "changed")
    code, out, error = call(capsys, "reverse", *target)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("smartgen patch: ") and SCHEDULER in error
    code, out, error = call(capsys, "status", "--target", str(copy / "srt"))
    assert (code, out) == (2, "") and "is no folder of the package sglang" in error


def test_the_script_is_the_command() -> None:
    script = ROOT / "scripts/apply_patches.sh"
    assert os.access(script, os.X_OK)
    assert 'run.sh" smartgen patch apply "$@"' in script.read_text()


def test_diffs_and_manifest_get_into_a_wheel() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["sglang_smartgen.patches"]
    for file in (*PATCHES.glob("*.diff"), PATCHES / "manifest.json", PATCHES / "README.md"):
        assert any(file.match(pattern) for pattern in patterns), file.name


# What a process makes of the tree that it runs on.


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, copy: Path) -> SimpleNamespace:
    """`copy` as the SGLang of this process."""
    monkeypatch.setattr(tree, "find_target", lambda given=None: copy)
    tree.state_here.cache_clear()
    yield SimpleNamespace(copy=copy, ask=lambda: (tree.state_here.cache_clear(), tree.carried())[1])
    tree.state_here.cache_clear()


def test_a_process_knows_what_carries_it(here: SimpleNamespace) -> None:
    assert here.ask() is False
    bring(here.copy, "apply")
    assert here.ask() is True
    bring(here.copy, "reverse")
    (here.copy / SCHEDULER).write_text("# a newer one\n")
    assert here.ask() is False  # hooks are checked against it


def test_a_process_refuses_a_partly_patched_sglang(here: SimpleNamespace) -> None:
    own = (here.copy / SCHEDULER).read_bytes()
    bring(here.copy, "apply")
    patched = (here.copy / SCHEDULER).read_bytes()
    for content in (own, b"# unknown\n"):
        (here.copy / SCHEDULER).write_bytes(content)
        with pytest.raises(PatchError) as caught:
            here.ask()
        assert str(caught.value).startswith(f"refuses to start: {here.copy} is partly patched")
        assert "\n" not in str(caught.value)
    (here.copy / SCHEDULER).write_bytes(patched + b"# other\n")
    for path in FILES:
        if path != SCHEDULER:
            (here.copy / path).write_bytes(b"")
    with pytest.raises(PatchError, match="by another version of SmartGen"):
        here.ask()


def test_the_doctor_sees_it_too(monkeypatch: pytest.MonkeyPatch, copy: Path) -> None:
    from sglang_smartgen.report import doctor_versions

    monkeypatch.setattr(doctor_versions, "find_target", lambda: copy)

    def line() -> tuple[str, str]:
        (found,) = doctor_versions._patches()
        return found.state, found.text

    assert line() == ("ok", "none applied; hooks do what they would")
    bring(copy, "apply")
    assert line() == ("ok", "all 5 applied; no hook is laid")
    (copy / SCHEDULER).write_text("# mine\n")
    assert line()[0] == "error" and "is partly patched" in line()[1]
    for path in FILES:
        (copy / path).write_text("# a newer one\n")
    assert line()[0] == "warning" and "somebody has changed it" in line()[1]


def test_hashes_are_of_bytes() -> None:
    assert sha256(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
