"""`Layout`: how a model is split over ranks, as one line of text that is the same everywhere.

`dp=2,tp=2,zero=3,sp` on the command line, in TOML, in reports and in checkpoints parses to the same frozen object, and
`str(layout)` gives its canonical text: what differs from the defaults, in the order of the keys (`keys.py`). A layout
that contradicts itself fails here; whether it suits a model is `legality.py`'s question.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

from shardwise.errors import LayoutError, UserError
from shardwise.layout.algorithm_names import check_algorithm
from shardwise.layout.axes import DP, EP, ETP, TP
from shardwise.layout.keys import APART, KEYS, SERVED, Key, Keys, Servers, changed, defaults, read, text_of_keys
from shardwise.records import dataclass


@dataclass(frozen=True)
class Layout(Keys):
    """One way to split a model. Fields and defaults are the keys of the layout text.

    Raises `LayoutError` when the values contradict each other, whatever the model.
    """

    def __post_init__(self) -> None:
        try:
            given = changed(self)
            for key, value in given.items():
                object.__setattr__(self, key.name, key.checked(value))
            self._check_keys(given)
            if self.algorithm != "auto" or self.node:
                check_algorithm(self.algorithm, self.node)
        except LayoutError as error:
            raise LayoutError(f"layout: {error}") from None

    def _check_keys(self, given: dict[Key, Any]) -> None:
        """Check rules and sizes of groups, and give keys that mean their default that default."""
        for key, value in given.items():
            for rule in key.rules:
                if not rule.met(self):
                    why = rule.why if isinstance(rule.why, str) else rule.why(self)
                    raise LayoutError(why.format(word=key.text(value), x=self))
            if key.group:
                size, whole = getattr(self, key.name), getattr(self, key.group.whole)
                sizes = key.group.sizes(whole)
                if size in (0, whole):
                    object.__setattr__(self, key.name, 0)
                elif size not in sizes:
                    valid = ", ".join(map(str, sizes)) or f"none of {whole} ranks"
                    raise LayoutError(key.group.why.format(word=key.text(size), whole=whole, valid=valid))
            if key.usual and value == key.usual(self):
                object.__setattr__(self, key.name, key.default)

    @property
    def ranks(self) -> int:
        return self.training_ranks + (self.parameter_servers.count if self.parameter_servers.own else 0)

    @property
    def training_ranks(self) -> int:
        """Ranks that compute gradients: the first ones."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def parameter_servers(self) -> Servers:
        """Its parameter servers; none where replicas agree without."""
        return Servers.parse(self.servers) if self.served else Servers(0, False)

    @property
    def served(self) -> bool:
        return self.sync in SERVED

    @property
    def asynchronous(self) -> bool:
        """Whether each gradient is an update, without waiting for others."""
        return self.sync == "async"

    @property
    def local_sgd(self) -> bool:
        """Whether replicas train apart from each other between outer steps."""
        return self.sync == "local"

    @property
    def independent(self) -> int:
        """Replicas that compute without each other between two exchanges; 1 in lockstep."""
        if self.sync == "allreduce":
            return 1
        return (self.local_sgd and self.replicas) or self.dp

    @property
    def inner_ranks(self) -> int:
        """Ranks that share the activations inside a block: heads and the feed-forward width; one where every output is
        gathered, so that each rank has all of them."""
        return 1 if self.gathers_outputs else self.tp

    @property
    def gathers_outputs(self) -> bool:
        """Whether tensor parallelism splits every map by its outputs and gathers them."""
        return self.tpkind == "gathered"

    @property
    def ulysses(self) -> bool:
        """Whether context-parallel attention exchanges sequence for heads (Jacobs et al. 2023)."""
        return self.cpkind == "ulysses"

    @property
    def expert_tp(self) -> int:
        """Ranks that share the width of one expert: all tensor-parallel ranks, or one."""
        return self.etp or (self.tp if self.ep == 1 else 1)

    @property
    def data_ranks(self) -> int:
        """Ranks among which gradients are summed: dp x cp, or a replica's part of them."""
        return self.dp * self.cp // self.independent

    @property
    def stage_count(self) -> int:
        """Stages of the pipeline: chunks of layers over all of its ranks."""
        return self.pp * self.virtual

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
    def offloads_params(self) -> bool:
        """Whether gathers read parameters from the host's memory or from disk."""
        return self.offload_params != "none"

    @property
    def params_on_disk(self) -> bool:
        return self.offload_params == "nvme"

    @property
    def offloads_activations(self) -> bool:
        return self.offload_activations != "none"

    @property
    def uses_disk(self) -> bool:
        return "nvme" in (self.offload_home, self.offload_params)

    @property
    def dtype(self) -> str:
        """torch's name of the compute precision."""
        return {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}[self.precision]

    def __str__(self) -> str:
        return ",".join(key.text(value) for key, value in changed(self).items()) or "dp=1"

    def __repr__(self) -> str:
        return f"Layout.parse({str(self)!r})"

    @classmethod
    def of(cls, given: object) -> "Layout":
        """A layout, or the one of a text or of keys with values. Raises `UserError`."""
        if isinstance(given, Layout):
            return given
        if isinstance(given, Mapping):
            given = text_of_keys(given)
        if not isinstance(given, str):
            raise UserError(f"layout must be a Layout, a text such as tp=2,dp=4, or a dict; not {given!r}")
        return cls.parse(given)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a layout text, in any case, with commas or spaces between keys. Raises `LayoutError` with the reason and
        the nearest legal value."""
        return cls(**read(text, f"layout {text!r}"))


def with_replicas(layout: Layout, count: int) -> Layout:
    """The layout with another number of replicas. Raises `LayoutError` where other keys need theirs."""
    return replace(layout, dp=count)


def with_stage(layout: Layout, zero: int) -> Layout:
    """The layout under another ZeRO stage, without the keys that the stage does not have. Raises `LayoutError`."""
    return replace(layout, zero=zero, **defaults(*(key.name for key in KEYS.values() if key.stage > zero)))


def traced_cut(layout: Layout) -> str:
    """The layout text of the keys for whose values a module is traced apart; empty where they have their defaults."""
    apart = ((key, value) for key, value in changed(layout).items() if key.name in APART and key.matters(layout))
    return ",".join(key.text(value) for key, value in apart)


def cut_layout(cut: str | Mapping[str, Any], **keys: Any) -> Layout:
    """The layout of these keys, by their text or values, and of other `keys`, on as few ranks as it takes. Raises
    `UserError`."""
    values = read(cut, f"cuts: {cut!r}", APART) if isinstance(cut, str) else cut
    if other := next((name for name in values if name not in APART), ""):
        raise UserError(f"cuts: {cut!r}: {other} is none of {', '.join(APART)}: leave it out")
    ranks = {DP[0]: max(1, values.get(EP[0], 1)), TP[0]: max(1, values.get(ETP[0], 1))}
    return Layout(**{**ranks, **values, **keys})


def suits_cut(cut: str, tp: int) -> bool:
    """Whether so many tensor-parallel ranks can have a cut: one that splits experts is for its number of ranks."""
    return cut_layout(cut).expert_tp in (1, tp)
