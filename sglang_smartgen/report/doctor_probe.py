"""Doctor, in a process of its own: torch and its GPUs, Triton, SGLang's import, SmartGen's hooks.

Run as `python -m sglang_smartgen.report.doctor_probe`; prints one JSON object a step.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from sglang_smartgen.report.findings import Finding, error, ok, steps_of, warning

MODULE = "sglang_smartgen.report.doctor_probe"
TIMEOUT_S = 240.0
STEPS = ("torch", "triton", "sglang", "hooks")


def check() -> Iterator[Finding]:
    """GPUs, kernels and hooks, as the process found them."""
    found = steps_of(MODULE, STEPS, TIMEOUT_S)
    yield from _gpus(found["torch"])
    yield from _kernels(found["triton"], bool(found["torch"].get("gpus")))
    yield from _hooks(found["sglang"], found["hooks"])


def _gpus(step: dict[str, Any]) -> Iterator[Finding]:
    if cause := step.get("failed"):
        yield error("gpu", "torch", f"cannot be imported: {cause}", "install the pinned torch")
    elif step["gpus"]:
        for gpu in step["gpus"]:
            yield ok("gpu", gpu["name"], f"{gpu['memory_gb']} GB, CUDA {step['cuda']}")
    else:
        built = f"torch is built for CUDA {step['cuda']}" if step["cuda"] else "torch has no CUDA"
        yield ok("gpu", "none", f"no GPU here ({built}); SGLang runs on the CPU")


def _kernels(step: dict[str, Any], gpu: bool) -> Iterator[Finding]:
    if cause := step.get("failed"):
        say = error if gpu else warning
        text = f"cannot be imported: {cause}"
        yield say("gpu", "triton", text, "install the pinned triton; on a CPU torch stands in")
    else:
        yield ok(
            "gpu", "triton", f"{step['version']}, kernels run {'on the GPU' if gpu else 'in torch'}"
        )


def _hooks(sglang: dict[str, Any], hooks: dict[str, Any]) -> Iterator[Finding]:
    if cause := sglang.get("failed"):
        mend = "mend SGLang first: python -m sglang.launch_server --help must work"
        yield error("hooks", "sglang", f"its scheduler cannot be imported: {cause}", mend)
        return
    yield ok("hooks", "sglang", f"its scheduler imports, {sglang['seconds']:.0f} s")
    if cause := hooks.get("failed"):
        yield error("hooks", "table", f"cannot be checked: {cause}", "report this line")
        return
    for problem in hooks["problems"]:
        yield error("hooks", "table", problem, "use the pinned SGLang (docs: upgrading)")
    if not hooks["problems"]:
        yield ok("hooks", "table", f"{hooks['count']} hooks found with the right parameters")
    if not hooks["plugin"]:
        text = "SGLang would not load the plugin 'smartgen'"
        yield error("hooks", "plugin", text, "install the package; unset SGLANG_PLUGINS or add it")
    else:
        yield ok("hooks", "plugin", "SGLang finds the plugin 'smartgen'")


# In the process --------------------------------------------------------------------------------


def main() -> int:
    """Print what is found, step by step; 0 at the end."""
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for name, look in (
            ("torch", _look_at_torch),
            ("triton", _look_at_triton),
            ("sglang", _look_at_sglang),
            ("hooks", _look_at_hooks),
        ):
            _tell(out, name, look)
    out.flush()
    os._exit(0)  # threads of what was imported need not end by themselves


def _tell(out: TextIO, name: str, look: Any) -> None:
    try:
        found = look()
    except Exception as problem:
        found = {"failed": f"{type(problem).__name__}: {problem}"[:500]}
    print(json.dumps({"step": name, **found}), file=out, flush=True)


def _look_at_torch() -> dict[str, Any]:
    import torch

    gpus = []
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            gb = round(properties.total_memory / 1e9, 1)
            gpus.append({"name": properties.name, "memory_gb": gb})
    return {"gpus": gpus, "cuda": torch.version.cuda}


def _look_at_triton() -> dict[str, Any]:
    import triton

    return {"version": triton.__version__}


def _look_at_sglang() -> dict[str, Any]:
    import time

    from sglang_smartgen.engine import cpu_host

    began = time.monotonic()
    cpu_host.prepare_environment([])
    import sglang.srt.managers.scheduler  # noqa: F401

    return {"seconds": time.monotonic() - began}


def _look_at_hooks() -> dict[str, Any]:
    from importlib.metadata import entry_points

    from sglang_smartgen.engine.hooking import problems
    from sglang_smartgen.plugin import HOOKS

    allowed = os.environ.get("SGLANG_PLUGINS", "").strip()
    known = entry_points(group="sglang.srt.plugins", name="smartgen")
    named = not allowed or "smartgen" in [name.strip() for name in allowed.split(",")]
    return {"problems": problems(HOOKS), "count": len(HOOKS), "plugin": bool(known) and named}


if __name__ == "__main__":
    sys.exit(main())
