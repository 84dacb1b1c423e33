"""The parts of predicted times, as people read them."""

from collections.abc import Mapping, Sequence

from shardwise.report.units import format_time

STEP = {
    "matmul": "matrix products",
    "attention": "attention",
    "memory": "memory-bound kernels",
    "tensor": "collectives inside blocks (tp, cp)",
    "experts": "routing to experts",
    "host": "waiting for launches, or for a core",
    "bubble": "pipeline bubble",
    "pipeline": "messages between stages",
    "data": "gradients and parameters over dp",
    "gradients": "adding up gradients of micro-batches",
    "optimizer": "optimizer",
    "offload": "offloading to the host or disk",
    "outer": "outer steps (sync=local)",
    "servers": "gradients to servers and weights back",
    "emulated": "arithmetic, emulated",
    "stragglers": "slow ranks",
}
"""Parts of a training step."""

TOKEN = {
    "weights": "weights: reading, products",
    "attention": "attention",
    "memory": "memory-bound kernels",
    "tensor": "collectives inside blocks (tp, cp)",
    "experts": "rows to experts of other replicas (ep)",
    "data": "gathers, what arithmetic does not hide",
    "pipeline": "messages between stages",
    "bubble": "waiting for other groups",
    "host": "host",
}
"""Parts of a token or a prompt."""

GROUPS = {
    "compute": ("matmul", "attention", "memory", "gradients", "optimizer", "emulated"),
    "communication": ("tensor", "experts", "pipeline", "data", "offload", "outer", "servers"),
    "bubble": ("bubble",),
    "waiting": ("host", "stragglers"),
}
"""Parts of a training step, grouped: arithmetic, communication that it does not hide, idle stages, the rest."""


RECORDED = {
    "computing": GROUPS["compute"],
    "core": ("host",),
    "transfer": ("tensor", "experts", "pipeline", "data", "outer", "servers"),
    "others": ("bubble", "stragglers"),
    "disk": ("offload",),
}
"""Parts of a training step, grouped as a recording divides it (`step_parts.PARTS`)."""


def grouped(parts: Mapping[str, float], groups: Mapping[str, Sequence[str]] = GROUPS) -> dict[str, float]:
    """Seconds of each group, which add up to those of the parts."""
    return {name: sum(parts.get(part, 0.0) for part in group) for name, group in groups.items()}


def in_words(parts: Mapping[str, float], words: Mapping[str, str]) -> dict[str, float]:
    """Seconds of the parts that need time. words: `STEP` or `TOKEN`."""
    return {word: float(parts[name]) for name, word in words.items() if parts.get(name, 0.0) > 0}


def as_sum(parts: Mapping[str, float], words: Mapping[str, str], seconds: float) -> str:
    """The parts as terms of their sum: "matrix products 2 ms + attention 1 ms = 3 ms"."""
    terms = " + ".join(f"{word} {format_time(part)}" for word, part in in_words(parts, words).items())
    return f"{terms} = {format_time(seconds)}"


def longest(parts: Mapping[str, float]) -> str:
    """The longest part of a step or a token, in words."""
    name = max(parts, key=lambda name: parts[name])
    return STEP.get(name) or TOKEN[name]
