"""vLLM's arguments, or the YAML that its --config takes. Names and defaults: vllm-project/vllm, engine/arg_utils.py,
config/.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import UserError
from shardwise.interop.reading.arguments import dashed
from shardwise.interop.reading.fields import ConfigFields
from shardwise.interop.reading.known_keys import Known, known, rows
from shardwise.interop.reading.settings import Reading, ServerSettings
from shardwise.layout import Layout


def read(data: Mapping[str, Any], ranks: int | None) -> Reading:
    """Layout of the arguments. ranks: of the cluster; fewer than the degrees need are refused with a `UserError`, as
    are values that vLLM refuses."""
    flags = {key.replace("-", "_"): value for key, value in data.items()}
    alone, harmless = known("vllm", "alone"), known("vllm")
    fields = ConfigFields(flags, Known(alone.keys | harmless.keys, ()), shown=dashed)
    layout = _layout(fields, ranks)
    served = _served(fields)
    return fields.reading("vLLM", layout, model=fields.word("model") or None, served=served)


def _layout(fields: ConfigFields, ranks: int | None) -> Layout:
    names = rows("vllm", "layout")
    tp, pp, dp = (fields.integer(names[key], 1) for key in ("tp", "pp", "dp"))
    context = fields.integer("decode_context_parallel_size", 1)
    if tp % context:
        raise UserError(f"--decode-context-parallel-size {context} must divide --tensor-parallel-size {tp}")
    if context > 1:
        fields.fact(
            f"the cache is cut by tokens over {context} of the tensor-parallel ranks; it is counted without that"
        )
    experts = fields.flag(names["ep"])
    check_count(fields, tp * pp * dp, ranks)
    if dp > 1:
        fields.fact(f"{dp} engines, each with its own requests and cache")
    dtype = fields.word(names["precision"], "auto").lower()
    if dtype in ("half", "float16"):
        fields.fact("float16: 2 bytes as bfloat16")
    if pp > 1:
        fields.note("pipeline stages make a single request no faster: they hold a larger model, for more hops a token")
    precision = "fp32" if dtype in ("float", "float32") else "bf16"
    return Layout(dp=dp, tp=tp, pp=pp, ep=tp * dp if experts else 1, precision=precision)


def check_count(fields: ConfigFields, used: int, ranks: int | None) -> None:
    """Note that GPUs are left over. Raises `UserError` where there are fewer than the degrees need."""
    if ranks is not None and used > ranks:
        raise UserError(f"tensor x pipeline x data parallel = {used} GPUs, but there are {ranks}")
    if ranks is not None and used < ranks:
        fields.note(f"{used} of the {ranks} GPUs are used")


def _served(fields: ConfigFields) -> ServerSettings:
    memory = fields.number("gpu_memory_utilization", 0.9)
    if not 0 < memory <= 1:
        raise UserError(f"--gpu-memory-utilization must lie between 0 and 1, not {memory:g}")
    quantization = fields.word("quantization").lower()
    weights = rows("vllm", "weights").get(quantization, "bfloat16")
    if quantization and quantization not in rows("vllm", "weights"):
        fields.fact(f"--quantization {quantization}: the width of its weights is not known here; counted as 16 bits")
    cache = fields.word("kv_cache_dtype", "auto").lower()
    if fields.given("num_gpu_blocks_override") or fields.given("kv_cache_memory_bytes"):
        fields.fact("the cache has a size of its own (--num-gpu-blocks-override, --kv-cache-memory-bytes)")
    if (offloaded := fields.number("cpu_offload_gb", 0.0)) > 0:
        fields.fact(f"{offloaded:g} GiB of weights a GPU stay in the CPU's memory and are read over PCIe in every step")
    if fields.given("speculative_config"):
        fields.fact("speculative decoding: a draft's weights and cache are not counted")
    if fields.given("max_loras") or fields.given("max_lora_rank"):
        fields.fact("LoRA adapters are not counted")
    if fields.flag("enforce_eager"):
        fields.note("--enforce-eager: no CUDA graphs, so that the host's launches count in every decode step")
    return ServerSettings(
        weights="float32" if fields.word("dtype", "auto").lower() in ("float", "float32") else weights,
        cache="float8_e4m3fn" if cache.startswith("fp8") else "bfloat16",
        length=_size(fields, "max_model_len") or None,
        sequences=fields.integer("max_num_seqs") or None,
        tokens=_size(fields, "max_num_batched_tokens") or None,
        memory=memory,
    )


def _size(fields: ConfigFields, key: str) -> int:
    """A number of tokens, which vLLM also takes as 32k (1,000s) or 32K (1,024s). Raises `UserError` as `integer`."""
    text = fields.word(key)
    scale = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}.get(text[-1:])
    if scale and text[:-1].replace(".", "", 1).isdigit():
        return round(float(text[:-1]) * scale)
    return fields.integer(key)
