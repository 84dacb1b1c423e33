"""Words of a command line as keys and values."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NEGATIVE = re.compile(r"-\d")
LAUNCHER_SHORT = {"-N": "nodes", "-n": "ntasks", "-np": "ntasks"}
_COUNTS = (
    ("nnodes", "nproc_per_node"), ("num_nodes", "num_gpus"), ("", "num_processes"),
    ("actor_num_nodes", "actor_num_gpus_per_node"), ("nodes", "ntasks_per_node"), ("", "ntasks"),
)  # fmt: skip
"""Flags of torchrun, deepspeed, accelerate, slime, srun and mpirun: (nodes, processes of each), the innermost first."""


@dataclass(frozen=True)
class Arguments:
    """flags: name with underscores, without dashes -> value, True for one that stands alone, a list for several; the
    last one counts, as with argparse. words: what belongs to no flag, in order."""

    flags: dict[str, Any]
    words: tuple[str, ...]


def parse(words: Sequence[str], short: Mapping[str, str], alone: frozenset[str]) -> Arguments:
    """Flags and other words. short: "-tp" -> "tensor_parallel_size". alone: flags that never take a value."""
    flags: dict[str, Any] = {}
    rest: list[str] = []
    current: str | None = None
    for word in words:
        name, equals, value = word.partition("=")
        if name in short or (word.startswith("--") and len(word) > 2):
            current = short.get(name, name.lstrip("-").replace("-", "_"))
            flags[current] = value if equals else True
            current = None if equals or current in alone else current
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
    """Processes that a launcher's flags start: nodes times processes of a node, or all; None where they do not say."""

    def number(name: str) -> int | None:
        # What follows the launcher's last flag is the script, not a value.
        value = flags.get(name)
        text = str(value[0] if isinstance(value, list) else value)
        return int(text) if text.isdigit() else None

    for nodes, processes in _COUNTS:
        if processes in flags:
            each, several = number(processes), number(nodes) if nodes in flags else 1
            return each * several if each and several else None
    return None
