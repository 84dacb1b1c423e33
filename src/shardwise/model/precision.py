"""Precision of a model's files: `quantization_config`, or `hf_quant_config.json` beside the configuration."""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.errors import UserError
from shardwise.model.formats import FORMS


@dataclass(frozen=True)
class Precision:
    """How matrices are stored."""

    format: str
    group: int = 0
    """Numbers of a row that share a scale; 0: one scale per row, or per matrix."""
    block: tuple[int, int] | None = None
    """Rows and columns of a block with one scale of 4 bytes."""
    scale: float = 0.0
    """Bytes of a group's scale; 0: those of the format (`formats.FORMS`)."""
    zeros: bool = False
    """Whether groups have a zero point, too."""
    kept: tuple[str, ...] = ()
    """Modules in 16 bits: names, beginnings or ends of names, patterns with `*`, or `re:` and a regular expression."""
    only: str = ""
    """A regular expression of the only modules that are quantized; empty: all linear maps."""
    cache: str = ""
    """Type of the cache, where the files name one."""
    each: tuple[tuple[str, str], ...] = ()
    """(name or pattern, format) of modules that have a format of their own."""

    @property
    def words(self) -> str:
        """The format in a few characters, as a parameter carries it."""
        if self.block:
            return f"{self.format}-block{self.block[0]}x{self.block[1]}"
        group = f"-g{self.group}" if self.group or FORMS[self.format].group else ""
        return self.format + group + (f"s{self.scale:g}" if self.scale else "") + ("z" if self.zeros else "")

    def of(self, name: str, shape: Sequence[int]) -> str:
        """How a parameter is stored; empty for 16 bits. name: as in the files, without `.weight`."""
        name = _plain(name)
        for pattern, words in self.each if len(shape) > 1 else ():
            if _matches(pattern, name):
                return words
        if len(shape) < 2 or not self.format or (self.only and not re.search(self.only, name)):
            return ""
        return "" if any(_matches(pattern, name) for pattern in self.kept) else self.words


def _plain(name: str) -> str:
    return re.sub(r"^(model\.language_model|language_model\.model|language_model)\.", "model.", name)


def _matches(pattern: str, name: str) -> bool:
    pattern = _plain(pattern)
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    if "*" in pattern:
        return fnmatch.fnmatch(name, pattern)
    return name == pattern or name.startswith(f"{pattern}.") or name.endswith(f".{pattern}") or f".{pattern}." in name


