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
    modules: tuple[tuple[str, str], ...] = ()
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
        for pattern, words in self.modules if len(shape) > 1 else ():
            if _matches(pattern, name):
                return "" if pattern.startswith("re:") and self._keeps(name) else words
        if len(shape) < 2 or not self.format or (self.only and not re.search(self.only, name)):
            return ""
        return "" if self._keeps(name) else self.words

    def _keeps(self, name: str) -> bool:
        return any(_matches(pattern, name) for pattern in self.kept)


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
    reader = _READERS.get(method.rpartition("/")[2])
    if reader is None:
        what = "has codebooks, whose bytes are not counted" if method in _CODEBOOKS else "is not known"
        known = ", ".join(name for name in _READERS if name.partition("_")[0] not in {*_READERS} - {name})
        raise UserError(
            f"quantization_config: quant_method {method[:40]!r} {what}; known are {known}. Delete quantization_config "
            "to plan for 16 bits"
        )
    found = reader(given)
    if layers := given.get("quantized_layers"):
        found = _mixed(found, layers, given)
    elif (config.get("expert_dtype") or given.get("expert_dtype")) == "fp4":
        found = replace(found, modules=(("*.experts.*", "mxfp4-g32"), ("*.experts", "mxfp4-g32")))
    return found


def _mixed(found: Precision, layers: Any, given: Mapping[str, Any]) -> Precision:
    """Modules with a format each; others stay as `fp8` says, or in 16 bits."""
    if not isinstance(layers, dict):
        raise UserError("quantization_config: quantized_layers must be a JSON object")
    formats: dict[str, str] = {}
    for name, own in layers.items():
        words = _modelopt(own if isinstance(own, dict) else {}).words
        formats[re.sub(r"\.\d+\.(?=[a-z])", ".*.", re.sub(r"experts\.\d+", "experts", name.replace("ffn", "*")))] = (
            words
        )
        formats[name] = words
    plain = sorted(n for n in formats if "*" not in n)
    one = {formats[n] for n in plain if "expert" in n}
    if not any("layers" in n and "model" in n for n in plain) and len(one) == 1:  # names of another software's modules
        return replace(found, modules=(("*.experts.*", one.pop()),))
    rest = found if given.get("quant_method") == "fp8" else replace(found, format="")
    return replace(rest, modules=tuple((n, formats[n]) for n in plain))


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
    if "24" in str(given.get("checkpoint_format")):
        raise UserError("quantization_config: weights of 2:4 sparsity (marlin_24) are not counted")
    zeros = bool(given.get("zero_point", not given.get("sym", True)))
    zeros = zeros or str(given.get("quant_method")).startswith("gptq")
    # GPTQModel: patterns of modules with other bits; those after -: keep 16.
    patterns = {f"re:{name[2:] if name[:2] in ('+:', '-:') else name}": 16 if name.startswith("-:") else table
                for name, table in _table(given, "dynamic").items()}  # fmt: skip
    usual = Precision(_integer(bits), max(0, int(group)), zeros=zeros, kept=kept)
    return _with_bits(usual, {**patterns, **_table(given, "extra_config")})


def _with_bits(usual: Precision, modules: Mapping[str, Any]) -> Precision:
    """The precision where modules, by name or pattern, have other bits: a number, or a table with it."""
    formats, kept = [], []
    for name, value in modules.items():
        bits = value.get("bits", usual.format[3:]) if isinstance(value, dict) else value
        if isinstance(bits, int) and bits >= 16:
            kept.append(name)
        else:
            formats.append((name, replace(usual, format=_integer(bits)).words))
    return replace(usual, modules=tuple(formats), kept=(*kept, *usual.kept))


def _auto_round(given: Mapping[str, Any]) -> Precision:
    """AutoRound: integers as GPTQ's, or the groups of MXFP4 and NVFP4."""
    kind, form = (
        given.get("data_type", "int"),
        {"mx_fp": "mxfp4", "nv_fp": "nvfp4"}.get(str(given.get("data_type"))[:5]),
    )
    if kind != "int" and (form is None or given.get("bits", 4) != 4 or given.get("extra_config")):
        raise UserError(
            f"quantization_config: auto-round's {str(kind)[:20]!r} is counted with 4 bits in all modules alone"
        )
    return Precision(form, FORMS[form].group, kept=_awq(given).kept) if form else _awq(given)


