"""Loops over hash codes for CPU tensors, with the bits of what `codes.py` and `hata.py` say.

All sums are of integers below 2**24 and so exact in any order, and every float operation is one
that torch would do, in the same order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglang_smartgen.triton_kernels.compiled import compiled


@compiled("void(float32[:,:,::1], uint8[:,:,:], float32[:,:,::1])")
def signed_sums(
    numbers: NDArray[np.float32], code: NDArray[np.uint8], out: NDArray[np.float32]
) -> None:
    """Fill `out` [H, G, N] with `sum_j +-numbers_j`, plus where bit j of the code is set.

    `numbers` [H, G, r] are integers, `code` [N, H, r / 8] the octets of the codes. What an octet
    adds is looked up: a table of 256 sums for each of them costs 256 additions, once a query head.
    """
    heads, group, bits = numbers.shape
    octets = bits // 8
    table = np.empty((octets, 256), np.int32)
    for h in range(heads):
        for g in range(group):
            total = np.int32(0)
            for octet in range(octets):
                table[octet, 0] = 0
                for bit in range(8):
                    number = np.int32(numbers[h, g, 8 * octet + bit])
                    total += number
                    for low in range(1 << bit):
                        table[octet, (1 << bit) + low] = table[octet, low] + number
            for n in range(code.shape[0]):
                held = np.int32(0)
                for octet in range(octets):
                    held += table[octet, code[n, h, octet]]
                out[h, g, n] = 2 * held - total
