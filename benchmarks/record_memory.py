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
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.errors import UserError
from shardwise.layout import Layout, UnitPlan, Workload, check_runnable, unit_plan
from shardwise.layout.experts import RoutedRows
from shardwise.model import ModelConfig
from shardwise.model.catalog import catalog, get
from shardwise.model.config import LatentAttention
from shardwise.model.lora import Lora
from shardwise.predict.memory import recorded
from shardwise.predict.memory.sizes import Sizes, core_sizes
from shardwise.runtime.fake_group import fake_comms, fake_ranks
from shardwise.runtime.job.setup import blank_batch
from shardwise.runtime.pipeline.stages import StageRunner

DATA = Path(recorded.__file__).with_name("recordings.json")
UNITS = {"bfloat16": ("element", 2), "float32": ("statistic", 4), "int64": ("8", 8), "bool": ("", 1)}
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
    "route": ("spread", "here"),
    "etp": ("whole", "split"),
    "rows": ("padded", "capacity", ""),
}


def models() -> Iterator[ModelConfig]:
    """One model of each form of a block."""
    known: set[frozenset[Key]] = set()
    changed = [get(name).replace(**change) for name, changes in CHANGES.items() for change in changes]
    for model in sorted((*changed, *catalog().values()), key=lambda model: model.experts is not None):
        if model.why_not_runnable():
            continue
        layouts = Layout(), Layout(attention="math")
        forms = frozenset(key for layout in layouts for key in keys(unit_plan(model, layout, Workload(8, 1))))
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
    if plan.blueprint.routes:
        if chosen["rows"] == "padded" and plan.routing.places * plan.model.experts.active == plan.routing.pairs:
            return None
        pairs = next(n for n in range(plan.routing.pairs, 0, -1) if unique(n)) if chosen["rows"] else plan.routing.pairs
        received = next(n for n in itertools.count(pairs + 1) if unique(n)) if ep > 1 else pairs
        routed = RoutedRows(tuple((part, ((pairs, received),)) for part in plan.of_kind("block")))
        plan = replace(plan, routed=routed)
    return plan


TRAITS: dict[str, dict[str, str]] = {
    "embedding": {"token ids": "trains", "position ids": "trains learned"},
    "head": {
        "input": "",
        "final norm statistics": "norm",
        "final norm output": "trains",
        "logits": "",
        "log-sum-exp of the loss": "split",
        "targets": "",
    },
    "recomputed": {"input": ""},
    "later": {},
    "block": {
        "input": "before attention",
        "attention norm statistics": "norm",
        "attention norm output": "before attention",
        "queries and keys before their norm": "query_norm",
        "statistics of query and key norms": "query_norm",
        "low ranks": "latent",
        "normed low ranks": "latent",
        "statistics of low ranks": "latent",
        "queries": "some_heads",
        "keys and values": "some_heads",
        "log-sum-exp": "core some_heads",
        "probabilities": "core some_heads",
        "tanh of scores": "some_heads capped",
        "dropped probabilities": "some_heads dropped",
        "output of some heads": "core some_heads",
        "attention output": "core some_heads output",
        "attention before its norm": "after",
        "attention post norm statistics": "after",
        "residual": "sum feed_forward",
        "feed-forward norm statistics": "norm",
        "feed-forward norm output": "before feed_forward",
        "chosen experts": "routes",
        "order of pairs": "routes spread places",
        "rows of experts": "routes",
        "gate and up of experts": "routes",
        "outputs of experts": "routes",
        "gate": "gated",
        "up": "",
        "activation": "gated down",
        "product": "gated down",
        "feed-forward before its norm": "after",
        "feed-forward post norm statistics": "after",
    },
}
"""Kind of a part -> name of a tensor that it saves -> traits on which its formulas depend."""
NORMS = {
    "attention_norm": "attention norm statistics",
    "mlp_norm": "feed-forward norm statistics",
    "attention_post_norm": "attention post norm statistics",
    "mlp_post_norm": "feed-forward post norm statistics",
    "norm": "final norm statistics",
}
"""Module -> name of what it saves beside its input."""


