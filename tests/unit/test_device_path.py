"""The seam to a GPU host: who may use it, memory with two faces, streams, and the pinned pool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_smartgen.config import ConfigError, SmartGenConfig
from sglang_smartgen.engine.cuda import mapped
from sglang_smartgen.engine.cuda.mapped import MappedRegion
from sglang_smartgen.engine.cuda.step import Step
from sglang_smartgen.engine.cuda.streams import Streams
from sglang_smartgen.engine.device_path import DevicePath, check_device, device_path
from sglang_smartgen.engine.refusals import declare_options

CPU = torch.device("cpu")


def config(**settings: object) -> SmartGenConfig:
    return SmartGenConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "device", "said"),
    [
        ({}, "cuda", "its CUDA path has not been run on a GPU yet; allowed is --device cpu"),
        ({"device_path": "cuda"}, "cpu", "device_path is cuda; this server runs on cpu"),
        ({"device_path": "cuda_graph"}, "cpu", "device_path is cuda_graph"),
        ({"attention_kernels": "triton"}, "cpu", "attention_kernels is triton; it runs on a GPU"),
        ({"attention_kernels": "flashinfer"}, "cpu", "attention_kernels is flashinfer; it runs"),
        ({"device_path": "cuda"}, "xpu", "cannot serve on xpu; allowed are cpu and cuda"),
    ],
)
def test_a_host_of_the_other_kind_is_refused(
    settings: dict[str, object], device: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        check_device(config(**settings), device)
    assert "\n" not in str(refused.value)


def test_the_experimental_path_is_opted_into_and_says_so() -> None:
    assert check_device(config(), "cpu") is None
    warning = check_device(config(device_path="cuda"), "cuda")
    assert warning is not None and "has not been run on a GPU yet" in warning
    assert type(device_path(config())) is DevicePath


@pytest.mark.parametrize("graphs", [False, True])
def test_graphs_are_breakable_or_off(graphs: bool) -> None:
    declared = declare_options(SimpleNamespace(disaggregation_mode="decode"), graphs)
    assert declared.get("disable_decode_cuda_graph") is (None if graphs else True)
    assert declared.get("cuda_graph_backend_decode") == ("breakable" if graphs else None)


class Runtime:
    """torch.cuda's `cudart()`: what is registered, and the code that it answers with."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.registered: list[tuple[int, int, int]] = []

    def cudart(self) -> Runtime:
        return self

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:
        self.registered.append((address, length, flags))
        return self.code


def test_both_faces_show_the_same_bytes() -> None:
    runtime = Runtime()
    region = MappedRegion(1000, CPU, runtime)
    assert runtime.registered == [(region.region.address, 1000, 3)]
    assert not bool(region.bytes.any())  # the probe leaves no trace
    region.tensor(8, (2, 3), torch.float32).fill_(2.5)
    assert bool((region.device_tensor(8, (2, 3), torch.float32) == 2.5).all())
    region.device_tensor(0, (4,), torch.uint8).fill_(9)
    assert region.bytes[:4].tolist() == [9] * 4


def test_memory_that_cannot_be_pinned_or_seen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"cannot pin 64 bytes .*\(error 2\).*max-total-tokens"):
        MappedRegion(64, CPU, Runtime(2))
    monkeypatch.setattr(mapped, "face", lambda memory, device: memory.clone())
    with pytest.raises(ConfigError, match="does not see pinned host memory"):
        MappedRegion(64, CPU, Runtime())


class ScriptedCuda:
    """torch.cuda's streams and events as clocks: what each stream is known to come after."""

    def __init__(self) -> None:
        self.here = ScriptedStream(self)
        self.stack = [self.here]

    def Stream(self) -> ScriptedStream:
        return ScriptedStream(self)

    def current_stream(self) -> ScriptedStream:
        return self.stack[-1]

    @contextmanager
    def stream(self, stream: ScriptedStream) -> Iterator[None]:
        self.stack.append(stream)
        yield
        self.stack.pop()

    def work(self, name: str) -> None:
        """Something is launched on the current stream."""
        self.current_stream().done.add(name)


