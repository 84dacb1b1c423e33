"""Record the saved tensors of the decoder's parts as formulas: `make recordings`.

Every form (the mechanisms of a part) runs under every mode (recomputation, attention, cut) on fake tensors whose sizes
are products of distinct primes, so that bytes factor into a coefficient and symbols of `predict.memory.recorded`.
Equal branches of the tree of modes are joined.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.errors import UserError
from shardwise.layout import Layout, UnitPlan, Workload, check_runnable, unit_plan
from shardwise.layout.experts import RoutedRows
from shardwise.model import ModelConfig
from shardwise.model.catalog import catalog, get
from shardwise.model.config import LatentAttention
from shardwise.model.lora import Lora
from shardwise.predict.memory import recorded
from shardwise.runtime.measure.recordings import MLP, SHARED, saved_storages

DATA = Path(recorded.__file__).with_name("recordings.json")
UNITS = {"bfloat16": ("e", 2), "float32": ("a", 4), "int64": ("8", 8), "bool": ("", 1)}
"""dtype in a bf16 run -> factor of the formula, bytes an element."""
TP, CP, EP, MICRO = 5, 3, 2, 7
SIZES = {19, 23, 29, 31, 37, 41, 43, 61, 67, 73, 79, 83, 97, 109, 131, 137, 151, 193, 227}
"""Primes of a model's sizes, of sums of them, and of degrees."""
WINDOW = {"window": 4}
ADAPTERS = [{"lora": Lora(4, targets=names)} for names in ((), ("q", "up"), ("out", "down"), ("up",), ("q",))]
"""Of all maps, and of some that leave others frozen."""
CHANGES: dict[str, list[dict[str, Any]]] = {
    "tiny-llama": [{}, WINDOW, *ADAPTERS],
    "tiny-olmo2": [{}, WINDOW, *ADAPTERS],
    "tiny-gemma2": [{}, *ADAPTERS],
    "qwen3-0.6b": [{}, WINDOW, *ADAPTERS],
    "gpt-neox-20b": [{}, WINDOW, *ADAPTERS],
    "tiny-gpt": [{}, WINDOW, *ADAPTERS],
    "gpt2": [{"attention_dropout": drop, **change} for drop in (0.0, 0.1) for change in ({}, WINDOW, *ADAPTERS)],
    "tiny-deepseek": [{"experts": None, **change} for change in ({}, WINDOW)],
    "deepseek-v2-lite": [
        {"experts": None, "rope_scaling": None, "dropout": drop, **change}
        for drop in (0.0, 0.1)
        for change in ({}, WINDOW)
    ],
}
"""Forms that no model of the catalog has: changes of one."""
CHOICES = {
    "recompute": ("none", "selective", "full", "input"),
    "core": ("sdpa", "math", "short"),
    "documents": (False, True),
    "cpkind": ("", "ring", "allgather", "ulysses", "ulysses-copies"),
    "tensor": ("megatron-sp", "megatron", "gathered", ""),
    "route": ("here", "spread"),
    "etp": ("whole", "split"),
    "rows": ("", "padded", "capacity"),
}


def models() -> Iterator[ModelConfig]:
    """One model of each form of a block."""
    known: set[tuple[str, ...]] = set()
    changed = [get(name).replace(**change) for name, changes in CHANGES.items() for change in changes]
    for model in sorted((*changed, *catalog().values()), key=lambda model: model.experts is not None):
        if model.why_not_runnable():
            continue
        plan = unit_plan(model, Layout(), Workload(8, 1))
        forms = tuple(sorted({form for form, _ in keys(plan)}))
        if forms not in known:
            known.add(forms)
            yield model