def _integer(bits: Any) -> str:
    if f"int{bits}" not in FORMS:
        raise UserError(f"quantization_config: {str(bits)[:20]} bits are not known; known are 2, 3, 4 and 8")
    return f"int{bits}"


def _bitsandbytes(given: Mapping[str, Any]) -> Precision:
    kept = _names(given, "llm_int8_skip_modules") + _TABLES
    if given.get("load_in_8bit") or given.get("_load_in_8bit"):
        return Precision("int8", kept=kept)
    if not (given.get("load_in_4bit") or given.get("_load_in_4bit")):
        raise UserError("quantization_config: bitsandbytes with neither load_in_8bit nor load_in_4bit")
    form = str(given.get("bnb_4bit_quant_type", "fp4"))
    # Scales in fp32, unless these are quantized, too (QLoRA, section 3, double quantization).
    scale = 0.0 if given.get("bnb_4bit_use_double_quant") else 4.0
    return Precision(form if form in ("nf4", "fp4") else "nf4", 64, scale=scale, kept=kept)


def _compressed(given: Mapping[str, Any]) -> Precision:
    """compressed-tensors: groups of weights, for classes of modules or for patterns of their names."""
    kept = (*_names(given, "ignore"), "embed_tokens", "gate", "router")
    cache = "fp8" if (given.get("kv_cache_scheme") or {}).get("num_bits") == 8 else ""
    groups = [group for group in _table(given, "config_groups").values() if isinstance(group, dict)]
    pairs = [(_names(group, "targets"), _weights(group["weights"], kept, cache)) for group in groups
             if group.get("weights")]  # fmt: skip
    if not pairs:
        raise UserError("quantization_config: compressed-tensors without weights in config_groups")
    usual = next((one for targets, one in pairs if "Linear" in targets), replace(pairs[0][1], format=""))
    if len({one.words for _, one in pairs}) == 1:
        return pairs[0][1]
    return replace(usual, modules=tuple((name, one.words) for targets, one in pairs for name in targets))


def _weights(weights: Mapping[str, Any], kept: tuple[str, ...], cache: str = "") -> Precision:
    bits, group, block = weights.get("num_bits", 8), weights.get("group_size") or 0, weights.get("block_structure")
    if weights.get("type") == "float":
        if bits not in (4, 8):
            raise UserError(f"quantization_config: floats of {str(bits)[:20]} bits are not known; known are 4 and 8")
        narrow, wide = "nvfp4" if group in (0, 16) else "mxfp4", "mxfp8" if group == 32 else "fp8"
        form = narrow if bits == 4 else wide
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
    form = next((f for f in ("nvfp4", "mxfp4", "mxfp8", "w4a16", "w4a8", "int4", "fp8", "int8")
                 if f in str(given.get("quant_algo")).lower()), None)  # fmt: skip
    form = {"w4a16": "int4", "w4a8": "int4"}.get(form or "", form)
    if str(given.get("quant_algo")).upper() == "MIXED_PRECISION" and given.get("quantized_layers"):
        form = "fp8"  # of what these do not name, where anything is
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


def _hqq(given: Mapping[str, Any]) -> Precision:
    """HQQ: scale and zero point in 16 bits. Settings by module are not read."""
    inner = _table(_table(given, "quant_config") or given, "weight_quant_params")
    if not inner:
        raise UserError("quantization_config: hqq without weight_quant_params, which say bits and groups")
    kept = _names(given, "skip_modules") + _TABLES
    return Precision(_integer(inner.get("nbits", 4)), int(inner.get("group_size") or 0), scale=4.0, kept=kept)


