"""Record the families of transformers as data: `make families`, or `... record_families.py MODEL_TYPE ...` for some.

Each class is built on the meta device with many sizes, flags and layer patterns drawn at random; formulas and
conditions (`shardwise.model.shapes.formulas`) are fitted to what the builds show, and checked on further builds. A
family of which a build contradicts the formulas is left out, and said.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import inspect
import itertools
import json
import multiprocessing
import random
import re
import signal
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.errors import UserError
from shardwise.model.shapes import recording
from shardwise.model.shapes.formulas import Scope, evaluate, holds

DATA = Path(__file__).parents[1] / "src/shardwise/model/shapes/families.json"
BUILDS, CHECKS, SECONDS = 36, 8, 90
"""Builds that formulas are fitted to and checked on, and the processor's time for a family."""
IGNORED = re.compile(
    r"token_id|token_index|^max_length|_length$|num_labels|num_beams|^top_|return|^id2|label|initializer|version|dtype|"
    r"^chunk_size_f|router_aux|_eps|dropout|_cache$|output_|^is_|problem|architectures|^prefix|loss_coef|begin_suppress|"
    r"position_ids|time_step_(min|max|floor|limit)|num_hidden_layers"
)
LEGACY = ("full_attention_interval", "sliding_window_pattern", "first_k_dense_replace", "moe_layer_freq", "num_experts",
          "n_embed",
          "global_attn_every_n_layers", "num_hash_layers", "global_head_dim", "num_global_key_value_heads",
          "index_topk_freq", "index_skip_topk_offset", "tie_embedding", "block_ff_dim", "head_dim", "mamba_expand",
          "mamba_n_groups", "mamba_d_conv", "no_rope_layer_interval", "decoder_sparse_step")  # fmt: skip
MEANT = (
    "layer_types",
    "layers_block_type",
    "attention_layers",
    "sliding_window",
    "num_key_value_heads",
    "head_dim",
    "num_attention_heads",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "attention_chunk_size",
)
"""Attributes that caches and operations need, whether shapes depend on them or not."""
Tensor = tuple[str, int | None, tuple[int, ...]]
"""Name with `{}` for the layer, the layer, shape with the number of equal tensors in front."""
Build = tuple[dict[str, Any], dict[str, Any], list[Tensor], dict[str, int]]
"""Given fields, attributes, tensors, layers of each stack."""


class Family:
    """One class of configurations and the builds of its model."""

    def __init__(self, model_type: str, seed: int = 0) -> None:
        self.model_type, self.kind = model_type, recording.config_class(model_type)
        self.random = random.Random(seed)
        self.names = dict(self.kind.attribute_map or {})
        self.layers = self.names.get("num_hidden_layers", "num_hidden_layers")
        self.default = recording.attributes_of(self.kind())
        source = inspect.getsource(inspect.getmodule(self.kind))
        self.legacy = [n for n in LEGACY if f'"{n}"' in source and n not in self.default]
        for name in list(self.legacy):
            with contextlib.suppress(Exception):
                made = recording.attributes_of(self.kind(**{name: 96}))
                same = [k for k, v in made.items() if v == 96 and k in self.default and self.default[k] != 96]
                if len(same) == 1:
                    self.names[name] = same[0]
                    self.legacy.remove(name)
        import importlib

        with contextlib.suppress(Exception):
            modeling = importlib.import_module(self.kind.__module__.replace("configuration_", "modeling_"))
            extra = set(re.findall(r'getattr\((?:self\.)?config, "(\w+)"', inspect.getsource(modeling)))
            extra.add("tie_word_embeddings")
            self.legacy += sorted(n for n in extra - self.default.keys() if n not in self.legacy and n[0] != "_")
        self.annotations = {n: str(f.type) for n, f in getattr(self.kind, "__dataclass_fields__", {}).items()}
        self.cuts: dict[str, str] = {}
        self.head = ""
        self.windowed = False
        self.moves: dict[tuple[str, int], set[str]] = defaultdict(set)
        self.fields: set[str] = set()
        self.follows: dict[str, set[str]] = defaultdict(set)
        self.base: dict[str, Any] = {}
        self.words: dict[str, list[str]] = {}

    def build(self, given: dict[str, Any]) -> Build:
        """The tensors of a configuration."""
        scope = Scope({**self.default, **given})
        given = {**given, **{n: evaluate(f, scope) for n, f in COMPUTED.get(self.model_type, {}).items()}}
        nested: dict[str, Any] = {}
        for name, value in given.items():
            outer, _, inner = name.rpartition(".")
            (nested.setdefault(outer, {}) if outer else nested)[inner or name] = value
        config = self.kind(**nested)
        made = recording.record_config(config)
        self.cuts, self.head, self.windowed = dict(made.cuts), made.kind, made.windowed
        tensors, stacks = recording.layered(made.tensors)
        return {self.names.get(k, k): v for k, v in given.items()}, made.attributes, tensors, stacks

    def attempt(self, given: dict[str, Any]) -> Build | None:
        with contextlib.suppress(Exception):
            return self.build(given)
        return None


