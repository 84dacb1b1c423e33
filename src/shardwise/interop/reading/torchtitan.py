"""torchtitan's TOML, or its arguments --section.key value. Names and defaults: pytorch/torchtitan, config/job_config.py
of 0.2 and config/configs.py after it, which counts tokens in place of sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import UserError
from shardwise.interop.reading.arguments import launched_ranks, parse
from shardwise.interop.reading.fields import ConfigFields, nearest_multiples
from shardwise.interop.reading.known_keys import known, renamed, rows
from shardwise.interop.reading.settings import Reading
from shardwise.layout import Layout

_KEYS = rows("torchtitan", "layout")
_POLICY = "activation-checkpoint:"
"""Word of arguments that chooses what is recomputed, since 0.3."""


def read(data: Mapping[str, Any] | list[str], ranks: int | None, base: Mapping[str, Any] | None = None) -> Reading:
    """Layout of a file or of arguments. base: the file that the arguments name; theirs come first. Raises `UserError`
    where the degrees do not multiply to the number of processes, or leave one open that nothing tells."""
    preset = ""
    if isinstance(data, list):
        flags = parse([word for word in data if not word.startswith(_POLICY)], {}, frozenset()).flags
        ranks = ranks or launched_ranks(flags)
        policies = [word.removeprefix(_POLICY).replace("-", "_") for word in data if word.startswith(_POLICY)]
        preset = flags.get("config", "")
        data = _nested(flags) | ({"activation_checkpoint": {"mode": policies[-1]}} if policies else {})
        for section, table in (base or {}).items():
            data[section] = {**table, **data.get(section, {})} if isinstance(table, Mapping) else table
    data = _by_new_names(data)
    top = ConfigFields(data, known("torchtitan"))
    training = top.table("training", known("torchtitan", "training"))
    parallel = top.table("parallelism", known("torchtitan", "parallelism"))
    words = _degrees(parallel, ranks) | _schedule(parallel)
    words |= _sharding(parallel, words) | _numbers(training, bool(words.get("zero"))) | _recompute(top)
    seq, local, batch = _batch(training, words["dp"], _several(parallel, words["pp"]))
    words["micro"] = _micro(parallel, words["pp"], local)
    if top.table("compile", known("torchtitan", "compile")).flag("enable"):
        words["compile"] = "block"
    if local * words["dp"] < batch:
        top.fact(f"{batch // (local * words['dp'])} local batches are accumulated in a step")
    model = top.table("model", known("torchtitan", "model"))
    named = _model(model)
    if preset and not (training.given("seq_len") or training.given("max_context_length")):
        top.unsettle(f"what is not given here is in torchtitan's preset {preset}, which is not read")
    if model.given("converters") and (converters := data["model"]["converters"]):
        top.fact(f"converters {converters}: matrix products in narrow types; weights and activations count as 16 bits")
    return top.reading("torchtitan", Layout(**words), seq=seq, batch=batch, model=named)


def _by_new_names(data: Mapping[str, Any]) -> dict[str, Any]:
    """A file of 0.1 by the names since 0.2."""
    table = renamed(data, "torchtitan")
    parallel = table.setdefault("parallelism", {})
    for section in (table.get("training"), table.get("experimental")):
        if isinstance(section, dict) and isinstance(parallel, dict):
            for key in [key for key in section if "_parallel_" in str(key)]:
                parallel.setdefault(key, section.pop(key))
    began = data.get("experimental")
    if isinstance(began, Mapping) and "pipeline_parallel_degree" in began and isinstance(parallel, dict):
        # Its local batch is cut into as many micro-batches as stages unless their number is given.
        parallel.setdefault("num_pp_microbatches", began["pipeline_parallel_degree"])
    return table


def _nested(flags: Mapping[str, Any]) -> dict[str, Any]:
    """--training.seq_len 8192 as {"training": {"seq_len": "8192"}}; flags without a section are torchrun's."""
    data: dict[str, Any] = {}
    for name, value in flags.items():
        section, dot, key = name.partition(".")
        if dot:
            data.setdefault(section, {})[key] = value
    return data


def _degrees(parallel: ConfigFields, ranks: int | None) -> dict[str, Any]:
    replicate, tp, pp, cp = (
        parallel.integer(f"{name}_degree", 1)
        for name in ("data_parallel_replicate", "tensor_parallel", "pipeline_parallel", "context_parallel")
    )
    shard = parallel.integer("data_parallel_shard_degree", -1, least=-1)
    rest = replicate * tp * pp * cp
    if shard < 1:
        if ranks is None:
            raise UserError(
                f"{parallel.name('data_parallel_shard_degree')} is {shard}, all GPUs that are left: give --ranks N, "
                "or --cluster"
            )
        if ranks % rest:
            raise UserError(f"{ranks} ranks cannot be divided by replicate x tp x pp x cp = {rest}")
        shard = ranks // rest
    if ranks is not None and rest * shard != ranks:
        raise UserError(f"replicate x shard x tp x pp x cp = {rest * shard}, but there are {ranks} ranks")
    ep, etp = parallel.integer("expert_parallel_degree", 1), parallel.integer("expert_tensor_parallel_degree", 1)
    whole = parallel.flag("enable_sequence_parallel", True)
    words: dict[str, Any] = {
        "dp": replicate * shard,
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "ep": ep,
        "etp": etp if ep > 1 else 0,
    }
    # FSDP shards over shard x cp; DDP over replicate, where nothing is sharded.
    if shard * cp > 1:
        words |= {"zero": 3, "shard": shard * cp}
    return words | ({"sp": True} if tp > 1 and whole else {})


