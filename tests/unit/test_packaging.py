"""What is importable under which name, in this checkout and in what gets installed from it."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITHOUT_SGLANG = ("sglang_smartgen/core", "sglang_smartgen/select", "sglang_smartgen/transfer")


def run_python(code: str, folder: Path) -> str:
    """Standard output of `code` in a new interpreter that starts in `folder` like run.sh's does."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_triton_kernels_is_not_importable_from_the_top(tmp_path: Path) -> None:
    code = "import importlib.util as u; s = u.find_spec('triton_kernels'); print(s and s.origin)"
    for folder in (ROOT, tmp_path):
        origin = run_python(code, folder)
        assert origin == "None" or not Path(origin).is_relative_to(ROOT)


def test_triton_kernels_is_not_importable_from_the_top_in_tests() -> None:
    spec = importlib.util.find_spec("triton_kernels")
    assert spec is None or not Path(spec.origin or ROOT).is_relative_to(ROOT)


@pytest.mark.parametrize("folder", ["triton_kernels", "patches"])
def test_mapped_folders_have_our_import_name(folder: str) -> None:
    spec = importlib.util.find_spec(f"sglang_smartgen.{folder}")
    assert spec is not None and spec.origin is not None
    assert Path(spec.origin) == ROOT / folder / "__init__.py"


def test_every_code_folder_is_a_package() -> None:
    """A folder without __init__.py would be missing from a wheel."""
    stand_in = ROOT / "sglang_smartgen/engine/cpu_host/stand_in"
    folders = {
        file.parent
        for top in ("sglang_smartgen", "triton_kernels", "patches")
        for file in (ROOT / top).rglob("*.py")
    } - {stand_in}
    assert folders
    assert sorted(str(f) for f in folders if not (f / "__init__.py").is_file()) == []


def test_console_script_and_plugin_resolve() -> None:
    (script,) = entry_points(group="console_scripts", name="smartgen")
    (plugin,) = entry_points(group="sglang.srt.plugins", name="smartgen")
    assert callable(script.load())
    assert callable(plugin.load())


def imported_modules(file: Path) -> set[str]:
    """Absolute names of all modules that `file` imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


@pytest.mark.parametrize("folder", [*WITHOUT_SGLANG, "triton_kernels"])
def test_lower_folders_import_no_sglang(folder: str) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    for file in files:
        for module in imported_modules(file):
            assert module.split(".")[0] not in ("sglang", "sgl_kernel"), f"{file}: {module}"
            assert not module.startswith("sglang_smartgen.engine"), f"{file}: {module}"


def test_nobody_imports_triton_kernels_from_the_top() -> None:
    for top in ("sglang_smartgen", "triton_kernels", "tests"):
        for file in (ROOT / top).rglob("*.py"):
            tops = {module.split(".")[0] for module in imported_modules(file)}
            assert "triton_kernels" not in tops, file


def test_requirements_are_plain_pins() -> None:
    for file in (ROOT / "requirements").glob("*.txt"):
        lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        assert lines
        for line in lines:
            name, _, version = line.partition("==")
            assert name.replace("-", "").replace("_", "").replace(".", "").isalnum(), line
            assert version and not set(version) & set(" @/;,"), line