def probe(family: Family) -> tuple[dict[str, list[Any]], dict[str, list[Any]], dict[str, int]]:
    """(sizes, flags, lists): fields that change shapes, with values to draw from, and layer lists with their words."""
    base = base_of(family)
    first = family.build(base)
    family.base = base
    sizes: dict[str, list[Any]] = {}
    flags: dict[str, list[Any]] = {}
    lists: dict[str, Any] = {}
    renaming: set[str] = set()
    for name, value in {**family.default, **dict.fromkeys(family.legacy)}.items():
        if (IGNORED.search(name) and name not in family.legacy) or name == family.layers:
            continue
        if isinstance(value, list):
            if "/" not in name:
                lists[name] = value
            continue
        tries: list[Any] = []
        if type(value) is bool:
            tries = [not value]
        elif type(value) is int:
            tries = [2 * value or 2, *([0, None] if value else []), *([1, 2] if name.endswith("layers") else [])]
        elif name.endswith("/layers"):
            continue
        elif value is None and (
            name in family.legacy or re.search("int|bool|None", family.annotations.get(name, "int"))
        ):
            tries = [True, 2, 96] if "bool" in family.annotations.get(name, "") else [2, 96]
        elif isinstance(value, str) or type(value) is float:
            continue
        for trial in tries:
            made = family.attempt({**base, name: trial})
            if (
                made is not None
                and made[2:] == first[2:]
                and name in core_fields(family)
                and trial
                and trial is not True
            ):
                sizes.setdefault(name, []).append(trial)  # what depends on it may be given, too
                family.fields.add(name)
            if made is None or made[2:] == first[2:]:
                continue
            note_moves(family, name, first, made)
            if type(trial) is bool:
                flags.setdefault(name, []).append(trial)
            elif trial in (None, 0):
                if {t[0] for t in made[2]} == {t[0] for t in first[2]}:
                    continue
                flags.setdefault(name, []).append(trial)
            else:
                sizes.setdefault(name, []).append(trial)
                if {t[0] for t in made[2]} != {t[0] for t in first[2]}:
                    renaming.add(name)
    probe_words(family, lists)
    variants = [{n: v} for n, values in flags.items() for v in values]
    variants += [{n: v[-1]} for n, v in sizes.items() if n in renaming]
    variants += [{n: [w] * len(v) for n, v in lists.items() if w in family.words.get(n, ())}
                 for w in sorted({w for words in family.words.values() for w in words})]  # fmt: skip
    probe_variants(family, variants, sizes)
    return sizes, flags, lists


WORDS = ("full_attention", "sliding_attention", "linear_attention", "chunked_attention", "attention", "mamba", "conv",
         "moe", "mlp", "hybrid", "recurrent", "dense", "sparse", "indexed_attention", "shared", "full")  # fmt: skip


def probe_words(family: Family, lists: dict) -> None:
    """Words that the entries of each list of layers may be."""
    for name, value in lists.items():
        words = {v for v in value if isinstance(v, str)}
        layers = family.base.get(family.layers) or family.default.get(family.layers) or 0
        for word in WORDS if words else ():
            given = {**family.base, name: [word, *(value * 4)[1:layers]]}
            if word not in words and family.attempt(given):
                words.add(word)
        family.words[name] = sorted(words)


def base_of(family: Family) -> dict[str, Any]:
    """The smallest change of the defaults that builds."""
    empty = {n: 8 for n, v in family.default.items() if v is None and "int" in family.annotations.get(n, "")
             and not IGNORED.search(n) and re.search("expert|group|head|size|dim|rank", n)}  # fmt: skip
    seed = SEEDS.get(family.model_type, {})
    for name in ("layer_types", "layers_block_type"):
        if family.default.get(name, ()) is None and not family.attempt({family.layers: 4}):
            found = [[word] * 4 for word in WORDS if family.attempt({family.layers: 4, name: [word] * 4})]
            if found:
                family.default[name] = found[0]
                return {family.layers: 4, name: found[0]}
    if family.layers not in family.kind().to_dict():  # it follows from a list
        return seed
    for base in (
        {family.layers: 4, **seed},
        {family.layers: 4},
        {family.layers: 4, **empty},
        {family.layers: 12},
        {},
        empty,
    ):
        if family.attempt(base):
            return base
    family.build({})
    return {}


def probe_variants(family: Family, variants: list[dict[str, Any]], sizes: dict) -> None:
    """See which integers move which dims where a flag is set, or tensors are there that the defaults lack."""
    for variant in variants[:7]:
        first = family.attempt({**family.base, **variant})
        for name, value in {**family.default, **dict.fromkeys(sizes)}.items():
            if first is None or name in variant or IGNORED.search(name) or name == family.layers:
                continue
            trial = 2 * value if type(value) is int and value else next((v for v in sizes.get(name, ()) if v), None)
            made = trial and family.attempt({**family.base, **variant, name: trial})
            if made and made[2:] != first[2:]:
                note_moves(family, name, first, made)
                if type(value) is int:
                    sizes.setdefault(name, []).append(trial)


