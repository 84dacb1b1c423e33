"""The keys of the layout text, one entry each: `Keys`, whose fields are the keys, and `KEYS`, what is known of them.

Parsing, printing, checks, `--fix`, canonical layouts, generation, users' modules, engines' features, the studio and
lists of keys loop over `KEYS`. What a key does is in the code of its technique (docs/extending.md, "A layout key").
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import field, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple, Self

from shardwise.errors import LayoutError, did_you_mean, nearest
from shardwise.layout.axes import DENSE
from shardwise.options import runs_in, runs_text
from shardwise.records import dataclass

ORDER = "-".join(DENSE)
"""Rank axes from slowest to fastest: tensor parallel stays inside a node."""
SERVED = ("ps", "async", "ssp")
"""Values of `sync` with parameter servers."""


class Rule(NamedTuple):
    """What a key that differs from its default needs of the other keys, or excludes."""

    met: Callable[[Any], bool]
    """Takes the `Layout`."""
    why: str | Callable[[Any], str]
    """The message, or what gives it for a layout: a format of `word`, the key with its value, and `x`, the layout."""


class Group(NamedTuple):
    """A key that is the size of equal parts of a group of ranks."""

    whole: str
    """Property of `Layout`: the ranks of the group."""
    why: str
    """The message for a size that does not divide them: a format of `word`, `whole` and the `valid` sizes."""
    valid: slice = slice(None)
    """The sizes among the group's divisors, ascending; all of its ranks, in one part, is what 0 means, too."""

    def sizes(self, whole: int) -> tuple[int, ...]:
        return divisors(whole)[self.valid]


MARKS = {
    "searched": "`plan` tries its values, or `--fix` sets them",
    "priced": "the planner prices values that it does not try",
    "untraced": "a traced module has no predictions under it",
    "apart": "a module is traced for each of its values that has predictions",
    "untimed": "the time of a step under it is not modelled",
    "uncounted": "the memory of other engines is not known under it",
    "training": "generation does not have it",
    "unadapted": "frozen weights with adapters do not train under it yet",
    "inexact": "a step computes other numbers under it, by more than rounding",
}
"""Mark of a key -> what it says."""


