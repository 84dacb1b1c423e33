"""Numbers and sizes as people write them on a command line."""

import argparse
import re

from shardwise.errors import UserError
from shardwise.options import length_in

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for suffix, base in (("B", 1000), ("", 1000), ("IB", 1024))
}


def numbers(option: str, text: str) -> list[int]:
    """Positive numbers: "8", "1-64", "2,4,8-12"; ascending, each once. Raises `UserError` that names the option."""
    values: set[int] = set()
    for word in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise UserError(f"{option} {text}: give numbers, such as 8, 1-64 or 2,4,8")
        values.update(range(first, last + 1))
    return sorted(values)


def count_of(things: str, option: str, text: str) -> float:
    """A large number: 15T, 300B, 7e9. things: with an example, for the message. Raises `UserError` as `numbers`."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?(?:e\+?\d{1,2})?)\s*([KMBT]?)\s*", text, re.IGNORECASE)
    count = float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[match[2].upper()] if match else 0.0
    if not 1 <= count <= 1e18:
        raise UserError(f"{option} {text}: give a number of {things}")
    return count


def length_of(text: str) -> int:
    """`options.length_in`, for argparse."""
    if (length := length_in(text)) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, such as 8192 or 8k")
    return length


def bytes_of(option: str, text: str) -> int:
    """A number of bytes: 4096, 64MB, 1.5GiB; kB, MB, GB and TB are powers of 1000. Raises `UserError` as `numbers`."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in _UNITS:
        raise UserError(f"{option} {text}: give a size, such as 4096, 64MB or 1GiB")
    return round(float(match[1]) * _UNITS[match[2].upper()])


def seconds_of(option: str, text: str) -> float:
    """A time: 200ms, 0.2s, 0.2. Raises `UserError` as `numbers`."""
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(ms|s?)\s*", text, re.IGNORECASE)
    seconds = float(match[1]) * (1e-3 if match[2].lower() == "ms" else 1.0) if match else 0.0
    if not seconds:
        raise UserError(f"{option} {text}: give a time, such as 200ms or 0.2s")
    return seconds