def core_fields(family: Family) -> list[str]:
    """Fields that are drawn whether the defaults' shapes depend on them or not."""
    return [family.names.get(n, n) for n in ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size",
                                                "num_kv_heads")]  # fmt: skip


def note_moves(family: Family, name: str, first: Build, made: Build) -> None:
    """Remember which dims a field moves, itself or through attributes that follow it."""
    moved = {name.removesuffix("/layers")} | {k.removesuffix("/layers") for k, v in made[1].items()
             if v != first[1].get(k) and not IGNORED.search(k) and not isinstance(v, dict)}  # fmt: skip
    family.fields |= moved
    for attribute in moved:
        family.follows[attribute].add(family.names.get(name, name))
    before = {t[:2]: t[2] for t in first[2]}
    for key, layer, shape in made[2]:
        old = before.get((key, layer), ())
        for dim, size in enumerate(shape):
            if dim >= len(old) or old[dim] != size:
                family.moves[key, dim] |= moved


def draw(family: Family, sizes: dict, flags: dict, lists: dict, tries: int = 0) -> dict[str, Any]:
    """Fields of a random configuration. Heads stay multiples of key/value heads, and hidden sizes of heads."""
    rand, settable = family.random, family.layers in family.base
    layers = rand.choice((4, 5, 6, 7, 11, 14)) + (family.base.get(family.layers, 4) - 4)
    given: dict[str, Any] = {**family.base, family.layers: layers} if settable else dict(family.base)
    follows = family.layers not in family.kind().to_dict()
    layers = layers if follows else given.get(family.layers, family.default.get(family.layers) or 0)
    common = rand.choice((1, 1, 2, 3))
    for name, values in sizes.items():
        if rand.random() < (0.35 if tries < 3 else 0.7) and not name.endswith("layers"):
            continue  # but of layers there may be fewer than their default
        default = family.default.get(name)
        if default is None or (default < 8 and not re.search("head|size|dim|rank|vocab", name)):
            given[name] = rand.choice([*values, 2, 3, 4]) if default is None else rand.randint(1, 6)
            if default is None and re.search("dim|size|rank|width|inner|n_embd", name):
                given[name] = 32 * rand.choice((1, 2, 3, 5, 7, 11, 13))
        elif name.endswith("layers"):
            given[name] = rand.randint(0, layers)
        elif re.search("group", name):
            given[name] = default * rand.choice((1, 1, 2))
        elif re.search("key_value_heads|kv_heads", name) and rand.random() < 0.5:
            given[name] = max(1, default // rand.choice((2, 4)))
        else:
            many = (
                common * rand.choice((1, 1, 2)) if re.search("num.*head|n_head", name) else rand.choice((1, 2, 3, 5, 7))
            )
            given[name] = default * (many if not re.search(r"hidden_size$|d_model|n_embd$", name) else 6 * many)
    for name, values in flags.items():
        if rand.random() < (0.3 if tries < 3 else 0.12):
            given[name] = rand.choice(values)
    for name, value in lists.items():
        words = family.words.get(name) or []
        if words and (rand.random() < 0.6 or (follows and not name.startswith("mtp"))):
            given[name] = [*rand.sample(words, len(words)), *rand.choices(words, k=layers)][:layers]
        elif rand.random() < 0.5 and value and all(type(v) is int for v in value) and len(value) > 20:
            given[name] = [
                value[0] * rand.choice((1, 2, 3)) if value[0] > 1 else rand.choice((0, 1)) for _ in range(layers)
            ]
        elif rand.random() < 0.5 and re.search("only|idx|ids|indices|moe_layers", name):
            given[name] = sorted(rand.sample(range(layers), rand.randint(0, 3)))
    return given


COMPUTED = {
    "mamba2": {"num_heads": "hidden_size*expand/head_dim"},
    "falcon_h1": {"mamba_n_heads": "mamba_d_ssm/mamba_d_head"},
    "bamba": {"mamba_n_heads": "hidden_size*mamba_expand/64"},
    "granitemoehybrid": {"mamba_n_heads": "hidden_size*mamba_expand/64"},
}
"""Fields that must follow others for a class to be built."""
SEEDS: dict[str, dict[str, Any]] = {
    "gemma4_text": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 96,
                    "num_global_key_value_heads": 2},
    "mamba2": {"hidden_size": 2048, "num_heads": 64},
}  # fmt: skip
"""Fields without which parts of a class are not built."""