@dataclass(frozen=True, eq=False)
class Key:
    """A key of the layout text."""

    default: Any
    help: str
    name: str = ""
    choices: tuple[Any, ...] = ()
    """Its values where they are few; of `offload` the homes, which a fraction may follow."""
    example: str = ""
    """A value for messages; the first choice where it is empty, or 2."""
    least: int = 0
    """Smallest value of a number."""
    form: Callable[[Any], Any] | None = None
    """Canonical form of a value. Raises `LayoutError`."""
    of: tuple[str, ...] = ()
    """Keys without which it means nothing."""
    matters: Callable[[Any], bool] = lambda layout: True
    """Whether it changes what a layout does."""
    rules: tuple[Rule, ...] = ()
    group: Group | None = None
    usual: Callable[[Any], Any] | None = None
    """The value that the default stands for."""
    stage: int = 0
    """Smallest ZeRO stage that has it."""
    marks: frozenset[str] = frozenset()
    """Of `MARKS`."""
    training: str = "is for training: leave it out, generation has tp, cp, ep, pp, dp and zero=3"
    """Why generation does not have it, where it is marked so."""
    feature: tuple[str, str] = ("", "")
    """Field of `predict.time.features.Features` without which an engine does not have it, and that feature's name."""
    words: str | Mapping[str, str] = ""
    """What it does, in words, of all values or by value: a format of the value."""

    @property
    def kind(self) -> str:
        """flag, number, list (of numbers), word (a choice) or text."""
        if isinstance(self.default, bool):
            return "flag"
        if isinstance(self.default, int):
            return "number"
        if isinstance(self.default, tuple):
            return "list"
        return "text" if self.form or not self.choices else "word"

    def text(self, value: Any) -> str:
        """The key with a value, as it is in a layout text."""
        if value is True:
            return self.name
        return f"{self.name}={runs_text(value) if self.kind == 'list' else value}"

    def in_words(self, value: Any) -> str:
        """What a value does; empty for the default, and where there is nothing to say."""
        words = self.words if isinstance(self.words, str) else self.words.get(str(value).partition(":")[0], "")
        return "" if value == self.default else words.format(value)

    def read(self, value: str | None) -> Any:
        """The value of a text, None for a key that stands alone. Raises `LayoutError` with the nearest value."""
        if self.kind == "flag":
            if value in (None, "true", "1", "false", "0"):
                return value in (None, "true", "1")
            raise LayoutError(f"{self.name} stands alone, or is {self.name}=true or {self.name}=false")
        if not value:
            example = self.example or (self.choices[0] if self.kind == "word" else "2")
            raise LayoutError(f"{self.name} needs a value, such as {self.name}={example}")
        if self.kind not in ("number", "list"):
            self._check_choice(value)
            return value
        if self.kind == "list" and value == "even":
            return self.default
        try:
            numbers = runs_in(value) if self.kind == "list" else (int(value),)
        except ValueError:
            raise LayoutError(f"{self.name} needs an integer, not {value!r}") from None
        if self.kind == "number" and numbers[0] < 0:
            raise LayoutError(f"{self.name} must not be negative")
        return numbers if self.kind == "list" else numbers[0]

    def _check_choice(self, value: str) -> None:
        word = value.partition(":")[0] if self.form else value
        if not self.choices or word in self.choices:
            return
        meant = [_SYNONYMS[word]] if _SYNONYMS.get(word) in self.choices else None
        near = meant or nearest(word, self.choices, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise LayoutError(f"{self.name}={value} is unknown; {hint}choices: {', '.join(self.choices)}")

    def checked(self, value: Any) -> Any:
        """The canonical form of a value. Raises `LayoutError` for one that the key never has."""
        if self.kind == "number":
            whole = isinstance(value, int) and not isinstance(value, bool)
            if self.choices and not (whole and value in self.choices):
                *first, last = map(str, self.choices)
                raise LayoutError(f"{self.name} must be {', '.join(first)} or {last}, not {value!r}")
            if not whole or value < self.least:
                words = "a positive integer" if self.least else "an integer that is not negative"
                raise LayoutError(f"{self.name} must be {words}, not {value!r}")
        elif self.kind == "flag" and not isinstance(value, bool):
            raise LayoutError(f"{self.name} stands alone, or is {self.name}=true or {self.name}=false, not {value!r}")
        elif self.kind in ("word", "text") and not isinstance(value, str):
            raise LayoutError(f"{self.name} must be a text, such as {self.example or self.choices[0]}, not {value!r}")
        elif self.kind == "word" and value not in self.choices:
            raise LayoutError(f"{self.name}={value} is not one of {', '.join(self.choices)}")
        return self.form(value) if self.form else value


def key(default: Any, help: str, marks: str = "", **more: Any) -> Any:
    """A field of `Keys`. marks: some of `MARKS`; more: fields of `Key`."""
    return field(default=default, metadata={"key": Key(default, help, marks=frozenset(marks.split()), **more)})


@dataclass(frozen=True)
class Servers:
    """Parameter servers of a layout."""

    count: int
    own: bool
    """Whether they are ranks of their own, after those of the workers; else server s is in the process of rank s."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `2` or `2:own`; "" is one server. Raises `LayoutError`."""
        number, colon, word = text.partition(":")
        if not (number or "1").isdecimal() or int(number or 1) < 1 or (word != "own" if colon else word):
            raise LayoutError(f"servers={text} is not a number of servers, such as 2, or 2:own on own ranks")
        return cls(int(number or 1), bool(colon))

    def __str__(self) -> str:
        return f"{self.count}:own" if self.own else "" if self.count == 1 else str(self.count)


def _home(text: str) -> str:
    """The home of optimizer state, with a fraction unless it is all of it."""
    home, colon, share = text.partition(":")
    if home not in _HOMES or (colon and home == "none"):
        raise LayoutError(f"offload={text} is not one of {', '.join(_HOMES)}, cpu:0.5, nvme:0.5")
    try:
        fraction = float(share) if colon else 1.0
    except ValueError:
        fraction = 0.0
    if not 0.0 < fraction <= 1.0:
        raise LayoutError(
            f"offload={text} needs a fraction of the optimizer state above 0 and up to 1, such as {home}:0.5"
        )
    return home if fraction == 1.0 else f"{home}:{fraction:g}"


def _order(text: str) -> str:
    if sorted(text.split("-")) != sorted(DENSE):
        raise LayoutError(f"order must name {', '.join(DENSE)} once each, such as {ORDER}")
    return text


def _agreeing(values: str, *more: Rule) -> dict[str, Any]:
    """Fields of a key that means something under these values of `sync` alone. more: rules of it there."""
    needed = " or sync=".join(values.split())
    rule = Rule(lambda x: x.sync in values.split(), f"{{word}} needs sync={needed}, not sync={{x.sync}}")
    return {"of": ("sync",), "rules": (rule, *more)}


def _unserved(why: str) -> Rule:
    """The rule of a key that workers of parameter servers do not have."""
    return Rule(lambda x: x.sync not in SERVED, f"sync={{x.sync}} does not go with {{word}}: {why}; leave it out")


_HOMES = ("none", "cpu", "nvme")
_IN_WORDS = {"cpu": "in the host's memory", "nvme": "on disk"}
_SPLITS = _unserved("only tp and sp split a worker")
_STATE = _unserved("its optimizer state is on the servers")
_EXPERTS = Rule(
    lambda x: x.data_ranks * x.tp % (x.ep * x.expert_tp) == 0,
    lambda x: f"ep x etp = {x.ep * x.expert_tp} must divide dp x cp x tp = {x.data_ranks * x.tp}",
)
_SHARED = Rule(
    lambda x: x.parameter_servers.own or x.parameter_servers.count <= x.training_ranks,
    "servers={x.parameter_servers.count} are more than the {x.training_ranks} ranks whose processes they share; at "
    "most servers={x.training_ranks}, or servers={x.parameter_servers.count}:own on ranks of their own",
)
_PACKED = Rule(lambda x: x.qgz, "{word} adds what 4-bit gradients have lost to the next ones and needs qgz")
_BACKUP = Rule(lambda x: x.backup < x.dp, lambda x: f"{{word}} of dp={x.dp} workers leaves none; at most {x.dp - 1}")
_ROUNDS = Rule(
    lambda x: x.sync != "local" or x.every > 0,
    "sync=local needs the number of local steps between two outer ones, such as every=20",
)
_COUNTS = Rule(
    lambda x: len(x.stages) == x.stage_count and min(x.stages) >= 0,
    "{word} must name pp x virtual = {x.stage_count} layer counts, such as 21/20/20/19",
)
_PIPELINE: dict[str, Any] = {"of": ("pp",), "matters": lambda x: x.pp > 1}


def _staged(zero: int, why: str, *more: Rule) -> dict[str, Any]:
    """Fields of a key that the ZeRO stages from `zero` on have."""
    needed = "zero=3" if zero == 3 else f"zero of at least {zero}"
    return {"stage": zero, "rules": (Rule(lambda x: x.zero >= zero, f"{{word}} {why} needs {needed}"), *more)}


def _sharding(zero: int, why: str, *more: Rule) -> dict[str, Any]:
    return _staged(zero, why, *more) | {"of": ("zero",), "matters": lambda x: x.stage > 0}


@dataclass(frozen=True)
class Keys:
    """The keys of a layout in the order of its text: type, default, and their `Key`."""

    dp: int = key(1, "data-parallel degree", "searched", least=1)
    tp: int = key(1, "tensor-parallel degree", "searched", least=1, feature=("tensor", "tensor parallelism"))
    pp: int = key(
        1,
        "pipeline-parallel degree; ranks = dp x tp x pp x cp",
        "searched",
        least=1,
        rules=(_SPLITS,),
        feature=("schedules", "pipelines"),
    )
    cp: int = key(
        1,
        "context-parallel degree: each rank has 1/cp of every sequence",
        "searched apart",
        least=1,
        rules=(_SPLITS,),
    )
    ep: int = key(
        1,
        "expert-parallel degree: experts of a mixture over ep ranks of a stage",
        "searched apart",
        least=1,
        rules=(_SPLITS, _EXPERTS),
        feature=("experts", "expert parallelism"),
    )
    etp: int = key(
        0,
        "ranks that share the width of one expert; 0: tp where ep is 1, else 1",
        "apart untimed",
        of=("tp", "ep"),
        usual=lambda x: x.tp if x.ep == 1 else 1,
        rules=(
            Rule(
                lambda x: x.etp in (1, x.tp),
                "{word} must be 1, which keeps experts whole, or tp={x.tp}, which splits them as tp splits all else",
            ),
            _EXPERTS,
        ),
    )
    zero: int = key(
        0,
        "ZeRO stage: shards optimizer state (1), gradients, too (2), and parameters (3)",
        "searched",
        choices=(0, 1, 2, 3),
        rules=(_STATE,),
        matters=lambda x: x.stage > 0,
    )
    shard: int = key(
        0,
        "ranks over which ZeRO shards (HSDP when smaller); 0: dp x cp",
        "searched",
        **_sharding(1, "makes groups of the ranks that ZeRO shards over and"),
        group=Group("data_ranks", "{word} does not divide dp x cp = {whole}; valid: {valid}", slice(1, None)),
        feature=("hybrid", ""),
    )
    hpz: int = key(
        0,
        "zero=3: ranks over which a second copy of parameters is cut (ZeRO++); 0: none",
        "searched uncounted training",
        form=lambda ranks: 0 if ranks == 1 else ranks,  # 1 is DeepSpeed's word for none
        group=Group(
            "shard_ranks",
            "{word} must cut the {whole} ranks that ZeRO shards over into smaller groups; valid: {valid}",
            slice(1, -1),
        ),
        **_sharding(3, "keeps second copies of gathered parameters and"),
        training="is for training: generation gathers over the ranks of shard, all or some",
        feature=("copies", "second copies of parameters"),
        words="backward gathers from a second copy over {} ranks",
    )
    qwz: bool = key(
        False,
        "zero=3: parameters are gathered in 8 bits (ZeRO++)",
        "uncounted inexact training",
        **_sharding(3, "gathers parameters in 8 bits for each use and"),
        words="weights are gathered in 8 bits",
    )
    qgz: bool = key(
        False,
        "zero=1 to 3: gradients are reduced in 4 bits (ZeRO++)",
        "uncounted inexact training",
        **_sharding(1, "reduces gradients to their shards in 4 bits and"),
        words="gradients are summed in 4 bits",
    )
    feedback: bool = key(
        False,
        "beside qgz: the error of packed gradients goes into the next sum",
        "inexact",
        **_sharding(1, "adds what 4-bit gradients have lost to the next ones and", _PACKED),
        words="what they lose is added to the next ones (error feedback)",
    )
    sp: bool = key(
        False,
        "sequence parallel, beside tp",
        "searched training",
        of=("tp",),
        feature=("sequence", "sequence parallelism"),
        rules=(
            Rule(lambda x: x.tp > 1, "{word} splits sequences over the tp ranks and needs tp of at least 2"),
            Rule(
                lambda x: x.tpkind != "gathered",
                "{word} scatters the sums of row-parallel maps, and tpkind=gathered has none; leave out one of them",
            ),
        ),
        training="cuts sequences, of which an engine step has one token each: leave sp out",
    )
    cpkind: str = key(
        "ring",
        "how attention sees other ranks' tokens under cp",
        "priced training apart",
        choices=("ring", "ulysses", "allgather"),
        of=("cp",),
        matters=lambda x: x.cp > 1,
        training="is for training: leave it out, generation cuts the cache's pages",
    )
    tpkind: str = key(
        "megatron",
        "megatron, or every layer split by outputs and gathered",
        "untraced uncounted unadapted training",
        choices=("megatron", "gathered"),
        of=("tp",),
        feature=("gathered", "tensor parallelism that gathers"),
        rules=(Rule(lambda x: x.tp > 1, "{word} splits maps over the tp ranks and needs tp of at least 2"),),
        training="is for training: leave it out, and tp gathers nothing but logits",
    )
    sync: str = key(
        "allreduce",
        "how replicas agree (`layout.sync`)",
        "uncounted unadapted training",
        choices=("allreduce", *SERVED, "local"),
        rules=(_ROUNDS,),
    )
    servers: str = key(
        "",
        "number of parameter servers, such as `2`, or `2:own` on ranks of their own",
        example="2",
        form=lambda text: str(Servers.parse(text)),
        **_agreeing(" ".join(SERVED), _SHARED),
    )
    staleness: int = key(0, "ssp: steps that a worker may be ahead of the slowest", **_agreeing("ssp"))
    backup: int = key(
        0, "ps: gradients of a step, the last to come, that are not waited for", **_agreeing("ps", _BACKUP)
    )
    damped: bool = key(False, "async: stale gradients move weights less", **_agreeing("async"))
    every: int = key(0, "local: steps from one outer step to the next", **_agreeing("local"))
    outer: str = key("average", "local: what an outer step does", choices=("average", "nesterov"), **_agreeing("local"))
    outer_bits: int = key(
        0,
        "local: bits of outer gradients on the wire, 4 or 8; 0: full precision",
        choices=(0, 4, 8),
        **_agreeing("local"),
    )
    moments: str = key(
        "own",
        "local: whose moments of the inner optimizer replicas continue with",
        choices=("own", "average"),
        **_agreeing("local"),
    )
    replicas: int = key(
        0,
        "local: replicas that train apart; 0: dp",
        **_agreeing("local"),
        group=Group("dp", "{word} does not divide dp={whole}; valid: {valid}"),
    )
    algorithm: str = key(
        "auto",
        "schedule of all-reduce, all-gather and reduce-scatter (`layout.algorithms`)",
        "training",
        example="ring",
    )
    node: int = key(0, "ranks of a node, for hierarchical algorithms", of=("algorithm",))
    schedule: str = key(
        "1f1b",
        "order of a pipeline's work (`shardwise list schedules`)",
        "searched",
        **_PIPELINE,
        choices=("naive", "gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"),
    )
    virtual: int = key(
        1,
        "model chunks per pipeline rank",
        "searched training",
        least=1,
        **_PIPELINE,
        rules=(Rule(lambda x: x.pp > 1, "virtual stages need pp of at least 2"),),
        training="is for training: generation has one chunk of layers a stage",
    )
    stages: tuple[int, ...] = key(
        (),
        "layers of each of the pp x virtual stages, such as 21/20/20/19; none, or `even`: even",
        "searched",
        example="16/16",
        feature=("listed", ""),
        **_PIPELINE,
        rules=(_COUNTS,),
    )
    micro: int = key(1, "sequences per micro-batch", "searched", least=1)
    recompute: str = key(
        "none",
        "activations that the backward pass recomputes",
        "searched",
        choices=("none", "selective", "full", "input"),
        words={
            "selective": "recomputes attention's core in backward",
            "full": "recomputes every block in backward",
            "input": "recomputes from the first block's input, for each block in backward anew",
        },
    )
    attention: str = key("sdpa", "fused or explicit attention", "priced untraced", choices=("sdpa", "math"))
    offload: str = key(
        "none",
        "home of optimizer state: `cpu`, `nvme`, or a fraction there, as `cpu:0.5`",
        "searched uncounted training",
        choices=_HOMES,
        example="cpu",
        form=_home,
        rules=(_STATE,),
        words={home: f"optimizer state {where}, updated by the host's cores" for home, where in _IN_WORDS.items()},
    )
    offload_params: str = key(
        "none",
        "zero=3: home of parameters",
        "searched uncounted training",
        choices=_HOMES,
        **_staged(
            3,
            "gathers parameters for each use and",
            Rule(
                lambda x: x.offload != "none",
                "{word} needs offload=cpu or offload=nvme: under zero=3 parameters are the optimizer's own",
            ),
        ),
        words={home: f"parameters {where}, gathered from there" for home, where in _IN_WORDS.items()},
    )
    offload_activations: str = key(
        "none",
        "home of saved activations",
        "apart training",
        choices=("none", "cpu"),
        words="saved activations of blocks in the host's memory",
    )
    compile: str = key(
        "off",
        "torch.compile for every block",
        "untraced uncounted unadapted untimed",
        choices=("off", "block"),
        words="blocks are compiled",
    )
    precision: str = key("bf16", "data type of the computation", "uncounted", choices=("bf16", "fp32", "fp64"))
    grads: str = key(
        "bf16", "data type of gradient accumulators", choices=("bf16", "fp32"), matters=lambda x: x.precision == "bf16"
    )
    order: str = key(ORDER, "rank axes from slowest to fastest", "untimed", example=ORDER, form=_order)


KEYS: dict[str, Key] = {each.name: replace(each.metadata["key"], name=each.name) for each in fields(Keys)}
CHOICES: dict[str, tuple[str, ...]] = {key.name: key.choices for key in KEYS.values() if key.kind == "word"}
"""Key -> its words."""
SEARCHED = tuple(key.name for key in KEYS.values() if "searched" in key.marks)
"""The keys of a layout over which a search goes."""
APART = tuple(name for name, key in KEYS.items() if "apart" in key.marks)
"""The keys for whose values a module is traced apart, beside tp, sp, precision and recomputation."""


def goes_with(name: str) -> tuple[str, ...]:
    """The keys that mean nothing without another, which may be given by one of them, too."""
    return tuple(key.name for key in KEYS.values() if name in key.of)


def defaults(*names: str) -> dict[str, Any]:
    return {name: KEYS[name].default for name in names}


def changed(layout: Keys) -> dict[Key, Any]:
    """Key -> value where it differs from the default, be it by its type alone."""
    values = vars(layout)
    return {
        key: value
        for name, key in KEYS.items()
        if (value := values[name]) is not key.default and (value != key.default or type(value) is not type(key.default))
    }


def difference(layout: Keys, other: Keys) -> str:
    """The layout text of the keys whose values are others than `other` has; empty for equal layouts."""
    values = {key: (vars(layout)[key.name], vars(other)[key.name]) for key in KEYS.values()}
    texts = (f"{key.name}=false" if one is False else key.text(one) for key, (one, two) in values.items() if one != two)
    return ",".join(texts)


def read(text: str, where: str, known: Collection[str] = tuple(KEYS)) -> dict[str, Any]:
    """Key -> value of a layout text, in any case, with commas or spaces between keys. known: the keys of a hint.
    Raises `LayoutError` with the reason and the nearest legal value, after `where`."""
    values: dict[str, Any] = {}
    for word in filter(None, re.split(r"[,\s]+", re.sub(r"\s*=\s*", "=", text.lower()))):
        name, has_value, value = word.partition("=")
        if name not in KEYS:
            raise LayoutError(f"{where}: unknown key {name!r}; {_meant(word, known)}")
        if name in values:
            raise LayoutError(f"{where}: {name} is given twice")
        try:
            values[name] = KEYS[name].read(value if has_value else None)
        except LayoutError as error:
            raise LayoutError(f"{where}: {error}") from None
    return values


def text_of_keys(given: Mapping[str, Any]) -> str:
    """The text of keys with values, which may be texts already; several numbers are stages' layers."""
    values = {k: "/".join(map(str, v)) or "even" if isinstance(v, list | tuple) else v for k, v in given.items()}
    return ",".join(key if value is True else f"{key}={str(value).lower()}" for key, value in values.items())


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
    name, _, value = word.partition("=")
    if name in _ELSEWHERE:
        return f"did you mean {_ELSEWHERE[name].replace('N', value or 'N')}?"
    if (run_together := re.fullmatch(r"([a-z_]+?)(\d+)", name)) and run_together[1] in known:
        return f"did you mean {run_together[1]}={run_together[2]}?"
    return did_you_mean(name, known, "known keys:")


@lru_cache(maxsize=4096)
def divisors(n: int) -> tuple[int, ...]:
    """Ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))
