"""Every operator on every leg against its torch reference, on fresh random input."""

from __future__ import annotations

import pytest
from reference.cases import OPERATORS, Source, compare
from reference.legs import DirectLeg, InterpreterLeg

from sglang_smartgen import triton_kernels

Leg = DirectLeg | InterpreterLeg
OVERFLOW_CASES = 50  # which the interpreter checks for integer overflow, at extra cost


def check(leg: Leg, name: str, seed: str, scale: int = 1) -> None:
    """One case; a failure names the seed that makes it again."""
    operator = OPERATORS[name]
    case = operator.make(Source(seed, scale))
    wrong = compare(operator, case, leg.run(name, *case.args, **case.options))
    assert wrong is None, f"{name} on {leg.name}, case {seed!r}, scale {scale}: {wrong}"


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_equals_its_reference(leg: Leg, name: str, seed: str, cases: int) -> None:
    print(f"SMARTGEN_KERNEL_SEED={seed}")
    try:
        for number in range(cases):
            leg.checks_overflow = number < OVERFLOW_CASES
            check(leg, name, f"{seed}-{number}")
    finally:
        leg.checks_overflow = True


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_equals_its_reference_over_many_blocks(leg: Leg, name: str, seed: str) -> None:
    print(f"SMARTGEN_KERNEL_SEED={seed}")
    for number in range(2):
        check(leg, name, f"{seed}-large-{number}", OPERATORS[name].large)


def test_every_operator_has_cases() -> None:
    public = {name for name in triton_kernels.__all__ if name.islower()}
    assert public == set(OPERATORS)
