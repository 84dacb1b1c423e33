"""A `config.json` read by its family's data: attributes with their defaults, and the shape of every tensor."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.errors import UserError
from shardwise.model.shapes.formulas import Scope, evaluate, holds
from shardwise.model.shapes.recording import flat

Shaped = tuple[str, int, tuple[int, ...]]
"""Name of a tensor with `{}` for its layer's number, that number (-1 outside layers), and its shape, with the number of
equal tensors in front."""


@cache
def families() -> dict[str, Any]:
    """model_type -> data, as `make families` recorded it."""
    return json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))


@cache
def composites() -> dict[str, Any]:
    """model_type of models that see or hear -> key and family of their language model, and whether its head is tied."""
    return json.loads(Path(__file__).with_name("composites.json").read_text(encoding="utf-8"))


def attributes_of(family: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of a configuration: given ones under their class's names, and defaults for the rest."""
    names = family["names"]
    given = flat(given)
    words = family["words"]
    given = {n: [words.get(f"{n}@{e}", e) for e in v] if isinstance(v, list) else v for n, v in
             ((names.get(k, k), v) for k, v in given.items()) if n not in family["overridden"]}  # fmt: skip
    result = {**family["others"], **given}
    rules, null = family["defaults"], family["defaults"]["null"]
    todo = {n: null.get(n) if n in given else r for n, r in rules.items() if n != "null" and result.get(n) is None}
    derived = {n: r for n, r in todo.items() if isinstance(r, dict)}
    result |= {n: r for n, r in todo.items() if n not in derived}
    for _ in range(6):  # a default may need another one
        for name, rule in derived.items():
            missing = (n for n in derived if n != name and result.get(n) is None and n in _used(name, family))
            if result.get(name) is None and not any(missing):
                _derive(result, name, rule, family)
    hidden, heads = result.get(names.get("hidden_size", "hidden_size")), result.get("num_attention_heads")
    if result.get("head_dim") is None and type(hidden) is int and type(heads) is int and heads > 0:
        result["head_dim"] = hidden // heads
    return result


def _used(name: str, family: Mapping[str, Any]) -> set[str]:
    rules = family["defaults"]
    text = json.dumps([rules.get(name), rules["null"].get(name)])
    return set(re.findall(r"[A-Za-z_][\w./]*", text))


def _derive(attributes: dict[str, Any], name: str, rule: Mapping[str, Any], family: Mapping[str, Any]) -> None:
    if rule.get("unknown"):
        raise UserError(f"required field {name} is missing")
    try:
        if "is" in rule:
            attributes[name] = _first(rule["is"], Scope(attributes))
        elif "choose" in rule:
            attributes[name] = _entry(rule["choose"], Scope(attributes))
        else:
            layers = Scope(attributes).number(family["names"].get("num_hidden_layers", "num_hidden_layers"))
            scopes = [Scope(attributes, i) for i in range(layers)]
            if "index" in rule:
                attributes[name] = [s.layer for s in scopes if any(holds(c, s) for c in rule["index"])]
                return
            chosen = rule.get("each")
            attributes[name] = [_entry(chosen, s) if chosen else _first(rule["layers"], s) for s in scopes]
    except UserError:
        return


def _entry(pairs: Sequence[Any], scope: Scope) -> Any:
    return next(value for conditions, value in pairs if any(holds(c, scope) for c in conditions))


def _first(pairs: Sequence[Any], scope: Scope) -> int:
    return next(evaluate(formula, scope) for condition, formula in pairs if holds(condition, scope))


def tensors_of(family: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[Shaped]:
    yield from shaped(family, attributes_of(family, given))


def shaped(family: Mapping[str, Any], attributes: Mapping[str, Any]) -> Iterator[Shaped]:
    """The tensors of a model with these attributes."""
    counts = {stack: evaluate(formula, Scope(attributes)) for stack, formula in family["stacks"].items()}
    for name, (conditions, *dims) in family["tensors"].items():
        stack, layered, _ = name.partition(".{}")
        for layer in range(counts[stack]) if layered else (-1,):
            scope = Scope(attributes, max(layer, 0))
            if any(holds(c, scope) for c in conditions):
                shape = (evaluate(dim, scope) if isinstance(dim, str) else _first(dim, scope) for dim in dims)
                yield name, layer, tuple(shape)
