"""`Query`: the words of a URL as values, with defaults; what was asked for is remembered as the state of the view."""

import math
from collections.abc import Collection, Mapping
from typing import TypeVar

from shardwise.errors import UserError, did_you_mean

Value = str | int | float | bool
V = TypeVar("V", bound=Value)


class Query:
    """Reads one parameter after the other. `state` then has all of them, defaults included, in that order."""

    def __init__(self, params: Mapping[str, str]) -> None:
        self._given = dict(params)
        self.state: dict[str, Value] = {}

    def has(self, name: str) -> bool:
        return bool(self._given.get(name, "").strip())

    def text(self, name: str, default: str) -> str:
        return self._keep(name, self._given.get(name, "").strip() or default)

    def word(self, name: str, default: str, choices: Collection[str]) -> str:
        """One of the choices. Raises `UserError` with the nearest one."""
        value = self.text(name, default)
        if value not in choices:
            raise UserError(f"{name}={value}: {did_you_mean(value, choices, 'choose one of')}")
        return value

    def whole(self, name: str, default: int, least: int, most: int) -> int:
        """A whole number from `least` to `most`. Raises `UserError`."""
        text = self._given.get(name, "").strip()
        try:
            value = int(text) if text else default
        except ValueError:
            raise UserError(f"{name}={text}: give a whole number from {least} to {most}") from None
        if not least <= value <= most:
            raise UserError(f"{name}={value}: give a whole number from {least} to {most}")
        return self._keep(name, value)

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """A number from `least` to `most`. Raises `UserError`."""
        text = self._given.get(name, "").strip()
        try:
            value = float(text) if text else default
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise UserError(f"{name}={text}: give a number from {least:g} to {most:g}")
        return self._keep(name, value)

    def flag(self, name: str, default: bool = False) -> bool:
        """1 or 0, true or false. Raises `UserError`."""
        text = self._given.get(name, "").strip().lower()
        if text not in ("", "0", "1", "true", "false"):
            raise UserError(f"{name}={text}: give 1 or 0")
        value = text in ("1", "true") if text else default
        return self._keep(name, value)

    def done(self) -> None:
        """Raises `UserError` for a parameter that nothing asked for."""
        unknown = [name for name in self._given if name not in self.state]
        if unknown:
            raise UserError(f"this view has no {unknown[0]!r}; {did_you_mean(unknown[0], self.state, 'there are')}")

    def _keep(self, name: str, value: V) -> V:
        self.state[name] = value
        return value
