"""Counter-based noise for sampling: the same (seed, choice, position, token) draws the same number.

Gumbel-max picks `argmax(log w_i + g_i)` with `g_i = -log(e_i)` and `e_i ~ Exp(1)`, which is
`argmax(w_i / e_i)`; so exponentials are all that is drawn. Nothing is stored between draws, so
neither the batch, nor chunking, nor preemption, nor a rejected draft can shift the stream.

A 64-bit key is mixed from (seed, choice, position) by SplitMix64's finaliser (Steele et al., 2014);
each token id is then hashed with the key's halves by the three-round 32-bit multiply-xorshift mixer
"triple32" (Wellons, 2018). The second half enters after the first round, so that no two keys give
shifted copies of one stream, and two rounds follow it: with one, keys that differed in a single
bit of it gave streams correlated by up to 0.4.
"""

import numpy as np
from numpy.typing import NDArray

_MASK64 = (1 << 64) - 1
_GOLDEN64 = 0x9E3779B97F4A7C15
_GOLDEN32 = np.uint32(0x9E3779B1)
_ROUND_1 = np.uint32(0xED5AD4BB)
_ROUND_2 = np.uint32(0xAC4C1B51)
_ROUND_3 = np.uint32(0x31848BAB)
_11, _14, _15, _17 = (np.uint32(shift) for shift in (11, 14, 15, 17))


def draw_key(seed: int, choice: int, position: int) -> int:
    """The 64-bit key of one sampled position."""
    key = _mix64(seed & _MASK64)
    key = _mix64(key ^ (choice & _MASK64))
    return _mix64(key ^ (position & _MASK64))


def exponentials(key: int, token_ids: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Exp(1) draws, `[n]` fp64 in (0, 23], one for each of `token_ids` `[n]` under `key`."""
    # hash, then u = (hash + 1/2) / 2^32; 1 - u is exact in fp64 and never 0 or 1
    h = token_ids * _GOLDEN32
    h += np.uint32(key & 0xFFFFFFFF)
    h ^= h >> _17
    h *= _ROUND_1
    h += np.uint32(key >> 32)
    h ^= h >> _11
    h *= _ROUND_2
    h ^= h >> _15
    h *= _ROUND_3
    h ^= h >> _14
    complement = h.astype(np.float64)
    complement *= -(2.0**-32)
    complement += 1.0 - 2.0**-33
    np.log(complement, out=complement)
    return np.negative(complement, out=complement)


def _mix64(value: int) -> int:
    value = (value + _GOLDEN64) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
