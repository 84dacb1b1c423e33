"""`Layout`: how a model is split over ranks, as one line of text that is the same everywhere.

`dp=2,tp=2,zero=3,sp` on the command line, in TOML, in reports and in checkpoints parses to the same frozen object, and
`str(layout)` gives its canonical text: what differs from the defaults, in the table's order. A layout that contradicts
itself fails here; whether it suits a model is `legality.py`'s question.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import fields
from typing import Any

from shardwise.errors import LayoutError, did_you_mean
from shardwise.layout.algorithm_names import check_algorithm
from shardwise.layout.axes import DENSE
from shardwise.layout.sync import MOMENTS, OUTERS, SERVED, SYNCS, Servers, check_sync
from shardwise.options import option
from shardwise.records import dataclass

CHOICES: dict[str, tuple[str, ...]] = {
    "cpkind": ("ring", "ulysses", "allgather"),
    "tpkind": ("megatron", "gathered"),
    "schedule": (
        "naive", "gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-h2", "zb-v", "dualpipe-v",
    ),
    "recompute": ("none", "selective", "full", "input"),
    "attention": ("sdpa", "math"),
    "offload_params": ("none", "cpu", "nvme"),
    "offload_activations": ("none", "cpu"),
    "sync": SYNCS,
    "outer": OUTERS,
    "moments": MOMENTS,
    "compile": ("off", "block"),
    "precision": ("bf16", "fp32", "fp64"),
    "grads": ("bf16", "fp32"),
}  # fmt: skip

OFFLOADS = ("none", "cpu", "nvme")
"""Homes of optimizer state; the two beside none also with a fraction, such as `cpu:0.5`."""
FLAGS = ("sp", "qwz", "qgz", "feedback", "damped")
"""Keys that stand alone."""
ORDER = "-".join(DENSE)
"""Rank axes from slowest to fastest: tensor parallel stays inside a node."""


@dataclass(frozen=True)
class Layout:
    """One way to split a model. Fields and defaults are the keys of the layout text.

    Raises `LayoutError` when the values contradict each other, whatever the model.
    """

    dp: int = option(1, "data-parallel degree")
    tp: int = option(1, "tensor-parallel degree")
    pp: int = option(1, "pipeline-parallel degree; ranks = dp x tp x pp x cp")
    cp: int = option(1, "context-parallel degree: each rank has 1/cp of every sequence")
    ep: int = option(1, "expert-parallel degree: experts of a mixture over ep ranks of a stage")
    etp: int = option(0, "ranks that share the width of one expert; 0: tp where ep is 1, else 1")
    zero: int = option(0, "ZeRO stage: shards optimizer state (1), gradients, too (2), and parameters (3)")
    shard: int = option(0, "ranks over which ZeRO shards (HSDP when smaller); 0: dp x cp")
    hpz: int = option(0, "zero=3: ranks over which a second copy of parameters is cut (ZeRO++); 0: none")
    qwz: bool = option(False, "zero=3: parameters are gathered in 8 bits (ZeRO++)")
    qgz: bool = option(False, "zero=1 to 3: gradients are reduced in 4 bits (ZeRO++)")
    feedback: bool = option(False, "beside qgz: the error of packed gradients goes into the next sum")
    sp: bool = option(False, "sequence parallel, beside tp")
    cpkind: str = option("ring", "how attention sees other ranks' tokens under cp")
    tpkind: str = option("megatron", "megatron, or every layer split by outputs and gathered")
    sync: str = option("allreduce", "how replicas agree (`layout.sync`)")
    servers: str = option("", "number of parameter servers, such as `2`, or `2:own` on ranks of their own")
    staleness: int = option(0, "ssp: steps that a worker may be ahead of the slowest")
    backup: int = option(0, "ps: gradients of a step, the last to come, that are not waited for")
    damped: bool = option(False, "async: stale gradients move weights less")
    every: int = option(0, "local: steps from one outer step to the next")
    outer: str = option("average", "local: what an outer step does")
    outer_bits: int = option(0, "local: bits of outer gradients on the wire, 4 or 8; 0: full precision")
    moments: str = option("own", "local: whose moments of the inner optimizer replicas continue with")
    replicas: int = option(0, "local: replicas that train apart; 0: dp")
    algorithm: str = option("auto", "schedule of all-reduce, all-gather and reduce-scatter (`layout.algorithms`)")
    node: int = option(0, "ranks of a node, for hierarchical algorithms")
    schedule: str = option("1f1b", "order of a pipeline's work (`shardwise list schedules`)")
    virtual: int = option(1, "model chunks per pipeline rank")
    stages: tuple[int, ...] = option((), "layers of each of the pp x virtual stages, such as 21/20/20/19; none: even")
    micro: int = option(1, "sequences per micro-batch")
    recompute: str = option("none", "activations that the backward pass recomputes")
    attention: str = option("sdpa", "fused or explicit attention")
    offload: str = option("none", "home of optimizer state: `cpu`, `nvme`, or a fraction there, as `cpu:0.5`")
    offload_params: str = option("none", "zero=3: home of parameters")
    offload_activations: str = option("none", "home of saved activations")
    compile: str = option("off", "torch.compile for every block")
    precision: str = option("bf16", "data type of the computation")
    grads: str = option("bf16", "data type of gradient accumulators")
    order: str = option(ORDER, "rank axes from slowest to fastest")

    def __post_init__(self) -> None:
        for key in ("dp", "tp", "pp", "cp", "ep", "virtual", "micro"):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise LayoutError(f"layout: {key} must be a positive integer, not {value!r}")
        if self.zero not in (0, 1, 2, 3):
            raise LayoutError(f"layout: zero must be 0, 1, 2 or 3, not {self.zero!r}")
        for key, allowed in CHOICES.items():
            if getattr(self, key) not in allowed:
                raise LayoutError(f"layout: {key}={getattr(self, key)} is not one of {', '.join(allowed)}")
        self._check_order()
        check_sync(self)
        self._check_offload()
        self._check_shard()
        if self.algorithm != "auto" or self.node:
            check_algorithm(self.algorithm, self.node)
        if self.sp and self.tp == 1:
            raise LayoutError("layout: sp splits sequences over the tp ranks and needs tp of at least 2")
        if self.tpkind == "gathered":
            self._check_gathered()
        if self.stages and (len(self.stages) != self.pp * self.virtual or min(self.stages) < 0):
            raise LayoutError(
                f"layout: stages={'/'.join(map(str, self.stages))} must name pp x virtual = {self.pp * self.virtual} "
                "layer counts, such as 21/20/20/19"
            )
        if self.virtual > 1 and self.pp == 1:
            raise LayoutError("layout: virtual stages need pp of at least 2")
        self._check_experts()

    def _check_gathered(self) -> None:
        if self.tp == 1:
            raise LayoutError("layout: tpkind=gathered splits maps over the tp ranks and needs tp of at least 2")
        if self.sp:
            raise LayoutError(
                "layout: sp scatters the sums of row-parallel maps, and tpkind=gathered has none; leave out one of them"
            )

    def _check_offload(self) -> None:
        home, colon, share = self.offload.partition(":")
        if home not in OFFLOADS or (colon and home == "none"):
            raise LayoutError(f"layout: offload={self.offload} is not one of {', '.join(OFFLOADS)}, cpu:0.5, nvme:0.5")
        try:
            fraction = float(share) if colon else 1.0
        except ValueError:
            fraction = 0.0
        if not 0.0 < fraction <= 1.0:
            raise LayoutError(
                f"layout: offload={self.offload} needs a fraction of the optimizer state above 0 and up to 1, such as "
                f"{home}:0.5"
            )
        object.__setattr__(self, "offload", home if fraction == 1.0 else f"{home}:{fraction:g}")
        if self.offload_params == "none":
            return
        if self.zero < 3:
            raise LayoutError(
                f"layout: offload_params={self.offload_params} gathers parameters for each use and needs zero=3"
            )
        if self.offload_home == "none":
            raise LayoutError(
                f"layout: offload_params={self.offload_params} needs offload=cpu or offload=nvme: under zero=3 "
                "parameters are the optimizer's own"
            )

    def _check_experts(self) -> None:
        if self.etp not in (0, 1, self.tp):
            raise LayoutError(
                f"layout: etp={self.etp} must be 1, which keeps experts whole, or tp={self.tp}, which splits them as "
                "tp splits all else"
            )
        ranks = self.data_ranks * self.tp
        if ranks % (self.ep * self.expert_tp):
            raise LayoutError(f"layout: ep x etp = {self.ep * self.expert_tp} must divide dp x cp x tp = {ranks}")
        if self.etp == (self.tp if self.ep == 1 else 1):
            object.__setattr__(self, "etp", 0)

    def _check_order(self) -> None:
        if sorted(self.order.split("-")) != sorted(DENSE):
            raise LayoutError(f"layout: order must name {', '.join(DENSE)} once each, such as {ORDER}")

    def _check_shard(self) -> None:
        data = self.data_ranks
        if self.shard:
            if self.shard < 2 or data % self.shard:
                valid = ", ".join(str(n) for n in _divisors(data) if n > 1) or "none (dp x cp is 1)"
                raise LayoutError(f"layout: shard={self.shard} does not divide dp x cp = {data}; valid: {valid}")
            if self.zero == 0:
                raise LayoutError("layout: shard needs zero of at least 1; add zero=1, 2 or 3")
            if self.shard == data:
                object.__setattr__(self, "shard", 0)
        if self.hpz:
            self._check_hpz()
        if self.qwz and self.zero < 3:
            raise LayoutError("layout: qwz gathers parameters in 8 bits for each use and needs zero=3")
        if self.qgz and not self.zero:
            raise LayoutError("layout: qgz reduces gradients to their shards in 4 bits and needs zero of at least 1")
        if self.feedback and not self.qgz:
            raise LayoutError("layout: feedback adds what 4-bit gradients have lost to the next ones and needs qgz")

    def _check_hpz(self) -> None:
        if self.zero < 3:
            raise LayoutError(f"layout: hpz={self.hpz} keeps second copies of gathered parameters and needs zero=3")
        ranks = self.shard_ranks
        if self.hpz in (1, ranks):  # DeepSpeed's word for none; and a copy of the shards as they are
            object.__setattr__(self, "hpz", 0)
        elif ranks % self.hpz:
            valid = ", ".join(str(n) for n in _divisors(ranks)[1:-1]) or f"none of {ranks} ranks"
            raise LayoutError(
                f"layout: hpz={self.hpz} must cut the {ranks} ranks that ZeRO shards over into smaller groups; "
                f"valid: {valid}"
            )

    @property
    def ranks(self) -> int:
        """All ranks: training ranks, and servers with ranks of their own."""
        return self.training_ranks + (self.parameter_servers.count if self.parameter_servers.own else 0)

    @property
    def training_ranks(self) -> int:
        """Ranks that compute gradients: the first ones."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def parameter_servers(self) -> Servers:
        """Its parameter servers; none where replicas agree without."""
        return Servers.parse(self.servers) if self.sync in SERVED else Servers(0, False)

    @property
    def independent(self) -> int:
        """Replicas that compute without each other between two exchanges; 1 in lockstep."""
        if self.sync == "allreduce":
            return 1
        return (self.sync == "local" and self.replicas) or self.dp

    @property
    def inner_ranks(self) -> int:
        """Ranks that share the activations inside a block: heads and the feed-forward width. tpkind=gathered gathers
        every output, so that each rank has all of them."""
        return self.tp if self.tpkind == "megatron" else 1

    @property
    def expert_tp(self) -> int:
        """Ranks that share the width of one expert: all tensor-parallel ranks, or one."""
        return self.etp or (self.tp if self.ep == 1 else 1)

    @property
    def data_ranks(self) -> int:
        """Ranks among which gradients are summed: dp x cp, or a replica's part of them."""
        return self.dp * self.cp // self.independent

    @property
    def shard_ranks(self) -> int:
        """Size of the group over which ZeRO shards; 1 at stage 0."""
        return (self.shard or self.data_ranks) if self.zero else 1

    @property
    def replicate_ranks(self) -> int:
        """Number of groups that hold the same shard and sum their gradients by an all-reduce (HSDP)."""
        return self.data_ranks // self.shard_ranks

    @property
    def stage(self) -> int:
        """The ZeRO stage in effect: a shard group of one rank shards nothing, but what is offloaded still comes and
        goes by the stage."""
        return self.zero if self.shard_ranks > 1 or self.offload_home != "none" else 0

    @property
    def offload_home(self) -> str:
        """Home of offloaded optimizer state: none, cpu or nvme."""
        return self.offload.partition(":")[0]

    @property
    def offload_fraction(self) -> float:
        """Fraction of the optimizer state that is there; 0 where none is."""
        home, _, share = self.offload.partition(":")
        return 0.0 if home == "none" else float(share or 1)

    @property
    def dtype(self) -> str:
        """torch's name of the compute precision."""
        return {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}[self.precision]

    def __str__(self) -> str:
        """Canonical text; the empty layout is `dp=1`."""
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            if value is True:
                words.append(field.name)
            elif field.name == "stages":
                words.append(f"stages={'/'.join(map(str, value))}")
            else:
                words.append(f"{field.name}={value}")
        return ",".join(words) or "dp=1"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read a layout text, in any case, with commas or spaces between keys. Raises `LayoutError` with the reason and
        the nearest legal value."""
        known = {field.name: field for field in fields(cls)}
        values: dict[str, Any] = {}
        for word in filter(None, re.split(r"[,\s]+", re.sub(r"\s*=\s*", "=", text.lower()))):
            key, has_value, value = word.partition("=")
            if key not in known:
                raise LayoutError(f"layout {text!r}: unknown key {key!r}; {_meant(word, known)}")
            if key in values:
                raise LayoutError(f"layout {text!r}: {key} is given twice")
            values[key] = _value(text, key, value if has_value else None)
        return cls(**values)


_SYNONYMS = {
    **dict.fromkeys(("fp16", "float16", "half", "bfloat16", "mixed"), "bf16"),
    **dict.fromkeys(("float32", "single", "tf32"), "fp32"),
    **dict.fromkeys(("float64", "double"), "fp64"),
}
"""Other frameworks' words for a precision, and 16 bits of another kind -> the choice that is meant. By its letters fp16
is nearest to fp64."""


_ELSEWHERE = {
    "ddp": "dp=N",
    "fsdp": "dp=N,zero=3",
    "fsdp2": "dp=N,zero=3",
    "hsdp": "zero=3,shard=N",
    "mp": "tp=N",
    "tensor_parallel": "tp=N",
    "pipeline_parallel": "pp=N",
    "context_parallel": "cp=N",
    "expert_parallel": "ep=N",
    "sequence_parallel": "sp",
}
"""Other frameworks' words -> keys of a layout."""


