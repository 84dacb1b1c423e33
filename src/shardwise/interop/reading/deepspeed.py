"""DeepSpeed's JSON. Names and defaults: DeepSpeed 0.19, runtime/config.py, constants.py and zero/config.py.

The file does not say on how many processes it runs, which is what its batch equation needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwise.errors import UserError
from shardwise.interop.reading.fields import ConfigFields, nearest_multiples
from shardwise.interop.reading.known_keys import Known, known, rows
from shardwise.interop.reading.settings import Reading
from shardwise.layout import Layout

_KEYS = rows("deepspeed", "layout")


def read(data: Mapping[str, Any], ranks: int | None) -> Reading:
    """Layout of a file for `ranks` processes. Raises `UserError` where it does not say how many, and where values
    contradict each other as they would for DeepSpeed."""
    top = ConfigFields(data, known("deepspeed"))
    if ranks is None:
        raise UserError("DeepSpeed's file does not say on how many GPUs it runs: give --ranks N, or --cluster")
    degrees = _degrees(top, ranks)
    batches = _batches(top, degrees["dp"])
    words = degrees | _zero(top.table("zero_optimization", known("deepspeed", "zero"))) | _precision(top, data)
    _clipping(top)
    _rest(top, words, batches)
    layout, optimizer = Layout(micro=batches.micro, **words), _optimizer(top, data.get("optimizer"))
    return top.reading("DeepSpeed", layout, batch=batches.whole, optimizer=optimizer)


def filled(data: Mapping[str, Any], **trainer: Any) -> dict[str, Any]:
    """The file with a trainer's values where it says "auto". trainer: bf16, fp16, micro, steps, clip; None where the
    trainer does not say."""
    result = dict(data)
    for key, name in (
        (_KEYS["micro"], "micro"),
        ("gradient_accumulation_steps", "steps"),
        ("gradient_clipping", "clip"),
    ):
        if result.get(key) == "auto" and trainer.get(name) is not None:
            result[key] = trainer[name]
    for key in ("bf16", "fp16"):
        table = result.get(key)
        if isinstance(table, Mapping) and table.get("enabled") == "auto" and trainer.get(key) is not None:
            result[key] = {**table, "enabled": trainer[key]}
    return result


def settings_of(trainer: ConfigFields) -> dict[str, Any]:
    """What the arguments of Hugging Face's trainer fill in."""
    return {
        "bf16": trainer.flag("bf16"),
        "fp16": trainer.flag("fp16"),
        "micro": trainer.integer("per_device_train_batch_size", 8),
        "steps": trainer.integer("gradient_accumulation_steps", 1),
        "clip": trainer.number("max_grad_norm", 1.0),
    }


def within(top: ConfigFields, engine: str, inner: Reading, **said: Any) -> Reading:
    """The reading of DeepSpeed's file inside another engine's configuration. said: fields of `Reading`."""
    top.facts += inner.facts
    top.notes += inner.notes
    outer = top.reading(engine, inner.layout, **{"batch": inner.batch, "optimizer": inner.optimizer} | said)
    return replace(
        outer,
        ignored=(*outer.ignored, *inner.ignored),
        unknown=(*outer.unknown, *inner.unknown),
        unsettled=(*outer.unsettled, *inner.unsettled),
        unpriced=outer.unpriced or inner.unpriced,
    )


def _optimizer(top: ConfigFields, table: Any) -> str | None:
    """SGD, with momentum where its parameters have some; None for all else, which is counted as AdamW."""
    if not isinstance(table, Mapping) or str(table.get("type")).lower() != "sgd":
        return None
    params = top.table("optimizer", Known(frozenset({"type"}), ())).table("params", Known(frozenset(), ("",)))
    return "momentum" if params.number("momentum") else "sgd"