def sample(family: Family, count: int, sizes: dict, flags: dict, lists: dict) -> list[Build]:
    """Builds of random configurations; those that the class rejects are drawn again."""
    made: list[Build] = []
    for attempt in range(8 * count):
        if len(made) == count:
            break
        build = family.attempt(draw(family, sizes, flags, lists, attempt % 6))
        if build and plausible(family, build[1]):
            made.append(build)
    if len(made) < count // 3:
        raise ValueError(f"only {len(made)} of {8 * count} configurations were built")
    return made


def plausible(family: Family, attributes: dict[str, Any]) -> bool:
    """Whether heads share the hidden size, and groups the heads, without a rest."""
    hidden, heads, groups = (
        attributes.get(family.names.get(n, n)) for n in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    pairs = [(heads, groups)]
    own = [family.default.get(family.names.get(n, n)) for n in ("hidden_size", "num_attention_heads")]
    whole = all(type(n) is int and n for n in own) and not own[0] % own[1]
    if whole or ("head_dim" in family.legacy and attributes.get("head_dim") is None):
        pairs.append((hidden, heads))
    some = (attributes.get(n) for n in family.fields if n.endswith("layers") and n != family.layers)
    fewer = all(type(n) is not int or n <= (attributes.get(family.layers) or n) for n in some)
    return fewer and all(type(a) is not int or type(b) is not int or (b and not a % b) for a, b in pairs)


KEPT: list[Scope] = []
SCOPES: dict[tuple[int, int], Scope] = {}
TRUTH: dict[int, dict[str, bool]] = {}
"""Scopes of builds' layers, and what holds in each, by its id: both are asked for again and again."""


def scope_of(build: Build, layer: int | None) -> Scope:
    key = id(build[1]), layer or 0
    if key not in SCOPES:
        SCOPES[key] = Scope(build[1], layer or 0)
    return SCOPES[key]


def true(word: str, scope: Scope) -> bool:
    """Whether a literal holds."""
    known = TRUTH.setdefault(id(scope), {})
    if word not in known:
        known[word] = holds([word], scope)
    return known[word]


def literals(builds: list[Build], layered: bool, fields: set[str]) -> list[str]:
    """Conditions that differ among builds or layers."""
    words: set[str] = set()
    for _, attributes, *_ in builds:
        for name, value in attributes.items():
            if (name not in fields and not (layered and isinstance(value, list))) or name.startswith(("rope", "_name")):
                continue
            if isinstance(value, list) and layered:
                texts = {v for v in value if isinstance(v, str)}
                words |= {f"{name}@{text}" for text in texts}
                if value and all(type(v) in (int, bool) for v in value):
                    words |= {f"{name}#", f"{name}@"}
            elif type(value) in (bool, int) or value is None:
                words.add(name)
                if type(value) is int and value < 4:
                    words.add(f"{name}={value}")
                if (
                    layered
                    and type(value) is int
                    and re.search(
                        "layer|dense|interval|step|period|pattern|every|freq|index|replace|first|last|shared", name
                    )
                ):
                    words |= {f"<{name}", f">{name}", f"%{name}", f"%{name}+1", f"-{name}"}
                    offset = name.replace("period", "offset")
                    if offset != name:
                        words.add(f"%{name}-{offset}")
            elif isinstance(value, str) and len(value) < 24:
                words.add(f"{name}={value}")
    if layered:
        words |= {f"%{n}{s}" for n in range(2, 9) for s in ("", "+1")} | {f"<{n}" for n in range(1, 5)} | {"^"}
    if any("word_embed_proj_dim" in b[1] for b in builds):
        words.add("word_embed_proj_dim~hidden_size")
    return sorted(words, key=lambda w: (w[0] == "%" and w[1].isdigit(), w[-1] == "#", len(w), w))


def split_rows(rows: list[tuple[Scope, Any]], words: list[str]) -> Iterator[tuple[str, list, list]]:
    """Rows on both sides of each literal that divides them."""
    for word in words:
        sides: tuple[list, list] = ([], [])
        for row in rows:
            sides[true(word, row[0])].append(row)
        if sides[0] and sides[1]:
            yield word, sides[1], sides[0]


def presence(there: list[Scope], absent: list[Scope], words: list[str], depth: int = 2) -> list[list[str]] | None:
    """Conditions of which one must hold: [] where nothing is absent. None where none was found."""
    if not absent:
        return [[]]
    both = [w for word in words for w in (word, f"!{word}")]
    always = [w for w in both if all(true(w, s) for s in there)]
    chosen, left = [], absent
    while left and always:
        best = min(always, key=lambda w: sum(true(w, s) for s in left))
        rest = [s for s in left if true(best, s)]
        if len(rest) == len(left):
            break
        chosen.append(best)
        left = rest
    if not left:
        return [chosen]
    if not depth:
        return None
    for word in words:  # one of two conditions
        first = [s for s in there if true(word, s)]
        second = [s for s in there if not true(word, s)]
        if first and second:
            one = presence(first, absent, words, 0)
            two = one and presence(second, absent, words, depth - 1)
            if one and two:
                return [*one, *two]
    return None


def monomials(names: list[str]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    result: list = [((), ())]
    for size in (1, 2, 3):
        result += [(c, ()) for c in itertools.combinations(names, size)]
    result += [((a, a), ()) for a in names]
    result += [((a,), (b,)) for a, b in itertools.permutations(names, 2)]
    result += [((a, b), (c,)) for a, b in itertools.combinations(names, 2) for c in names if c not in (a, b)]
    return result


def fit(rows: list[tuple[Scope, int]], names: list[str]) -> str | None:
    """A formula of at most three terms for the numbers, of whole multiples of products."""
    if len({n for _, n in rows}) == 1:
        return str(rows[0][1])
    unique: dict[Any, tuple[Scope, int]] = {}
    for scope, number in rows:
        values = tuple(str(_named(n, scope)) for n in names)
        if unique.setdefault(values, (scope, number))[1] != number:
            return None
    every = list(unique.values())
    rows = every[:: max(1, len(every) // 24)][:24]
    found = {n: [_named(n, s) for s, _ in rows] for n in names}
    names = [n for n in names if all(type(v) in (int, float) and v == int(v) and v > 0 for v in found[n])]
    target = [n for _, n in rows]
    table = []
    for up, down in monomials(names):
        column = []
        for scope, _ in rows:
            value = Fraction(1)
            for n in up:
                value *= int(_named(n, scope))
            for n in down:
                value /= int(_named(n, scope))
            column.append(value)
        if all(v.denominator == 1 for v in column) and all(
            v <= 64 * t + 64 for v, t in zip(column, target, strict=True)
        ):
            table.append((up, down, [int(v) for v in column]))
    simple = [t for t in table if not t[1] and len(t[0]) < 3]
    pairs = simple[:40] + [t for t in table if t[1]][:40]
    for size in (1, 2, 3):
        for terms in itertools.combinations(table if size < 2 else pairs if size < 3 else simple[:22], size):
            if coefficients := solve([t[2] for t in terms], target):
                formula = "+".join(_term(c, *t[:2]) for c, t in zip(coefficients, terms, strict=True))
                if all(_value(formula, s) == n for s, n in every):
                    return formula
    for name in names:
        if len({int(s.value(name)) - n for s, n in rows}) == 1:
            return f"{name}-{int(rows[0][0].value(name)) - rows[0][1]}"
    for name, by in itertools.product(names, (8, 16, 32)):
        if all(-(-int(s.value(name)) // by) == n for s, n in rows):
            return f"{name}^{by}"
    return None


def _value(formula: Any, scope: Scope) -> int | None:
    with contextlib.suppress(Exception):
        if isinstance(formula, str):
            return evaluate(formula, scope)
        return next(evaluate(one, scope) for when, one in formula if holds(when, scope))
    return None


def _named(name: str, scope: Scope) -> Any:
    return scope.number(name) if name[0] == "#" else scope.value(name)


def _term(c: Fraction, up: tuple[str, ...], down: tuple[str, ...]) -> str:
    head = [str(c.numerator)] if c.numerator != 1 or not up else []
    return "*".join([*head, *up]) + "".join(f"/{d}" for d in down) + (f"/{c.denominator}" if c.denominator != 1 else "")


def solve(columns: list[list[int]], target: list[int]) -> list[Fraction] | None:
    """Positive coefficients, halves at the finest, of columns whose sum is the target in every row."""
    if len(columns) == 1:
        c = Fraction(target[0], columns[0][0])
        return [c] if c.denominator < 9 and all(c * v == t for v, t in zip(columns[0], target, strict=True)) else None
    matrix = np.array(columns, dtype=float).T
    scale = np.array(target, dtype=float)
    if not scale.all():
        return None
    found, _, rank, _ = np.linalg.lstsq(matrix / scale[:, None], np.ones(len(target)), rcond=1e-12)
    if rank < len(columns) or np.any(found < 0.4) or np.any(abs(found * 2 - np.round(found * 2)) > 1e-6):
        return None
    result = [Fraction(round(2 * c), 2) for c in found.tolist()]
    sums = (sum(c * column[i] for c, column in zip(result, columns, strict=True)) for i in range(len(target)))
    return result if all(total == t for total, t in zip(sums, target, strict=True)) else None


def fit_rows(rows: list[tuple[Scope, int]], names: list[str], words: list[str], depth: int = 2) -> list[Any] | None:
    """[[condition, formula], ...], of which the first whose condition holds counts."""
    if (formula := fit(rows, names)) is not None:
        return [[[], formula]]
    if not depth:
        return None
    for word, yes, no in split_rows(rows, words):
        a = fit_rows(yes, names, [], 0)
        if a is None:
            continue
        b = fit_rows(no, names, words, depth - 1)
        if b is not None:
            return [[[word], a[0][1]], *b]
    return None


def relevant(rows: list[tuple[Scope, int]], builds: list[Build]) -> list[str]:
    """Integer attributes in the order of how far the numbers go along with them."""
    names = {n for b in builds for n, v in b[1].items()
             if type(v) in (int, float) or (isinstance(v, list) and v and all(type(e) is int for e in v))}  # fmt: skip
    names = {n for n in names if not IGNORED.search(n) and not n.startswith("rope")}
    scores = []
    for name in names:
        pairs = [(s.value(name), n) for s, n in rows]
        if not all(type(v) in (int, float) and v and v == int(v) for v, _ in pairs) or len({v for v, _ in pairs}) < 2:
            continue
        by: dict[Any, set[int]] = defaultdict(set)
        for v, n in pairs:
            by[v].add(n)
        exact = sum(n % int(v) == 0 for v, n in pairs) / len(pairs)
        scores.append((-exact - 1 / (1 + sum(map(len, by.values())) / len(by)), name))
    return [name for _, name in sorted(scores)][:9]


def tensors_of(family: Family, builds: list[Build]) -> dict[str, Any]:
    """Name of each tensor -> its conditions and shape."""
    keys: dict[str, list[tuple[Scope, tuple[int, ...]]]] = defaultdict(list)
    for build in builds:
        for name, layer, shape in build[2]:
            keys[name].append((scope_of(build, layer), shape))
    result = {}
    end = {family.layers} & builds[0][1].keys()
    for name, rows in sorted(keys.items(), key=lambda item: item[0].endswith("bias")):
        layered = "{}" in name
        words = literals(builds, layered, family.fields)
        stack = name.partition(".{}")[0]
        there = {(id(s.attributes), s.layer) for s, _ in rows}
        everywhere = [scope_of(b, i) for b in builds for i in (range(b[3].get(stack, 0)) if layered else [None])]
        absent = [s for s in everywhere if (id(s.attributes), s.layer) not in there]
        when = presence([s for s, _ in rows], absent, words)
        if when is None:
            raise ValueError(f"no condition for {name}")
        dims = []
        for dim in range(max(len(shape) for _, shape in rows)):
            some = [(s, shape[dim]) for s, shape in rows]
            names = (family.moves.get((name, dim)) or set(core_fields(family))) | (end if not layered else set())
            sibling = (
                result.get(name.removesuffix("bias") + "weight", ())[1:][dim : dim + 1] if name.endswith("bias") else ()
            )
            if sibling and all(_value(sibling[0], s) == n for s, n in some):
                dims.append(sibling[0])
                continue
            formula = fit_rows(some, sorted(names), words) if names else None
            if formula is None:
                more = [n for n in relevant(some, builds)[:4] if n not in names]
                formula = fit_rows(some, [*sorted(names)[:5], *more], words)
            if formula is None:
                raise ValueError(f"no formula for dim {dim} of {name}")
            dims.append(formula[0][1] if len(formula) == 1 else formula)
        result[name] = [when, *dims]
    return result


def defaults_of(family: Family, builds: list[Build], needed: set[str]) -> dict[str, Any]:
    """Attribute -> rules of the value that it has where it is not given: constants, formulas, lists by layer. Under
    `null`, where it is given as null."""
    result: dict[str, Any] = {"null": {}}
    for name in sorted(needed):
        for where, rows in ((result, [b for b in builds if name not in b[0]]),
                            (result["null"], [b for b in builds if b[0].get(name, 0) is None])):  # fmt: skip
            if rows and (where is result or any(b[1].get(name) is not None for b in rows)):
                try:
                    where[name] = default_of(family, name, [b for b in rows if name in b[1]])
                except ValueError:
                    if name not in MEANT:
                        raise
    return result


def default_of(family: Family, name: str, free: list[Build]) -> Any:
    """The rule of one attribute."""
    if any(isinstance(b[1][name], list) for b in free):  # none beside lists: another list says it
        free = [b for b in free if b[1][name] is not None]
    values = [b[1][name] for b in free]
    if not values or (all(v == values[0] for v in values) and not (isinstance(values[0], list) and len(values[0]) > 3)):
        return values[0] if values else None
    widened = [{**b[1], **{k: v for k, v in b[0].items() if v is not None}} for b in free]
    if all(isinstance(v, list) and v == sorted(set(v)) and all(type(e) is int for e in v) for v in values):
        return index_rule(family, name, free, widened)
    if all(isinstance(v, list) for v in values):
        return list_rule(family, name, free, widened)
    rows = [(Scope({k: v for k, v in w.items() if k != name}), v) for w, v in zip(widened, values, strict=True)]
    KEPT.extend(s for s, _ in rows)
    again = [(w.attributes, dict(w.attributes), [], {}) for w, _ in rows]
    names = sorted(family.follows[name] - {name})
    names += [n for n in relevant([(w, v) for w, v in rows if type(v) is int and v], again)[:4] if n not in names]
    names += [family.layers] if re.search("layer|index", name) and name != family.layers else []
    names += [f"#{n}" for n, v in free[0][1].items() if isinstance(v, list)] if name == family.layers else []
    words = literals(again, False, family.fields)
    formula = fit_rows(rows, names, words) if all(type(v) is int for v in values) else None
    if formula is not None:
        return {"is": formula}
    if len({str(v) for v in values}) < 5:
        return {"choose": choices(name, rows, words)}
    raise ValueError(f"no default for {name}")


def choices(name: str, rows: list[tuple[Scope, Any]], words: list[str]) -> list[Any]:
    """[[conditions, value], ...], of which the first that holds counts; the rarest values come first."""
    pairs, left = [], rows
    for text in sorted({str(v) for _, v in rows}, key=lambda v: sum(str(w) == v for _, w in rows)):
        here = [s for s, v in left if str(v) == text]
        rest = [(s, v) for s, v in left if str(v) != text]
        if here:
            when = presence(here, [s for s, _ in rest], words)
            if when is None:
                raise ValueError(f"no rule for {name}")
            pairs.append([when, next(v for _, v in rows if str(v) == text)])
        left = rest
    return pairs


def index_rule(family: Family, name: str, free: list[Build], widened: list[dict[str, Any]]) -> Any:
    """{"index": conditions}: the layers whose numbers are in a list."""
    rows = []
    for build, attributes in zip(free, widened, strict=True):
        others = {k: v for k, v in attributes.items() if k != name}
        rows += [(Scope(others, i), i in build[1][name]) for i in range(build[1][family.layers])]
        KEPT.extend(s for s, _ in rows)
    again = [({}, dict(s.attributes), [], {}) for s, _ in rows[:: max(1, len(rows) // 60)]]
    words = literals(again, True, family.fields | set(family.legacy))
    when = presence([s for s, there in rows if there], [s for s, there in rows if not there], words)
    if when is None:
        raise ValueError(f"no rule for {name}")
    return {"index": when}


def list_rule(family: Family, name: str, free: list[Build], widened: list[dict[str, Any]]) -> Any:
    """{"each": [[conditions, value], ...]}: the entries of a list by layer."""
    rows, again = [], []
    for build, attributes in zip(free, widened, strict=True):
        others = {k: v for k, v in attributes.items() if k != name}
        again.append((build[0], others, [], {}))
        rows += [(Scope(others, i), v) for i, v in enumerate(build[1][name])]
        KEPT.extend(s for s, _ in rows)
    words = literals(again, True, family.fields | set(family.legacy))
    if name.endswith("/layers"):
        names = sorted(family.fields | set(family.legacy))
        formulas = fit_rows(
            rows, [n for n in names if any(type(s.attributes.get(n)) is int for s, _ in rows)][:12], words
        )
        if formulas is None:
            raise ValueError(f"no rule for {name}")
        return {"layers": formulas}
    try:
        return {"each": choices(name, rows, words)}
    except ValueError:
        return {"unknown": True}  # a configuration must give it


def used(data: Any) -> set[str]:
    """Names in formulas and conditions."""
    return set(re.findall(r"[A-Za-z_][\w.]*", json.dumps(data)))


def record(model_type: str, seed: int = 0) -> dict[str, Any]:
    """The family's data. Raises `ValueError` where none was found that fits."""
    for memo in (SCOPES, TRUTH, KEPT):
        memo.clear()
    family = Family(model_type, seed)
    sizes, flags, lists = probe(family)
    builds = sample(family, BUILDS * (1 + seed), sizes, flags, lists)
    if plausible(family, (base := family.build(family.base))[1]):
        builds.insert(0, base)
    overridden = sorted(
        n for n in {n for b in builds for n in b[0]}
        if type(family.default.get(n)) is int and n != family.layers
        and (have := [b for b in builds if n in b[0]])[1:]
        and 2 * sum(b[0][n] == b[1].get(n) for b in have) < len(have)
    )  # fmt: skip
    for given, made, *_ in builds:
        for name in overridden:
            given.pop(name, None)
        for name in {n for b in builds for n in b[1] if n.endswith("/layers")}:
            plain = made.get(name.removesuffix("/layers"))
            made.setdefault(name, [plain] * made[family.layers])
    tensors = tensors_of(family, builds)
    counts = {}
    for stack in {s for b in builds for s in b[3]}:
        rows = [(scope_of(b, None), b[3][stack]) for b in builds if stack in b[3]]
        names = [n for n in builds[0][1] if "layer" in n and type(builds[0][1][n]) is int]
        if family.layers not in family.kind().to_dict():  # it follows from a list
            names = []
        names += [f"#{n}" for n, v in builds[0][1].items() if isinstance(v, list)]
        formula = fit(rows, names) or fit(rows, [n for n in sorted(family.fields) if type(builds[0][1].get(n)) is int])
        if formula is None:
            raise ValueError(f"no number of layers of {stack}")
        counts[stack] = formula
    layered = {n for b in builds for n in b[1] if n.endswith("/layers")}
    needed = {n for n in used([tensors, counts]) if n in family.default} | layered
    needed |= {n for n in MEANT if n in family.default}
    while True:
        rules = defaults_of(family, builds, needed)
        rules.setdefault(family.layers, family.default.get(family.layers))
        more = {n for n in used(rules) if n in family.default} - needed
        if not more:
            break
        needed |= more
    shown = {n: v for n, v in family.default.items()
             if n not in rules and (v is None or (type(v) in (int, bool, float, str) and not IGNORED.search(n)))
             }  # fmt: skip
    words = {f"{n}@{a}": c for given, made, *_ in builds for n, v in given.items()
             if isinstance(v, list) and isinstance(made.get(n), list) and len(v) == len(made[n])
             for a, c in zip(v, made[n], strict=True) if a != c}  # fmt: skip
    data = {"class": family.head, "words": words, "overridden": overridden, "names": family.names, "stacks": counts,
            "tensors": tensors, "defaults": rules,
            "others": shown, "cuts": family.cuts, "windowed": family.windowed,
            "known": sorted({*family.legacy, *recording.attributes_of(family.kind())})}  # fmt: skip
    check(family, data, sample(family, CHECKS, sizes, flags, lists))
    # The class's own defaults are a published model's; where they contradict, the lists by layer must be given.
    whole = family.attempt({})
    try:
        check(family, data, [whole] if whole else [])
    except (ValueError, UserError):
        guessed = [n for n, r in rules.items() if isinstance(r, dict) and r.keys() & {"each", "layers", "index"}]
        data["defaults"] |= {n: {"unknown": True} for n in guessed}
        check(family, data, [whole] if whole and not guessed else [])
    return data


def check(family: Family, data: dict[str, Any], builds: list[Build]) -> None:
    """Raise `ValueError` where a build contradicts the data."""
    from shardwise.model.shapes.reading import tensors_of as evaluated

    for given, _attributes, tensors, _ in builds:
        given = {n: v for n, v in given.items() if n not in data["overridden"]}
        if any(isinstance(r, dict) and r.get("unknown") and n not in given for n, r in data["defaults"].items()):
            continue
        made = sorted((n, layer, s) for n, layer, s in evaluated(data, given))
        want = sorted((n, -1 if layer is None else layer, s) for n, layer, s in tensors)
        if made != want:
            wrong = [t for t in want if t not in made][:2], [t for t in made if t not in want][:2]
            raise ValueError(f"a build contradicts: {str(wrong)[:300]} at {given}")


def task(model_type: str) -> tuple[str, dict[str, Any] | str]:
    signal.signal(signal.SIGPROF, lambda *_: (_ for _ in ()).throw(TimeoutError("too long")))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with contextlib.suppress(ValueError, np.linalg.LinAlgError):
            return model_type, record(model_type)
        return model_type, record(model_type, 1)
    except Exception as error:
        return model_type, f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def model_types() -> list[str]:
    """Of every class with a head for the next token, and of the text parts of those that see or hear."""
    recording.transformers()
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    causal = set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    found = set(causal)
    for mapping in (auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES):
        for name in mapping:
            with contextlib.suppress(Exception):
                config = CONFIG_MAPPING[name]()
                found.add(config.get_text_config().model_type)
    return sorted(t for t in found if t in CONFIG_MAPPING)


def composites() -> dict[str, Any]:
    """model_type of models that see or hear -> key and family of their language model, and whether its head is tied."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    result: dict[str, Any] = {}
    for name in sorted(CONFIG_MAPPING.keys()):
        with contextlib.suppress(Exception):
            config = CONFIG_MAPPING[name]()
            text = config.get_text_config()
            key = next((k for k in config.sub_configs if getattr(config, k, None) is text), "")
            if text is not config and key:
                result[name] = [key, text.model_type, getattr(config, "tie_word_embeddings", None)]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="MODEL_TYPE", help="all of transformers where none is named")
    parser.add_argument("--out", type=Path, default=DATA, help="file that they are added to (the package's own)")
    args = parser.parse_args()
    wanted = args.families or model_types()
    if not args.families:
        lines = (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in composites().items())
        args.out.with_name("composites.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        for model_type, data in pool.imap_unordered(task, wanted):
            if isinstance(data, str):
                print(f"{model_type}: left out: {data[:1500]}", flush=True)
            else:
                store(model_type, data, args.out)
                print(f"{model_type}: {len(data['tensors'])} tensors", flush=True)


def store(model_type: str, data: dict[str, Any], out: Path) -> None:
    """Write a family beside those that are there."""
    with out.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        families = {**(json.loads(out.read_text()) if out.exists() else {}), model_type: data}
        lines = (f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in sorted(families.items()))
        out.with_suffix(".new").write_text("{\n" + ",\n".join(lines) + "\n}\n")
        out.with_suffix(".new").replace(out)
    out.with_suffix(".lock").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
