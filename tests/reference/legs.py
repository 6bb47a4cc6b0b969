"""The three ways to run an operator: CPU path, Triton's interpreter, Triton on CUDA.

Triton decides at import whether its kernels are interpreted, so the interpreter lives in a process
of its own, started once: one frame in (operator, arguments), one frame out (results or error).
"""

from __future__ import annotations

import dataclasses
import gc
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

    checks_overflow = False

    def __init__(self, device: str) -> None:
        self.name = device

    def run(self, name: str, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        """The results of one operator, on the CPU."""
        moved = {key: on(self.name, value) for key, value in options.items()}
        found: tuple[Tensor, ...] = on("cpu", call(name, on(self.name, args), moved))
        return found


class InterpreterLeg:
    """A process with TRITON_INTERPRET=1, where CPU tensors go through the kernels.

    checks_overflow: whether integer operations are done once more in int64 and compared, as
    Triton's interpreter does unless told otherwise.
    """

    name = "interpreter"
    checks_overflow = True

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
        _write(self._process.stdin, (name, args, options, self.checks_overflow))
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


def hasten() -> None:
    """Spare this process what Triton's interpreter does again and again, to the same effect.

    It replaces its language and puts it back at each launch and each call inside a kernel, makes a
    table of all dtypes each time it looks one up, and keeps the garbage collector busy with it.
    """
    from triton.runtime import interpreter

    patch, look_up = interpreter._patch_lang, interpreter._get_np_dtype
    patched: dict[int, Any] = {}
    known: dict[str, Any] = {}

    def patch_once(fn: Any) -> Any:
        key = id(fn.__globals__)
        if key not in patched:
            patched[key] = patch(fn)
            patched[key].restore = lambda: None
        return patched[key]

    def dtype_once(kind: Any) -> Any:
        plain = kind.scalar
        if type(plain) is not interpreter.tl.dtype:  # a pointer
            return look_up(kind)
        if plain.name not in known:
            known[plain.name] = look_up(plain)
        return known[plain.name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, dtype_once
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)


def check_overflow(wanted: bool) -> None:
    """Switch the interpreter's overflow checks."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=wanted)


def serve() -> None:
    """Answer frames until the other side closes; nothing else may print to stdout."""
    assert triton_kernels._dispatch.use_triton(torch.zeros(1))
    hasten()
    torch.set_num_threads(1)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while (request := _read(sys.stdin.buffer)) is not None:
        name, args, options, checks_overflow = request
        check_overflow(checks_overflow)
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