def _torchao(given: Mapping[str, Any]) -> Precision:
    """torchao: its older names, or the class of a configuration with its fields."""
    kind = given.get("quant_type")
    kind = kind.get("default") if isinstance(kind, dict) else kind
    fields = (kind.get("_data") if isinstance(kind, dict) else given.get("quant_type_kwargs")) or {}
    name = str(kind.get("_type") if isinstance(kind, dict) else kind)
    form = re.search(r"(float8|int4|int8)_?weight", name, re.IGNORECASE)
    if form is None:
        raise UserError(f"quantization_config: torchao's {name[:60]} is not counted; int4, int8 and float8 weights are")
    kept = _names(given, "modules_to_not_convert") + _TABLES
    if form[1].lower() == "int4":
        return Precision("int4", int(fields.get("group_size") or 128), scale=4.0, kept=kept)
    return Precision("fp8" if form[1].lower() == "float8" else "int8", kept=kept)


def _quark(given: Mapping[str, Any]) -> Precision:
    """AMD Quark: one format of all weights."""
    weights = _table(given, "global_quant_config").get("weight")
    weights = weights[0] if isinstance(weights, list) and weights else weights
    first: Mapping[str, Any] = weights if isinstance(weights, dict) else {}
    kind = str(first.get("dtype")).partition("_")[0]
    form = {"fp8": "fp8", "int8": "int8", "int4": "int4", "uint4": "int4", "fp4": "mxfp4"}.get(kind)
    if form is None or given.get("layer_quant_config"):
        raise UserError("quantization_config: quark is counted with one format of fp8, int8, int4 or fp4 in "
                        "global_quant_config, without layer_quant_config")  # fmt: skip
    group = int(first.get("group_size") or 0) if first.get("qscheme") == "per_group" else 0
    cache = "fp8" if "fp8" in str(given.get("kv_cache_quant_config") or "") else ""
    zeros = not first.get("symmetric", True)
    return Precision(form, group or FORMS[form].group * (form == "mxfp4"), zeros=zeros, cache=cache,
                     kept=(*_names(given, "exclude"), "embed_tokens", "gate", "router"))  # fmt: skip


def _simple(given: Mapping[str, Any]) -> Precision:
    """Methods with a format in one word, or in bits: quanto, EETQ, FP-Quant, HIGGS, BitNet."""
    word = given.get("weights") or given.get("forward_dtype") or f"int{given.get('bits', 2)}"
    form = str(word).lower().replace("float8", "fp8")
    if form not in FORMS:
        raise UserError(f"quantization_config: weights of {form[:20]!r} are not known; known are {', '.join(FORMS)}")
    group = FORMS[form].group if "4" in form else 0
    kept = _names(given, "modules_to_not_convert") + _TABLES
    return Precision(form, int(given.get("group_size") or group), kept=kept)


def _table(given: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    inner = given.get(key)
    return inner if isinstance(inner, dict) else {}


_READERS = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "finegrained_fp8": _fp8,
    "awq": _awq,
    "awq_marlin": _awq,
    "gptq": _awq,
    "gptq_marlin": _awq,
    "auto_round": _auto_round,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": lambda given: Precision("mxfp4", 32, kept=_names(given, "modules_to_not_convert"), only="experts"),
    "compressed_tensors": _compressed,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "modelopt_mixed": _modelopt,
    "quark": _quark,
    "torchao": _torchao,
    "hqq": _hqq,
    "higgs": _simple,
    "eetq": _simple,
    "quanto": _simple,
    "fp_quant": _simple,
    "bitnet": _simple,
}
_CODEBOOKS = ("aqlm", "vptq", "spqr", "quip", "quip_sharp", "quip#")

_IN_NAMES = re.compile(
    r"(?<![a-z])(?:fp|int|nf|w|mxfp|nvfp)-?(?P<bits>[48])(?!\d)|(?<!\d)(?P<apart>[48])-?bits?(?![a-z])"
    r"|(?<![a-z])(?:g?awq|gptq|gguf|hqq|aqlm|vptq|exl[23]|bnb|quanti[sz]ed|autoround|quark)(?![a-z])",
    re.IGNORECASE,
)


def bits_in_name(name: str) -> int | None:
    """Bits of weights that a model's name states; 0 where it states a quantizer alone, None where it states nothing."""
    matches = _IN_NAMES.finditer(name.rpartition("/")[2])
    return max((int(match["bits"] or match["apart"] or 0) for match in matches), default=None)
