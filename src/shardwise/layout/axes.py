"""Axes of a mesh: a tuple of names, composed by `+` (`SHARD + TP`). No other file spells a name of an axis (a test)."""

Axes = tuple[str, ...]
"""Axes of a group, the slowest first. None of them: every rank for itself."""

REPLICA: Axes = ("replica",)
"""The replicas that agree otherwise than in lockstep (`layout.sync`): always the slowest axis."""
PP: Axes = ("pp",)
DP: Axes = ("dp",)
CP: Axes = ("cp",)
TP: Axes = ("tp",)
EDP: Axes = ("edp",)
EP: Axes = ("ep",)
ETP: Axes = ("etp",)
EP_ACROSS: Axes = ("ep-across",)
"""The expert-parallel ranks with one place in tensor parallelism: those between which generation sends tokens."""
SHARD: Axes = ("shard",)
"""The data ranks among which ZeRO shards."""
REPLICATE: Axes = ("replicate",)
"""The data ranks that hold the same shard (HSDP; all of them without ZeRO)."""
HPZ: Axes = ("hpz",)
"""The ranks of a shard group that gather second copies of its parameters among themselves (ZeRO++'s hpZ)."""
HPZ_ACROSS: Axes = ("hpz-across",)
"""The ranks of a shard group with one place among those of `HPZ`."""
KV: Axes = ("kv",)
"""The tensor-parallel ranks that hold the same key/value head."""

SERVER = "server"
"""Where the ledger has axes: a message between a worker and a parameter server."""
DATA = DP + CP
STAGE = DATA + TP
"""All ranks of one stage of the pipeline."""
DENSE = PP + DATA + TP
EXPERT = PP + EDP + EP + ETP


def named(name: str) -> Axes:
    """The axes of a group by the name that it has in a ledger (`Mesh.name`)."""
    return tuple(name.split("_")) if name else ()
