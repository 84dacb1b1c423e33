"""SGLang's arguments. Names and defaults: sgl-project/sglang 0.5, server_args.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import UserError
from shardwise.interop.reading.arguments import dashed
from shardwise.interop.reading.fields import ConfigFields
from shardwise.interop.reading.known_keys import Known, known, rows
from shardwise.interop.reading.settings import Reading, ServerSettings
from shardwise.interop.reading.vllm import attention_dp, check_count
from shardwise.layout import Layout

_KEYS = rows("sglang", "layout")


def read(data: Mapping[str, Any], ranks: int | None) -> Reading:
    """Layout of the arguments. ranks: of the cluster.

    Raises `UserError` where there are fewer than the degrees need, and for values that SGLang rejects.
    """
    alone, harmless = known("sglang", "alone"), known("sglang")
    short = {name.lstrip("-").replace("-", "_"): key for name, key in rows("sglang", "short").items()}
    fields = ConfigFields(
        {short.get(key, key): value for key, value in data.items()}, Known(alone.keys | harmless.keys, ()), shown=dashed
    )
    tp, pp, dp, ep = (fields.integer(_KEYS[key], 1) for key in ("tp", "pp", "dp", "ep"))
    if fields.flag("enable_ep_moe"):
        ep = tp
    shared = fields.flag("enable_dp_attention")
    check_count(fields, tp * pp * (1 if shared else dp), ranks)
    dtype = fields.word(_KEYS["precision"], "auto").lower()
    wide = dtype in ("float", "float32")
    model = fields.word("model_path") or None
    precision = "fp32" if wide else "bf16"
    layout = Layout(dp=dp, tp=tp, pp=pp, ep=ep, precision=precision)
    if shared:
        layout = attention_dp(fields, tp, dp, pp, ep, precision)
    return fields.reading("SGLang", layout, model=model, served=_served(fields, wide))


def _served(fields: ConfigFields, wide: bool) -> ServerSettings:
    memory = fields.number("mem_fraction_static", 0.9)
    if not 0 < memory <= 1:
        raise UserError(f"--mem-fraction-static must be between 0 and 1, not {memory:g}")
    quantization = fields.word("quantization").lower()
    weights = rows("sglang", "weights").get(quantization, "bfloat16")
    if quantization and quantization not in rows("sglang", "weights"):
        fields.fact(f"--quantization {quantization}: the width of its weights is not known here; counted as 16 bits")
    if fields.given("speculative_algorithm"):
        fields.fact("speculative decoding: a draft's weights and cache are not counted")
    cache = fields.word("kv_cache_dtype", "auto").lower()
    return ServerSettings(
        weights="float32" if wide else weights,
        cache="float8_e4m3fn" if cache.startswith("fp8") else "bfloat16",
        length=fields.integer("context_length") or None,
        sequences=fields.integer("max_running_requests") or None,
        tokens=fields.integer("chunked_prefill_size") or None,
        memory=memory,
    )