USUAL = ("element*stream*hidden", "statistic*stream", "element*tokens*inner")
"""Formulas that are meant where a layout gives others the same bytes."""


class Saved(NamedTuple):
    """The memory behind one or more saved tensors."""

    nbytes: int
    dtype: str
    """torch's name."""
    saver: str
    """Path of the module inside the part that saves it first."""
    maker: str
    """Path of the part's module that has made it; "outside" for other parts'."""
    op: str
    """torch's operation that has made it."""


class _Made(TorchDispatchMode):
    """Who has made each storage."""

    def __init__(self) -> None:
        super().__init__()
        self.modules = [("", "")]
        """Part and path of the modules under way."""
        self.made: dict[int, tuple[str, str, str]] = {}
        self._kept: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for value in tree_leaves(results):
            if isinstance(value, torch.Tensor) and (key := value.untyped_storage()._cdata) not in self.made:
                self.made[key] = (*self.modules[-1], func.__name__.partition(".")[0])
                self._kept.append(value)  # so that no other storage gets its address
        return results


def saved_storages(plan: UnitPlan, fake: FakeTensorMode) -> dict[str, list[Saved]]:
    """Part of the plan's first rank -> storages that it saves in the forward pass of a micro-batch, the head's loss
    included, in the order in which they are saved; those that several parts save left out."""
    found: dict[int, tuple[torch.Tensor, str, set[str]]] = {}
    first, from_input = next(iter(plan.local.first_blocks), ""), plan.layout.recompute == "input"
    with fake_ranks(plan.layout.ranks), fake:
        runner, made = StageRunner(plan, fake_comms(plan), torch.device("cpu")), _Made()
        lasting = {t.untyped_storage()._cdata for tensors in runner.engine.storages().values() for t in tensors}
        use_unit, current = runner.engine.use_unit, [plan.parts[0]]

        def used(kind: str, part: str) -> None:
            current[0] = first if from_input and plan.blueprint.kind(part) == "block" else part
            made.modules[0] = current[0], ""
            use_unit(kind, part)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            key = tensor.untyped_storage()._cdata
            if key not in lasting:
                found.setdefault(key, (tensor, made.modules[-1][1], set()))[2].add(current[0])
            return tensor

        for part in plan.parts:
            for path, module in runner.parts[part].named_modules():
                module.register_forward_pre_hook(lambda *_, at=(part, path): made.modules.append(at))
                module.register_forward_hook(lambda *_: made.modules.pop() and None)
        runner.engine.use_unit = used  # type: ignore[method-assign]
        batch, targets = blank_batch(plan)
        runner.engine.begin_step()
        runner.engine.begin_micro_batch()
        with made, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            runner.loss(runner.forward(0, None, batch.fresh()), targets)
    saved: dict[str, list[Saved]] = {part: [] for part in plan.parts}
    for key, (tensor, saver, parts) in found.items():
        if len(parts) == 1:
            part, path, op = made.made.get(key, ("", "", ""))
            (of,) = parts
            dtype, maker = str(tensor.dtype).removeprefix("torch."), path if part == of else "outside"
            saved[of].append(Saved(tensor.untyped_storage().nbytes(), dtype, saver, maker, op))
    return saved


