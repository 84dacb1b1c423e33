"""Fixed keys of a layout, read from text: `tp=8,zero=1,sp`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import UserError
from shardwise.layout.layout import CHOICES, Layout
from shardwise.predict.time.split import SCHEDULES

WORDS = {"schedule": SCHEDULES, "recompute": ("none", "selective", "full")}
"""Keys whose value is a word -> the words that are searched."""

KEYS = ("dp", "tp", "pp", "cp", "ep", "zero", "shard", "hpz", "sp", "schedule", "virtual", "micro", "recompute",
        "offload", "offload_params")  # fmt: skip
"""The keys of a layout over which a search goes."""
HOMES = ("offload", "offload_params")
"""Keys that keep their default where they are not fixed."""
_OR_NONE = ("zero", "shard", "hpz")
"""Keys whose value may be 0."""


def fixed_of(text: str) -> dict[str, Any]:
    """Key -> value. Raises `UserError` for a key that is not searched, and a value that it cannot have."""
    fixed: dict[str, Any] = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        key, has_value, value = (part.strip() for part in word.partition("="))
        if key in fixed:
            raise UserError(f"--fix {text}: {key} is given twice")
        fixed[key] = _value(text, key, value if has_value else None)
    check_fixed(fixed)
    return fixed


def check_fixed(fixed: Mapping[str, Any]) -> None:
    """Raise `UserError` for keys that are not searched, and values that they cannot have."""
    for key, value in fixed.items():
        if key not in KEYS:
            raise UserError(f"{key!r} cannot be fixed; {_nearest(key)}")
        if key in WORDS:
            if value not in WORDS[key]:
                known = ", ".join(WORDS[key])
                real = " is a layout's, but is not searched" if value in CHOICES[key] else " is unknown"
                raise UserError(f"{key}={value}{real}; choose one of {known}")
        elif key in HOMES:
            _check_home(key, value)
        elif key == "sp":
            if not isinstance(value, bool):
                raise UserError(f"sp stands alone, or is sp=true or sp=false, not {value!r}")
        elif type(value) is not int or value < (key not in _OR_NONE) or (key == "zero" and value > 3):
            allowed = "0, 1, 2 or 3" if key == "zero" else "a positive integer"
            raise UserError(f"{key} must be {allowed}, not {value!r}")
    if fixed.get("offload_params", "none") != "none" and fixed.get("offload", "none") == "none":
        raise UserError(f"offload_params={fixed['offload_params']} needs offload=cpu or offload=nvme")


def _check_home(key: str, value: Any) -> None:
    if not isinstance(value, str):
        raise UserError(f"{key} must be a text, such as cpu, not {value!r}")
    if key == "offload":
        Layout(offload=value)
    elif value not in CHOICES[key]:
        raise UserError(f"{key}={value} is unknown; choose one of {', '.join(CHOICES[key])}")


def words_of(fixed: Mapping[str, Any]) -> str:
    """The keys and values as text."""
    return ",".join(key if value is True else f"{key}={value}" for key, value in fixed.items())


def text_of(layout: Layout) -> str:
    """The searched keys of a layout, as `fixed_of` reads it."""
    degrees = {key: getattr(layout, key) for key in ("dp", "tp", "pp", "cp") if getattr(layout, key) > 1}
    others = {"ep": layout.ep, "zero": layout.stage, "micro": layout.micro}
    if layout.stage:
        others |= {"shard": layout.shard_ranks, "hpz": layout.hpz}
    if layout.pp > 1:
        others |= {"virtual": layout.virtual}
    words = [f"{key}={value}" for key, value in (degrees | others).items()]
    words += [f"{key}={value}" for key in HOMES if (value := getattr(layout, key)) != "none"]
    words += [f"sp={str(layout.sp).lower()}"] if layout.tp > 1 else []
    chosen = {"recompute": layout.recompute} | ({"schedule": layout.schedule} if layout.pp > 1 else {})
    return ",".join(words + [f"{key}={value}" for key, value in chosen.items() if value in WORDS[key]])


def _value(text: str, key: str, value: str | None) -> Any:
    if key == "sp":
        known = {None: True, "true": True, "1": True, "false": False, "0": False}
        if value not in known:
            raise UserError(f"--fix {text}: sp stands alone, or is sp=true or sp=false")
        return known[value]
    if key not in KEYS:
        raise UserError(f"--fix {text}: {key!r} cannot be fixed; {_nearest(key)}")
    if not value:
        raise UserError(f"--fix {text}: {key} needs a value")
    if key in WORDS or key in HOMES:
        return value
    try:
        return int(value)
    except ValueError:
        raise UserError(f"--fix {text}: {key} needs an integer, not {value!r}") from None


def _nearest(key: str) -> str:
    import difflib

    near = difflib.get_close_matches(key, KEYS, n=1)
    return f"did you mean {near[0]}?" if near else f"keys: {', '.join(KEYS)}"