def _sharding(parallel: ConfigFields, words: Mapping[str, Any]) -> dict[str, Any]:
    policy = parallel.word(_KEYS["zero"], "default", ("default", "always", "never"))
    kept = policy == "never" or (policy == "default" and words["pp"] > 1)
    if not words.get("zero") or not kept:
        return {}
    why = "never" if policy == "never" else "its default with a pipeline"
    parallel.note(
        f"fsdp_reshard_after_forward is {why}: weights stay gathered from forward to backward, which is ZeRO-2's "
        "traffic and its memory while a step runs"
    )
    return {"zero": 2}


def _schedule(parallel: ConfigFields) -> dict[str, Any]:
    name = parallel.word(_KEYS["schedule"], "1F1B")
    each = parallel.integer("pipeline_parallel_layers_per_stage")
    if parallel.integer("pipeline_parallel_degree", 1) == 1:
        return {}
    if name.lower() == "interleavedzerobubble":
        parallel.fact("InterleavedZeroBubble has no name here: taken as interleaved, whose bubble is larger")
        name = "Interleaved1F1B"
    # Brings numpy, which only a pipeline needs.
    from shardwise.schedule.pipeline import find

    found = find(name)
    if each:
        parallel.fact(f"{each} layers a stage; the number of chunks a rank is taken as {found.virtual}")
    return {"schedule": found.name, "virtual": found.virtual}


def _numbers(training: ConfigFields, sharded: bool) -> dict[str, Any]:
    """Precision of weights and gradients, and where the optimizer state is: FSDP (sharded) offloads it."""
    param = training.word(_KEYS["precision"], "bfloat16", ("bfloat16", "float32"))
    training.word("mixed_precision_reduce", "float32", ("float32", "bfloat16"))
    stored = training.word("dtype", "float32", ("bfloat16", "float32"))
    words: dict[str, Any] = {"grads": "fp32"} if param == "bfloat16" else {"precision": "fp32"}
    if stored == "bfloat16":
        words = {}
        training.unprice("training.dtype is bfloat16: weights, gradients and moments are kept in 16 bits, 8 bytes per "
                         "parameter, which no layout here has")  # fmt: skip
    if training.flag(_KEYS["offload"]) and sharded:
        words |= {"offload": "cpu", "offload_params": "cpu"}
    return words


def _recompute(top: ConfigFields) -> dict[str, Any]:
    table = top.table("activation_checkpoint", known("torchtitan", "checkpointing"))
    mode = table.word("mode", "selective", ("selective", "full", "memory_budget", "none"))
    option, budget = table.word("selective_ac_option", "2"), table.number("memory_budget", 0.5)
    if mode == "full":
        return {"recompute": "full"}
    if mode == "memory_budget":
        top.fact(f"the compiler recomputes down to {budget:.0%} of the activations; counted as none: an upper bound")
    elif mode == "selective":
        which = "of cheap operations" if option == "op" else f"of one block in {option}"
        top.fact(f"selective recomputation {which} has no word here; counted as none: an upper bound")
    return {}


def _several(parallel: ConfigFields, pp: int) -> int:
    """Micro-batches of a pipeline where their number is given; 1 without a pipeline."""
    return parallel.integer("num_pp_microbatches", 1) if pp > 1 else 1


def _batch(training: ConfigFields, dp: int, several: int) -> tuple[int, int, int]:
    """(tokens of a sequence, sequences of a data-parallel rank at a time, sequences of a step). several: micro-batches
    of a pipeline, each with the given tokens."""
    seq = training.integer("max_context_length") or training.integer("seq_len", 2048)
    tokens = training.integer("num_tokens_per_microbatch_per_dp_rank")
    if tokens % seq:
        raise UserError(f"{tokens} tokens a micro-batch are no whole sequences of {seq}")
    local = tokens // seq * several or training.integer("local_batch_size", 8)
    whole = training.integer("global_batch_size", -1, least=-1)
    step = training.integer("num_tokens_per_train_step", -1, least=-1)
    batch = step // seq if step > 0 else whole if whole > 0 else local * dp
    if batch % (local * dp):
        nearest = nearest_multiples(batch, local * dp)
        raise UserError(f"a batch of {batch} is no multiple of local batch x dp = {local} x {dp}; nearest: {nearest}")
    return seq, local, batch


def _micro(parallel: ConfigFields, pp: int, local: int) -> int:
    """Sequences of a micro-batch: the local batch, which a pipeline cuts further."""
    size, number = parallel.integer(_KEYS["micro"], 1), parallel.integer("num_pp_microbatches")
    if pp == 1:
        return local
    size = local // number if number else size
    if size < 1 or local % size:
        raise UserError(f"a local batch of {local} cannot be cut into pipeline micro-batches of {max(size, 1)}")
    return size


def _model(model: ConfigFields) -> str | None:
    """The catalog's way of writing a model's name and flavor: llama3 and 70B are llama-3-70b."""
    name, flavor = model.word("name"), model.word("flavor")
    if not name:
        return None
    family = {"llama3": "llama-3", "qwen3": "qwen3"}.get(name, name)
    return f"{family}-{flavor.lower()}" if flavor else family