def _meant(word: str, known: Collection[str]) -> str:
    """A hint for a word whose key is unknown."""
    key, _, value = word.partition("=")
    if key in _ELSEWHERE:
        return f"did you mean {_ELSEWHERE[key].replace('N', value or 'N')}?"
    if (run_together := re.fullmatch(r"([a-z_]+?)(\d+)", key)) and run_together[1] in known:
        return f"did you mean {run_together[1]}={run_together[2]}?"
    return did_you_mean(key, known, "known keys:")


def _near(value: str, choices: Collection[str]) -> list[str]:
    """The nearest choice, if one is near."""
    import difflib

    return difflib.get_close_matches(value, choices, n=1, cutoff=0.5)


def _value(text: str, key: str, value: str | None) -> Any:
    if key in FLAGS:
        if value in (None, "true", "1"):
            return True
        if value in ("false", "0"):
            return False
        raise LayoutError(f"layout {text!r}: {key} stands alone, or is {key}=true or {key}=false")
    if not value:
        raise LayoutError(f"layout {text!r}: {key} needs a value, such as {key}={_example(key)}")
    if key in CHOICES:
        if value not in CHOICES[key]:
            meant = [_SYNONYMS[value]] if _SYNONYMS.get(value) in CHOICES[key] else None
            near = meant or _near(value, CHOICES[key])
            hint = f"did you mean {near[0]}? " if near else ""
            raise LayoutError(f"layout {text!r}: {key}={value} is unknown; {hint}choices: {', '.join(CHOICES[key])}")
        return value
    if key == "offload" and value.partition(":")[0] not in OFFLOADS:
        near = _near(value, OFFLOADS)
        hint = f"did you mean {near[0]}? " if near else ""
        raise LayoutError(f"layout {text!r}: offload={value} is unknown; {hint}choices: {', '.join(OFFLOADS)}")
    if key in ("order", "algorithm", "offload", "servers"):
        return value
    try:
        if key == "stages":
            return tuple(int(n) for n in value.split("/"))
        number = int(value)
    except ValueError:
        raise LayoutError(f"layout {text!r}: {key} needs an integer, not {value!r}") from None
    if number < 0:
        raise LayoutError(f"layout {text!r}: {key} must not be negative")
    return number


def _example(key: str) -> str:
    others = {"stages": "16/16", "order": ORDER, "algorithm": "ring", "offload": "cpu", "servers": "2"}
    return CHOICES[key][0] if key in CHOICES else others.get(key, "2")


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
