"""A row of a table in our terms: model, cluster, split, engine profile.

Missing keys are unknown: what is assumed for them is added to `assumed`, a sentence each. All functions raise
`UserError` with the reason where a row cannot be understood.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.cluster import Cluster, Link, catalog
from shardwise.errors import UserError
from shardwise.model import ModelConfig
from shardwise.model.config import Experts, LatentAttention
from shardwise.predict.time.constants import known_devices
from shardwise.predict.time.step import StepShape

Row = Mapping[str, Any]

DEVICES = {
    "A100-SXM": "A100-80GB-SXM",
    "A100-80GB-SXM (Selene)": "A100-80GB-SXM",
    "A100-80GB 330W hybrid cube mesh": "A100-80GB-SXM",
    "A100-80GB": "A100-80GB-SXM",
    "A100-40GB": "A100-40GB-SXM",
    "DGX-H100": "H100-80GB-SXM",
    "DGX-B200": "B200",
    "DGX-B300": "B300",
    "DGX-GB200": "GB200-NVL72",
    "DGX-GB300": "GB300-NVL72",
}
"""A device's name in tables -> its name in the catalog, where they differ."""

NETWORKS = {
    "Omni-Path 4x100Gb/s": (4 * 100e9 / 8 / 8, "Omni-Path, 4 x 100 Gb/s a node of 8 GPUs, from the row"),
    "8x200Gb/s HDR": (25e9, "InfiniBand HDR, 8 x 200 Gb/s a node of 8 GPUs, from the row"),
    "1600 Gb/s": (25e9, "RoCE, 1600 Gb/s a node of 8 GPUs, from the row"),
    "400 Gb/s RDMA per GPU": (50e9, "RDMA, 400 Gb/s a GPU, from the row"),
}
"""Start of what tables say about the network -> bytes/s a GPU, and the words for it."""

PRECISIONS = {
    "MXFP8": "float8_e4m3fn",
    "FP8": "float8_e4m3fn",
    "amp_fp8": "float8_e4m3fn",
    "NVFP4": "float4",
    "FP4": "float4",
    "int8": "int8",
    "int4-g32": "int4",
}
"""Precisions of matrix products that are not 16 bits."""


def whole(row: Row, key: str, default: int | None = None) -> int:
    """A positive integer of the row, or the default where it says nothing; 0 only where 0 is the default. Raises
    `UserError`."""
    value = row.get(key)
    if value is None:
        if default is None:
            raise UserError(f"{key} is not stated")
        return default
    if type(value) is not int or value < (0 if default == 0 else 1):
        raise UserError(f"{key} must be a positive integer, not {value!r}")
    return value


def source(row: Row) -> str:
    """Source of the row, in lower case."""
    return str(row.get("source", "")).lower()


def engine_of(row: Row, assumed: list[str]) -> str:
    """The profile of the software that a row's key `engine` or, without it, its own words name."""
    if row.get("engine") is not None:
        return str(row["engine"])
    words = " ".join(str(row.get(key, "")) for key in ("source", "notes", "schedule", "techniques")).lower()
    if "megatron-deepspeed" in words:
        wide = row.get("precision") == "bf16" and row.get("zero_stage")
        return "megatron-deepspeed-bf16" if wide else "megatron-deepspeed-2022"
    if "korthikanti" in words:
        return "megatron-lm-2022"
    if "llm-foundry" in words or "fsdp" in words:
        return "llm-foundry-pure" if "mode pure" in words else "llm-foundry"
    if "megatron-bridge" in words or "nemo" in words or "megatron core" in words:
        return "megatron-bridge"
    assumed.append("software not named: priced as Megatron-LM of 2022")
    return "megatron-lm-2022"


