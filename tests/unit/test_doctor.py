"""`smartgen doctor`: every line has its mend, and nothing that is broken ends the doctor."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from sglang_smartgen import cli
from sglang_smartgen.config import SmartGenConfig
from sglang_smartgen.report import (
    doctor,
    doctor_files,
    doctor_loopback,
    doctor_machine,
    doctor_probe,
    doctor_versions,
)
from sglang_smartgen.report.doctor_files import Files
from sglang_smartgen.report.findings import Finding, error, guarded, ok, steps_of, warning
from sglang_smartgen.select.artifact import Manifest, model_hash, write_artifact

MODEL = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "torch_dtype": "bfloat16",
}


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    """Findings by name; each that is not ok must say how to mend it."""
    found = {finding.name: finding for finding in findings}
    for finding in found.values():
        assert (finding.state == "ok") == (finding.mend == ""), finding
        assert "\n" not in finding.text + finding.mend
    return found


# The frame.


def test_a_check_that_raises_is_an_error_line_and_its_earlier_lines_stay() -> None:
    def check() -> Iterable[Finding]:
        yield ok("a", "first", "fine")
        raise ZeroDivisionError("of all things")

    first, second = guarded("a", check)
    assert first.state == "ok"
    assert (second.section, second.state) == ("a", "error")
    assert "ZeroDivisionError: of all things" in second.text and second.mend


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of a module `broken_probe` that a process can run."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "broken_probe.py"


def test_a_process_that_crashes_leaves_its_finished_steps(module: Path) -> None:
    module.write_text(
        "import os, sys\n"
        "print('noise'); print('[1]'); print('{\"step\": 3}')\n"
        'print(\'{"step": "one", "x": 1}\', flush=True)\n'
        "print('the driver is gone\\n', file=sys.stderr, flush=True)\n"
        "os.kill(os.getpid(), 11)\n"
    )
    found = steps_of("broken_probe", ["one", "two"], 60)
    assert found["one"] == {"step": "one", "x": 1}
    how = f"its process was ended by signal {signal.SIGSEGV.value}: the driver is gone"
    assert found["two"] == {"failed": how}


def test_a_process_that_hangs_is_ended_with_what_it_started(module: Path, tmp_path: Path) -> None:
    module.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        'print(\'{"step": "one"}\', flush=True)\n'
        "time.sleep(600)\n"
    )
    began = time.monotonic()
    found = steps_of("broken_probe", ["one", "two"], 3.0)
    assert time.monotonic() - began < 30
    assert found["two"]["failed"].startswith("it did not end within 3 s")
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{child}/stat").read_text().split()[2] == "Z":
            break
        time.sleep(0.02)
    assert time.monotonic() < deadline


def test_the_probe_does_not_become_a_server(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SMARTGEN_CONFIG", "{}")
    module.write_text(
        "import json, os\n"
        "print(json.dumps({'step': 'one', 'set': 'SGLANG_SMARTGEN_CONFIG' in os.environ}))\n"
    )
    assert steps_of("broken_probe", ["one"], 60)["one"]["set"] is False


# The command.


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """What the only check finds."""
    found = [ok("a", "one", "fine"), warning("a", "two", "slow", "[wait]")]
    monkeypatch.setattr(doctor, "checks", lambda args: [("a", lambda: found)])
    return found


@pytest.mark.parametrize("form", ["terminal", "json"])
def test_the_exit_code_says_whether_there_is_an_error(
    form: str, findings: list[Finding], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--format", form]) == 0
    findings.append(error("b", "three", "no [link]", "plug it in"))
    capsys.readouterr()
    assert cli.main(["doctor", "--format", form]) == 1
    out = capsys.readouterr().out
    if form == "json":
        (line,) = out.splitlines()
        report = json.loads(line)
        assert report["ok"] is False
        assert report["findings"][2] == {
            "section": "b",
            "name": "three",
            "state": "error",
            "text": "no [link]",
            "mend": "plug it in",
        }
    else:
        assert "error   b: three: no [link]\n        -> plug it in\n" in out
        assert "ok      a: one: fine\n" in out and "-> [wait]" in out
        assert out.endswith("1 ok, 1 warning, 1 error\n")


def test_quick_leaves_out_what_takes_long(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["doctor", "--quick", "--format", "json"])
    report = json.loads(capsys.readouterr().out)
    assert code == (0 if report["ok"] else 1)
    sections = {finding["section"] for finding in report["findings"]}
    assert sections == {"versions", "machine", "network", "ports", "memory"}


@pytest.mark.parametrize("ports", ["", "x", "0", "65536", "1,,2"])
def test_bad_ports_are_refused(ports: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--ports", ports])
    assert ended.value.code == 2
    assert "allowed are numbers from 1 to 65535" in capsys.readouterr().err


# Versions.


def test_versions_of_this_environment_are_as_pinned() -> None:
    found = by_name(doctor_versions.check())
    assert {"python", "sglang", "torch", "triton", "mooncake"} <= set(found)
    assert [f for f in found.values() if f.state == "error"] == []


def test_wrong_and_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"sglang": "0.5.24", "torch": "2.14.1+cpu", "transformers": "9"}
    monkeypatch.setattr(doctor_versions, "_installed", there.get)
    pins = {"sglang": "0.5.23", "torch": "2.14.1", "transformers": "5.19.0"}
    monkeypatch.setattr(doctor_versions, "_wanted", lambda by, package: pins.get(package))
    found = by_name(doctor_versions.check())
    assert found["sglang"].text == "0.5.24; SmartGen is made for 0.5.23 alone"
    states = {name: finding.state for name, finding in found.items()}
    assert states["sglang"] == states["mooncake"] == "error"
    assert (states["torch"], states["transformers"], states["triton"]) == (
        "ok",
        "warning",
        "warning",
    )


# Machine.


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_rdma_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert by_name(doctor_machine.check_rdma(tmp_path))["rdma"].state == "ok"
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "rdma")
    assert by_name(doctor_machine.check_rdma(tmp_path))["rdma"].state == "error"
    tree(
        tmp_path / "class/infiniband",
        {
            "mlx5_0/ports/1/state": "4: ACTIVE\n",
            "mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
            "mlx5_1/ports/1/state": "1: DOWN\n",
        },
    )
    found = by_name(doctor_machine.check_rdma(tmp_path))
    assert found["rdma mlx5_0"].text == "400 Gb/sec (4X NDR)"
    assert found["rdma mlx5_1"].state == "warning" and "1: DOWN" in found["rdma mlx5_1"].text


def test_cores_by_node(tmp_path: Path) -> None:
    nodes = "devices/system/node"
    tree(tmp_path, {f"{nodes}/node0/cpulist": "0-1\n", f"{nodes}/node1/cpulist": "2-3\n"})
    found = by_name(doctor_machine.check_cores(tmp_path))
    assert "node0: 0-1; node1: 2-3" in found["cores"].text and "numa" in found


def test_interfaces(tmp_path: Path) -> None:
    assert by_name(doctor_machine.check_network(tmp_path))["interfaces"].state == "warning"
    net = tmp_path / "class/net"
    tree(net, {"lo/operstate": "unknown", "eth1/operstate": "down", "eth0/operstate": "up"})
    tree(net, {"eth0/speed": "25000\n", "eth0/mtu": "9000\n"})
    found = by_name(doctor_machine.check_network(tmp_path))
    assert found["interfaces"].text == "eth0 25000 Mbit/s (MTU 9000)"


def test_a_taken_port_and_a_narrow_range(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as end:
        end.bind(("0.0.0.0", 0))
        end.listen()
        port = end.getsockname()[1]
        found = by_name(doctor_machine.check_ports((port,)))
    assert found[f"port {port}"].state == "warning"
    assert found["mooncake"].state == "ok"
    monkeypatch.setenv("MC_MIN_RPC_PORT", "16000")
    monkeypatch.setenv("MC_MAX_RPC_PORT", "16001")
    assert by_name(doctor_machine.check_ports(()))["mooncake"].state == "warning"


def test_refused_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    monkeypatch.setenv("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE", "0")
    found = by_name(doctor_machine.check_limits())
    assert found["SGLANG_USE_HND_KVCACHE"].state == "error"
    assert found["SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"].state == "error"


def test_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for token, state in (("", "ok"), ("short", "error"), ("long enough to be one", "ok")):
        monkeypatch.setenv("SMARTGEN_TOKEN", token)
        finding = by_name(doctor_machine.check_token())["SMARTGEN_TOKEN"]
        assert finding.state == state and (not token or token not in finding.text)


# Files.


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tree(folder, {"config.json": json.dumps(MODEL), "a.safetensors": "weights"})
    return folder


def artifact(path: Path, model: Path, selector: str = "hata") -> Path:
    manifest = Manifest(
        selector=selector,
        model_hash=model_hash(model),
        layers=4,
        q_heads=4,
        kv_heads=2,
        head_dim=16,
        parameters={},
        text_hash="0",
        created="2026-01-01",
    )
    write_artifact(path, manifest, {"w.2": torch.zeros(2, 3), "w.3": torch.zeros(2, 3)})
    return path


def test_an_artifact_of_this_model(model: Path, tmp_path: Path) -> None:
    path = artifact(tmp_path / "a.st", model)
    found = by_name(doctor_files.check(Files(artifact=str(path), model=str(model))))
    assert found["artifact"].text == "hata of 2026-01-01: whole, and made for this model"
    assert found["model"].text == "4 layers, 2 KV heads of 16, 512 bytes of KV a token"
    assert "not compared" in by_name(doctor_files.check(Files(artifact=str(path))))["artifact"].text
    # Named in the configuration it counts too.
    config = json.dumps({"artifact": str(path)})
    assert by_name(doctor_files.check(Files(config=config)))["artifact"].state == "ok"
    (model / "a.safetensors").write_text("others!")
    found = by_name(doctor_files.check(Files(artifact=str(path), model=str(model))))
    assert found["artifact"].state == "error" and "hash" in found["artifact"].text


def test_an_artifact_of_another_selector_or_damaged(model: Path, tmp_path: Path) -> None:
    path = artifact(tmp_path / "a.st", model, "infinigen")
    found = by_name(doctor_files.check(Files(artifact=str(path))))
    assert "made for selector infinigen; here it is hata" in found["artifact"].text
    path.write_bytes(path.read_bytes()[:-1] + b"\7")
    for bad in (path, tmp_path / "absent", model):
        found = by_name(doctor_files.check(Files(artifact=str(bad), profile=str(bad))))
        assert found["artifact"].state == found["profile"].state == "error"


@pytest.mark.parametrize(
    ("files", "name", "part"),
    [
        (Files(config='{"ratio": 7}'), "config", "ratio is 7"),
        (Files(config="/absent.json"), "config", "/absent.json"),
        (Files(config='{"selector": "infinigen"}'), "artifact", "infinigen needs one"),
        (Files(config='{"order": "profile"}'), "profile", "order is profile"),
        (Files(config='{"store_gb": 1e6}'), "store", "store_gb is 1e+06"),
        (Files(model="/absent"), "model", "/absent: No such file"),
    ],
)
def test_what_cannot_work_is_an_error(files: Files, name: str, part: str) -> None:
    finding = by_name(doctor_files.check(files))[name]
    assert finding.state == "error" and part in finding.text


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"num_attention_heads": 0}', '{"a": '])
def test_a_broken_model_folder(text: str, model: Path) -> None:
    (model / "config.json").write_text(text)
    for finding in guarded("files", lambda: doctor_files.check(Files(model=str(model)))):
        if finding.name == "model":
            assert finding.state == "error"


def test_memory_is_the_containers_where_that_is_less(tmp_path: Path) -> None:
    meminfo = tree(tmp_path, {"meminfo": "MemTotal: 9 kB\nMemAvailable: 8388608 kB\n"}) / "meminfo"
    assert doctor_files.memory_left(meminfo, tmp_path) == 8 << 30
    tree(tmp_path, {"memory.max": f"{5 << 30}\n", "memory.current": f"{2 << 30}\n"})
    assert doctor_files.memory_left(meminfo, tmp_path) == 3 << 30
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor_files.memory_left(meminfo, tmp_path) == 8 << 30
    assert doctor_files.memory_left(tmp_path / "x", tmp_path) is None
    for gb, state in ((1.0, "ok"), (5.0, "warning"), (9.0, "error")):
        config = SmartGenConfig(store_gb=gb)
        found = by_name(doctor_files.check_memory(config, None, meminfo, tmp_path))
        assert found["store"].state == state


# Processes of their own.


def test_the_transport_writes_to_itself() -> None:
    found = by_name(doctor_loopback.check())
    assert found["mooncake"].state == "ok", found
    assert "the bytes are right" in found["loopback"].text, found


def test_a_transport_that_does_not_start_or_write(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {"failed": "its process was ended by signal 11"}
    steps = {"start": gone, "write": gone}
    monkeypatch.setattr(doctor_loopback, "steps_of", lambda *_: steps)
    assert [f.state for f in doctor_loopback.check()] == ["error"]
    steps["start"] = {"seconds": 1.0}
    assert [f.state for f in doctor_loopback.check()] == ["ok", "error"]
    steps["write"] = {"gbit": 0.1, "small_ms": 3.0}
    assert [f.state for f in doctor_loopback.check()] == ["ok", "warning"]


def test_what_the_probe_found(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {name: {"failed": "gone"} for name in doctor_probe.STEPS}
    monkeypatch.setattr(doctor_probe, "steps_of", lambda *_: steps)
    assert {f.name: f.state for f in doctor_probe.check()} == {
        "torch": "error",
        "triton": "warning",
        "sglang": "error",
    }
    steps["torch"] = {"gpus": [{"name": "H200", "memory_gb": 150.0}], "cuda": "13.0"}
    assert {f.name: f.state for f in doctor_probe.check()}["triton"] == "error"
    steps["triton"] = {"version": "3.8.0"}
    steps["sglang"] = {"seconds": 20.0}
    steps["hooks"] = {"problems": ["a.b takes c"], "count": 2, "plugin": False}
    found = {f.name: f for f in doctor_probe.check()}
    assert found["H200"].text == "150.0 GB, CUDA 13.0"
    assert (found["table"].text, found["table"].state) == ("a.b takes c", "error")
    assert found["plugin"].state == "error" and found["triton"].state == "ok"
    steps["hooks"] = {"problems": [], "count": 2, "plugin": True}
    by_name(doctor_probe.check())


def test_a_step_that_raises_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    doctor_probe._tell(sys.stdout, "torch", lambda: os.stat("/absent"))
    step = json.loads(capsys.readouterr().out)
    assert step["step"] == "torch" and step["failed"].startswith("FileNotFoundError")
