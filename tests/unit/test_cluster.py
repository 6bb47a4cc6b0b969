"""Clusters of cheap stand-ins: how they fail, and that nothing is ever left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglang_smartgen.report import cluster as cluster_module
from sglang_smartgen.report.cluster import Cluster, ClusterError, free_ports
from sglang_smartgen.report.processes import ServerProcess, session_members, stop

HEALTHY = """
import http.server, subprocess, sys
{before}
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
print("serving", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
"""
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"


class StandIns(Cluster):
    """A cluster whose servers are small HTTP servers with a child each; `scripts` replaces some."""

    def __init__(self, log_dir: Path, scripts: dict[str, str] | None = None, **named: object):
        super().__init__("no-model", config=None, log_dir=log_dir, **named)  # type: ignore[arg-type]
        self.scripts = scripts or {}
        self.sessions: list[int] = []

    def command(self, role: str) -> list[str]:
        script = self.scripts.get(role) or HEALTHY.format(port=self._ports[role], before="")
        return [sys.executable, "-c", script]

    def check(self) -> None:
        self.sessions = list({*self.sessions, *self.pids.values()})
        super().check()

    def left_behind(self) -> list[int]:
        assert self.sessions
        return [pid for session in self.sessions for pid in session_members(session)]


def wait_for_end(*sessions: int) -> list[int]:
    """What is left of the sessions after at most 20 s."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if not (left := [pid for session in sessions for pid in session_members(session)]):
            return []
        time.sleep(0.1)
    return left


def test_start_and_stop(tmp_path: Path) -> None:
    seen: list[dict[str, bool]] = []
    cluster = StandIns(tmp_path)
    cluster.start(lambda seconds, ready: seen.append(ready))
    assert set(cluster.pids) == {"prefill", "decode", "router"}
    assert all(len(session_members(pid)) == 2 for pid in cluster.pids.values())
    assert all(seen[-1].values()) and not all(seen[0].values())
    cluster.stop()
    assert cluster.left_behind() == []
    cluster.stop()


def test_a_server_that_dies_at_start_gives_one_sentence_and_its_log(tmp_path: Path) -> None:
    script = "import sys; print('no such model'); sys.exit(3)"
    cluster = StandIns(tmp_path, {"decode": script})
    with pytest.raises(ClusterError) as failure:
        cluster.start()
    sentence, *tail = str(failure.value).splitlines()
    assert sentence.startswith("the decode server ended with exit code 3 after")
    assert str(tmp_path / "decode.log") in sentence
    assert tail == ["  no such model"]
    assert cluster.left_behind() == []


def test_a_server_that_never_answers(tmp_path: Path) -> None:
    script = "import time; print('loading', flush=True); time.sleep(600)"
    cluster = StandIns(tmp_path, {"prefill": script}, start_timeout_s=6)
    with pytest.raises(ClusterError, match="the prefill server does not answer 6 s") as failure:
        cluster.start()
    assert "loading" in str(failure.value)
    assert cluster.left_behind() == []


def test_an_interrupt_during_the_start(tmp_path: Path) -> None:
    cluster = StandIns(tmp_path, {"prefill": "import time; time.sleep(600)"})

    def interrupt(seconds: float, ready: dict[str, bool]) -> None:
        cluster.check()
        if seconds > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cluster.start(interrupt)
    assert cluster.left_behind() == []


def test_an_exception_inside_the_context(tmp_path: Path) -> None:
    cluster = StandIns(tmp_path)
    with pytest.raises(ZeroDivisionError), cluster:
        raise ZeroDivisionError
    assert cluster.left_behind() == []


def test_a_server_deaf_to_sigterm_is_killed(tmp_path: Path) -> None:
    script = f"{DEAF}; import time; print('up', flush=True); time.sleep(600)"
    process = start([sys.executable, "-c", script], tmp_path)
    wait_for_log(process, "up")
    started = time.monotonic()
    stop([process], grace_s=1)
    assert time.monotonic() - started >= 1
    assert session_members(process.pid) == []


def test_orphans_of_a_dead_server_are_ended(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys;"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    )
    process = start([sys.executable, "-c", script], tmp_path)
    while process.exit_code is None:
        time.sleep(0.05)
    assert len(session_members(process.pid)) == 1
    stop([process])
    assert session_members(process.pid) == []


def test_prefill_can_be_killed_and_comes_back_at_its_ports(tmp_path: Path) -> None:
    with StandIns(tmp_path) as cluster:
        urls, before = cluster.urls, cluster.pids
        cluster.kill_prefill()
        assert session_members(before["prefill"]) == []
        cluster.restart_prefill()
        assert cluster.urls == urls
        after = cluster.pids
        assert after["decode"] == before["decode"] and after["prefill"] != before["prefill"]
    assert cluster.left_behind() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_parent_leaves_no_server(tmp_path: Path, number: signal.Signals) -> None:
    """The parent has no handler for either signal; the server, deaf to SIGTERM, has a child."""
    server = (
        f"{DEAF}; import subprocess, sys, time;"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); time.sleep(600)"
    )
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "from sglang_smartgen.report.processes import ServerProcess, session_members\n"
        f"command, log = [sys.executable, '-c', {server!r}], Path({str(tmp_path)!r}) / 'log'\n"
        "process = ServerProcess('probe', command, env=os.environ, log=log)\n"
        "while len(session_members(process.pid)) < 2: time.sleep(0.05)\n"
        "print(process.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    session = int(parent.stdout.readline())
    assert len(session_members(session)) == 2
    parent.send_signal(number)
    parent.wait()
    assert wait_for_end(session) == []


def test_commands_of_a_real_cluster(tmp_path: Path) -> None:
    cluster = Cluster(
        "model",
        config={"ratio": 0.5},
        decode_config={"ratio": 1.0},
        decode_args=["--random-seed", "1"],
        log_dir=tmp_path,
    )
    names = ("prefill", "decode", "router", "prefill bootstrap", "prefill nccl", "decode nccl")
    cluster._ports = {name: 20000 + number for number, name in enumerate(names)}
    prefill, decode = cluster.command("prefill"), cluster.command("decode")
    assert prefill[-2:] == ["--smartgen-config", '{"ratio": 0.5}']
    assert decode[-4:] == ["--smartgen-config", '{"ratio": 1.0}', "--random-seed", "1"]
    assert prefill[prefill.index("--disaggregation-bootstrap-port") + 1] == "20003"
    assert "--disaggregation-bootstrap-port" not in decode
    stock = Cluster("model", config=None, log_dir=tmp_path)
    stock._ports = cluster._ports
    assert not [word for word in stock.command("prefill") if "--smartgen" in word]


def test_commands_of_several_servers(tmp_path: Path) -> None:
    cluster = Cluster("model", config=None, log_dir=tmp_path, prefills=2, decodes=2)
    servers = ("prefill", "prefill-2", "decode", "decode-2")
    names = (*servers, "router", "prefill bootstrap", "prefill-2 bootstrap")
    names += tuple(f"{name} nccl" for name in servers)
    cluster._ports = {name: 20000 + number for number, name in enumerate(names)}
    router = cluster.command("router")
    second = router.index("--prefill", router.index("--prefill") + 1)
    assert router[second + 1 : second + 3] == ["http://127.0.0.1:20001", "20006"]
    assert [router[i + 1][-5:] for i, word in enumerate(router) if word == "--decode"] == [
        "20002",
        "20003",
    ]
    decode = cluster.command("decode-2")
    assert decode[decode.index("--disaggregation-mode") + 1] == "decode"
    assert len({cluster.environment(name)["SGLANG_HOST_IP"] for name in names[:5]}) == 1


def test_environment_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SMARTGEN_CONFIG", "{}")
    monkeypatch.setattr(cluster_module.os, "cpu_count", lambda: 2)
    cluster = Cluster("model", config=None, log_dir=tmp_path, env={"EXTRA": "1"})
    prefill, decode = cluster.environment("prefill"), cluster.environment("decode")
    assert "SGLANG_SMARTGEN_CONFIG" not in prefill
    assert prefill["SGLANG_CPU_OMP_THREADS_BIND"] == "0"
    assert decode["SGLANG_CPU_OMP_THREADS_BIND"] == "1"
    assert prefill["EXTRA"] == "1" and prefill["PYTHONSAFEPATH"] == "1"


def test_each_rank_has_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module.os, "cpu_count", lambda: 3)
    cluster = Cluster("model", config=None, log_dir=tmp_path, tp_size=2, decode_args=["--x"])
    cluster._ports = dict.fromkeys(("prefill", "decode", "router"), 20000)
    cluster._ports |= {"prefill bootstrap": 20001, "prefill nccl": 20002, "decode nccl": 20003}
    bound = [cluster.environment(name)["SGLANG_CPU_OMP_THREADS_BIND"] for name in cluster._names]
    assert bound == ["0|1", "2|0", "1|2"]
    assert cluster.command("prefill")[-2:] == ["--tp-size", "2"]
    assert cluster.command("decode")[-3:] == ["--tp-size", "2", "--x"]


def test_free_ports_are_different() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20 and all(20000 <= port < 32000 for port in ports)


def start(command: list[str], folder: Path) -> ServerProcess:
    return ServerProcess("probe", command, env=os.environ, log=folder / "log")


def wait_for_log(process: ServerProcess, line: str) -> None:
    while line not in process.log_tail():
        assert process.exit_code is None, process.log_tail()
        time.sleep(0.05)