def _degrees(top: ConfigFields, ranks: int) -> dict[str, Any]:
    tensor = top.table("tensor_parallel", known("deepspeed", "tensor"))
    tp = max(1, tensor.integer(_KEYS["tp"], 1, least=0))
    ulysses = top.integer(_KEYS["cp"], 1)
    pp = top.table("pipeline", known("deepspeed", "pipeline")).integer(_KEYS["pp"], 1)
    if ranks % (tp * ulysses * pp):
        raise UserError(
            f"{ranks} ranks cannot be divided by autotp_size x sequence_parallel_size x stages = {tp * ulysses * pp}"
        )
    found: dict[str, Any] = {"dp": ranks // (tp * ulysses * pp), "tp": tp, "pp": pp, "cp": ulysses}
    return found | ({"cpkind": "ulysses"} if ulysses > 1 else {})


@dataclass(frozen=True)
class _Batches:
    """Sequences of a step (None where a trainer decides), of a rank's micro-batch, and how many of these a rank
    accumulates."""

    whole: int | None
    micro: int
    steps: int


def _batches(top: ConfigFields, world: int) -> _Batches:
    """DeepSpeed's rules: of three numbers two give the third, of one the others follow."""
    keys = ("train_batch_size", _KEYS["micro"], "gradient_accumulation_steps")
    whole, micro, steps = (top.integer(key) if top.given(key) else None for key in keys)
    if whole is None and micro is None:
        if any(map(top.automatic, keys[:2])):
            return _Batches(None, 1, steps or 1)
        raise UserError(f"one of {keys[0]} and {keys[1]} must be a number, or there is no batch")
    if micro is None:
        assert whole is not None
        micro = whole // world // (steps or 1)
    steps = steps or (whole // micro // world if whole and micro else 1)
    whole = whole or micro * steps * world
    if min(micro, steps) < 1 or whole != micro * steps * world:
        nearest = nearest_multiples(whole, max(1, micro * (steps if top.given(keys[2]) else 1)) * world)
        raise UserError(
            f"{keys[0]} = {whole} is not {keys[1]} x {keys[2]} x data-parallel ranks = {micro} x {steps} x {world}; "
            f"nearest {keys[0]} that is: {nearest}"
        )
    return _Batches(whole, micro, steps)


def _zero(zero: ConfigFields) -> dict[str, Any]:
    stage = zero.integer("stage", 0, least=0)
    if stage > 3:
        raise UserError(f"{zero.name('stage')} must be 0, 1, 2 or 3, not {stage}")
    devices = {key: _device(zero, key, stage) for key in ("optimizer", "param")}
    if devices["param"] != "none" and stage < 3:
        raise UserError(f"{zero.name('offload_param')} needs stage 3, not stage {stage}")
    if devices["optimizer"] != "none" and stage == 0:
        raise UserError(f"{zero.name('offload_optimizer')} needs stage 1, 2 or 3")
    words: dict[str, Any] = {"zero": stage}
    if devices["param"] != "none" and devices["optimizer"] == "none":
        zero.unprice(f"parameters are offloaded to {devices['param']} and the optimizer's state (12 bytes per "
                     "parameter, sharded) stays on the GPU, which no layout here has")  # fmt: skip
        devices["param"] = "none"
    words |= {key: place for key, place in (("offload", devices["optimizer"]), ("offload_params", devices["param"]))
              if place != "none"}  # fmt: skip
    if (mics := zero.integer(_KEYS["shard"], 0, least=-1)) > 0:
        words["shard"] = mics
    if (secondary := zero.integer(_KEYS["hpz"], 1, least=0)) > 1:
        words["hpz"] = secondary
    if zero.flag(_KEYS["qwz"]) and stage == 3:
        words["qwz"] = True
    if zero.flag(_KEYS["qgz"]) and stage:
        words["qgz"] = True
    for key, what in (("zero_quantized_nontrainable_weights", "frozen weights are kept in 8 bits"),):
        if zero.flag(key):
            zero.fact(what)
    _stage_3(zero, stage)
    return words


def _device(zero: ConfigFields, key: str, stage: int) -> str:
    """Home of optimizer state or parameters: "none", "cpu", "nvme", or "cpu:0.5" for a fraction, which stage 3 alone
    has."""
    table = zero.table(f"offload_{key}", known("deepspeed", "offload"))
    device = table.word("device", "none", ("none", "cpu", "nvme")).lower()
    old = zero.flag("cpu_offload" if key == "optimizer" else "cpu_offload_param")
    share = table.number("ratio", 1.0)
    if not 0 <= share <= 1:
        raise UserError(f"{table.name('ratio')} must be between 0 and 1, not {share:g}")
    if device != "none" and key == "optimizer" and stage == 3 and share < 1:
        return f"{device}:{share:g}" if share else "none"
    return "cpu" if old and device == "none" else device


def _stage_3(zero: ConfigFields, stage: int) -> None:
    threshold = zero.integer("stage3_param_persistence_threshold", 100_000, least=0)
    saved = [zero.flag(f"stage3_gather_{bits}_weights_on_model_save") for bits in ("16bit", "fp16")]
    if stage < 3:
        return
    zero.fact(f"parameters of fewer than {threshold:,} elements stay whole on every rank")
    if not any(saved):
        zero.note(
            "stage3_gather_16bit_weights_on_model_save is off: save_16bit_model writes nothing, and whole weights need "
            "zero_to_fp32.py"
        )


def _precision(top: ConfigFields, data: Mapping[str, Any]) -> dict[str, Any]:
    on = {}
    for name in ("bf16", "fp16"):
        table = top.table(name, known("deepspeed", "precision"))
        masters = table.flag(f"{name}_master_weights_and_grads") or table.flag("bf16_optimizer_states")
        if masters:
            top.fact(f"{name}: master weights, gradients or moments are kept in 16 bits: less than counted here")
        on[name] = table.flag("enabled")
    if on["bf16"] and on["fp16"]:
        raise UserError("bf16 and fp16 are both enabled; DeepSpeed takes one of them")
    if top.table("torch_autocast", Known(frozenset({"dtype", "lower_precision_safe_modules"}), ())).flag("enabled"):
        top.fact("torch_autocast: fp32 weights are cast in every operation, and the casts are saved for backward")
    unsaid = [name for name in on if isinstance(data.get(name), Mapping) and data[name].get("enabled") == "auto"]
    if unsaid and not any(on.values()):
        top.unsettle(f"{' and '.join(unsaid)} are auto, which a trainer decides: counted as bf16; --precision says it")
        on["bf16"] = True
    accumulated = top.table("data_types", Known(frozenset(), ("param_", "buffer_", "keep_"))).word(_KEYS["grads"])
    if not any(on.values()):
        return {"precision": "fp32"}
    if on["fp16"]:
        top.fact(
            "fp16: 2 bytes as bf16; the loss scale is dynamic unless it is given, and steps that overflow are skipped"
        )
    if accumulated.lower() in ("fp32", "float32", "float"):
        return {"grads": "fp32"}
    if on["bf16"]:
        top.note(
            "gradients of several micro-batches are added in bf16 unless data_types.grad_accum_dtype is fp32 (which "
            "adds 2 bytes a parameter)"
        )
    return {}


def _clipping(top: ConfigFields) -> None:
    clip = top.number("gradient_clipping", -1.0)
    if clip < 0:
        top.note(
            "gradient_clipping is not given: DeepSpeed 0.19 then clips the gradient norm at 1.0, versions before did "
            "not clip; write 0.0 or a norm"
        )


def _rest(top: ConfigFields, words: Mapping[str, Any], batches: _Batches) -> None:
    if top.given("activation_checkpointing"):
        top.fact("activation_checkpointing says how, not whether: what is recomputed stands in the model's code")
    if top.given("compile"):
        top.fact("compile: the model is compiled as a whole")
    if top.given("compression_training") or top.given("sparse_attention"):
        top.fact("compression_training and sparse_attention change what is computed; they are not counted")
    if batches.whole is None:
        top.fact("the batch is auto: Hugging Face's trainer decides; --batch and --micro say it here")
    if batches.steps > 1:
        top.fact(f"{batches.steps} micro-batches are accumulated in a step")
        if words["zero"] >= 2:
            top.note(
                f"stage {words['zero']} reduces the gradients of each of the {batches.steps} micro-batches; stage 1 "
                "would reduce them once"
            )
    if words["pp"] > 1 and words["zero"] >= 2:
        raise UserError(f"DeepSpeed's pipeline works with ZeRO stages 0 and 1, not {words['zero']}")
