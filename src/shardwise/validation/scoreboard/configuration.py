"""A row of a table in our terms: model, split, engine profile; `hardware.py` has the cluster.

Missing keys are unknown: what is assumed for them is added to `assumed`, a sentence each. All functions raise
`UserError` with the reason where a row cannot be understood.
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from importlib import resources
from typing import Any

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig
from shardwise.model.config import Experts, LatentAttention
from shardwise.model.flops import hardware_flops_per_token, training_flops_per_token
from shardwise.model.parameters import count
from shardwise.planner.plan import plan
from shardwise.predict.time.step import StepShape

Row = Mapping[str, Any]

PRECISIONS = (
    (r"(amp_|mx)?fp8", "float8_e4m3fn"),
    (r"(nv|mx)?fp4", "float4"),
    (r"int8", "int8"),
    (r"int4", "int4"),
    (r"(fp32|tf32|float32)", "float32"),
)
"""Start of a precision's name, in lower case -> torch's name of the products' type. All others are of 16 bits."""


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
    return str(row.get("source", "")).lower()


SOFTWARE = (
    ("torchtitan", "torchtitan"),
    ("korthikanti", "megatron-lm-2022"),
    ("llm-foundry", "llm-foundry"),
    ("fsdp", "llm-foundry"),
    ("megatron-bridge", "megatron-bridge"),
    ("nemo", "megatron-core"),
    ("megatron core", "megatron-core"),
    ("megatron-core", "megatron-core"),
    ("flash", "flash-attention-zero1"),
)
"""Word of a row, in lower case -> the profile of its software; the first one counts."""


def engine_of(row: Row, assumed: list[str]) -> str:
    """The profile of the software that a row's key `engine` or, without it, its own words name."""
    if row.get("engine") is not None:
        return str(row["engine"])
    words = " ".join(str(row.get(key, "")) for key in ("source", "notes", "schedule", "techniques")).lower()
    if "megatron-deepspeed" in words and "flash" not in words:
        wide = row.get("precision") == "bf16" and row.get("zero_stage")
        return "megatron-deepspeed-bf16" if wide else "megatron-deepspeed-2022"
    name = next((profile for word, profile in SOFTWARE if word in words), "")
    if name == "torchtitan":
        return "torchtitan-compiled" if row.get("compile") else name
    if name == "llm-foundry" and "mode pure" in words:
        return "llm-foundry-pure"
    if not name:
        # vTrain measured Megatron-LM of 2022; its rows say so by their schedule and precision alone.
        if "vtrain" in words:
            return "megatron-lm-2022"
        assumed.append("software not named: an unknown one, with a wider range")
    return name or "unknown"


SEQUENCE = ("megatron-bridge", "nemo", "torchtitan")
"""Words of software that always has sequence parallelism beside tensor parallelism."""


