"""Runs an operator with canary bytes on both sides of everything it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_smartgen.triton_kernels import _dispatch

EDGE = 256  # bytes on each side; keeps the alignment of the tensor between
CANARY = 0xA5


class Canaries:
    """Makes tensors with canary bytes around them and tells whether all of these still live."""

    def __init__(self) -> None:
        self._buffers: list[tuple[Tensor, int]] = []

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Take the place of `_dispatch.allocate`; what is between starts as canaries too."""
        size = torch.Size(shape).numel() * dtype.itemsize
        buffer = torch.full((size + 2 * EDGE,), CANARY, dtype=torch.uint8, device=device)
        self._buffers.append((buffer, size))
        return buffer[EDGE : EDGE + size].view(dtype).view(tuple(shape))

    def copy(self, value: Any) -> Any:
        """Return a contiguous tensor's copy between canaries; anything else as it is."""
        if not isinstance(value, Tensor) or not value.is_contiguous() or value.is_pinned():
            return value
        copied = self.allocate(value.shape, value.dtype, value.device)
        return copied.copy_(value)

    def check(self) -> None:
        """Raise AssertionError when a byte outside a tensor was written."""
        for buffer, size in self._buffers:
            edges = torch.cat((buffer[:EDGE], buffer[EDGE + size :]))
            if not bool((edges == CANARY).all()):
                raise AssertionError(f"a byte outside a tensor of {size} bytes was written")


def run(operator: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Call the operator; AssertionError when it writes outside its results or to its input."""
    canaries = Canaries()
    given = [canaries.copy(value) for value in args]
    kept = [value.clone() if isinstance(value, Tensor) else value for value in given]
    before = _dispatch.allocate
    _dispatch.allocate = canaries.allocate
    try:
        result = operator(*given, **{key: canaries.copy(v) for key, v in options.items()})
    finally:
        _dispatch.allocate = before
    canaries.check()
    for number, (value, was) in enumerate(zip(given, kept, strict=True)):
        # As bytes: NaN differs from itself.
        if isinstance(value, Tensor) and not torch.equal(_bytes(value), _bytes(was)):
            raise AssertionError(f"argument {number} was written to")
    return result


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
