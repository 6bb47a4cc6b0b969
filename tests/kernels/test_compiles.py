"""Every kernel goes through Triton's compiler down to machine code of an H100/H200; no GPU needed.

The interpreter accepts more than the compiler. This takes the launches that the wrappers make,
compiles instead of running them, and so finds what would fail on the first call on a device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from reference.cases import OPERATORS, Source
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime import JITFunction

from sglang_smartgen import triton_kernels as operators

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
}


def compile_launch(kernel: JITFunction, args: tuple[Any, ...], options: dict[str, Any]) -> str:
    """Compile one launch as the runtime would and return its PTX."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | options
    signature, constants = {}, {}
    for parameter in kernel.params:
        value = given[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    made = compile(ASTSource(kernel, signature, constants), target=TARGET)
    assert made.asm["cubin"]
    return str(made.asm["ptx"])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Wrappers take the Triton path for CPU tensors; what they launch is compiled, name to PTX."""
    found: dict[str, str] = {}

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        assert all(size >= 1 for size in grid)
        found[self.fn.__name__] = compile_launch(self, args, options)

    monkeypatch.setattr(JITFunction, "run", run)
    for name, module in list(sys.modules.items()):
        if name.startswith("sglang_smartgen.triton_kernels.") and hasattr(module, "use_triton"):
            monkeypatch.setattr(module, "use_triton", lambda tensor: True)
    yield found


@pytest.mark.parametrize("name", OPERATORS)
def test_kernel_compiles(name: str, compiled: dict[str, str]) -> None:
    for number in range(100):
        case = OPERATORS[name].make(Source(f"compile-{number}", 10))
        getattr(operators, name)(*case.args, **case.options)
        if compiled:
            break
    assert compiled, f"{name} launched nothing"
    for ptx in compiled.values():
        assert "sm_90" in ptx


def test_attention_compiles_at_real_sizes(compiled: dict[str, str]) -> None:
    """Eight KV heads of four query heads, head_dim 128, a tenth of 32,768 tokens."""
    dtype = torch.bfloat16
    rows = torch.zeros(2, 8, 3277, 128, dtype=dtype)
    operators.sparse_decode(
        torch.zeros(2, 32, 128, dtype=dtype),
        rows,
        rows,
        torch.zeros(2, 8, 3277, dtype=torch.int64),
        torch.zeros(64, 8, 128, dtype=dtype),
        torch.zeros(64, 8, 128, dtype=dtype),
        torch.zeros(2, 64, dtype=torch.int64),
        128**-0.5,
    )
    assert set(compiled) == {"_parts_kernel", "_merge_kernel"}


def test_the_hash_compiles_to_correctly_rounded_operations(compiled: dict[str, str]) -> None:
    """An approximate division or root on a device would give other bits than the CPU's."""
    x, matrix = torch.zeros(20, 2, 128), torch.zeros(2, 128, 32)
    operators.hash_encode(x, matrix, torch.zeros(2, 128), norm=True)
    ptx = compiled["_hash_encode_kernel"]
    assert "sqrt.rn.f64" in ptx and "div.rn.f32" in ptx and "approx" not in ptx
