"""Formulas and conditions of a configuration's attributes, in the words of `families.json`.

A formula is a sum of products: `2*hidden_size+num_key_value_heads*head_dim`. `-` subtracts, `/` divides, `^` divides
and rounds up. A name stands for an integer attribute, or for the layer's entry of a list, `#name` for a list's length.

A condition is a list of literals that must all hold. `flag` and `!flag`: an attribute is set or not. `name=value`: a
word. `name@value`: the layer's entry of a list, which repeats where there are more layers; `name@`: it is set. `name#`:
the layer is in the list. `name~other`: both are equal. `<name`, `>name`: its number is below, or above. `%name+1`: its
number plus 1 is a multiple. `^`: it is the last layer. `-name`: among the last ones, which are not all.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.errors import UserError


@dataclass(frozen=True)
class Scope:
    """Attributes as one layer sees them."""

    attributes: Mapping[str, Any]
    layer: int = 0

    def value(self, name: str) -> Any:
        """An attribute; of a list the layer's entry where there is one for each layer."""
        value = self.attributes.get(f"{name}/layers") or self.attributes.get(name)
        if isinstance(value, list) and self.layer < len(value):
            return value[self.layer]
        return value

    def number(self, name: str) -> int:
        """An integer. Raises `UserError` for what is none."""
        if name.isdigit():
            return int(name)
        if name[0] == "#":
            return len(self.attributes.get(name[1:]) or ())
        value = self.value(name)
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or value < 0:
            raise UserError(f"{name} must be an integer of at least 0, not {str(value)[:60]}")
        return value


def evaluate(formula: str, scope: Scope) -> int:
    """The number that a formula stands for. Raises `UserError` for attributes that are no numbers."""
    terms = re.findall(r"[+-]?[^+-]+", formula)
    return sum(_product(t.lstrip("+-"), scope) * (-1 if t[0] == "-" else 1) for t in terms)


def _product(term: str, scope: Scope) -> int:
    first, *rest = re.split(r"([*/^])", term)
    result = scope.number(first)
    for sign, name in zip(rest[::2], rest[1::2], strict=True):
        number = scope.number(name)
        if sign == "*":
            result *= number
        elif not number:
            raise UserError(f"{name} must not be 0")
        else:
            result = result // number if sign == "/" else -(-result // number)
    return result


def holds(condition: Sequence[str], scope: Scope) -> bool:
    return all(_literal(word, scope) for word in condition)


def _literal(word: str, scope: Scope) -> bool:
    if word[0] == "!":
        return not _literal(word[1:], scope)
    if word == "^":
        return bool(scope.layer + 1 == scope.attributes.get("num_hidden_layers"))
    if word[0] == "-":
        last, layers = scope.attributes.get(word[1:]), scope.attributes.get("num_hidden_layers")
        return type(last) is int and type(layers) is int and last < layers <= scope.layer + last
    if word[0] in "<>":
        bound = int(word[1:]) if word[1:].isdigit() else scope.attributes.get(word[1:])
        return type(bound) is int and (scope.layer < bound if word[0] == "<" else scope.layer > bound)
    if word[0] == "%":
        return _every(word[1:], scope)
    name, sign, value = re.fullmatch(r"([\w./]+)([=@#~]?)(.*)", word).groups()  # type: ignore[union-attr]
    entries = scope.attributes.get(name)
    if sign == "~":
        return bool(entries == scope.attributes.get(value))
    if sign == "#":
        return isinstance(entries, list) and scope.layer in entries
    if sign == "@":
        entry = entries[scope.layer % len(entries)] if isinstance(entries, list) and entries else None
        return str(entry) == value if value else bool(entry)
    return str(scope.value(name)) == value if sign else bool(scope.value(name))


def _every(text: str, scope: Scope) -> bool:
    name, sign, shift = re.fullmatch(r"([\w.]+)([+-]?)([\w.]*)", text).groups()  # type: ignore[union-attr]
    period = int(name) if name.isdigit() else scope.attributes.get(name)
    offset = int(shift) if shift.isdigit() else scope.attributes.get(shift, 0) if shift else 0
    if type(period) is not int or period < 1 or type(offset) is not int:
        return False
    return (scope.layer + (offset if sign == "+" else -offset)) % period == 0
