"""The keys of a layout for whose values a module is traced apart, beside tp, sp, precision and recomputation."""

from typing import Any

from shardwise.errors import UserError
from shardwise.layout.keys import KEYS, changed, read
from shardwise.layout.layout import Layout

APART = tuple(name for name, key in KEYS.items() if "apart" in key.marks)


def traced_cut(layout: Layout) -> str:
    """The layout text of these keys; empty where they have their defaults."""
    return ",".join(key.text(value) for key, value in changed(layout).items() if key.name in APART)


def cut_layout(text: str, **keys: Any) -> Layout:
    """The layout of a text of these keys and of other `keys`, on as few ranks as it takes. Raises `UserError`."""
    values = read(text, f"{text!r}", APART)
    if other := next((name for name in values if name not in APART), ""):
        raise UserError(f"{text!r}: {other} is none of {', '.join(APART)}, for which a module is traced apart")
    return Layout(dp=values.get("ep", 1), **values, **keys)