class Namer:
    """Names of the tensors that one part saves, in the order in which they come."""

    def __init__(self, plan: UnitPlan, part: str) -> None:
        self.plan, self.kind, self.routes = plan, plan.blueprint.kind(part), plan.blueprint.routes_in(part)
        s = Sizes.of(plan)
        sizes = recorded.sizes_of(plan, s, part, self.routes)
        self.sizes = {name: size for name, size in sizes.items() if name not in vars(s)} | vars(s)
        some = "core " * (plan.layout.recompute != "selective" and core_sizes(plan, s) is not s)
        names = {"q": "queries", "k": "keys and values", "v": "keys and values"}
        names["attended"] = "output of some heads" if some else "attention output"
        self.core = [(name, f"element*{some}tokens*{some}{width}") for width, name in names.items()]
        """Names and formulas of tensors of attention's core that have not come yet."""
        self.norms = ["attention norm output", "residual", "feed-forward norm output"]
        """Of a fused block, those that have not come yet."""
        self.inner = ["gate", "up", "activation", "product"] if plan.model.gated else ["up", "activation"]
        """Of the feed-forward part, those that have not come yet."""

        self.experts = ["rows of experts", "outputs of experts"]

    def value(self, formula: str) -> int:
        """Bytes of a formula."""
        return prod(int(word) if word.isdecimal() else self.sizes[word] for word in formula.split("*"))

    def rows(self, saved: Saved) -> list[tuple[str, str]]:
        """Names and formulas whose bytes are a storage's together: of one product, several."""
        core = saved.saver.startswith("attention.core") or saved.saver == "attention"
        wide = [row for row in self.core if saved.nbytes == self.value(row[1])] if core else []
        if wide and saved.op != "_softmax":
            self.core.remove(wide[0])
            return wide[:1]
        if core and self.plan.fused and saved.nbytes == sum(self.value(formula) for _, formula in self.core[:3]):
            rows, self.core = self.core[:3], self.core[3:]
            return rows
        if saved.nbytes == 2 * self.value(inner := "element*tokens*inner") and self.inner[:1] == ["gate"]:
            del self.inner[:2]
            return [("gate", inner), ("up", inner)]
        name = self._of_core(saved) if core else getattr(self, f"_of_{self.kind}")(saved)
        meant = ("element*tokens*attended", *USUAL) if name == "attention output" else USUAL
        usual = [formula for formula in meant if self.value(formula) == saved.nbytes]
        return [(name, usual[0] if usual else factored(saved.nbytes, saved.dtype, self.sizes))]

    def _of_embedding(self, saved: Saved) -> str:
        return "token ids" if saved.saver == "tokens" else "position ids"

    def _of_head(self, saved: Saved) -> str:
        if saved.saver == "norm":
            return "final norm statistics" if saved.maker == "norm" else "input"
        if saved.maker == "norm":
            return "final norm output"
        if saved.dtype == "int64":
            return "targets"
        return "logits" if saved.nbytes == self.value("element*tokens*vocab") else "log-sum-exp of the loss"

    def _of_core(self, saved: Saved) -> str:
        if saved.dtype == "float32":
            return "log-sum-exp"
        return {"_softmax": "probabilities", "bmm": "tanh of scores"}.get(saved.op, "dropped probabilities")

    def _of_block(self, saved: Saved) -> str:
        saver, maker = saved.saver, saved.maker
        if self.plan.layout.recompute in ("full", "input"):
            return "input"
        if self.plan.fused and saver == "":
            return self._of_fused(saved)
        if saved.dtype in ("int64", "bool"):
            return "chosen experts" if maker == "mlp.router" else "order of pairs"
        if saver in NORMS:
            branch = NORMS[saver].split()[0]
            if maker == saver:
                return NORMS[saver]
            return f"{branch} before its norm" if "post" in saver else {"attention": "input"}.get(branch, "residual")
        if "_norm" in saver:
            what = "low ranks" if "down" in saver else "query and key norms"
            before = what if "down" in saver else "queries and keys before their norm"
            return f"statistics of {what}" if maker == saver else before
        if maker in ("attention_norm", "mlp_norm"):
            return NORMS[maker].replace("statistics", "output")
        if saver.startswith("attention"):
            first = "normed low ranks" if maker.endswith("_down_norm") else "input"
            return "attention output" if saver == "attention.out" else first
        if not maker.startswith("mlp"):
            return "residual"
        return self._of_experts(saved) if self.routes and "shared" not in saver else self.inner.pop(0)

    def _of_fused(self, saved: Saved) -> str:
        if saved.nbytes == self.value("statistic*stream"):
            branch = "feed-forward" if "feed-forward norm output" not in self.norms[1:] else "attention"
            return f"{branch} norm statistics"
        if saved.nbytes == self.value("element*stream*hidden"):
            return "input" if saved.maker == "outside" else self.norms.pop(0)
        return "attention output" if saved.nbytes == self.value("element*tokens*attended") else self.inner.pop(0)

    def _of_experts(self, saved: Saved) -> str:
        if saved.nbytes == self.value("element*received*expert width"):
            return "gate and up of experts"
        return self.experts.pop(0)


