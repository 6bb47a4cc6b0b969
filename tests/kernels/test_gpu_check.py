"""The GPU script runs with this repository's files, torch and triton, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
# Everything of ours and SGLang that the script must do without.
ALONE = """
import runpy, sys
for name in ("sglang", "msgspec", "zmq", "rich", "transformers", "sglang_smartgen.core"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the script in a folder that has only what it needs."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("triton_kernels", "tests/reference", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TRITON"))}
    script = str(folder / "scripts" / "gpu_check.py")
    return subprocess.run(
        [sys.executable, "-P", "-c", ALONE, script, "--out", str(folder / "out"), *args],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_dry_run_checks_every_operator_and_shows_no_time(tmp_path: Path) -> None:
    done = run(tmp_path, "--dry-run-cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert found["dry_run"] and found["card"] == "none (dry run)"
    assert len(found["correct"]) == 9 and not any(row["wrong"] for row in found["correct"])
    assert len(found["operators"]) == 6
    assert {row["share"] for row in found["attention"]} == {0.05, 0.1, 0.2}
    assert all(row["error"] < 1e-2 for row in found["attention"])
    assert (tmp_path / "out" / "gpu_check.png").stat().st_size > 1000
    assert done.stdout.rstrip().endswith("everything right")
    assert " us" not in done.stdout, "a dry run has no times to show"


def test_a_wrong_kernel_is_reported(tmp_path: Path) -> None:
    """Only the report: a result off by more than allowed makes the exit code 1."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import gpu_report
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    row = {"operator": "mask_gather", "cases": 1, "wrong": ["case 1: differs"], "graph": "ok"}
    far = {"tokens": 8, "batch": 1, "error": float("nan")}
    wrong = gpu_report.wrong_results({"correct": [row], "attention": [far]})
    assert len(wrong) == 2 and "case 1: differs" in wrong[0] and "error nan" in wrong[1]
    graph = gpu_report.wrong_results(
        {"correct": [row | {"wrong": [], "graph": "E: no"}], "attention": []}
    )
    assert graph == ["mask_gather in a CUDA graph: E: no"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("no CUDA device; --dry-run-cpu")
    assert not (tmp_path / "out").exists()
