"""The three legs as one fixture."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest
import torch
from reference.legs import DirectLeg, InterpreterLeg

Leg = DirectLeg | InterpreterLeg


@pytest.fixture(scope="session")
def interpreter() -> Iterator[InterpreterLeg]:
    leg = InterpreterLeg()
    yield leg
    leg.close()


@pytest.fixture(params=["cpu", "interpreter", "cuda"])
def leg(request: pytest.FixtureRequest) -> Leg:
    """CPU path, Triton's interpreter, or Triton on CUDA where there is a device."""
    if request.param == "interpreter":
        found: InterpreterLeg = request.getfixturevalue("interpreter")
        return found
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return DirectLeg(request.param)


@pytest.fixture(scope="session")
def seed() -> str:
    """Fresh every run; SMARTGEN_KERNEL_SEED repeats one."""
    return os.environ.get("SMARTGEN_KERNEL_SEED") or secrets.token_hex(4)


@pytest.fixture
def cases(leg: Leg) -> int:
    """Random cases an operator and leg; SMARTGEN_KERNEL_CASES=500 is the whole check.

    The interpreter takes two minutes for it, so it has fewer unless told otherwise.
    """
    given = os.environ.get("SMARTGEN_KERNEL_CASES")
    if given is not None:
        return int(given)
    return 150 if leg.name == "interpreter" else 500
