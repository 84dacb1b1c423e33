"""Memory of other engines beside weights and cache, and the share of a device that they fill."""

import math

from shardwise.cluster import Cluster, Device
from shardwise.layout import Layout
from shardwise.layout.experts import experts_across
from shardwise.layout.placement import cache_shape, width_held
from shardwise.model import ModelConfig
from shardwise.predict.time.profiles import EngineProfile
from shardwise.report.step_report import DTYPE_BYTES

SAMPLED_BYTES = 38
"""Bytes per sequence and entry of the vocabulary when tokens are sorted to choose among them: logits in 16 and 32 bits,
sorted logits, their indexes in 64 bits, and the sort's own indexes and second copies of both (vllm-project/vllm 0.9,
v1/sample/ops/topk_topp_sampler.py). Peaks that servers print, with 256 sequences: 38.6 of Qwen3-8B, 39 to 41 of
Llama-3-8B."""
LARGE_MEMORY = 70 * 2**30
"""Bytes of a device from which on `large_sequences` and `most_tokens` hold, but for the A100 (vllm-project/vllm 0.11,
engine/arg_utils.py)."""

STATIC_SIZES = (
    (20, 2048, 8, 8),
    (35, 2048, 24, 80),
    (60, 4096, 32, 160),
    (160, 8192, 256, 512),
    (math.inf, 16384, 512, 512),
)
"""(GiB of a device below which a row holds, tokens of a pass, sequences of graphs with tp below 4, and from 4 on):
SGLang's defaults (sgl-project/sglang 0.5, server_args.py, _handle_gpu_memory_settings)."""


def engine_workspace(
    model: ModelConfig, layout: Layout, head: bool, engine: EngineProfile, tokens: int, sequences: int
) -> int:
    """Bytes beside weights and cache on a rank, as an engine reserves or measures them when it starts. head: whether
    the rank has the output head; tokens, sequences: of its largest pass."""
    if engine.reserve_bytes:
        return int(engine.reserve_bytes)
    several = layout.tp * layout.pp > 1
    if engine.static_share:
        return int(engine.context_bytes[several] * engine.cache_share)
    return int(engine.context_bytes[several] + widest_pass(model, layout, head, tokens, sequences))


def widest_pass(model: ModelConfig, layout: Layout, head: bool, tokens: int, sequences: int) -> float:
    """Bytes of the widest moment of a pass: residual stream, its normed copy and the block's output, with what a
    feed-forward part or attention opens up to, and of experts a row for each pair of a token and an expert; or the
    choice of the next tokens."""
    tp, width = layout.tp, DTYPE_BYTES[layout.dtype]
    gates = 3 if model.gated else 2
    opened: float = tokens * gates * width_held(model.ffn, tp) * width
    if e := model.experts:
        rows = tokens * e.active
        dense = max(e.shared * e.ffn, model.ffn if e.dense_layers else 0)
        opened = max(
            rows * (model.hidden + gates * width_held(e.ffn, layout.expert_tp)) * width,
            tokens * gates * width_held(dense, tp) * width,
        )
    shape, heads = cache_shape(model, tp), max(1, model.heads // tp)
    attended = tokens * (heads * (shape.width + shape.values) + shape.numbers) * width
    block = tokens * 3 * model.hidden * width + max(opened, attended)
    chosen = sequences * model.vocab * SAMPLED_BYTES if head else 0
    return max(block, chosen)


def usual_sequences(engine: EngineProfile, device: Device | None) -> int:
    """The default for the most sequences of one pass."""
    return engine.large_sequences if engine.large_sequences and _is_large(device) else engine.most_sequences


def usual_tokens(engine: EngineProfile, device: Device | None) -> int:
    """A server's default for the most tokens of one pass."""
    small = engine.small_tokens and device is not None and not _is_large(device)
    return engine.small_tokens if small else engine.most_tokens


def _is_large(device: Device | None) -> bool:
    return device is not None and (device.memory_bytes or 0) >= LARGE_MEMORY and "A100" not in device.name


def usual_share(engine: EngineProfile, device: Device | None, layout: Layout, tokens: int | None = None) -> float:
    """The default for the share of a device's memory that an engine fills. tokens: of its largest pass, where given."""
    if not engine.static_share or device is None or not device.memory_bytes:
        return engine.cache_share
    mib = device.memory_bytes / 2**20
    inside = layout.dp if experts_across(layout) > 1 else 1
    ranks = layout.tp * layout.pp * inside
    _, usual, few, many = next(row for row in STATIC_SIZES if mib < row[0] * 1024)
    graphs = few if layout.tp * inside < 4 else many
    reserved = 512 + max(tokens * inside if tokens else usual, 2048) * 1.5 + graphs * 2 + ranks * 128
    if inside > 1:
        reserved += graphs * inside * (4.5 if graphs > 300 else 3)
    return round(1 - max(reserved, 10 * 1024 * (mib > 60 * 1024)) / mib, 3)


def expert_padding(engine: EngineProfile, device: Device | None) -> tuple[int, int]:
    """Multiples of (hidden size, width) to which an engine pads experts in MXFP4 on a device."""
    if not engine.padded_experts or device is None:
        return 1, 1
    first = 4 if "float4" in device.peak_flops else 2 * device.name.startswith(("H", "GH"))
    hidden, width = engine.padded_experts[first : first + 2]
    return hidden, width


def engine_room(cluster: Cluster, engine: EngineProfile) -> float | None:
    """Bytes of a device that an engine fills; None where its memory is not known."""
    memory = cluster.memory_per_device
    return None if memory is None else memory * engine.cache_share
