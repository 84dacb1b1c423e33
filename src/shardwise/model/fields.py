"""Reading the fields of a `config.json`: one by one, each with its type, and what families have in common.

Every field is accounted for: it is read, it must have one value, or it is on a list of fields that leave the
mathematics alone.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

from shardwise.errors import UserError
from shardwise.model.config import Activation, RopeScaling, YarnScaling

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    # The same tanh approximation under four names.
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
}


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_REQUIRED = object()


class Fields:
    """The fields of one JSON object. Reading a field marks it as understood; null counts as absent."""

    def __init__(self, data: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.data, self.where, self.prefix = data, where, prefix
        self.understood: set[str] = set()

    def error(self, text: str) -> UserError:
        return UserError(f"{self.where}: {text}")

    def take(self, *names: str, default: Any = _REQUIRED) -> Any:
        """The value of a field that goes under any of `names`, which must not contradict each other."""
        self.understood.update(names)
        given = [n for n in names if self.data.get(n) is not None]
        for other in given[1:]:
            if self.data[other] != self.data[given[0]]:
                raise self.error(
                    f"{self.prefix}{given[0]}={self.data[given[0]]!r} and "
                    f"{self.prefix}{other}={self.data[other]!r} contradict each other"
                )
        if given:
            return self.data[given[0]]
        if default is _REQUIRED:
            raise self.error(f"required field {self.prefix}{names[0]} is missing")
        return default

    def is_null(self, name: str) -> bool:
        """Whether the field is written down as null, which for some fields differs from leaving it out."""
        return name in self.data and self.data[name] is None

    def integer(self, *names: str, default: Any = _REQUIRED, least: int = 1) -> Any:
        value = self.take(*names, default=default)
        if value is not default and (type(value) is not int or value < least):
            raise self.error(f"{self.prefix}{names[0]} must be an integer of at least {least}, not {value!r}")
        return value

    def number(self, *names: str, default: Any = _REQUIRED, positive: bool = True) -> Any:
        value = self.take(*names, default=default)
        if value is default:
            return value
        # The bound also turns away nan, infinity and integers that no float holds.
        if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max or (positive and value == 0):
            kind = "positive" if positive else "non-negative"
            raise self.error(f"{self.prefix}{names[0]} must be a {kind} number, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name, default=default)
        if type(value) is not bool:
            raise self.error(f"{self.prefix}{name} must be true or false, not {value!r}")
        return value

    def table(self, name: str) -> dict[str, Any]:
        value = self.take(name, default={})
        if not isinstance(value, dict):
            raise self.error(f"{self.prefix}{name} must be a JSON object or null, not {value!r}")
        return value

    def must_be(self, name: str, *allowed: Any, why: str) -> None:
        """Refuse every value but `allowed`; absent and null are fine."""
        value = self.take(name, default=None)
        if value is not None and value not in allowed:
            only = " or ".join(json.dumps(a) for a in allowed if a is not None) or "null"
            raise self.error(f"{self.prefix}{name}={value!r} is not supported ({why}); only {only} is")

    def refuse_unknown(self, family: str, harmless: frozenset[str] = frozenset()) -> None:
        unknown = sorted(set(self.data) - self.understood - harmless)
        if unknown:
            raise self.error(
                f"field {self.prefix}{unknown[0]} is not known for {family} and may change the mathematics; "
                "delete it if it does not"
            )


def read_activation(f: Fields, name: str, default: str, allowed: tuple[str, ...]) -> Activation:
    """The activation that a field names. Raises `UserError` for one that is not `allowed`, by our names."""
    value = f.take(name, default=default)
    if ACTIVATIONS.get(value if isinstance(value, str) else "") not in allowed:
        names = ", ".join(n for n, ours in ACTIVATIONS.items() if ours in allowed)
        raise f.error(f"{name}={value!r} is not supported; supported are {names}")
    return ACTIVATIONS[value]


def rotary(
    f: Fields,
    max_positions: int,
    theta: float = 10000.0,
    theta_names: tuple[str, ...] = ("rope_theta",),
    fraction_names: tuple[str, ...] = ("partial_rotary_factor",),
    fraction: float | None = None,
    yarn: bool = False,
) -> dict[str, Any]:
    """Rotary positions from `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (5).

    fraction: the default share of a head that is rotated; None in families that rotate all of it. yarn: whether the
    family stretches angles as DeepSeek does.
    """
    beside = {n: f.take(n, default=None) for n in (*theta_names, *fraction_names)}
    merged: dict[str, Any] = {}
    for table in (f.table("rope_parameters"), f.table("rope_scaling"), beside):
        for key, value in table.items():
            if value is not None and merged.setdefault(key, value) != value:
                raise f.error(f"{key} is given twice, as {merged[key]!r} and as {value!r}")
    rope = Fields(merged, f.where)
    _refuse_unread(f, ((theta_names, theta), (fraction_names, fraction)))
    kind = rope.take("rope_type", "type", default="default")
    scalings = {"llama3": _llama3, **({"yarn": _yarn} if yarn else {})}
    if kind != "default" and kind not in scalings:
        raise f.error(f"rope type {kind!r} is not supported; supported are {', '.join(['default', *scalings])}")
    rotated = rope.number(*fraction_names, default=1.0 if fraction is None else fraction)
    if rotated > 1 or (fraction is None and rotated != 1):
        raise f.error(
            f"{fraction_names[0]}={rotated} is not supported; it must be {'1' if fraction is None else '<= 1'}"
        )
    result = {
        "positions": "rope",
        "rope_theta": rope.number(*theta_names, default=theta),
        "rotary_fraction": rotated,
    }
    if kind != "default":
        result["rope_scaling"] = scalings[kind](rope, max_positions)
    rope.prefix = "rope_parameters."
    rope.refuse_unknown(f"rope type {kind}")
    return result


def _refuse_unread(f: Fields, settings: tuple[tuple[tuple[str, ...], float | None], ...]) -> None:
    """Refuse rotary settings that transformers reads over, so that its model would be another one.

    settings: the names and the default of each. Beside a table only the first name is read.
    """
    scaling, parameters = f.table("rope_scaling"), f.table("rope_parameters")
    for name, value in parameters.items():
        if scaling and value is not None and name not in scaling:
            raise f.error(f"rope_parameters.{name} is not read by transformers beside rope_scaling; write it there")
    table = scaling or parameters
    for (read, *others), default in settings:
        for name in others:
            value = f.take(name, default=None)
            if value is not None and table.get(name) is None and value != f.take(read, default=default):
                raise f.error(f"{name}={value!r} is not read by transformers; write it as {read}")


def _llama3(rope: Fields, max_positions: int) -> RopeScaling:
    scaling = RopeScaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_positions=rope.integer("original_max_position_embeddings", default=max_positions),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise rope.error("high_freq_factor must be greater than low_freq_factor")
    return scaling


def _yarn(rope: Fields, max_positions: int) -> YarnScaling:
    mscale = rope.number("mscale_all_dim")
    if rope.number("mscale") != mscale:
        raise rope.error("mscale and mscale_all_dim must be equal: rotated elements have no factor of their own here")
    rope.must_be("attention_factor", why="rotated elements have no factor of their own here")
    return YarnScaling(
        factor=rope.number("factor"),
        original_max_positions=rope.integer("original_max_position_embeddings", default=max_positions),
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        mscale=mscale,
    )


LAYER_TYPES = "full_attention", "sliding_attention"


def layer_types(f: Fields, layers: int) -> list[str] | None:
    """Whether each layer's attention sees all tokens or a window of them; None where that is not said."""
    types = f.take("layer_types", default=None)
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != layers:
        raise f.error(f"layer_types must be a list with one entry for each of the {layers} layers")
    for kind in types:
        if kind not in LAYER_TYPES:
            raise f.error(f"layer_types has {kind!r}, which is not supported; supported are {', '.join(LAYER_TYPES)}")
    return types


def full_attention(f: Fields, config: dict[str, Any], window: int | None, from_layer: int = 0) -> None:
    """Refuse attention that does not see the whole sequence. `window` applies from layer `from_layer` on."""
    layers, longest = config["layers"], config["max_positions"]
    types = layer_types(f, layers)
    slides = window is not None and from_layer < layers if types is None else "sliding_attention" in types
    if slides and (window is None or window < longest):
        raise f.error(
            f"sliding_window={window} hides part of a sequence of max_position_embeddings={longest}, which is not "
            "supported; set sliding_window to null, or max_position_embeddings to at most the window"
        )
