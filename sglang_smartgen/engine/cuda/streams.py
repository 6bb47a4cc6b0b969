"""The forward stream and one side stream beside it, and what orders them.

Used by the forward thread alone. Work that is begun `aside` sees everything that the forward stream
was given before; the forward stream sees that work after `join`. Memory is safe to reuse without
more: what was allocated aside is written again only by later work aside, which waits for whatever
the forward stream was given meanwhile; what was allocated on the forward stream and is read aside
must be kept by its owner until `join`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A point in the side stream's work."""

    def synchronize(self) -> None:
        """Let the host wait for it."""


class Streams:
    """Both streams of one device; `cuda` is torch.cuda, or what stands in for it in a test."""

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._side = cuda.Stream()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What follows goes to the side stream, behind all that the forward stream has so far."""
        self._side.wait_event(self._cuda.current_stream().record_event())
        with self._cuda.stream(self._side):
            yield

    def mark(self) -> Mark:
        """The end of what the side stream has so far."""
        mark: Mark = self._side.record_event()
        return mark

    def join(self, mark: Mark) -> None:
        """What the forward stream gets from here on comes after `mark`."""
        self._cuda.current_stream().wait_event(mark)

    def to_host(self, tensor: Tensor) -> Tensor:
        """A pinned copy; its bytes are there once a later `mark` has been waited for."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return copy.copy_(tensor, non_blocking=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device, without waiting; the allocator keeps the pinned copy alive."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
