"""Megatron-LM's arguments. Names, defaults and checks: NVIDIA/Megatron-LM, megatron/training/arguments.py and config/.

The number of processes is in the launcher's arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardwise.errors import UserError
from shardwise.interop.reading.arguments import dashed
from shardwise.interop.reading.fields import ConfigFields, nearest_multiples
from shardwise.interop.reading.known_keys import known, rows
from shardwise.interop.reading.megatron_model import described
from shardwise.interop.reading.settings import Reading
from shardwise.layout import Layout

_KEYS = rows("megatron", "layout")


def read(data: Mapping[str, Any], ranks: int | None) -> Reading:
    """Layout of the arguments. Raises `UserError` where nothing says how many processes there are, and for values that
    Megatron-LM refuses, too."""
    fields = ConfigFields(data, known("megatron"), shown=dashed)
    if ranks is None:
        raise UserError("the arguments do not say on how many GPUs this runs: give --ranks N, or --cluster")
    found = _degrees(fields, ranks)
    found |= _experts(fields, found["dp"] * found["cp"] * found["tp"])
    found |= _pipeline(fields, found["pp"]) | _sharding(fields, found["dp"] * found["cp"])
    recompute, modules = _recompute(fields)
    if fields.given("actor_num_nodes"):
        fields.unsettle("this is the training beside rollouts; its program may set more, such as --bf16")
    found |= _precision(fields) | recompute | _cpu(fields) | _attention(fields)
    layout = Layout(**found)
    batch = _batch(fields, layout)
    seq = fields.integer("seq_length") or None
    model = described(fields, layout.tp)
    if not (fields.given("global_batch_size") or fields.given("gradient_accumulation_steps")):
        fields.fact(f"--global-batch-size is not given: micro-batch x data-parallel ranks = {batch}, no accumulation")
    optimizer = None
    if fields.word("optimizer", "adam") == "sgd":
        optimizer = "momentum" if fields.number("sgd_momentum", 0.9) else "sgd"
    return fields.reading("Megatron-LM", layout, seq=seq, batch=batch, optimizer=optimizer, described=model,
                          recomputed=modules)  # fmt: skip


def _batch(fields: ConfigFields, layout: Layout) -> int:
    """Sequences of a step. Raises `UserError` where they are no whole micro-batches on every rank."""
    each = layout.micro * layout.dp
    # Accumulation is a dialect's: Megatron-LM has the batch alone.
    batch = fields.integer("global_batch_size", each * fields.integer("gradient_accumulation_steps", 1))
    if batch % each:
        raise UserError(
            f"--global-batch-size {batch} is no multiple of micro-batch x data-parallel ranks = {layout.micro} x "
            f"{layout.dp}; nearest: {nearest_multiples(batch, each)}"
        )
    return batch


def _degrees(fields: ConfigFields, ranks: int) -> dict[str, Any]:
    tp, pp, cp = (fields.integer(_KEYS[key], 1) for key in ("tp", "pp", "cp"))
    if ranks % (tp * pp * cp):
        raise UserError(f"{ranks} ranks cannot be divided by tensor x pipeline x context parallel = {tp * pp * cp}")
    found: dict[str, Any] = {"dp": ranks // (tp * pp * cp), "tp": tp, "pp": pp, "cp": cp}
    found["micro"] = fields.integer(_KEYS["micro"], 1)
    kinds = {word: kind for kind, word in rows("megatron", "cpkind").items()}
    kind = kinds.get(fields.word(_KEYS["cpkind"], "p2p"), "ring")
    found |= {"cpkind": kind} if cp > 1 else {}
    if fields.flag(_KEYS["order"]):
        found["order"] = "dp-pp-cp-tp"
    sequence = fields.flag(_KEYS["sp"])
    if sequence and tp == 1:
        fields.note("--sequence-parallel does nothing without tensor parallelism; Megatron-LM switches it off")
    elif not sequence and tp > 1:
        fields.note(
            "without --sequence-parallel the norms' and dropouts' activations are whole on every tensor-parallel rank"
        )
    return found | ({"sp": True} if sequence and tp > 1 else {})


def _experts(fields: ConfigFields, ranks: int) -> dict[str, Any]:
    # Left out, experts are split as all else, even beside expert parallelism.
    ep, etp = fields.integer(_KEYS["ep"], 1), fields.integer(_KEYS["etp"], fields.integer(_KEYS["tp"], 1))
    if ranks % (ep * etp) and not fields.given(_KEYS["etp"]):
        fields.unsettle(f"{dashed(_KEYS['etp'])} is left out, which is {etp}, but {ranks} ranks cannot be divided by "
                        f"{ep} x {etp}: counted as 1")  # fmt: skip
        etp = 1
    return {"ep": ep, "etp": etp}


def _pipeline(fields: ConfigFields, pp: int) -> dict[str, Any]:
    """Virtual stages, and stages of different size."""
    each = fields.integer(_KEYS["virtual"])
    virtual = fields.integer("num_virtual_stages_per_pipeline_rank", 1)
    layers = fields.integer("num_layers")
    if fields.given(_KEYS["stages"]):
        return _listed(fields, pp, layers)
    if each:
        if not layers:
            raise UserError("--num-layers-per-virtual-pipeline-stage needs --num-layers")
        if layers % (pp * each):
            raise UserError(f"--num-layers {layers} is not a multiple of {pp} stages x {each} layers a virtual stage")
        virtual = layers // (pp * each)
    ends = [fields.integer(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last")]
    words: dict[str, Any] = {"virtual": virtual, "schedule": "interleaved"} if virtual > 1 and pp > 1 else {}
    if any(ends) and layers and pp > 1:
        words["stages"] = _uneven(layers, pp * max(1, virtual if pp > 1 else 1), *ends)
    return words


def _listed(fields: ConfigFields, pp: int, layers: int) -> dict[str, Any]:
    """Stages of a list such as Et*21|t*20|(t|)*2t*19L: t is a layer, E the embedding, L the loss. Another text is a
    fact, and counts as even stages."""
    text = fields.word(_KEYS["stages"])
    # Megatron-LM writes repetitions as (tt|)*30 or t*21.
    full = re.sub(r"\(([^()]*)\)\*(\d{1,4})", lambda match: match[1] * int(match[2]), text)
    full = re.sub(r"(\w)\*(\d{1,4})", lambda match: match[1] * int(match[2]), full.replace(",", ""))
    counts = tuple(stage.count("t") for stage in full.split("|"))
    if set(full) - set("EtL|") or len(counts) % pp or (layers and sum(counts) != layers) or pp == 1:
        fields.fact(f"--pipeline-model-parallel-layout {text}: taken as even")
        return {}
    virtual = len(counts) // pp
    return {"stages": counts} | ({"virtual": virtual, "schedule": "interleaved"} if virtual > 1 else {})


def _uneven(layers: int, stages: int, first: int, last: int) -> tuple[int, ...]:
    """Layers of each stage where the first or the last has a number of its own. Raises `UserError` where the rest
    cannot be divided."""
    middle = stages - bool(first) - bool(last)
    rest = layers - first - last
    if middle < 1 or rest < middle or rest % middle:
        raise UserError(f"{rest} layers between the first and the last stage cannot be divided by {middle} stages")
    return (*([first] if first else []), *[rest // middle] * middle, *([last] if last else []))


def _sharding(fields: ConfigFields, data: int) -> dict[str, Any]:
    """ZeRO's stage, and its groups. data: ranks that gradients are summed over."""
    words = _stage(fields)
    instances = fields.integer(_KEYS["shard"], 1)
    if instances > 1 and data % instances:
        raise UserError(f"{dashed(_KEYS['shard'])} {instances} must divide data x context parallel = {data}")
    # Groups of one rank shard nothing.
    if instances == data > 1:
        return words | {"zero": 0}
    return words | ({"shard": data // instances} if instances > 1 and words.get("zero") else {})


def _stage(fields: ConfigFields) -> dict[str, Any]:
    strategies = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
    distributed = fields.flag("use_distributed_optimizer")
    fsdp = fields.flag("use_megatron_fsdp") or fields.flag("use_custom_fsdp")
    strategy = fields.word(_KEYS["zero"], "optim_grads_params", strategies)
    if fields.flag("use_torch_fsdp2"):
        keeps = fields.flag("torch_fsdp2_no_reshard_after_forward")
        return {"zero": 2 if keeps else 3}
    if fsdp:
        return {"zero": strategies[strategy.lower()]}
    if fields.given(_KEYS["zero"]):
        fields.note("--data-parallel-sharding-strategy counts with --use-megatron-fsdp alone; it is not there")
    if distributed:
        fields.note(
            "--use-distributed-optimizer is ZeRO-1: optimizer state and master weights are sharded, parameters and "
            "gradients are whole"
        )
        return {"zero": 1}
    fields.note("without --use-distributed-optimizer every data-parallel rank keeps the whole optimizer state")
    return {}


def _precision(fields: ConfigFields) -> dict[str, Any]:
    bf16, fp16 = fields.flag(_KEYS["precision"]), fields.flag("fp16")
    if bf16 and fp16:
        raise UserError("--bf16 and --fp16 are both given; Megatron-LM takes one of them")
    for key in ("fp8_format", "fp8_recipe", "fp8_param_gather", "fp4_format"):
        if fields.given(key):
            fields.fact(
                f"{dashed(key)}: matrix products in narrow types; weights and activations count as 16 bits here"
            )
    precise = fields.flag("use_precision_aware_optimizer")
    main, reduced = fields.word("main_grads_dtype", "fp32"), fields.flag(_KEYS["grads"])
    fields.given("accumulate_allreduce_grads_in_fp32")
    moments = [fields.word(key, "fp32") for key in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")]
    if precise and any(dtype != "fp32" for dtype in moments):
        fields.fact(f"optimizer state in {' / '.join(moments)} (master, first, second moment): less than counted here")
    if not (bf16 or fp16):
        return {"precision": "fp32"}
    if fp16:
        fields.fact("fp16: 2 bytes as bf16; steps whose loss scale overflows are skipped")
    narrow = reduced or (precise and main == "bf16") or (fp16 and not fields.flag("accumulate_allreduce_grads_in_fp32"))
    return {} if narrow else {"grads": "fp32"}


def _recompute(fields: ConfigFields) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(Layout keys, modules that are recomputed beside attention's core)."""
    granularity = fields.word(_KEYS["recompute"], "", ("full", "selective"))
    if fields.flag("recompute_activations"):
        granularity = granularity or "selective"
    method = fields.word("recompute_method", "", ("uniform", "block"))
    layers = fields.integer("recompute_num_layers", 1)
    modules = fields.word("recompute_modules", "core_attn")
    if fields.flag("distribute_saved_activations"):
        fields.fact("--distribute-saved-activations: blocks' inputs are split over tensor-parallel ranks")
    if granularity == "full":
        if not method:
            raise UserError("--recompute-granularity full needs --recompute-method uniform or block")
        if method == "block":
            fields.fact(f"only {layers} layers a stage are recomputed; counted as all: the estimate is too low")
        elif layers > 1:
            fields.fact(f"{layers} layers together keep one input; counted as one each: the estimate is too high")
        return {"recompute": "full"}, ()
    if granularity == "selective":
        listed = tuple(modules.replace(",", " ").split())
        beside = tuple(module for module in listed if module != "core_attn")
        if beside:
            fields.fact(f"backward computes again: {', '.join(listed)}")
        return ({"recompute": "selective"} if "core_attn" in listed else {}), beside
    return {}, ()


def _attention(fields: ConfigFields) -> dict[str, Any]:
    return {"attention": "math"} if fields.word(_KEYS["attention"], "auto") in ("unfused", "local") else {}


def _cpu(fields: ConfigFields) -> dict[str, Any]:
    share = fields.number(_KEYS["offload"], 1.0)
    if not fields.flag("optimizer_cpu_offload"):
        return {}
    return {"offload": f"cpu:{share:g}"} if share > 0 else {}
