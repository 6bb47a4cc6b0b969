"""The help for hosts without a GPU; nothing here starts SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from sglang_smartgen.engine import cpu_host
from sglang_smartgen.engine.cpu_host import (
    arguments,
    cpu_engine,
    host_register,
    host_tier,
    kept_memory,
    kernel_stand_in,
    sender_indices,
)

SERVE = ["--model-path", "m"]
FLAGS = ["--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule"]
NAMES = {
    "cpu engine",
    "sgl_kernel stand-in",
    "no FlashInfer",
    "kept memory",
    "host memory registration",
    "sender indices",
    "retraction backup",
    "device flags",
    "hierarchical cache",
}


@pytest.fixture(autouse=True)
def restored_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what the launcher's preparation changes in this process."""
    for key in (*cpu_engine.SETTINGS, kept_memory.VARIABLE, "PYTHONPATH", cpu_host.STATUS_ENV):
        monkeypatch.setenv(key, "")  # so that the old state is restored, whichever it was
        monkeypatch.delenv(key)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(cpu_host, "_local", {})
    monkeypatch.delitem(sys.modules, "sgl_kernel", raising=False)
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))  # nothing to hide
    yield


def host(monkeypatch: pytest.MonkeyPatch, *, cpu_only: bool) -> None:
    monkeypatch.setattr(cpu_host, "is_cpu_only", lambda: cpu_only)


def test_gpu_host_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, cpu_only=False)
    before = dict(os.environ)
    assert cpu_host.prepare_environment(SERVE) == SERVE
    assert dict(os.environ) == before
    assert cpu_host.hooks() == []
    assert cpu_host.statuses() == dict.fromkeys(NAMES, "not needed")


def test_other_devices_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, cpu_only=True)
    argv = [*SERVE, "--device=xpu"]
    assert cpu_host.prepare_environment(argv) == argv
    assert "SGLANG_USE_CPU_ENGINE" not in os.environ


def test_missing_flags_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, cpu_only=True)
    assert cpu_host.prepare_environment(SERVE) == [*SERVE, *FLAGS]
    assert os.environ["SGLANG_USE_CPU_ENGINE"] == "1"
    assert os.environ["MC_FORCE_TCP"] == "1"
    assert os.environ["MOONCAKE_PROTOCOL"] == "tcp"
    assert not Path(os.environ["SGLANG_NCCL_SO_PATH"]).exists()


@pytest.mark.parametrize(
    ("given", "added"),
    [
        (FLAGS, []),
        (["--attention-backend=smartgen"], ["--device", "cpu", "--disable-overlap-schedule"]),
        (["--decode-attention-backend", "x", *FLAGS[:2]], ["--disable-overlap-schedule"]),
    ],
)
def test_given_flags_stay(
    monkeypatch: pytest.MonkeyPatch, given: list[str], added: list[str]
) -> None:
    host(monkeypatch, cpu_only=True)
    assert cpu_host.prepare_environment(given) == [*given, *added]


def test_flags_of_a_config_file_count_as_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host(monkeypatch, cpu_only=True)
    file = tmp_path / "server.yaml"
    file.write_text("disaggregation-mode: decode\nattention-backend: smartgen\n")
    argv = ["--config", str(file)]
    result = cpu_host.prepare_environment(argv)
    assert "--attention-backend" not in result
    assert result[2:4] == ["--disaggregation-decode-retraction-backup", "none"]


def test_retraction_backup_is_for_decode_only(monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, cpu_only=True)
    flag = "--disaggregation-decode-retraction-backup"
    assert flag not in cpu_host.prepare_environment(["--disaggregation-mode", "prefill"])
    assert cpu_host.statuses()["retraction backup"] == "not needed"
    assert flag in cpu_host.prepare_environment(["--disaggregation-mode=decode"])
    assert cpu_host.statuses()["retraction backup"] == "applied"
    kept = ["--disaggregation-mode", "decode", flag, "cpu_tensor", *FLAGS]
    assert cpu_host.prepare_environment(kept) == kept
    assert cpu_host.statuses()["retraction backup"] == f"skipped: {flag} cpu_tensor was given"


def test_settings_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, cpu_only=True)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "0")
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "rdma")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setattr(kernel_stand_in, "installed_for_cpu", lambda: False)
    cpu_host.prepare_environment(SERVE)
    assert os.environ["MOONCAKE_PROTOCOL"] == "rdma"
    assert os.environ["PYTHONPATH"] == f"{kernel_stand_in.FOLDER}{os.pathsep}/elsewhere"
    assert cpu_host.statuses()["cpu engine"] == "skipped: SGLANG_USE_CPU_ENGINE=0 is set"


def test_cpu_build_of_sgl_kernel_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    host(monkeypatch, cpu_only=True)
    package = tmp_path / "sgl_kernel"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    cpu_host.prepare_environment(SERVE)
    assert cpu_host.statuses()["sgl_kernel stand-in"] == "not needed"
    assert "PYTHONPATH" not in os.environ
    (package / "sm90").mkdir()  # now it looks like a CUDA build
    cpu_host.prepare_environment(SERVE)
    assert cpu_host.statuses()["sgl_kernel stand-in"] == "applied"