def split_of(row: Row, model: ModelConfig, assumed: list[str]) -> StepShape:
    """The degrees and counts of a training row. Raises `UserError` where they contradict each other."""
    tp, pp, cp, gpus = whole(row, "tp"), whole(row, "pp"), whole(row, "cp", 1), whole(row, "gpus")
    dp = whole(row, "dp", max(gpus // (tp * pp * cp), 1))
    micro, batch = whole(row, "mbs"), whole(row, "gbs")
    if tp * pp * cp * dp != gpus:
        raise UserError(f"tp x pp x cp x dp = {tp * pp * cp * dp}, but there are {gpus} GPUs")
    if batch % (dp * micro):
        raise UserError(f"a batch of {batch} does not divide among dp x micro = {dp} x {micro}")
    recompute = _recompute(row, assumed)
    zero = stage_of(row, assumed)
    sp = "sequence parallel" in str(row.get("techniques", "")) or ("megatron-bridge" in source(row) and tp > 1)
    return StepShape(
        seq=whole(row, "seq"),
        micro=micro,
        micro_batches=batch // (dp * micro),
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        ep=whole(row, "ep", 1) if model.experts else 1,
        virtual=_virtual(row, model, pp, assumed),
        shard=whole(row, "sharding_group", dp * cp) if zero else 1,
        zero=zero if dp * cp > 1 else 0,
        sp=sp,
        recompute=recompute,
        dtype=_dtype(row),
    )


def _recompute(row: Row, assumed: list[str]) -> str:
    text = str(row.get("recompute") or "").split(" ")[0]
    if text not in ("none", "selective", "full"):
        assumed.append("recompute not stated: none")
        return "none"
    return text


def stage_of(row: Row, assumed: list[str]) -> int:
    """The ZeRO stage of a training row, whether there are ranks to shard over or not."""
    sharding = {"yes": 3, "FULL_SHARD": 3, "SHARD_GRAD_OP": 2}.get(str(row.get("fsdp")))
    if sharding:
        return sharding
    if row.get("zero_stage") is not None:
        return min(whole(row, "zero_stage", 0), 3)
    zero = 1 if "megatron-bridge" in source(row) else 0
    assumed.append(f"ZeRO stage not stated: {zero}")
    return zero


def _virtual(row: Row, model: ModelConfig, pp: int, assumed: list[str]) -> int:
    if pp == 1 or row.get("vpp") or "megatron-bridge" not in source(row):
        return whole(row, "vpp", 1) if pp > 1 else 1
    # Its recipes interleave wherever layers divide, down to four layers a chunk (docs/performance-guide.md).
    item = model.layers // pp if model.layers % pp == 0 else 0
    virtual = max((n for n in range(1, item // 4 + 1) if item % n == 0), default=1)
    assumed.append(f"virtual stages not stated: {virtual}")
    return virtual


def _dtype(row: Row) -> str:
    precision = str(row.get("precision") or "").split()
    if not precision:
        return "float8_e4m3fn" if "megatron-bridge" in source(row) else "bfloat16"
    head = precision[0].split("-")[0] if precision[0].startswith("FP8") else precision[0]
    return PRECISIONS.get(head, "bfloat16")


def model_of(row: Row, assumed: list[str]) -> ModelConfig:
    """The model. Which norms, biases and positions it has follows from the software and from `gated_ffn`: gated models
    are Llama-like. Raises `UserError` for widths that contradict each other."""
    hidden, heads = whole(row, "hidden"), row.get("heads")
    if heads is None:
        # What they change is the attention's efficiency alone.
        heads = next((n for n in (64, 96, 128, 80, 32) if hidden % n == 0), 1)
        assumed.append(f"heads not stated: {heads}")
    else:
        heads = whole(row, "heads")
    foundry, bridge = "llm-foundry" in source(row), "megatron-bridge" in source(row)
    gated = bool(row.get("gated_ffn"))
    experts = None
    if row.get("moe_experts"):
        experts = Experts(
            whole(row, "moe_experts"),
            whole(row, "moe_topk"),
            whole(row, "expert_ffn"),
            whole(row, "shared_experts", 0),
            whole(row, "dense_layers", 0),
        )
    latent = LatentAttention(1536, 512, 128, 64, 128) if row.get("attention") == "mla" else None
    name = str(row.get("model"))
    return ModelConfig(
        name=name,
        vocab=whole(row, "vocab"),
        hidden=hidden,
        layers=whole(row, "layers"),
        heads=heads,
        ffn=whole(row, "ffn") if row.get("ffn") else whole(row, "expert_ffn"),
        max_positions=whole(row, "seq", 2048),
        kv_heads=whole(row, "kv_heads", heads),
        head_dim=latent.head_dim if latent else whole(row, "head_dim", max(hidden // heads, 1)),
        norm="rmsnorm" if gated else "layernorm",
        positions="rope" if gated else "learned",
        activation="silu" if gated else "gelu",
        gated=gated,
        bias="all" if name.startswith("GPT OSS") else "none" if gated or foundry else "all",
        qk_norm=name.startswith("Qwen3"),
        tied=not gated and not bridge,
        experts=experts,
        latent_attention=latent,
    )


def cluster_of(row: Row, assumed: list[str]) -> Cluster:
    """The devices, and the network that the row names, else the usual one. Raises `UserError` for devices that are
    not in the catalog, or have no constants."""
    gpu = str(row.get("gpu"))
    name = DEVICES.get(gpu, gpu)
    try:
        entry = catalog.lookup(name)
    except UserError:
        raise UserError(f"device {gpu} is not in the catalog") from None
    if entry.device.name not in known_devices():
        raise UserError(f"device {gpu} has no constants of time")
    gpus = whole(row, "gpus")
    usual = 72 if "NVL72" in entry.device.name else 8
    per_node = min(gpus, whole(row, "gpus_per_node", usual))
    if per_node == 72 or (usual == 72 and gpus > 64):
        # Jobs on NVL72 racks use 64 of the 72 GPUs, where degrees are powers of two.
        per_node = 64
    nodes = -(-gpus // per_node)
    return Cluster(nodes, per_node, entry.device, entry.intra, _network(row, entry.inter, nodes, assumed))


def _network(row: Row, usual: Link, nodes: int, assumed: list[str]) -> Link:
    """The network that the row names, else the usual one of such devices."""
    text = str(row.get("inter_node") or "")
    for start, (bandwidth, words) in NETWORKS.items():
        if text.startswith(start):
            return Link(usual.alpha, bandwidth, words, kind="network")
    if text and nodes > 1:
        assumed.append(f"network {text!r} not known: {usual.source}")
    return usual
