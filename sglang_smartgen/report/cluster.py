"""Prefill servers, decode servers and a router on this machine, as a context manager.

    with Cluster(model, config={"ratio": 0.2}, log_dir=Path("logs")) as cluster:
        Client(cluster.url).generate("Once upon a time", max_new_tokens=16)

Servers are named `prefill`, `prefill-2` and so on, and `decode`, `decode-2`. The caller's thread
owns the processes; while they start, a thread for each asks whether it is up. Whatever ends the
caller, the processes end too (see `processes`).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sglang_smartgen.config import CONFIG_ENV
from sglang_smartgen.report.processes import ServerProcess, session_members, stop

PORTS = range(20480, 32000)  # below the ports that the kernel gives to outgoing connections
POLL_S = 0.5
HEALTH_S = 30.0  # a /health answer of SGLang takes 1 to 20 s: it generates a token

Progress = Callable[[float, dict[str, bool]], None]
"""Called about twice a second while servers start: seconds since the start, and who is ready."""


class ClusterError(RuntimeError):
    """The servers did not start or ended; one sentence, then the last lines of a log."""


class Cluster:
    """Running prefill and decode servers behind SGLang's mini router, all on `host`.

    prefills, decodes: how many of each. tp_size: ranks of every server. decode_host: another
    address of this machine, for the decode servers alone. config: SmartGen's configuration of both
    sides, None = stock SGLang; `decode_config` replaces it on the decode side where it is given.
    prefill_args, decode_args: flags for SGLang behind ours. router_args: flags for its router, by
    default those of the mini router, which goes on asking a server that has ended.
    Enter (or `start`) raises ClusterError when a process ends or `start_timeout_s` passes.
    """

    def __init__(
        self,
        model: Path | str,
        *,
        config: dict[str, Any] | None,
        log_dir: Path,
        prefill_args: Sequence[str] = (),
        decode_args: Sequence[str] = (),
        decode_config: dict[str, Any] | None = None,
        host: str = "127.0.0.1",
        decode_host: str | None = None,
        max_total_tokens: int = 20000,
        start_timeout_s: float = 600.0,
        env: Mapping[str, str] | None = None,
        prefills: int = 1,
        decodes: int = 1,
        router_args: Sequence[str] = ("--mini-lb",),
        tp_size: int = 1,
    ) -> None:
        self.model = str(model)
        self.host = host
        self.prefills = _names("prefill", prefills)
        self.decodes = _names("decode", decodes)
        self._names = (*self.prefills, *self.decodes, "router")
        self._hosts = dict.fromkeys(self._names, host)
        self._hosts.update(dict.fromkeys(self.decodes, decode_host or host))
        self.log_dir = Path(log_dir).resolve()
        self._configs = {
            "prefill": config,
            "decode": config if decode_config is None else decode_config,
        }
        self._tp_size = tp_size
        ranks = [] if tp_size == 1 else ["--tp-size", str(tp_size)]
        self._extra_args = {"prefill": ranks + list(prefill_args)}
        self._extra_args["decode"] = ranks + list(decode_args)
        self._max_total_tokens = max_total_tokens
        self._start_timeout_s = start_timeout_s
        self._router_args = list(router_args)
        self._env = dict(env or {})
        self._ports: dict[str, int] = {}
        self._processes: dict[str, ServerProcess] = {}

    # Life -----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, progress: Progress | None = None) -> None:
        """Start all of them and wait until they answer; on any failure nothing is left running."""
        self.log_dir.mkdir(parents=True, exist_ok=True)
        servers = (*self.prefills, *self.decodes)
        more = [f"{name} bootstrap" for name in self.prefills] + [f"{n} nccl" for n in servers]
        names = (*self._names, *more)
        self._ports = dict(zip(names, free_ports(len(names)), strict=True))
        self._launch(self._names, progress)

    def stop(self, grace_s: float = 8.0) -> None:
        """End all processes of the cluster; harmless when it has ended already."""
        try:
            self.resume()  # a stopped process would not hear SIGTERM
            stop(self._processes.values(), grace_s=grace_s)
        finally:
            self._processes.clear()

    def pause(self) -> None:
        """Stop every process (SIGSTOP): SGLang's idle loops take a core each."""
        self.signal(signal.SIGSTOP, *self._processes)

    def resume(self) -> None:
        """Let paused processes go on; harmless for running ones."""
        self.signal(signal.SIGCONT, *self._processes)

    def signal(self, number: signal.Signals, *roles: str) -> None:
        """Send a signal to all processes of these servers."""
        for role in roles:
            for pid in session_members(self._processes[role].pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def kill_prefill(self, name: str = "prefill") -> None:
        """SIGKILL a prefill server with all its processes, as a crash of the machine would."""
        stop([self._processes.pop(name)], grace_s=0)

    def restart_prefill(self, progress: Progress | None = None, name: str = "prefill") -> None:
        """Start a prefill server again at the same ports (after killing it, if it still runs)."""
        if name in self._processes:
            self.kill_prefill(name)
        self._ports[f"{name} nccl"] = free_ports(1)[0]
        self._launch([name], progress)

    def _launch(self, roles: Sequence[str], progress: Progress | None) -> None:
        try:
            for role in roles:
                self._processes[role] = ServerProcess(
                    role,
                    self.command(role),
                    env=self.environment(role),
                    log=self.log_dir / f"{role}.log",
                )
            self._wait_until_ready(roles, progress or (lambda seconds, ready: None))
        except BaseException:
            self.stop()
            raise

    def _wait_until_ready(self, roles: Sequence[str], progress: Progress) -> None:
        started = time.monotonic()
        ended = threading.Event()
        with ThreadPoolExecutor(len(roles)) as pool:
            try:
                answers = {
                    role: pool.submit(_poll_health, self.urls[role], ended) for role in roles
                }
                while True:
                    seconds = time.monotonic() - started
                    ready = {role: answers[role].done() for role in roles}
                    progress(seconds, ready)
                    self.check()
                    if all(ready.values()):
                        return
                    if seconds > self._start_timeout_s:
                        raise self._late(ready, seconds)
                    time.sleep(POLL_S)
            except BaseException:
                # Their connections break with the servers, so that the threads end at once.
                ended.set()
                stop(self._processes.values(), grace_s=0)
                raise

    # Failures -------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ClusterError when a process of the cluster has ended by itself."""
        for role, process in self._processes.items():
            if (code := process.exit_code) is not None:
                how = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
                after = time.monotonic() - process.started
                raise ClusterError(
                    _with_log(f"the {role} server ended {how} after {after:.0f} s", process)
                )

    def log_tails(self, lines: int = 12) -> dict[str, list[str]]:
        """The last `lines` log lines of every running process."""
        return {role: process.log_tail(lines) for role, process in self._processes.items()}

    def _late(self, ready: dict[str, bool], seconds: float) -> ClusterError:
        late = [role for role in ready if not ready[role]]
        noun = f"the {late[0]} server does" if len(late) == 1 else f"{' and '.join(late)} do"
        sentence = f"{noun} not answer {seconds:.0f} s after the start"
        return ClusterError(_with_log(sentence, self._processes[late[0]]))

    # Command lines --------------------------------------------------------------------------

    @property
    def urls(self) -> dict[str, str]:
        """HTTP addresses of every server and of `router`."""
        return {name: f"http://{self._hosts[name]}:{self._ports[name]}" for name in self._names}

    @property
    def url(self) -> str:
        """Address that requests go to: the router's."""
        return self.urls["router"]

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the running launchers; each leads the session of its server."""
        return {role: process.pid for role, process in self._processes.items()}

    def command(self, name: str) -> list[str]:
        """The command line of a server or the router."""
        port = str(self._ports[name])
        python = [sys.executable, "-P", "-m"]
        if name == "router":
            command = [*python, "sglang_router.launch_router", "--pd-disaggregation"]
            command += [*self._router_args, "--host", self.host, "--port", port]
            for prefill in self.prefills:
                command += [
                    "--prefill",
                    self.urls[prefill],
                    str(self._ports[f"{prefill} bootstrap"]),
                ]
            for decode in self.decodes:
                command += ["--decode", self.urls[decode]]
            return command
        role = _role(name)
        command = [
            *python,
            "sglang_smartgen.launch_server",
            *("--model-path", self.model, "--host", self._hosts[name], "--port", port),
            *("--disaggregation-mode", role, "--disaggregation-transfer-backend", "mooncake"),
            *("--nccl-port", str(self._ports[f"{name} nccl"])),
            # The share counts what other processes use; --max-total-tokens sets the pool's size.
            *("--dtype", "float32", "--mem-fraction-static", "0.7"),
            *("--max-total-tokens", str(self._max_total_tokens), "--max-running-requests", "8"),
            "--skip-server-warmup",
        ]
        if role == "prefill":
            command += ["--disaggregation-bootstrap-port", str(self._ports[f"{name} bootstrap"])]
        config = self._configs[role]
        if config is not None:
            command += ["--enable-smartgen", "--smartgen-config", json.dumps(config)]
        return command + self._extra_args[role]

    def environment(self, name: str) -> dict[str, str]:
        """The environment of a server: ours, one core for each rank, and no network but `host`."""
        first = self._names.index(name) * self._tp_size
        cores = [str((first + rank) % (os.cpu_count() or 1)) for rank in range(self._tp_size)]
        programs = str(Path(sys.executable).parent)
        env = {
            **os.environ,
            "PATH": os.pathsep.join([programs, os.environ.get("PATH", os.defpath)]),
            "PYTHONSAFEPATH": "1",  # else a folder `triton_kernels` could be imported from the top
            "SGLANG_HOST_IP": self._hosts[name],
            "HOST_IP": self._hosts[name],
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "MC_LOG_LEVEL": "WARNING",  # stock's too: a line for every transfer takes time
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(cores),
            **self._env,
        }
        env.pop(CONFIG_ENV, None)
        return env

    # Questions ------------------------------------------------------------------------------

    def server_info(self, name: str) -> dict[str, Any]:
        """/server_info of a server."""
        import requests

        response = requests.get(f"{self.urls[name]}/server_info", timeout=30)
        response.raise_for_status()
        info: dict[str, Any] = response.json()
        return info

    def smartgen_state(self, name: str) -> dict[str, Any]:
        """SmartGen's block of /server_info. Raises KeyError on a stock server."""
        state: dict[str, Any] = self.server_info(name)["internal_states"][0]["smartgen"]
        return state

    def flush_cache(self, role: str = "prefill", timeout_s: float = 20.0) -> None:
        """Empty the radix cache of a server. Raises ClusterError when it does not get idle."""
        import requests

        url = f"{self.urls[role]}/flush_cache"
        response = requests.post(url, params={"timeout": timeout_s}, timeout=timeout_s + 10)
        if response.status_code != 200:
            raise ClusterError(
                f"the {role} server did not flush its cache within {timeout_s:.0f} s: "
                f"{response.text.strip()}"
            )


def _names(role: str, count: int) -> tuple[str, ...]:
    return tuple(role if i == 1 else f"{role}-{i}" for i in range(1, count + 1))


def _role(name: str) -> str:
    return name.partition("-")[0]


def free_ports(count: int) -> list[int]:
    """`count` different TCP ports of PORTS that nothing on this machine listens on."""
    bound: list[socket.socket] = []
    try:
        for port in random.sample(PORTS, len(PORTS)):
            candidate = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                candidate.bind(("", port))
            except OSError:
                candidate.close()
                continue
            bound.append(candidate)
            if len(bound) == count:
                return [open_socket.getsockname()[1] for open_socket in bound]
        raise ClusterError(f"no {count} free ports from {PORTS.start} to {PORTS.stop - 1}")
    finally:
        for open_socket in bound:
            open_socket.close()


def _poll_health(url: str, ended: threading.Event) -> None:
    """Return when the server at `url` is healthy or `ended` is set."""
    import requests

    while not ended.wait(POLL_S):
        try:
            if requests.get(f"{url}/health", timeout=(1.0, HEALTH_S)).status_code == 200:
                return
        except requests.RequestException:
            continue


def _with_log(sentence: str, process: ServerProcess) -> str:
    tail = "".join(f"\n  {line}" for line in process.log_tail())
    return f"{sentence}; {process.log} ends with:{tail or ' (nothing)'}"