def sized(model: ModelConfig, tp: int, cp: int, copies: bool) -> ModelConfig:
    """The model with sizes that are products of primes of their own, for so many ranks. copies: whether each rank has
    one head of keys and values, of which context-parallel ranks have copies."""
    kv_heads, groups = 19 * cp * tp, 1 if model.latent_attention else 27
    if copies:
        kv_heads, groups = tp, kv_heads * groups // tp
    latent = model.latent_attention
    if latent:
        latent = LatentAttention(137 * bool(latent.q_rank), 131, 109, 118, 193)
    if experts := model.experts:
        shared = 67 * bool(experts.shared)
        experts = replace(experts, count=46 * experts.groups, active=23, ffn=61 * tp, shared=shared, dense_layers=0)
    return model.replace(
        layers=2, vocab=43 * tp, hidden=31, heads=kv_heads * groups, kv_heads=kv_heads,
        head_dim=0 if latent else 8 * 37, ffn=41 * tp, max_positions=1 << 15, latent_attention=latent, experts=experts,
        window=3 if model.window else 0, score_scale=None if model.plain_attention else 5.0,
    )  # fmt: skip


def unique(number: int) -> bool:
    """Whether it is a prime that no other size has."""
    return number > 12 and number not in SIZES and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def length(model: ModelConfig, tp: int, cp: int, **chosen: Any) -> int:
    """Tokens of a sequence, of which a rank's stream or its chunks have a prime number; 0 where there is none."""
    short, padded = chosen["core"] == "short", chosen["rows"] == "padded" or chosen["cpkind"].startswith("ulysses")
    lengths = range(64, 512) if short else range(513, 1 << 16)
    kind, _, sp = chosen["tensor"].partition("-")
    if kind and not sp and model.experts and chosen["etp"] == "whole" and cp == 1:
        # Ranks route a part of the tokens each.
        return next(seq for seq in lengths if unique(-(-MICRO * seq // tp)) and unique(seq))
    step = (tp if sp else 1) * (2 * cp if cp > 1 else 1)
    for seq in lengths:
        if not seq % step and unique(seq // step):
            filled = next((n for n in range(seq - 1, seq - step, -1) if unique(n)), 0) if padded else seq
            if filled:
                return filled
    return 0


def plan_of(model: ModelConfig, tp: int, cp: int, **chosen: Any) -> UnitPlan | None:
    """The plan of a choice of each of `CHOICES`; None where there is none."""
    copies = chosen["cpkind"] == "ulysses-copies"
    model, seq = sized(model, tp, cp, copies and not model.latent_attention), length(model, tp, cp, **chosen)
    if not seq:
        return None
    if model.experts and chosen["rows"] == "capacity":
        model = model.replace(experts=replace(model.experts, capacity=1.0))
    kind, _, sp = chosen["tensor"].partition("-")
    ep = EP if chosen["route"] == "spread" else 1
    try:
        keys = {"tpkind": kind} if kind else {}
        keys |= {"cpkind": chosen["cpkind"].removesuffix("-copies")} if cp > 1 else {}
        keys |= {"etp": 1 if chosen["etp"] == "whole" else tp} if model.experts and tp > 1 else {}
        layout = Layout(
            dp=ep, ep=ep, tp=tp, cp=cp, sp=bool(sp), recompute=chosen["recompute"], micro=MICRO,
            attention="math" if chosen["core"] == "math" else "sdpa", **keys,
        )  # fmt: skip
        workload = Workload(seq, MICRO * ep, isolate_documents=chosen["documents"])
        check_runnable(layout, model, workload)
        plan = unit_plan(model, layout, workload)
    except UserError:
        return None
    if plan.routes:
        pairs = next(n for n in range(plan.routed_pairs, 0, -1) if unique(n)) if chosen["rows"] else plan.routed_pairs
        received = next(n for n in itertools.count(pairs + 1) if unique(n)) if ep > 1 else pairs
        routed = RoutedRows(tuple((part, ((pairs, received),)) for part in plan.of_kind("block")))
        plan = replace(plan, routed=routed)
    return plan


def factored(nbytes: int, dtype: str, sizes: dict[str, int]) -> str:
    """Bytes as a formula."""
    unit, width = UNITS[dtype]
    number, words = nbytes, [unit] if unit in sizes else []
    if words:
        assert not number % width
        number //= width
    for symbol, size in sizes.items():
        while symbol not in ("e", "a") and size > 1 and not number % size:
            number, words = number // size, [*words, symbol]
    if number > 16:
        raise ValueError(f"{nbytes} bytes of {dtype} are no product of {sizes}")
    return "*".join([str(number)] * (number > 1 or not words) + words)


def keys(plan: UnitPlan) -> list[recorded.Key]:
    """What a plan records."""
    return [key for part in plan.parts for key in recorded.keys_of(plan, part)]


def recorded_lists(plan: UnitPlan, fake: FakeTensorMode) -> Iterator[tuple[recorded.Key, tuple[str, ...]]]:
    """Keys and their formulas."""
    storages = saved_storages(plan, fake)
    for part in plan.parts:
        sizes = recorded.sizes_of(plan, part)
        whole, *inner = recorded.keys_of(plan, part)
        names = [(whole, "")] + [(key, MLP) for key in inner]
        if part == plan.first_blocks[0]:
            names.append(((f"{recorded.SHARED} {whole[0]}", whole[1]), SHARED))
        for key, name in names:
            rows = storages.pop((part, name), [])
            yield key, tuple(sorted(factored(row.nbytes, row.dtype, sizes) for row in rows))
    assert not storages, storages


def plans(model: ModelConfig, known: set[recorded.Key]) -> Iterator[UnitPlan]:
    """Plans of one model's forms and all modes that record something new."""
    for values in itertools.product(*CHOICES.values()):
        chosen = dict(zip(CHOICES, values, strict=True))
        if not model.experts and (chosen["route"] != "here" or chosen["rows"] or chosen["etp"] == "split"):
            continue
        plan = plan_of(model, TP if chosen["tensor"] else 1, CP if chosen["cpkind"] else 1, **chosen)
        if plan is not None and not known.issuperset(new := keys(plan)):
            known.update(new)
            yield plan


def tree(found: dict[tuple[str, ...], int], axis: int = 0) -> recorded.Tree:
    """The tree of modes, where values of an axis with equal branches share one."""
    if axis == len(recorded.AXES):
        return next(iter(found.values()))
    branches: dict[str, dict[tuple[str, ...], int]] = {}
    for mode, number in found.items():
        branches.setdefault(mode[axis], {})[mode] = number
    alike: dict[str, list[str]] = {}
    below = {value: tree(some, axis + 1) for value, some in branches.items()}
    for value, branch in below.items():
        alike.setdefault(json.dumps(branch), []).append(value)
    return {"|".join(values): below[values[0]] for values in alike.values()}


def modes(stored: recorded.Tree, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """The modes of a tree and their numbers."""
    if isinstance(stored, int):
        yield before, stored
        return
    for values, below in stored.items():
        for value in values.split("|"):
            yield from modes(below, (*before, value))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--missing", action="store_true", help="keep what is stored, and record what is not")
    data = json.loads(DATA.read_text("utf-8")) if parser.parse_args().missing else {"lists": [], "forms": {}}
    fake, begin = FakeTensorMode(), time.monotonic()
    lists = {tuple(formulas): number for number, formulas in enumerate(data["lists"])}
    forms = {form: dict(modes(stored)) for form, stored in data["forms"].items()}
    known = {(form, mode) for form, numbers in forms.items() for mode in numbers}
    for model in models():
        for plan in plans(model, known):
            for (form, mode), formulas in recorded_lists(plan, fake):
                number = lists.setdefault(formulas, len(lists))
                if forms.setdefault(form, {}).setdefault(mode, number) != number:
                    raise ValueError(f"{plan.layout}: {form} {mode} has other tensors than an equal mode: {formulas}")
        print(f"{model.name}: {len(known)} keys, {len(lists)} lists, {time.monotonic() - begin:.0f} s", flush=True)
        data = {"lists": list(lists), "forms": {form: tree(forms[form]) for form in sorted(forms)}}
        DATA.write_text(json.dumps(data, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
