"""How the loops of CPU paths become machine code: numba, when their module is imported.

A loop does in one pass, without temporaries, what torch or numpy need several for. The signatures
are given, so nothing is compiled in the middle of a request, and the code is kept on disk beside
the module for the next start. numba is imported only here and only by modules with such loops;
the kernels on a GPU do without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Loop = TypeVar("Loop", bound=Callable[..., Any])


def compiled(*signatures: str) -> Callable[[Loop], Loop]:
    """Return a decorator that compiles a function for these numba signatures.

    The loop runs without the interpreter's lock, so transfer threads go on meanwhile. Floats are
    added and multiplied in the order written: the result has the bits that torch would give.
    """
    from numba import njit

    decorate: Callable[[Loop], Loop] = njit(
        list(signatures), cache=True, nogil=True, error_model="numpy"
    )
    return decorate