def split_of(row: Row, model: ModelConfig, assumed: list[str]) -> StepShape:
    """The degrees and counts of a training row. Raises `UserError` where they contradict each other."""
    gpus, cp, pp = whole(row, "gpus"), whole(row, "cp", 1), whole(row, "pp", 1 if row.get("dp") else None)
    stated = whole(row, "dp", 0)
    tp = whole(row, "tp", max(gpus // (stated * pp * cp), 1) if stated else None)
    dp = stated or max(gpus // (tp * pp * cp), 1)
    micro, batch = whole(row, "mbs"), whole(row, "gbs")
    if tp * pp * cp * dp != gpus:
        raise UserError(f"tp x pp x cp x dp = {tp * pp * cp * dp}, but there are {gpus} GPUs")
    if batch % (dp * micro):
        raise UserError(f"a batch of {batch} does not divide among dp x micro = {dp} x {micro}")
    recompute = _recompute(row, assumed)
    if "rowwise" in str(row.get("precision")).lower():
        assumed.append("products scaled by row, without fast sums: at the rate of 16 bits (torchtitan issue 1207)")
    usual = "float8_e4m3fn" if "megatron-bridge" in source(row) else "bfloat16"
    zero = stage_of(row, assumed)
    words = f"{source(row)} {row.get('techniques', '')}"
    # torchtitan: models/llama3/infra/parallelize.py, apply_tp: norms and residual streams are cut by sequence.
    sp = "sequence parallel" in words or (tp > 1 and any(word in words for word in SEQUENCE))
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
        dtype=dtype_of(row) if row.get("precision") else usual,
    )


def _recompute(row: Row, assumed: list[str]) -> str:
    text = str(row.get("recompute") or "").removeprefix("per-op ").split(" ")[0]
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
    zero = 1 if any(word in source(row) for word in ("megatron-bridge", "nemo")) else 0
    assumed.append(f"ZeRO stage not stated: {zero}")
    return zero


def _virtual(row: Row, model: ModelConfig, pp: int, assumed: list[str]) -> int:
    """Virtual stages; where a row of software that always interleaves states none, the most that it would use."""
    fewest = next((layers for word, layers in INTERLEAVED if word in f"{row.get('engine')} {source(row)}"), None)
    if pp == 1 or row.get("vpp") or fewest is None:
        return whole(row, "vpp", 1) if pp > 1 else 1
    item = model.layers // pp if model.layers % pp == 0 else 0
    virtual = max((n for n in range(1, item // fewest + 1) if item % n == 0), default=1)
    assumed.append(f"virtual stages not stated: {virtual}")
    return virtual


INTERLEAVED = (("megatron-bridge", 4), ("megatron-core", 1))
"""Word of a row -> fewest layers of a chunk. Megatron-Bridge's recipes interleave wherever layers divide, down to four
layers (docs/performance-guide.md). Megatron-LM's README overlaps messages of pipelines, which only interleaved ones can
(NVIDIA/Megatron-LM@d98e8a64, megatron/training/arguments.py); its 177B model is as fast on 96 to 4,608 GPUs
(published_scaling.json) as with a layer each, and could not be with 16 layers in one piece."""


def dtype_of(row: Row) -> str:
    """Torch's name of the type of a row's matrix products; 16 bits where it names none that is known."""
    text = str(row.get("precision")).lower()
    if "rowwise" in text:
        return "bfloat16"
    return next((dtype for pattern, dtype in PRECISIONS if re.match(pattern, text)), "bfloat16")


FORMATS = {"float8_e4m3fn": "fp8", "float4": "nvfp4", "int4": "int4-g32s4", "bfloat16": "bf16", "float32": "fp32"}
"""Type of a row's products -> format of served weights; int4 is gpt-fast's."""


def weights_of(row: Row, model: ModelConfig) -> str:
    """Format of a serving row's weights. Models with latent attention are published in FP8 of blocks."""
    dtype = dtype_of(row)
    if dtype == "float8_e4m3fn" and (model.latent_attention or "block" in str(row.get("precision")).lower()):
        return "fp8-block128x128"
    return FORMATS.get(dtype, dtype)


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


FASTEST = "most performant"
"""Words in a row's notes that its layout was the fastest of all."""


def laid_out(row: Row, model: ModelConfig, cluster: Cluster, engine: str, assumed: list[str]) -> Row:
    """The row with the fastest layout that the planner knows, in 16 bits, where it states none but says that it was the
    fastest; any other row as it is. Raises `UserError` where none fits."""
    if row.get("tp") is not None or FASTEST not in str(row.get("notes", "")):
        return row
    layout = _fastest(model, cluster, whole(row, "seq"), whole(row, "gbs"), whole(row, "cp", 1), engine)
    assumed.append(f"layout not stated but the fastest: {engine}'s fastest as planned")
    degrees = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "cp": layout.cp, "vpp": layout.virtual}
    return {**row, **degrees, "mbs": layout.micro, "zero_stage": layout.stage, "recompute": layout.recompute}


@lru_cache
def _fastest(model: ModelConfig, cluster: Cluster, seq: int, batch: int, cp: int, engine: str) -> Layout:
    fixed = {"cp": cp}
    best = plan(model, cluster, Workload(seq, batch), engine=engine, top=1, fix=fixed, explain=False).ranked[0].layout
    if best.tp > cluster.devices_per_node:
        raise UserError("the layout is not stated, and the fastest as planned splits tensors over nodes, which few do")
    return best


CONTAINER = re.compile(r"(\d\d\.\d\d(?:\.\d\d)?) NeMo Container")
"""Release of the software in a row's source or notes."""


@cache
def releases() -> dict[str, Any]:
    """The table of the package: release -> `source` and `runs`."""
    text = (resources.files("shardwise.validation.scoreboard") / "recipes.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


SCOPES = ("attention", "router", "experts")
"""What CUDA graphs can hold of a block with experts."""

ENGINES = {"tokens": "megatron-bridge", "rows": "megatron-bridge-alltoall"}
"""How a recipe has tokens exchanged -> the engine profile."""


def recipe_of(row: Row, device: str, narrow: bool) -> tuple[str, Mapping[str, Any]] | None:
    """(the engine profile, its fields that differ in this run), None where no recipe is known. narrow: whether products
    take less than 16 bits. What a row states itself counts first. Raises `UserError` for a setting that is none."""
    if row.get("exchange") is not None:
        return _settings(row)
    release = CONTAINER.search(f"{row.get('source')} {row.get('notes')}")
    if release is None:
        return None
    tables = [table for name, table in sorted(releases().items(), reverse=True) if name <= release[1]]
    for run in (run for table in tables for run in table["runs"]):
        named = str(row.get("model")).startswith(run["model"]) and device.split("-")[0] in run["devices"]
        if named and run.get("narrow", narrow) == narrow:
            return _settings(run)
    return None


def _settings(run: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    exchange, captured = run["exchange"], run.get("captured") or []
    if exchange not in list(ENGINES):
        raise UserError(f"exchange must be one of {', '.join(ENGINES)}, not {exchange!r}")
    if not isinstance(captured, list) or not all(scope in SCOPES for scope in captured):
        raise UserError(f"captured must be a list of {', '.join(SCOPES)}, not {captured!r}")
    return ENGINES[exchange], {
        "exchange_overlap": bool(run.get("overlap")),
        "captured": tuple(captured),
        "fused_experts": bool(run.get("fused")),
    }


OLD_FORMULA = "old formula"
"""In the notes of rows whose FLOPs are 8 per parameter and token, all parameters (BLOOM's chronicles, before the page's
remark "TFLOPs calculation improved")."""

CONVENTIONS: dict[str, Callable[[ModelConfig, int], int]] = {
    "model FLOPs, causal attention counted half": training_flops_per_token,
    "model FLOPs, full attention counted": lambda model, seq: training_flops_per_token(model, seq, causal=False),
    "model FLOPs (6N + attention)": lambda model, seq: training_flops_per_token(model, seq, causal=False),
    "recompute counted (about 8N per token)": lambda model, seq: hardware_flops_per_token(
        model, seq, "full", causal=False
    ),
}
"""Start of what tables say of their TFLOP/s -> FLOPs per token. Of the rows that state a time, too, each convention
gives that time within 1% at the median."""


def step_seconds_of(row: Row, model: ModelConfig) -> float:
    """Measured seconds of a step. Raises `UserError` with the reason where the row does not say."""
    if (seconds := _stated(row, "iter_time_s")) is not None:
        return seconds
    tokens = whole(row, "gbs") * whole(row, "seq") / whole(row, "gpus")
    if (rate := _stated(row, "tokens_per_s_per_gpu")) is not None:
        return tokens / rate
    if (tera := _stated(row, "tflops_per_gpu")) is not None:
        return tokens * _flops_per_token(row, model) / (tera * 1e12)
    raise UserError("no measured time of a step, tokens/s or TFLOP/s")


def _flops_per_token(row: Row, model: ModelConfig) -> int:
    if OLD_FORMULA in str(row.get("notes", "")):
        return 8 * count(model)
    text = str(row.get("tflops_convention"))
    for start, flops in CONVENTIONS.items():
        if text.startswith(start):
            return flops(model, whole(row, "seq"))
    raise UserError(f"TFLOP/s by a convention that is not known: {text}")


def _stated(row: Row, key: str) -> float | None:
    """A positive number of the row, None where it says nothing. Raises `UserError`."""
    value = row.get(key)
    if value is not None and (type(value) not in (int, float) or not 0 < value < float("inf")):
        raise UserError(f"{key} must be a positive number, not {value!r}")
    return None if value is None else float(value)