def factored(nbytes: int, dtype: str, sizes: dict[str, int]) -> str:
    """Bytes as a formula."""
    unit, width = UNITS[dtype]
    number, words = nbytes, [unit] if unit in sizes else []
    if words:
        assert not number % width
        number //= width
    for symbol, size in sizes.items():
        while symbol not in ("element", "statistic") and size > 1 and not number % size:
            number, words = number // size, [*words, symbol]
    if number > 16:
        raise ValueError(f"{nbytes} bytes of {dtype} are no product of {sizes}")
    return "*".join([str(number)] * (number > 1 or not words) + words)


Key = tuple[str, str, str]
"""Kind of a part, name of a tensor, values of its traits."""


def keys(plan: UnitPlan) -> dict[Key, str]:
    """What a plan records -> a part that does."""
    found: dict[Key, str] = {}
    for part in plan.parts:
        traits = recorded.traits_of(plan, part, plan.blueprint.routes_in(part))
        kind = str(traits["kind"])
        for name, names in TRAITS[kind].items():
            found[kind, name, recorded.key_of(traits, names.split())] = part
    return found


def recorded_rows(plan: UnitPlan, fake: FakeTensorMode) -> dict[tuple[str, str], list[str]]:
    """Part and name -> formulas of the tensors that the plan saves."""
    rows: dict[tuple[str, str], list[str]] = {}
    for part, storages in saved_storages(plan, fake).items():
        namer = Namer(plan, part)
        for saved in storages:
            for name, formula in namer.rows(saved):
                rows.setdefault((part, name), []).append(formula)
    return rows


def plans(model: ModelConfig, known: set[Key]) -> Iterator[UnitPlan]:
    """Plans of one model's forms and all modes that record something new. Attention is recorded without experts."""
    few = {"recompute": ("none",), "core": ("sdpa",), "documents": (False,), "cpkind": ("", "ring")}
    choices = CHOICES | (few if model.experts else {"route": ("here",), "etp": ("whole",), "rows": ("",)})
    for values in itertools.product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        plan = plan_of(model, TP if chosen["tensor"] else 1, CP if chosen["cpkind"] else 1, **chosen)
        if plan is not None and not known.issuperset(new := keys(plan).keys()):
            known.update(new)
            yield plan


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    fake, begin = FakeTensorMode(), time.monotonic()
    known: set[Key] = set()
    table: dict[Key, list[str]] = {}
    for model in models():
        for plan in plans(model, known):
            rows = recorded_rows(plan, fake)
            for (kind, name, values), part in keys(plan).items():
                formulas, value = rows.pop((part, name), []), Namer(plan, part).value
                stored = table.setdefault((kind, name, values), formulas)
                if sum(map(value, stored)) != sum(map(value, formulas)):
                    raise ValueError(f"{plan.layout}: {name} of {values} is {formulas} here, and {stored} elsewhere")
        print(f"{model.name}: {len(known)} keys, {time.monotonic() - begin:.0f} s", flush=True)
    lines = []
    for kind, traits in TRAITS.items():
        entries = []
        for name, of in traits.items():
            values = {at: formulas for (*which, at), formulas in sorted(table.items()) if which == [kind, name]}
            entries.append(f"  {json.dumps(name)}: {json.dumps([of.split(), values])}")
        inside = "\n" + ",\n".join(entries) + "\n " if entries else ""
        lines.append(f"{json.dumps(kind)}: {{{inside}}}")
    DATA.write_text("{\n " + ",\n ".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
