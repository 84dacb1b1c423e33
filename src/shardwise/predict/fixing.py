"""Fixed keys of a layout, read from text: `tp=8,zero=1,sp`."""

from collections.abc import Mapping
from typing import Any

from shardwise.errors import UserError, did_you_mean
from shardwise.layout.keys import KEYS, SEARCHED, goes_with, read, text_of_keys
from shardwise.layout.layout import Layout
from shardwise.options import runs_text

SCHEDULES = ("1f1b", "gpipe", "zb-h1", "interleaved")
"""The schedules whose bubble has a closed form for the whole step (`schedule.pipeline.closed_forms`): not those that
have one for a rank's own span alone; nor breadth-first, which takes as long as interleaved and holds more."""

WORDS = {"schedule": SCHEDULES, "recompute": ("none", "selective", "full")}
"""Keys with some choices that are searched -> these choices."""
HOMES = tuple(name for name in SEARCHED if "cpu" in KEYS[name].choices)
"""Keys that keep their default where they are not fixed."""


def fixed_of(given: object) -> dict[str, Any]:
    """Key -> value, of a text or of keys with values. Raises `UserError` for a key that is not searched, and a value
    that it cannot have."""
    text = text_of_keys(given) if isinstance(given, Mapping) else given
    if not isinstance(text, str):
        raise UserError(f"fix must be a text such as tp=2,zero=1, or a dict; not {given!r}")
    fixed = read(text, f"--fix {text}", SEARCHED)
    check_fixed(fixed)
    return fixed


def check_fixed(fixed: Mapping[str, Any]) -> None:
    """Raise `UserError` for keys that are not searched, and values that they cannot have."""
    for name, value in fixed.items():
        if name not in SEARCHED:
            raise UserError(f"{name!r} cannot be fixed; {did_you_mean(name, SEARCHED, 'keys:')}")
        KEYS[name].checked(value)
        if value not in WORDS.get(name, (value,)):
            raise UserError(
                f"{name}={value} is a layout's, but is not searched; choose one of {', '.join(WORDS[name])}"
            )
    Layout(zero=3, **{name: fixed[name] for name in HOMES if name in fixed})


def words_of(fixed: Mapping[str, Any]) -> str:
    return ",".join(KEYS[key].text(value) if value != () else f"{key}=even" for key, value in fixed.items())


def text_of(layout: Layout) -> str:
    """The searched keys of a layout, as `fixed_of` reads it."""
    degrees = {key: getattr(layout, key) for key in ("dp", "tp", "pp", "cp") if getattr(layout, key) > 1}
    others: dict[str, Any] = {"ep": layout.ep, "zero": layout.stage, "micro": layout.micro}
    if layout.stage:
        others |= {name: getattr(layout, name) for name in goes_with("zero") if name in SEARCHED}
        others |= {"shard": layout.shard_ranks}
    if layout.pp > 1:
        others |= {"virtual": layout.virtual, "stages": runs_text(layout.stages) or "even"}
    words = [f"{key}={value}" for key, value in (degrees | others).items()]
    words += [f"{key}={value}" for key in HOMES if (value := getattr(layout, key)) != "none"]
    words += [f"sp={str(layout.sp).lower()}"] if layout.tp > 1 else []
    chosen = {"recompute": layout.recompute} | ({"schedule": layout.schedule} if layout.pp > 1 else {})
    return ",".join(words + [f"{key}={value}" for key, value in chosen.items() if value in WORDS[key]])