def test_preparing_twice_changes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, cpu_only=True)
    monkeypatch.setattr(kernel_stand_in, "installed_for_cpu", lambda: False)
    argv = cpu_host.prepare_environment(SERVE)
    path = os.environ["PYTHONPATH"]
    assert cpu_host.prepare_environment(argv) == argv
    assert os.environ["PYTHONPATH"] == path
    assert cpu_host.statuses()["sgl_kernel stand-in"] == "applied"


def test_spawned_process_finds_the_stand_in_and_the_statuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host(monkeypatch, cpu_only=True)
    monkeypatch.setattr(kernel_stand_in, "installed_for_cpu", lambda: False)
    cpu_host.prepare_environment(SERVE)
    code = (
        "import json, os, sgl_kernel; from sglang_smartgen.engine import cpu_host as h;"
        "h.is_cpu_only = lambda: True;"
        "print(json.dumps([sgl_kernel.__file__, h.statuses(), len(h.hooks())]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    file, statuses, hooks = json.loads(done.stdout)
    assert Path(file).is_relative_to(kernel_stand_in.FOLDER)
    assert set(statuses) == NAMES
    assert statuses["device flags"] == "applied"
    assert hooks == 2


def test_flashinfer_is_hidden_from_spawned_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, cpu_only=True)
    cpu_host.prepare_environment(SERVE)
    assert cpu_host.statuses()["no FlashInfer"] == "skipped: flashinfer was imported before"
    monkeypatch.delitem(sys.modules, "flashinfer")
    cpu_host.prepare_environment(SERVE)
    assert cpu_host.statuses()["no FlashInfer"] == "applied"
    code = "import flashinfer"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: FlashInfer is for NVIDIA GPUs" in done.stderr


def test_every_stand_in_raises_when_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(kernel_stand_in.FOLDER)
    import sgl_kernel

    assert Path(sgl_kernel.__file__).is_relative_to(kernel_stand_in.FOLDER)
    assert len(sgl_kernel.IMPORTED_BY) == 9
    for name in sgl_kernel.IMPORTED_BY:
        with pytest.raises(sgl_kernel.KernelUnavailableError, match=f"{name} was called"):
            getattr(sgl_kernel, name)(1, other=2)
    assert not hasattr(sgl_kernel, "rmsnorm")


def test_memory_settings_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, cpu_only=True)
    monkeypatch.setenv(kept_memory.VARIABLE, "glibc.malloc.check=1")
    cpu_host.prepare_environment(SERVE)
    assert os.environ[kept_memory.VARIABLE] == "glibc.malloc.check=1"
    assert cpu_host.statuses()["kept memory"].startswith("skipped: GLIBC_TUNABLES=")


def test_a_spawned_process_keeps_the_memory_of_large_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host(monkeypatch, cpu_only=True)
    touch = (
        "import ctypes, resource\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.malloc.restype = ctypes.c_void_p\n"
        "size = 32 << 20\n"
        "for _ in range(8):\n"
        "    block = ctypes.c_void_p(libc.malloc(size))\n"
        "    ctypes.memset(block, 1, size)\n"
        "    libc.free(block)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)"
    )

    def faults() -> int:
        done = subprocess.run(
            [sys.executable, "-c", touch], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    before = faults()
    cpu_host.prepare_environment(SERVE)
    assert cpu_host.statuses()["kept memory"] == "applied"
    assert faults() < before / 2


def test_statuses_without_our_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, cpu_only=True)
    assert cpu_host.hooks() == []
    for status in cpu_host.statuses().values():
        assert status.startswith("skipped: this process was not started through")


def test_copies_between_the_tiers_are_for_a_hierarchical_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host(monkeypatch, cpu_only=True)
    cpu_host.prepare_environment(SERVE)
    assert cpu_host.statuses()["hierarchical cache"] == "not needed"
    assert not set(host_tier.HOOKS) & set(cpu_host.hooks())
    cpu_host.prepare_environment([*SERVE, "--enable-hierarchical-cache"])
    assert cpu_host.statuses()["hierarchical cache"] == "applied"
    assert set(host_tier.HOOKS) < set(cpu_host.hooks())
    monkeypatch.setattr(cpu_host, "state_here", lambda: "patched")
    assert cpu_host.hooks() == [*host_tier.HOOKS]


def test_hooks_do_what_they_say() -> None:
    assert host_register.leave_pageable(object()) is None

    class Sender:
        supports_host_tensor_indices = True

    sender = Sender()
    assert sender_indices.refuse_host_tensor_indices(sender, 1, key=2) is None
    assert sender.supports_host_tensor_indices is False


def test_values_of_flags() -> None:
    argv = ["--a", "1", "--b=2", "--a=3", "--c"]
    assert arguments.value(argv, "--a") == "3"
    assert arguments.value(argv, "--b") == "2"
    assert arguments.value(argv, "--c") is None
    assert arguments.given(argv, "--c") and not arguments.given(argv, "--d")
