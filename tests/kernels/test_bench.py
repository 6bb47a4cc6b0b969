"""`smartgen bench kernels` without its model: what it prints, and that its arms agree."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from sglang_smartgen import cli
from sglang_smartgen.core.split import split_index
from sglang_smartgen.report import bench_kernels


class FakeStep:
    """A decode step that takes no time worth speaking of."""

    sparse_layers = 2

    def __init__(self, batch: int, tokens: int) -> None:
        assert (batch, tokens) == (2, 9)  # as many as a head selects

    def __call__(self) -> None:
        torch.zeros(1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_kernels, "DecodeStep", FakeStep)
    monkeypatch.setattr(bench_kernels, "POOL_BYTES", 1 << 20)
    monkeypatch.setattr(bench_kernels, "ROW_BYTES", (256, 512))


def test_json_is_the_only_line_and_ends_with_the_two_ratios(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = "bench kernels --format json --quick --batch 2 --kv-heads 3 --k 9"
    assert cli.main(command.split()) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert list(found)[-2:] == ["split_share_of_step", "gather_vs_memcpy"]
    share = found["split_of_all_layers_s"] / found["step_s"]
    assert found["split_share_of_step"] == pytest.approx(share, abs=1e-4)
    for size in ("256", "512"):
        ratio = found["memcpy_s"][size] / found["gather_s"][size]
        assert found["gather_vs_memcpy"][size] == pytest.approx(ratio, abs=1e-3)


def test_terminal_shows_both_arms(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["bench", "kernels", "--quick", "--batch", "2", "--kv-heads", "3", "--k", "9"])
        == 0
    )
    shown = capsys.readouterr().out
    assert "decode step" in shown and "memcpy" in shown and "256 bytes" in shown


def test_bad_number_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "kernels", "--kv-heads", "0"]) == 2
    assert "--kv-heads is 0; it must be at least 1" in capsys.readouterr().err


def test_the_torch_arm_computes_what_the_operator_does() -> None:
    index = torch.randint(-1, 30, (2, 3, 17))
    mask = torch.randint(1, 3, (2, 28)).to(torch.int8)
    reordered, order, _, remote, _, local = bench_kernels._torch_split(index, mask)
    split = split_index(index, mask)
    assert torch.equal(reordered, split.reordered) and torch.equal(order, split.order)
    assert torch.equal(remote, split.remote) and torch.equal(local, split.local)


def test_gather_and_memcpy_move_as_many_bytes() -> None:
    args = argparse.Namespace(batch=2, kv_heads=3)
    arms = bench_kernels._gather_arms(args, 256)
    keys, values = arms["gather"](1)  # type: ignore[misc]
    gathered = keys.clone()
    arms["memcpy"](1)
    assert keys.shape == values.shape and not torch.equal(keys, gathered)  # all of it was copied
