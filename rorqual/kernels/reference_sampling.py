"""What the sampling kernels compute, row by row in numpy.

The definition, for a row of float32 logits l, its parameters and one random number u:

1. l += bias; repetition penalty r over prompt and generated tokens (l > 0: l / r, else l * r); minus
   frequency_penalty * count + presence_penalty for generated tokens; stop tokens are impossible before min_tokens;
   what the mask does not allow is impossible.
2. temperature below 1e-5: the largest l, the lowest id among equals. Otherwise p = softmax(l / T).
3. Truncation keeps a prefix of the tokens in descending order of p (equals: lower id first): at most top_k of them;
   of these the shortest prefix whose share of their mass is at least top_p; of these those with p >= min_p * max p.
4. The token is the first, in the order of ids, at which the running sum of kept p exceeds u times the whole.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# One slot's parameters: 64 bytes, as csrc/include/rorqual/abi.h describes them.
RECORD = np.dtype(
    [
        ("temperature", "<f4"),
        ("top_p", "<f4"),
        ("top_k", "<i4"),
        ("min_p", "<f4"),
        ("seed", "<u8"),
        ("choice_index", "<u4"),
        ("num_logprobs", "<i4"),
        ("adjust_idx", "<i4"),
        ("mask_idx", "<i4"),
        ("num_prompt_tokens", "<i4"),
        ("min_tokens", "<i4"),
        ("presence_penalty", "<f4"),
        ("frequency_penalty", "<f4"),
        ("repetition_penalty", "<f4"),
        ("unused", "<i4"),
    ]
)
STOP_BIT, PROMPT_BIT = np.uint32(1 << 30), np.uint32(1 << 31)
COUNT_MASK = np.uint32((1 << 30) - 1)
MAX_TOP = 20
GREEDY_BELOW = 1e-5

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Int32s = npt.NDArray[np.int32]
UInt32s = npt.NDArray[np.uint32]
Bools = npt.NDArray[np.bool_]

_LOW = 0xFFFFFFFF


def uniform(seed: int, choice_index: int, position: int) -> float:
    """Philox-4x32-10 of counter (position, choice_index, 0) and key seed: 53 bits in [0, 1)."""
    x0, x1, x2, x3 = position & _LOW, position >> 32 & _LOW, choice_index & _LOW, 0
    k0, k1 = seed & _LOW, seed >> 32 & _LOW
    for _ in range(10):
        a, b = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x1, x2, x3 = (b >> 32) ^ x1 ^ k0, b & _LOW, (a >> 32) ^ x3 ^ k1, a & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return float((x0 >> 5) << 26 | x1 >> 6) * 2.0**-53


def adjusted_logits(
    logits: Float32s,
    record: np.void,
    position: int,
    bias: Float32s | None,
    states: UInt32s | None,
    mask: UInt32s | None,
) -> Float32s:
    """Step 1 for one row [vocab_size]: a new array. bias, states: [>= vocab_size]; mask: [>= ceil(vocab_size / 32)]."""
    x = logits.copy()
    vocab_size = x.shape[0]
    if bias is not None and states is not None:
        state = states[:vocab_size]
        x += bias[:vocab_size]
        seen, counts = (state & ~STOP_BIT) != 0, (state & COUNT_MASK).astype(np.float32)
        r = np.float32(record["repetition_penalty"])
        x[seen] = np.where(x[seen] > 0, x[seen] / r, x[seen] * r)
        made = counts > 0
        x[made] -= counts[made] * np.float32(record["frequency_penalty"]) + np.float32(record["presence_penalty"])
        if position - int(record["num_prompt_tokens"]) < int(record["min_tokens"]):
            x[(state & STOP_BIT) != 0] = -np.inf
    if mask is not None:
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]
        x[bits == 0] = -np.inf
    return x


def kept_mass(x: Float32s, *, temperature: float, top_k: int, top_p: float, min_p: float) -> Float64s:
    """Steps 2 and 3: softmax(x / T) of the kept tokens [vocab_size], 0 for the others."""
    scaled = (x / np.float32(temperature)).astype(np.float64)
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-x, kind="stable")
    ordered = p[order]
    keep = int((ordered > 0).sum())
    if top_k > 0:
        keep = min(keep, top_k)
    running = np.cumsum(ordered)
    if top_p < 1.0:
        keep = min(keep, int((running[:keep] < top_p * running[keep - 1]).sum()) + 1)
    keep = min(keep, max(1, int((ordered >= min_p * ordered[0]).sum())))
    kept: Float64s = np.zeros_like(p)
    kept[order[:keep]] = ordered[:keep]
    return kept


def choose(kept: Float64s, u: float) -> int:
    """Step 4."""
    running = np.cumsum(kept)
    above = np.flatnonzero((running > u * running[-1]) & (kept > 0))
    return int(above[0] if above.size else np.flatnonzero(kept)[-1])


def token_logprob(logits: Float32s, token_id: int, num_top: int) -> tuple[float, int, Int32s, Float64s]:
    """Of the row's own distribution: logprob and rank of a token, ids and logprobs of the num_top likeliest."""
    x = logits.astype(np.float64)
    log_sum = x.max() + np.log(np.exp(x - x.max()).sum())
    top = np.argsort(-logits, kind="stable")[:num_top].astype(np.int32)
    return float(x[token_id] - log_sum), int((x > x[token_id]).sum()) + 1, top, x[top] - log_sum
