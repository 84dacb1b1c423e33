"""Bounds that engines on torch's FSDP2 share: fp32 shards, whole blocks, and offload of all or nothing."""

from __future__ import annotations

from shardwise.interop.writing.canonical import SHARDING, defaults
from shardwise.interop.writing.old_limits import Limit, only

GRADS = {"grads": "fp32"}
LIMITS = (
    only("precision", ("bf16", "fp32"), "fp32", "it has no fp64"),
    Limit("zero", lambda x: x.zero == 1 and x.data_ranks > 1, lambda _: defaults(*SHARDING) | {"zero": 3},
          "FSDP shards parameters and gradients, too"),
    Limit("grads", lambda x: x.precision == "bf16" and x.grads == "bf16", lambda _: GRADS,
          "FSDP keeps its shards and their gradients in fp32"),
    Limit("shard", lambda x: bool(x.shard) and x.shard % x.cp > 0, lambda _: {"shard": 0}, "FSDP shards over whole cp"),
    only("recompute", ("none", "full"), "full", "it recomputes blocks"),
    Limit("offload", lambda x: x.offload != "none" and x.data_ranks == 1,
          lambda _: defaults(*SHARDING, "offload", "offload_params"), "it offloads with FSDP over several ranks"),
    Limit("offload", lambda x: x.offload not in ("none", "cpu"), lambda _: {"offload": "cpu"},
          "it offloads to the host's memory, all or nothing"),
    Limit("offload", lambda x: x.offload == "cpu" and (x.zero != 3 or x.offload_params != "cpu"),
          lambda _: {"zero": 3, "offload_params": "cpu"}, "it offloads parameters and optimizer, under zero=3"),
)  # fmt: skip
