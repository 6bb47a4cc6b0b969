"""The three ways to run an operator: CPU path, Triton's interpreter, Triton on CUDA.

Triton decides at import whether its kernels are interpreted, so the interpreter lives in a process
of its own, started once: one frame in (operator, arguments), one frame out (results or error).
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from reference import canary
from sglang_smartgen import triton_kernels


def on(device: str, value: Any) -> Any:
    """Move a tensor, or the tensors of a tuple, to `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(on(device, inner) for inner in value)
    return value


def call(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Tensor, ...]:
    """Run the operator of that name between canaries; its results as a plain tuple."""
    result = canary.run(getattr(triton_kernels, name), args, options)
    return tuple(result) if isinstance(result, tuple) else (result,)


class DirectLeg:
    """This process: the CPU path, or the kernels on CUDA."""

    def __init__(self, device: str) -> None:
        self.name = device

    def run(self, name: str, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        """The results of one operator, on the CPU."""
        moved = {key: on(self.name, value) for key, value in options.items()}
        found: tuple[Tensor, ...] = on("cpu", call(name, on(self.name, args), moved))
        return found


class InterpreterLeg:
    """A process with TRITON_INTERPRET=1, where CPU tensors go through the kernels."""

    name = "interpreter"

    def __init__(self) -> None:
        tests = Path(__file__).resolve().parents[1]
        code = (
            "import sys; sys.path.insert(0, sys.argv[1]); from reference import legs; legs.serve()"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, str(tests)],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, name: str, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        """The results of one operator; AssertionError with what the kernel raised."""
        assert self._process.stdin is not None and self._process.stdout is not None
        _write(self._process.stdin, (name, args, options))
        reply = _read(self._process.stdout)
        if isinstance(reply, str):
            raise AssertionError(reply)
        found: tuple[Tensor, ...] = reply
        return found

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=20)


def serve() -> None:
    """Answer frames until the other side closes; nothing else may print to stdout."""
    assert triton_kernels._dispatch.use_triton(torch.zeros(1))
    torch.set_num_threads(1)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while (request := _read(sys.stdin.buffer)) is not None:
        name, args, options = request
        try:
            _write(replies, call(name, args, options))
        except Exception as error:
            _write(replies, f"{type(error).__name__}: {error}")


def _write(stream: IO[bytes], value: Any) -> None:
    frame = io.BytesIO()
    torch.save(value, frame)
    stream.write(len(frame.getvalue()).to_bytes(8, "little") + frame.getvalue())
    stream.flush()


def _read(stream: IO[bytes]) -> Any:
    size = stream.read(8)
    if len(size) < 8:
        return None
    return torch.load(io.BytesIO(stream.read(int.from_bytes(size, "little"))), weights_only=False)
