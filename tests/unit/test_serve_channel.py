"""The line between scheduler and server process, and the memory that both map."""

from __future__ import annotations

import os
import socket
import threading

import pytest
import torch
from asked_entries import asked

from sglang_smartgen.core.geometry import KVGeometry
from sglang_smartgen.transfer.region import SharedRegion
from sglang_smartgen.transfer.residual import Residual
from sglang_smartgen.transfer.serve_channel import Channel, ChannelClosed, Drop, Take

PATIENCE_S = 30.0


def line() -> tuple[Channel, Channel]:
    a, b = socket.socketpair()
    return Channel(a), Channel(b)


def test_messages_of_any_size_arrive_whole_and_in_order() -> None:
    here, there = line()
    sent = [
        Drop(1, 2),
        Take(3, 4, 5, 6, b"s" * 3_000_000, b"o" * 5_000_000),
        *(Drop(i, i) for i in range(500)),
    ]
    sender = threading.Thread(target=lambda: [here.send(message) for message in sent])
    sender.start()
    received: list[object] = []
    while len(received) < len(sent):
        received += there.receive(PATIENCE_S)
    sender.join()
    assert received == sent
    assert there.receive(0) == []


def test_what_was_sent_before_the_end_is_received() -> None:
    here, there = line()
    here.send(Drop(1, 2))
    here.close()
    assert there.receive(0) == [Drop(1, 2)]
    with pytest.raises(ChannelClosed):
        there.receive(PATIENCE_S)
    with pytest.raises(ChannelClosed):
        there.send(Drop(1, 2))


def test_a_line_that_nobody_reads_is_given_up() -> None:
    here, there = line()
    with pytest.raises(ChannelClosed, match="the line was full"):
        here.send(Take(3, 4, 5, 6, b"", bytes(5_000_000)), timeout_s=0.05)
    with pytest.raises(ChannelClosed):  # half a message is none
        there.receive(PATIENCE_S)


def test_another_mapping_shows_the_same_bytes() -> None:
    here = SharedRegion(10_000)
    there = SharedRegion(10_000, os.dup(here.fd))
    here.bytes[9_999] = 7
    assert there.bytes[9_999] == 7
    assert here.region.address != there.region.address
    with pytest.raises(ValueError, match="size"):
        SharedRegion(10_001, os.dup(here.fd))
    with pytest.raises(ValueError, match="length is 0 bytes"):
        SharedRegion(0)


def test_shared_memory_has_no_name_and_its_descriptor_ends_with_it() -> None:
    names, before = set(os.listdir("/dev/shm")), set(os.listdir("/proc/self/fd"))
    region = SharedRegion(1 << 20)
    assert not os.get_inheritable(region.fd)
    tensor = region.bytes
    tensor.fill_(3)
    assert set(os.listdir("/dev/shm")) == names
    del region
    assert int(tensor.sum()) == 3 << 20  # the mapping lives as long as a tensor on it
    del tensor
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_residual_goes_on_where_the_other_one_stopped() -> None:
    geometry, length = KVGeometry(4, 3, 8, torch.float32), 37
    residual = Residual(geometry, length)
    residual.mark_tokens(0, torch.arange(length))
    residual.mark_tokens(1, torch.arange(length))
    residual.mark_entries(2, asked(3, {1: [0, 36]}))
    residual.set_order(torch.randperm(4 * length, generator=torch.Generator().manual_seed(1)))
    assert residual.take(30) is not None
    other = Residual.restored(geometry, length, *residual.packed())
    assert other.left == residual.left > 0
    while (wanted := residual.take(20)) is not None:
        portion = other.take(20)
        assert portion is not None
        assert torch.equal(portion.tokens, wanted.tokens)
        assert torch.equal(portion.entries, wanted.entries)
    assert other.left == 0 and other.take(1) is None
