"""Command lines and shell scripts as keys and values: every `--flag value` that stands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.errors import UserError

_DEFAULT = re.compile(r"\$\{(\w+):[-=]([^${}]*)\}")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_ASSIGNMENT = re.compile(r"\b([A-Za-z_]\w*)=([^\s()$`'\"]*)")
_END = ";"
"""Stands where a shell's array or command ends: what comes after it is no value of a flag before it."""
_LAYOUT = "--layout"
"""A flag whose value looks like an assignment: dp=2,tp=2."""
_NEGATIVE = re.compile(r"-\d")


@dataclass(frozen=True)
class Arguments:
    """flags: name with underscores, without dashes -> value, True for one that stands alone, a list for several; the
    last one counts, as with argparse. words: what belongs to no flag, in order."""

    flags: dict[str, Any]
    words: tuple[str, ...]


def split(text: str) -> list[str]:
    """The words of a command line or a shell script, with its plain variables filled in.

    Raises `UserError` for quotes that are not closed.
    """
    text = text.replace("\\\n", " ")
    text = _DEFAULT.sub(lambda match: match[2].strip("'\""), text)
    variables = {match[1]: match[2] for match in _ASSIGNMENT.finditer(text)}
    filled = _VARIABLE.sub(lambda match: variables.get(match[1] or match[2]) or match[0], text)
    try:
        words = shlex.split(filled, comments=True)
    except ValueError as error:
        raise UserError(f"the arguments cannot be read: {str(error).lower()}") from None
    return [
        part
        for before, word in zip(["", *words], words, strict=False)
        for part in ([word] if before == _LAYOUT else _parts(word))
    ]


def _parts(word: str) -> list[str]:
    """Elements of a shell word: NAME=( ... ), NAME="--flag value ..." and "--flag value" are their elements, another
    assignment is nothing."""
    if "$(" in word:
        return [word]
    bare = re.sub(r"^\w+\+?=(?:\(|(?=\s*--))|^\(|\)?;?$", "", word)
    end = [_END] if word.endswith((")", _END)) else []
    if re.match(r"\s*--[\w-]+\s", bare):
        return [*split(bare), _END]
    return [*([bare] if bare and not _ASSIGNMENT.fullmatch(bare) else []), *end]


def parse(words: Sequence[str], short: Mapping[str, str], alone: frozenset[str]) -> Arguments:
    """Flags and other words. short: "-tp" -> "tensor_parallel_size". alone: flags that never take a value."""
    flags: dict[str, Any] = {}
    rest: list[str] = []
    current: str | None = None
    for word in words:
        if word in short or (word.startswith("--") and len(word) > 2):
            name, equals, value = word.partition("=")
            current = short.get(name, name.lstrip("-").replace("-", "_"))
            flags[current] = value if equals else True
            current = None if equals or current in alone else current
        elif word == _END:
            current = None
        elif current is None or (word.startswith("-") and not _NEGATIVE.match(word)):
            current = None
            rest.append(word)
        elif flags[current] is True:
            flags[current] = word
        else:
            known = flags[current]
            flags[current] = [*known, word] if isinstance(known, list) else [known, word]
    return Arguments(flags, tuple(rest))


def dashed(key: str) -> str:
    """A flag as it is typed."""
    return f"--{key.replace('_', '-')}"


def launched_ranks(flags: Mapping[str, Any]) -> int | None:
    """Processes that `torchrun --nnodes N --nproc-per-node M` starts, None where the words do not say."""

    def first(name: str) -> int:
        # What follows the launcher's last flag is the script, not a value.
        value = flags.get(name, 1)
        return int(value[0] if isinstance(value, list) else value)

    try:
        return first("nnodes") * first("nproc_per_node") if "nproc_per_node" in flags else None
    except ValueError:
        return None
