"""vLLM's arguments, or the YAML that its --config takes. Names and defaults: vllm-project/vllm, engine/arg_utils.py,
config/.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import UserError
from shardwise.interop.reading.arguments import dashed, parse
from shardwise.interop.reading.fields import ConfigFields
from shardwise.interop.reading.known_keys import Known, known
from shardwise.interop.reading.settings import Reading, ServerSettings
from shardwise.layout import Layout

SHORT = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-dcp": "decode_context_parallel_size",
    "-dpl": "data_parallel_size_local",
    "-dpr": "data_parallel_start_rank",
    "-dpn": "data_parallel_rank",
    "-dpa": "data_parallel_address",
    "-dpp": "data_parallel_rpc_port",
    "-dpb": "data_parallel_backend",
    "-q": "quantization",
    "-O": "compilation_config",
}
_WEIGHTS = {
    "fp8": "float8_e4m3fn",
    "fbgemm_fp8": "float8_e4m3fn",
    "ptpc_fp8": "float8_e4m3fn",
    "experts_int8": "int8",
    "awq": "int4",
    "awq_marlin": "int4",
    "gptq": "int4",
    "gptq_marlin": "int4",
    "bitsandbytes": "int4",
    "modelopt_fp4": "float4",
    "mxfp4": "float4",
}
"""Quantisations -> torch's name of what is stored; others are said, and count as 16 bits."""


def read(data: Mapping[str, Any] | list[str], ranks: int | None) -> Reading:
    """What the arguments say. ranks: of the cluster; fewer than the degrees need are refused with a `UserError`, as are
    values that vLLM refuses."""
    model: str | None = None
    if isinstance(data, list):
        arguments = parse(data, SHORT, known("vllm", "alone").keys)
        flags: Mapping[str, Any] = arguments.flags
        words = [word for word in arguments.words if word not in ("vllm", "serve", "python", "python3", "-m")]
        model = next((word for word in words if not word.startswith(("-", "vllm."))), None)
    else:
        flags = {key.replace("-", "_"): value for key, value in data.items()}
    alone, harmless = known("vllm", "alone"), known("vllm")
    fields = ConfigFields(flags, Known(alone.keys | harmless.keys, ()), shown=dashed)
    facts: list[str] = []
    notes: list[str] = []
    layout = _layout(fields, ranks, facts, notes)
    served = _served(fields, facts, notes)
    model = fields.word("model", model or "") or None
    ignored, unknown = fields.left()
    return Reading(
        "vLLM",
        layout,
        model=model,
        served=served,
        facts=tuple(facts),
        notes=tuple(notes),
        ignored=ignored,
        unknown=unknown,
    )


def _layout(fields: ConfigFields, ranks: int | None, facts: list[str], notes: list[str]) -> Layout:
    tp, pp, dp = (fields.integer(f"{name}_parallel_size", 1) for name in ("tensor", "pipeline", "data"))
    context = fields.integer("decode_context_parallel_size", 1)
    if tp % context:
        raise UserError(f"--decode-context-parallel-size {context} must divide --tensor-parallel-size {tp}")
    if context > 1:
        facts.append(
            f"the cache is cut by tokens over {context} of the tensor-parallel ranks; it is counted without that"
        )
    experts = fields.flag("enable_expert_parallel")
    if ranks is not None and tp * pp * dp > ranks:
        raise UserError(f"tensor x pipeline x data parallel = {tp * pp * dp} GPUs, but there are {ranks}")
    if ranks is not None and tp * pp * dp < ranks:
        notes.append(f"{tp * pp * dp} of the {ranks} GPUs are used")
    if dp > 1:
        facts.append(f"{dp} engines, each with its own requests and cache")
    dtype = fields.word("dtype", "auto").lower()
    if dtype in ("half", "float16"):
        facts.append("float16: 2 bytes as bfloat16")
    if pp > 1:
        notes.append("pipeline stages make a single request no faster: they hold a larger model, for more hops a token")
    precision = "fp32" if dtype in ("float", "float32") else "bf16"
    return Layout(dp=dp, tp=tp, pp=pp, ep=tp * dp if experts else 1, precision=precision)


def _served(fields: ConfigFields, facts: list[str], notes: list[str]) -> ServerSettings:
    memory = fields.number("gpu_memory_utilization", 0.9)
    if not 0 < memory <= 1:
        raise UserError(f"--gpu-memory-utilization must lie between 0 and 1, not {memory:g}")
    quantisation = fields.word("quantization").lower()
    weights = _WEIGHTS.get(quantisation, "bfloat16")
    if quantisation and quantisation not in _WEIGHTS:
        facts.append(f"--quantization {quantisation}: the width of its weights is not known here; counted as 16 bits")
    cache = fields.word("kv_cache_dtype", "auto").lower()
    if fields.given("num_gpu_blocks_override") or fields.given("kv_cache_memory_bytes"):
        facts.append("the cache has a size of its own (--num-gpu-blocks-override, --kv-cache-memory-bytes)")
    if (offloaded := fields.number("cpu_offload_gb", 0.0)) > 0:
        facts.append(
            f"{offloaded:g} GiB of weights a GPU stay in the CPU's memory and are read over PCIe in every step"
        )
    if fields.given("speculative_config"):
        facts.append("speculative decoding: a draft's weights and cache are not counted")
    if fields.given("max_loras") or fields.given("max_lora_rank"):
        facts.append("LoRA adapters are not counted")
    if fields.flag("enforce_eager"):
        notes.append("--enforce-eager: no CUDA graphs, so that the host's launches count in every decode step")
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
