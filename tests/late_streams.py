"""A device's streams as a script: copies to the host are garbage until somebody waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sglang_smartgen.engine.cuda.streams import Mark, Streams


class LateMark:
    """Passes when it is waited for, or when `passed` is set by the test."""

    def __init__(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        self._copies = copies
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1
        for copy, source in self._copies:
            copy.copy_(source)


class LateStreams(Streams):
    """Work runs at once, on CPU tensors; what the host may know of it, it learns from marks."""

    def __init__(self) -> None:
        self.is_aside = False
        self.joined: list[Mark] = []
        self.marks: list[LateMark] = []
        self._copies: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def aside(self) -> Iterator[None]:
        assert not self.is_aside
        self.is_aside = True
        yield
        self.is_aside = False

    def mark(self) -> Mark:
        assert self.is_aside
        made = LateMark(self._copies)
        self._copies = []
        self.marks.append(made)
        return made

    def join(self, mark: Mark) -> None:
        assert not self.is_aside
        self.joined.append(mark)

    def to_host(self, tensor: Tensor) -> Tensor:
        assert self.is_aside
        copy = torch.full_like(tensor, 77)
        self._copies.append((copy, tensor.clone()))
        return copy
