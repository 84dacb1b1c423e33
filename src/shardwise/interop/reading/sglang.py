"""SGLang's arguments. Names and defaults: sgl-project/sglang 0.5, server_args.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import UserError
from shardwise.interop.reading.arguments import dashed
from shardwise.interop.reading.fields import ConfigFields
from shardwise.interop.reading.known_keys import Known, known, rows
from shardwise.interop.reading.settings import Reading, ServerSettings
from shardwise.interop.reading.vllm import check_count
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
    if redundant := fields.integer("ep_num_redundant_experts", 0, 0):
        fields.fact(f"{redundant} redundant experts: counted where they fill up ranks that have one expert less")
    replicas = dp if fields.flag("enable_dp_attention") else 1
    if replicas > 1:
        tp, ep = attention(fields, tp, dp, ep)
    check_count(fields, tp * pp * dp, ranks)
    dtype = fields.word(_KEYS["precision"], "auto").lower()
    wide = dtype in ("float", "float32")
    model = fields.word("model_path") or None
    layout = Layout(dp=dp, tp=tp, pp=pp, ep=ep, precision="fp32" if wide else "bf16")
    return fields.reading("SGLang", layout, model=model, served=_served(fields, wide, replicas))


def attention(fields: ConfigFields, tp: int, dp: int, ep: int) -> tuple[int, int]:
    """(tensor-parallel ranks of attention, ranks that experts are over) where `dp` replicas of attention are inside the
    engine's `tp` ranks. Raises `UserError` where they do not divide them."""
    if tp % dp:
        raise UserError(f"attention data parallel: tp-size {tp} must be a multiple of dp-size {dp}")
    fields.fact(f"attention data parallel: {dp} replicas of attention, tp={tp // dp} each, share experts")
    if ep == 1:
        fields.fact(f"experts are split over all {tp} ranks: counted as whole experts over them, in as many bytes")
    return tp // dp, tp if ep == 1 else ep


def _served(fields: ConfigFields, wide: bool, replicas: int) -> ServerSettings:
    """replicas: of attention in the engine, among which it divides requests and tokens."""
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
        sequences=(fields.integer("max_running_requests") or 0) // replicas or None,
        tokens=(fields.integer("chunked_prefill_size") or 0) // replicas or None,
        memory=memory,
    )