def read_precision(config: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> Precision | None:
    """The precision that a `config.json`, or the `hf_quant_config.json` beside it, names; None for 16 bits.

    Raises `UserError` for a format that is not known.
    """
    text = config.get("text_config") or {}
    given = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    given = given or config.get("compression_config")
    if not given and beside:
        given = {**beside.get("quantization", beside), "quant_method": "modelopt"}
    if not given:
        return None
    if not isinstance(given, dict):
        raise UserError(f"quantization_config must be a JSON object, not {str(given)[:40]!r}")
    method = str(given.get("quant_method") or ("modelopt" if "quant_algo" in given else "")).lower().replace("-", "_")
    reader = _READERS.get(method)
    if reader is None:
        raise UserError(
            f"quantization_config: quant_method {method[:40]!r} is not known; known are {', '.join(_READERS)}. Delete "
            "quantization_config to plan for 16 bits"
        )
    found = reader(given)
    if layers := given.get("quantized_layers"):
        found = _mixed(found, layers, given)
    elif (config.get("expert_dtype") or given.get("expert_dtype")) == "fp4":
        found = replace(found, each=(("*.experts.*", "mxfp4-g32"), ("*.experts", "mxfp4-g32")))
    return found


def _mixed(found: Precision, layers: Any, given: Mapping[str, Any]) -> Precision:
    """Modules with a format each; others stay as `fp8` says, or in 16 bits."""
    if not isinstance(layers, dict):
        raise UserError("quantization_config: quantized_layers must be a JSON object")
    each: dict[str, str] = {}
    for name, own in layers.items():
        words = _modelopt(own if isinstance(own, dict) else {}).words
        each[re.sub(r"\.\d+\.(?=[a-z])", ".*.", re.sub(r"experts\.\d+", "experts", name.replace("ffn", "*")))] = words
        each[name] = words
    plain = sorted(n for n in each if "*" not in n)
    one = {each[n] for n in plain if "expert" in n}
    if not any("layers" in n and "model" in n for n in plain) and len(one) == 1:  # names of another software's modules
        return replace(found, each=(("*.experts.*", one.pop()),))
    rest = found if given.get("quant_method") == "fp8" else replace(found, format="")
    return replace(rest, each=tuple((n, each[n]) for n in plain))


def _names(given: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    found = [given.get(key) or () for key in keys]
    return tuple(str(n) for names in found for n in ([names] if isinstance(names, str) else names))


def _fp8(given: Mapping[str, Any]) -> Precision:
    block = given.get("weight_block_size")
    kept = _names(given, "modules_to_not_convert", "ignored_layers", "ignore") + _TABLES
    form = str(given.get("expert_dtype") or "fp8")
    return Precision(
        "mxfp4" if form == "fp4" and not block else "fp8", block=tuple(block) if block else None, kept=kept
    )


_TABLES = ("lm_head", "embed_tokens", "gate", "router")
"""Modules that quantizers leave as they are."""


def _awq(given: Mapping[str, Any]) -> Precision:
    bits = given.get("bits", given.get("w_bit", 4))
    group = given.get("group_size", given.get("q_group_size", 128))
    kept = _names(given, "modules_to_not_convert", "modules_in_block_to_not_quantize") + _TABLES
    zeros = bool(given.get("zero_point", not given.get("sym", True)))
    return Precision(_integer(bits), max(0, int(group)), zeros=zeros or given.get("quant_method") == "gptq", kept=kept)


def _integer(bits: Any) -> str:
    if f"int{bits}" not in FORMS:
        raise UserError(f"quantization_config: {str(bits)[:20]} bits are not known; known are 2, 3, 4 and 8")
    return f"int{bits}"


def _bitsandbytes(given: Mapping[str, Any]) -> Precision:
    kept = _names(given, "llm_int8_skip_modules") + _TABLES
    if given.get("load_in_8bit"):
        return Precision("int8", kept=kept)
    form = str(given.get("bnb_4bit_quant_type", "fp4"))
    # Scales in fp32, unless these are quantized, too (QLoRA, section 3, double quantization).
    scale = 0.0 if given.get("bnb_4bit_use_double_quant") else 4.0
    return Precision(form if form in ("nf4", "fp4") else "nf4", 64, scale=scale, kept=kept)


def _mxfp4(given: Mapping[str, Any]) -> Precision:
    return Precision("mxfp4", 32, kept=_names(given, "modules_to_not_convert"), only=r"experts")


def _compressed(given: Mapping[str, Any]) -> Precision:
    """compressed-tensors: the first group's weights stand for all."""
    groups = given.get("config_groups") or {}
    first = next((g for g in groups.values() if isinstance(g, dict) and g.get("weights")), None)
    if first is None:
        raise UserError("quantization_config: compressed-tensors without weights in config_groups")
    kept = (*_names(given, "ignore"), "embed_tokens", "gate", "router")
    cache = given.get("kv_cache_scheme") or {}
    return _weights(first["weights"], kept, "fp8" if cache.get("num_bits") == 8 else "")


def _weights(weights: Mapping[str, Any], kept: tuple[str, ...], cache: str = "") -> Precision:
    bits, group, block = weights.get("num_bits", 8), weights.get("group_size") or 0, weights.get("block_structure")
    if weights.get("type") == "float":
        form = "fp8" if bits == 8 else "nvfp4" if group in (0, 16) else "mxfp4"
    else:
        form = _integer(bits)
    block = tuple(block) if isinstance(block, list) and len(block) == 2 else None
    group = max(0, int(group)) or FORMS[form].group * (not form.startswith("int"))
    zeros = not weights.get("symmetric", True)
    return Precision(form, 0 if block else group, block, zeros=zeros, kept=kept, cache=cache)


def _modelopt(given: Mapping[str, Any]) -> Precision:
    if groups := given.get("config_groups"):
        found = _compressed({"config_groups": groups, "ignore": given.get("ignore")})
        if not given.get("quant_algo"):
            return found
    form = next((f for f in ("nvfp4", "mxfp4", "w4a16", "w4a8", "int4", "fp8", "int8")
                 if f in str(given.get("quant_algo")).lower()), None)  # fmt: skip
    form = {"w4a16": "int4", "w4a8": "int4"}.get(form or "", form)
    if str(given.get("quant_algo")).upper() == "MIXED_PRECISION":
        form = "nvfp4" if "nvfp4" in str(given).lower() else "fp8"
    if form is None:
        raise UserError(
            f"quant_algo {str(given.get('quant_algo'))[:40]!r} is not known; known are FP8, NVFP4, INT4_AWQ"
        )
    kept = (*_names(given, "exclude_modules", "ignore"), "embed_tokens", "gate", "router")
    group = given.get("group_size") or FORMS[form].group
    cache = (
        "fp8" if "FP8" in str(given.get("kv_cache_quant_algo") or given.get("kv_cache_scheme") or "").upper() else ""
    )
    return Precision(form, 0 if form in ("fp8", "int8") else int(group), kept=kept, cache=cache)


_READERS = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "finegrained_fp8": _fp8,
    "awq": _awq,
    "gptq": _awq,
    "auto_round": _awq,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
    "compressed_tensors": _compressed,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "modelopt_mixed": _modelopt,
}
