"""A vllm serve command. Names and defaults: vllm-project/vllm 0.33, engine/arg_utils.py."""

from __future__ import annotations

import shlex
from typing import Any

from shardwise.errors import UserError
from shardwise.interop.reading.known_keys import rows
from shardwise.interop.reading.settings import ServerSettings
from shardwise.interop.writing.commands import command, flag_words, nodes_of, with_comments
from shardwise.interop.writing.limits import Changes, Limit, always, only, without
from shardwise.interop.writing.request import EngineWriter, WriteRequest
from shardwise.layout import Layout
from shardwise.model.formats import weight_format

KEYS = rows("vllm", "layout")
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def write(request: WriteRequest) -> tuple[str, list[str]]:
    """The command, and comments on what it leaves to its user."""
    layout, served = request.layout, request.served or ServerSettings()
    nodes, _ = nodes_of(request)
    flags: dict[str, Any] = {
        KEYS["tp"]: layout.tp,
        KEYS["pp"]: layout.pp,
        KEYS["dp"]: layout.dp,
        KEYS["ep"]: layout.ep > 1,
        KEYS["precision"]: DTYPES[layout.precision],
        "quantization": None if request.stored else quantization("vllm", served.weights),
        "kv_cache_dtype": "fp8" if served.cache.startswith("float8") else "auto",
        "gpu_memory_utilization": f"{served.memory:g}",
        "max_model_len": served.length,
        "max_num_seqs": served.sequences,
        "max_num_batched_tokens": served.tokens,
        # One node's processes; Ray over several.
        "distributed_executor_backend": "mp" if nodes == 1 else "ray",
        "data_parallel_backend": "ray" if nodes > 1 and layout.dp > 1 else None,
    }
    comments = ["start Ray on every node first"] if nodes > 1 else []
    if layout.pp > 1 and request.model.layers % layout.pp:
        comments.append("vLLM cuts layers evenly as it likes: see VLLM_PP_LAYER_PARTITION")
    if request.source in ("", request.model.name) and "/" not in request.model.name:
        comments.append(f"{request.model.name} is the catalog's name: give the folder or the hub's name in its place")
    comments += (
        [f"its files are in {request.stored}, which the engine sees"]
        if request.stored
        else checkpoint_needed("vllm", served.weights)
    )
    source = shlex.quote(request.source or request.model.name)
    return command([f"vllm serve {source}", *flag_words(flags)]), comments


def quantization(engine: str, weights: str) -> str | None:
    """The engine's word for a type of stored weights; None for 16 and 32 bits. Raises `UserError` without one."""
    stored = weight_format(weights)
    if not stored.lossy:
        return None
    for word, words in rows(engine, "weights").items():
        # Some store experts alone.
        if weight_format(words).form == stored.form and not word.startswith("experts"):
            return word
    raise UserError(f"no quantization of {engine} stores {weights}")


def checkpoint_needed(engine: str, weights: str) -> list[str]:
    """A comment where the engine cannot quantize weights while it loads them; none else."""
    word = quantization(engine, weights)
    return [f"--quantization {word} needs a checkpoint in that format"] if word not in (None, "fp8") else []


def _experts(layout: Layout) -> Changes:
    # Replicas that share experts are one group, or none of them does.
    return {"ep": 1, "etp": 0}


SERVING_LIMITS = (
    Limit("ep", lambda x: x.ep not in (1, x.tp * x.dp), _experts, "it spreads experts over all of tp x dp, or not"),
    only("precision", tuple(DTYPES), "bf16", "it has bf16 and fp32"),
    without("etp", always, "its experts are split with tp, or whole with expert parallelism"),
)

WRITER = EngineWriter(
    name="vllm",
    title="vLLM",
    keys=KEYS,
    left={"attention": "vLLM chooses attention's kernel"},
    limits=SERVING_LIMITS,
    write=write,
    comment=with_comments,
    file="vllm.sh",
    profile="vllm",
    serves=True,
    loads_model=True,
)
