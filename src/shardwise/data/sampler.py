"""Window of tokens of sample i: a pure function of (seed, i), for every i, at any number of ranks.

Resuming a run, or changing the number of ranks that share a batch, therefore never changes the samples or their order.
No shuffled array is stored: an epoch's order is a keyed permutation, evaluated where it is needed.
"""

from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwise.errors import UserError

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014), a bijection of 64-bit integers, elementwise.

    x: an array of at least one dimension (numpy warns when scalars wrap around, and arrays wrap silently).
    """
    x = x + GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(*key: int | str) -> float:
    """A number in [0, 1) that depends on the key only, equal on every machine."""
    digest = blake2b(repr(key).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


_ROUNDS = 6


def permute(positions: ArrayLike, epochs: ArrayLike, size: int, seed: int) -> NDArray[np.int64]:
    """Image of each position under the permutation of range(size) of (seed, epoch).

    positions, epochs: integers of one shape, 0 <= position < size. Returns int64 of that shape.

    A Feistel network over the smallest even number of bits that covers `size`; a result outside is mapped
    again until it is inside (cycle walking, Black and Rogaway 2002), less than four passes on average.
    """
    shape = np.shape(positions)
    values = np.array(positions, np.uint64).reshape(-1)
    half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
    base = splitmix64(splitmix64(np.array([seed % 2**64], np.uint64)) ^ np.array(epochs, np.uint64).reshape(-1))
    keys = [splitmix64(base + np.uint64(number)) for number in range(_ROUNDS)]
    todo = np.arange(values.size)
    while todo.size:
        values[todo] = _feistel(values[todo], half, [key[todo] for key in keys])
        todo = todo[values[todo] >= size]
    return values.astype(np.int64).reshape(shape)


def _feistel(x: NDArray[np.uint64], half: np.uint64, keys: list[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    """A bijection of the integers of 2 * half bits, elementwise; each key has x's shape."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & mask
    for key in keys:
        left, right = right, left ^ (splitmix64(right ^ key) & mask)
    return (left << half) | right


def documents(tokens: NDArray[Any], eos: int) -> NDArray[np.int64]:
    """Number the documents within each window, from 0; an end-of-text token belongs to the document that it ends.

    tokens: [..., seq]. Returns int64 of that shape, constant inside a document.
    """
    ends = np.asarray(tokens) == eos
    ids = np.zeros(ends.shape, np.int64)
    np.cumsum(ends[..., :-1], axis=-1, out=ids[..., 1:])
    return ids


def positions(document_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions that restart at 0 with each document. document_ids: [..., seq], as `documents` gives; same shape."""
    index = np.broadcast_to(np.arange(document_ids.shape[-1]), document_ids.shape)
    starts = np.zeros(document_ids.shape, np.int64)
    changed = document_ids[..., 1:] != document_ids[..., :-1]
    starts[..., 1:] = np.where(changed, index[..., 1:], 0)
    return index - np.maximum.accumulate(starts, axis=-1)


class Sampler:
    """Windows of seq + 1 tokens, one every seq tokens, in an order that (seed, global index) alone decides.

    tokens: [n] integers, usually `Corpus.tokens(split)`. Sample i belongs to epoch i // windows; each epoch visits
    every window once in its own order. The last (n - 1) % seq tokens are never visited.
    eos: when given, batches carry document ids and positions that restart with each document.
    Raises `UserError` when the tokens do not fill one window.
    """

    def __init__(self, tokens: NDArray[Any], seq: int, seed: int, *, eos: int | None = None) -> None:
        if seq < 1:
            raise UserError(f"a sequence length of {seq} is not possible; give at least 1")
        self.windows = (len(tokens) - 1) // seq
        """Windows of one epoch."""
        if self.windows < 1:
            raise UserError(
                f"{len(tokens)} tokens are too few for one window of {seq} + 1: shorten the sequence or add text"
            )
        self.tokens, self.seq, self.seed, self.eos = tokens, seq, seed, eos

    def summary(self) -> str:
        """What is remarkable about its windows: nothing."""
        return ""

    def window(self, indices: ArrayLike) -> NDArray[np.int64]:
        """The window, in 0 .. windows - 1, that each global sample index >= 0 falls on; int64 of the same shape."""
        index = np.asarray(indices, np.int64)
        if index.size and index.min() < 0:
            raise IndexError(f"global sample indices start at 0, got {index.min()}")
        return permute(index % self.windows, index // self.windows, self.windows, self.seed)

    def batch(self, indices: ArrayLike) -> dict[str, NDArray[np.int64]]:
        """Samples in the order of `indices` [n], any from 0: inputs and targets, which are one token on, each int64
        [n, seq].

        With `eos`, also documents and positions of the inputs, each int64 [n, seq].
        """
        starts = self.window(indices) * self.seq
        tokens = np.asarray(self.tokens[starts[:, None] + np.arange(self.seq + 1)], np.int64)
        batch = {"inputs": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy()}
        if self.eos is not None:
            batch["documents"] = documents(batch["inputs"], self.eos)
            batch["positions"] = positions(batch["documents"])
        return batch
