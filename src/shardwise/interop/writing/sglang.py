"""A command that starts SGLang's server. Names: SGLang 0.5, server_args.py."""

from __future__ import annotations

import shlex
from typing import Any

from shardwise.interop.reading.known_keys import rows
from shardwise.interop.reading.settings import ServerSettings
from shardwise.interop.writing.commands import command, flag_words, nodes_of, with_comments
from shardwise.interop.writing.limits import Limit, always, only, without
from shardwise.interop.writing.request import EngineWriter, WriteRequest
from shardwise.interop.writing.vllm import DTYPES, checkpoint_needed, quantization
from shardwise.layout.experts import expert_spread, experts_across

KEYS = rows("sglang", "layout")
PORT = 20000


def write(request: WriteRequest) -> tuple[str, list[str]]:
    """The command, and comments on what it leaves to its user."""
    layout, served = request.layout, request.served or ServerSettings()
    nodes, _ = nodes_of(request)
    shared = experts_across(layout) > 1  # replicas of attention inside one engine, which has all their ranks
    experts, replicas = request.model.experts, layout.dp if shared else 1
    flags: dict[str, Any] = {
        KEYS["tp"]: layout.tp * replicas,
        KEYS["pp"]: layout.pp,
        KEYS["dp"]: layout.dp,
        KEYS["ep"]: layout.ep,
        "enable_dp_attention": shared,
        "ep_num_redundant_experts": (expert_spread(layout, experts.count).redundant if experts else 0) or None,
        KEYS["precision"]: DTYPES[layout.precision],
        "quantization": None if request.stored else quantization("sglang", served.weights),
        "kv_cache_dtype": "fp8_e4m3" if served.cache.startswith("float8") else "auto",
        "mem_fraction_static": f"{served.memory:g}",
        "context_length": served.length,
        # Of the engine, which divides them by its replicas of attention.
        "max_running_requests": served.sequences and served.sequences * replicas,
        "chunked_prefill_size": served.tokens and served.tokens * replicas,
    }
    words = flag_words(flags)
    comments = []
    if nodes > 1:
        words += [f"--nnodes {nodes}", '--node-rank "$NODE_RANK"', f'--dist-init-addr "$HEAD_ADDRESS:{PORT}"']
        comments.append("run it on every node, with NODE_RANK and HEAD_ADDRESS set")
    if nodes > 1 and layout.dp > 1 and not shared:
        comments.append("replicas on several nodes are servers of their own behind SGLang's router")
    if request.source in ("", request.model.name) and "/" not in request.model.name:
        comments.append(f"{request.model.name} is the catalog's name: give the folder or the hub's name in its place")
    comments += (
        [f"its files are in {request.stored}, which the engine sees"]
        if request.stored
        else checkpoint_needed("sglang", served.weights)
    )
    source = shlex.quote(request.source or request.model.name)
    return command(["python -m sglang.launch_server", f"--model-path {source}", *words]), comments


LIMITS = (
    Limit("ep", lambda x: x.ep not in (1, x.tp, x.tp * x.dp), lambda _: {"ep": 1, "etp": 0},
          "it spreads experts over all of tp, over all of tp x dp, or not"),
    only("precision", tuple(DTYPES), "bf16", "it has bf16 and fp32"),
    without("etp", always, "its experts are split with tp, or whole with expert parallelism"),
)  # fmt: skip

WRITER = EngineWriter(
    name="sglang",
    title="SGLang",
    keys=KEYS,
    left={"attention": "SGLang chooses attention's kernel"},
    limits=LIMITS,
    write=write,
    comment=with_comments,
    file="sglang.sh",
    profile="vllm",
    serves=True,
    loads_model=True,
)
