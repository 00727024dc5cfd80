"""The sampler's random numbers: a function of seed, choice and position, nothing else.

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a counter goes in, four
words come out, and no state is carried from one number to the next.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)  # multipliers
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # Weyl increments of the key
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)

UInt64s = npt.NDArray[np.uint64]


def philox_4x32_10(
    counter: tuple[UInt64s, UInt64s, UInt64s, UInt64s], key: tuple[int, int]
) -> tuple[UInt64s, UInt64s, UInt64s, UInt64s]:
    """Ten rounds over words of 32 bits, each held in a uint64; all arrays have one shape."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = x0 * _M0, x2 * _M1
        x0, x1, x2, x3 = (
            (product1 >> _SHIFT) ^ x1 ^ np.uint64(k0),
            product1 & _LOW,
            (product0 >> _SHIFT) ^ x3 ^ np.uint64(k1),
            product0 & _LOW,
        )
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return x0, x1, x2, x3


def uniforms(seed: int, choice_index: int, start: int, count: int) -> npt.NDArray[np.float64]:
    """The random numbers of positions [start, start + count): float64 in [0, 1), 53 bits each.

    Counter (position's low and high word, choice_index, 0), key (seed's low and high word); the number is the upper
    27 bits of the first word followed by the upper 26 of the second, over 2**53.
    """
    position = np.arange(start, start + count, dtype=np.uint64)
    zero = np.zeros(count, dtype=np.uint64)
    x0, x1, _, _ = philox_4x32_10(
        (position & _LOW, position >> _SHIFT, zero + np.uint64(choice_index & 0xFFFFFFFF), zero),
        (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF),
    )
    bits = ((x0 >> np.uint64(5)) << np.uint64(26)) | (x1 >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53