class ScriptedStream:
    """`done`: the work after which the next launch runs."""

    def __init__(self, cuda: ScriptedCuda) -> None:
        self.done: set[str] = set()

    def record_event(self) -> set[str]:
        return set(self.done)

    def wait_event(self, event: Any) -> None:
        self.done |= event


def test_streams_order_what_they_promise_and_no_more() -> None:
    cuda = ScriptedCuda()
    streams = Streams(cuda)
    cuda.work("qkv")
    with streams.aside():
        assert cuda.current_stream() is not cuda.here
        cuda.work("select")
        listed = streams.mark()
        cuda.work("gather")
        gathered = streams.mark()
        assert cuda.current_stream().done == {"qkv", "select", "gather"}
    cuda.work("attention before")
    assert cuda.here.done == {"qkv", "attention before"}  # it runs beside the selection
    assert listed == {"qkv", "select"}  # the host waits for no gather
    streams.join(gathered)
    assert {"select", "gather"} <= cuda.here.done
    cuda.work("attention")
    with streams.aside():
        assert "attention" in cuda.current_stream().done  # memory of the last layer is free


def test_tail_slots_follow_from_rows_and_lengths() -> None:
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    step = Step([2, 1], [6, 3])
    assert step.tail(table, [0, 1], [4, 0]).tolist() == [[24, 25, -1], [10, 11, 12]]
    assert step.tail(table, [0, 1], [4, 0]) is step.tail(table, [0, 1], [4, 0])
    assert step.tail(table, [1], [2]).tolist() == [[12]]
    assert step.tail(table, [0], [6]).shape == (1, 0)
    wide = step.padded(3)
    assert wide is step.padded(3) and wide.rows == [2, 1, 0] and step.padded(2) is step
    assert wide.tail(table, [2], [0]).tolist() == [[0]]


def test_the_host_budget_is_what_is_free(tmp_path: Path) -> None:
    from sglang_smartgen.engine.cuda.pool import available_bytes

    file = tmp_path / "meminfo"
    file.write_text("MemTotal: 100 kB\nMemAvailable:   64 kB\n")
    assert available_bytes(file) == 64 << 10
    file.write_text("MemTotal: 100 kB\n")
    with pytest.raises(OSError, match="does not say MemAvailable"):
        available_bytes(file)


def test_sglangs_pool_works_on_the_pinned_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own store writes through the device faces; Mooncake is given the host's addresses."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool

    from sglang_smartgen.engine import runtime
    from sglang_smartgen.engine.cuda import pool as module

    monkeypatch.setattr(runtime._state, "path", DevicePath())
    made = module.PinnedMHATokenToKVPool(
        size=8,
        page_size=1,
        dtype=torch.float32,
        head_num=2,
        head_dim=4,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
    )
    rows = torch.randn(2, 2, 4)
    layer = SimpleNamespace(layer_id=1)
    made.set_kv_buffer(layer, KVWriteLoc(torch.tensor([3, 5]), None), rows, 2 * rows)
    assert torch.equal(made.host_keys[1][[3, 5]], rows)
    assert torch.equal(made.host_values[1][[3, 5]], 2 * rows)
    pointers, _, item_lengths = made.get_contiguous_buf_infos()
    assert pointers == [t.data_ptr() for t in (*made.host_keys, *made.host_values)]
    assert set(item_lengths) == {2 * 4 * 4}
    stock = lambda configurator, *, kind, default: default  # noqa: E731
    for mode, wanted in (("decode", module.PinnedMHATokenToKVPool), ("prefill", MHATokenToKVPool)):
        monkeypatch.setattr(
            module, "get_disagg", lambda mode=mode: SimpleNamespace(disaggregation_mode=mode)
        )
        assert module.pool_class(stock, None, kind="mha", default=MHATokenToKVPool) is wanted
        assert module.pool_class(stock, None, kind="mla", default=int) is int
        budget = module.host_budget(lambda configurator, *args: -1, None, 7)
        assert (budget == -1) is (mode == "prefill")


def test_the_device_hooks_fit_this_sglang() -> None:
    from sglang_smartgen.engine.cuda.hooks import HOOKS
    from sglang_smartgen.engine.hooking import problems

    assert problems(HOOKS) == []
