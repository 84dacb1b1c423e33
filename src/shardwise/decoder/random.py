"""Counter-based random numbers: a value depends on a key and a counter, never on who draws it or in which order.

That makes initial weights and dropout masks equal under every split of a model (keyed by name and global index), and
lets a recomputed forward pass, or a backward pass, draw the same mask again instead of saving it. The generator is
SplitMix64 (Steele, Lea, Flood 2014) used as a hash; all arithmetic is on integers, so results are the same bits on
every device and for every vector width.
"""

import hashlib

import torch
from torch import Tensor

from shardwise.model.parameters import Parameter

_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1


def key(*words: int | str) -> int:
    """A 64-bit key from a tuple of integers and names."""
    text = "\x1f".join(map(str, words)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _signed(value: int) -> int:
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def _shift_xor(z: torch.Tensor, bits: int) -> torch.Tensor:
    # torch shifts int64 arithmetically: the sign bits that come in are masked away.
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1).bitwise_xor_(z)


def hash64(key: int, counter: torch.Tensor) -> torch.Tensor:
    """64 random bits for each counter. counter: int64, any shape; returns int64 of the same shape."""
    z = counter.mul(_signed(_GOLDEN)).add_(_signed(key))
    z = _shift_xor(z, 30).mul_(_signed(0xBF58476D1CE4E5B9))
    z = _shift_xor(z, 27).mul_(_signed(0x94D049BB133111EB))
    return _shift_xor(z, 31)


def normal(key: int, counter: torch.Tensor) -> torch.Tensor:
    """Approximately standard normal float64 numbers, one for each counter.

    The sum of sixteen 16-bit uniforms (Irwin-Hall), centred and scaled: variance exactly one, tails to 6.9 sigma. No
    transcendental function is used, since their last bit depends on the vector width and the device.
    """
    total = torch.zeros_like(counter)
    for word in range(4):
        # No two counters have a word in common: 2^62 of them, each with four of its own.
        bits = hash64(key, 4 * counter + word)
        for part in range(4):
            total += (bits >> (16 * part)) & 0xFFFF
    mean, variance = 16 * 65535 / 2, 16 * (65536.0**2 - 1) / 12
    return (total.double() - mean) / variance**0.5


def keep_mask(key: int, counter: torch.Tensor, drop: float) -> torch.Tensor:
    """True with probability 1 - drop, for each counter."""
    return ((hash64(key, counter) >> 20) & 0xFFFFFFFF) >= int(drop * (1 << 32))


def initial_values(parameter: Parameter, index: Tensor, seed: int) -> Tensor:
    """Values of `parameter` at row-major global positions `index` (int64, any shape); float64 of the same shape."""
    if parameter.init == "zeros":
        return torch.zeros(index.shape, dtype=torch.float64, device=index.device)
    if parameter.init == "ones":
        return torch.ones(index.shape, dtype=torch.float64, device=index.device)
    return normal(key(seed, parameter.name), index).mul_(parameter.std)
