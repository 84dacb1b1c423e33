"""`suggest`: a tensor-parallel plan for any `nn.Module`, from one forward pass on fake tensors.

Every linear map is column-parallel at first, and row-parallel where its input is cut already. Where a cut cannot pass
through an operator, the maps that it comes from gather their outputs, or, behind such maps, split their inputs; then
the pass is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.errors import UserError, brief
from shardwise.layout import Layout
from shardwise.layout.styles import STYLES, matched, path_of
from shardwise.runtime.fake_group import fake_ranks
from shardwise.runtime.module.cuts import DimCut, Uncut, through
from shardwise.runtime.module.describe import DescribedModule, call, describe, find_blocks, is_plain_map
from shardwise.runtime.module.fake_step import default_loss, fake_copy, fake_order, fake_step
from shardwise.runtime.module.inputs import built, row_count, suited, tensors_in, usual_masks, with_rows
from shardwise.runtime.module.program import LossFunction
from shardwise.runtime.module.trace import readable

SMALL = 0.01
"""Share of a block's parameters below which a map is left whole where its outputs would have to be gathered."""
PARTIAL = "replicated_with_grad_allreduce"
EXCHANGING = ("colwise_gather_output", "rowwise_split_input")
SUMMED = ("row", *EXCHANGING)
"""Styles whose outputs come together."""


class Suggestion(dict[str, str]):
    """A plan, {pattern: style}, with the reasons for what is not simply cut."""

    def __init__(self, plan: dict[str, str], whole: dict[str, str], exchanged: dict[str, str], units: int) -> None:
        super().__init__(plan)
        self.whole = whole
        """Parameter -> why every rank has all of it."""
        self.exchanged = exchanged
        """Map -> why its outputs are gathered, or its inputs split."""
        self.units = units
        """Degrees that divide this number suit the plan; 0 where nothing limits them."""

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return {"plan": dict(self), "whole": self.whole, "exchanged": self.exchanged, "units": self.units}


def suggest(
    model: nn.Module | Callable[[], nn.Module], example: Any, *, blocks: Sequence[str] | None = None,
    loss: LossFunction | None = None,
) -> Suggestion:  # fmt: skip
    """A tensor-parallel plan for `split`, `verify` and `trace`.

    model: the module, on any device, or a function that builds it. example: inputs of one forward pass, or a function
    that makes them; with a loss, its micro-batch. blocks: as for `split`. Raises `UserError` for a module that cannot
    be traced.
    """
    module = built(model, "suggest")
    example = example() if callable(example) else example
    rows, fake = max(2, row_count(example)), FakeTensorMode(allow_non_fake_inputs=True)
    with readable(module, "give a plan of your own"), usual_masks(example):
        search = _Search(module, fake_order(module, fake, find_blocks(module, blocks), example, rows, loss), loss)
        with fake:
            batch = with_rows(example, rows)
        while True:
            blank = fake_copy(module, fake).eval()
            flow = _Flow(blank, search)
            with fake, torch.no_grad():
                flow.run(batch)
            if search.demoted(flow):
                continue
            plan = search.suggestion(flow)
            if not search.fixed(fake_copy(module, fake), plan, example, fake):
                return plan


def matching(module: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """The entries of a published plan that name a module or a parameter of this one."""
    names = {*dict(module.named_modules()), *dict(module.named_parameters())}
    return {p: style for p, style in plan.items() if any(path_of(p).fullmatch(name) for name in names)}


def why_not(module: nn.Module, plan: Mapping[str, str] | None, example: Any, tp: int) -> UserError | None:
    """Why a module does not run with a plan, by a step on fake tensors; None where it does, or cannot be traced."""
    fake, layout = FakeTensorMode(allow_non_fake_inputs=True), Layout(tp=tp)
    blocks = find_blocks(module, None)
    try:
        _fake_runs(fake_copy(module, fake), describe(module, Layout(), None, blocks), Layout(), example, fake)
    except Exception:
        return None
    try:
        _fake_runs(fake_copy(module, fake), describe(module, layout, plan, blocks), layout, example, fake)
    except UserError as error:
        return error
    except Exception as error:
        return UserError(f"{type(module).__name__} does not run with its plan: {brief(error, 160)}")
    return None


def _fake_runs(
    blank: nn.Module, described: DescribedModule, layout: Layout, example: Any, fake: FakeTensorMode,
    loss: LossFunction | None = None,
) -> None:  # fmt: skip
    with fake_ranks(layout.tp), usual_masks(example), fake:
        fake_step(blank, described, layout, [with_rows(example, max(2, row_count(example)))], loss or default_loss)


def unsummed(module: nn.Module, plan: Mapping[str, str], example: Any) -> dict[str, str]:
    """Entries that a plan lacks: modules whose parameters compute with a rank's own part of what the plan cuts beside
    them, and whose gradients are summed therefore."""
    try:
        suggestion = suggest(module, example)
    except UserError:
        return {}
    sums = {p: style for p, style in suggestion.items() if style == PARTIAL}
    held = [name for name, child in module.named_modules() if child._parameters]
    styles = matched({p: style for p, style in plan.items() if style in STYLES}, held, True)
    cut = {name.rpartition(".")[0] for name, style in styles.items() if style.cut == "column"}
    lacks = {
        name for name in matched(sums, held, True) if name not in styles and name.rpartition(".")[0] in cut
    }  # fmt: skip
    return {p: style for p, style in sums.items() if lacks & set(matched({p: style}, held, True))}


@dataclass(frozen=True)
class TensorState:
    """What is known of a tensor."""

    cut: DimCut | None = None
    origins: frozenset[str] = frozenset()
    """Maps whose outputs' cut it has."""
    near: frozenset[str] = frozenset()
    """Maps, and tables, from which it comes without another map between."""
    parameters: frozenset[str] = frozenset()
    """Modules of whose parameters alone it is made."""


_PLAIN = TensorState()


@dataclass
class _Search:
    """Styles so far."""

    module: nn.Module
    blocks: Sequence[str]
    loss: LossFunction | None = None
    gathered: dict[str, str] = field(default_factory=dict)
    """Map that exchanges its outputs or inputs -> why."""
    behind: set[str] = field(default_factory=set)
    """Those of them that split their inputs."""
    apart: set[str] = field(default_factory=set)
    """Maps whose weights are read outside of their forward passes, too."""

    def __post_init__(self) -> None:
        held = [(name, child) for name, child in self.module.named_modules() if "weight" in child._parameters]
        uncut = {id(child.weight) for _, child in held if not _is_cut_by(child)}
        self.apart |= {name for name, child in held if id(child.weight) in uncut}

    def block_of(self, name: str) -> str:
        """The block of a submodule; empty outside of blocks."""
        return next((block for block in self.blocks if name.startswith(f"{block}.")), "")

    def demoted(self, flow: _Flow) -> bool:
        """Take the cuts from maps whose outputs cannot stay cut; whether there are any."""
        if apart := flow.read - self.apart:
            self.apart |= apart  # what failed may not fail without their cuts
            return True
        for name, (why, near) in flow.failures.items():
            block = self.block_of(name)
            if block and near and all(self.block_of(other) == block and other in self.gathered for other in near):
                self.behind.add(name)
            self.gathered[name] = why
        return bool(flow.failures)

    def fixed(self, blank: nn.Module, plan: Suggestion, example: Any, fake: FakeTensorMode) -> bool:
        """Gather the outputs of maps whose module does not take a part of them, since it has sizes in its code; whether
        there are any. blank: a copy that is taken over."""
        degree = next((n for n in range(2, plan.units + 1) if plan.units % n == 0), 2)
        if plan.units == 1 or not plan:
            return False
        narrow = next(blank.parameters()).dtype == torch.bfloat16
        layout = Layout(tp=degree, precision="bf16" if narrow else "fp32")
        described = describe(self.module, layout, dict(plan), self.blocks)
        stack: list[str] = []
        for name, child in blank.named_modules():
            child.register_forward_pre_hook(lambda *_, name=name: stack.append(name))
            child.register_forward_hook(lambda *_: _left(stack))
        try:
            _fake_runs(blank, described, layout, example, fake, self.loss)
        except UserError:
            raise
        except Exception as error:
            names = self._columns(plan, stack)
            if not names:
                raise
            why = f"its module cannot compute with a part of them ({brief(error, 80)})"
            self.gathered |= dict.fromkeys(names, why)
            return True
        return False

    def _columns(self, plan: Suggestion, stack: Sequence[str]) -> list[str]:
        """Column-parallel maps directly in the innermost module in whose forward pass there are any."""
        styles = matched(dict(plan), [name for name, child in self.module.named_modules() if child._parameters], True)
        for inside in reversed(stack):
            names = [n for n in styles if n.rpartition(".")[0] == inside and n not in self.gathered]
            if names := [n for n in names if styles[n].cut == "column"]:
                return names
        return []

    def is_small(self, child: nn.Module, name: str) -> bool:
        """Whether a map has few of its block's parameters."""
        home = self.module.get_submodule(self.block_of(name)) if self.block_of(name) else self.module
        return sum(p.numel() for p in child.parameters()) < SMALL * sum(p.numel() for p in home.parameters())

    def suggestion(self, flow: _Flow) -> Suggestion:
        """The plan, with patterns where all blocks agree."""
        styles: dict[str, str] = {}
        whole: dict[str, str] = {}
        exchanged: dict[str, str] = {}
        for name, child in self.module.named_modules():
            style, why = self._style(name, child, flow)
            for leaf, _ in child.named_parameters(recurse=False):
                if leaf != "weight" and style in SUMMED:
                    whole[f"{name}.{leaf}".removeprefix(".")] = "a bias is added once, to outputs that are complete"
                elif style in ("", PARTIAL):
                    whole[f"{name}.{leaf}".removeprefix(".")] = why
            if style and any(True for _ in child.parameters(recurse=False)):
                styles[name] = style
                if style in EXCHANGING:
                    exchanged[name] = why
        patterns = self._patterns
        return Suggestion(patterns(styles), patterns(whole), patterns(exchanged), flow.units)

    def _style(self, name: str, child: nn.Module, flow: _Flow) -> tuple[str, str]:
        """(style, reason) of a submodule with parameters; empty where there is none."""
        if isinstance(child, nn.Embedding):
            return self._table(name, child)
        if name in flow.partial:
            return PARTIAL, "whole, and used with a rank's own units: its gradient is summed"
        if not is_plain_map(child):
            return "", f"{type(child).__name__} is no linear map or table, and every rank uses all of it"
        if name in self.apart:
            return "", "it is read outside of its map, too"
        if name in self.gathered:
            if self.is_small(child, name):
                return "", f"{self.gathered[name]}, and it is small"
            return ("rowwise_split_input" if name in self.behind else "colwise_gather_output"), self.gathered[name]
        if name not in flow.styles:
            return "", "it did not run for the example"
        return flow.styles[name], ""

    def _table(self, name: str, child: nn.Embedding) -> tuple[str, str]:
        if name in self.apart:
            return "", "it is read outside of its lookup, too"
        if child.max_norm is not None or child.scale_grad_by_freq:
            return "", "max_norm and scale_grad_by_freq need the whole table"
        if len(signature(child.forward).parameters) > 1:
            return "", "its class looks it up in another way"
        if self.is_small(child, name):
            return "", "a small table: a sum of rows would cost more than it saves"
        return "vocab", ""

    def _patterns(self, values: dict[str, str]) -> dict[str, str]:
        """Values by pattern: `*` in place of the block's number where all blocks of a list have the same."""
        result: dict[str, str] = {}
        for name, value in values.items():
            block = self.block_of(name)
            parent, _, _ = block.rpartition(".")
            siblings = [other for other in self.blocks if other.rpartition(".")[0] == parent]
            leaf = name.removeprefix(block)
            same = block and all(values.get(f"{other}{leaf}") == value for other in siblings)
            result[f"{parent}.*{leaf}".removeprefix(".") if same else name] = value
        return result


def _left(stack: list[str]) -> None:
    stack.pop()


def _is_cut_by(child: nn.Module) -> bool:
    return is_plain_map(child) or isinstance(child, nn.Embedding)


class _Flow(TorchDispatchMode):
    def __init__(self, module: nn.Module, search: _Search) -> None:
        super().__init__()
        self.module, self.search = module, search
        self.styles: dict[str, str] = {}
        self.failures: dict[str, tuple[str, frozenset[str]]] = {}
        self.partial: set[str] = set()
        self.read: set[str] = set()
        """Maps whose weights are read outside of their forward passes."""
        self.units = 0
        self._inputs: dict[str, frozenset[str]] = {}
        """Map -> where its input comes from."""
        self._states: dict[int, tuple[Tensor, TensorState]] = {}
        """Tensors stay alive, so that no other one gets their identity."""
        self._inside = 0
        self._maps = {name for name, child in module.named_modules() if _is_cut_by(child)}
        for name, child in module.named_modules():
            for parameter in child.parameters(recurse=False):
                self._put(parameter, TensorState(parameters=frozenset({name})))
            if name in self._maps:
                child.forward = self._whole(name, child, child.forward)  # type: ignore[method-assign]

    def run(self, example: Any) -> None:
        """One forward pass; what leaves it must be whole."""
        loss = self.search.loss
        self.module.register_forward_hook(lambda module, args, out: self._leaves(out))
        with self:
            call(self.module, example) if loss is None else loss(self.module, suited(self.module, example))

    def _leaves(self, out: Any) -> None:
        for x in tensors_in(out):
            if (state := self._get(x)).cut:
                self._fail(state.origins, "every rank needs the module's whole output")

    def _get(self, x: Tensor) -> TensorState:
        return self._states.get(id(x), (x, _PLAIN))[1]

    def _put(self, x: Tensor, state: TensorState) -> None:
        self._states[id(x)] = x, state

    def _fail(self, origins: Iterable[str], why: str) -> None:
        for name in origins:
            self.failures.setdefault(name, (why, self._inputs.get(name, frozenset())))

    @contextmanager
    def _map(self) -> Any:
        """Inside of a map operators are its own."""
        self._inside += 1
        yield
        self._inside -= 1

    def _whole(self, name: str, child: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward pass of a map or table, as one operation."""

        def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            with self._map():
                out = forward(x, *args, **kwargs)
            state = self._get(x)
            near = frozenset({name})
            if isinstance(child, nn.Embedding):
                self._put(out, TensorState(near=near))
                return out
            self._inputs[name] = state.near
            self._put(out, TensorState(*self._mapped(name, state, x, out), near=near))
            return out

        return run

    def _mapped(self, name: str, state: TensorState, x: Tensor, out: Tensor) -> tuple[DimCut | None, frozenset[str]]:
        """(cut, its origins) of a map's output."""
        cut = state.cut
        if cut is None:
            whole = name in self.search.gathered or name in self.search.apart
            if whole or not self._agree(name, "column"):
                return None, frozenset()
            return DimCut(out.dim() - 1, out.shape[-1]), frozenset({name})
        if cut.dim != x.dim() - 1:  # a map of each unit's own elements
            self.partial.add(name)
            return cut, state.origins
        whole = name in self.search.gathered or name in self.search.apart
        if cut.outer(x.shape) > 1 or whole or not self._agree(name, "row"):
            self._fail(state.origins, f"{name} needs it whole")
            return None, frozenset()
        self.units = gcd(self.units, cut.units)
        return None, frozenset()

    def _agree(self, name: str, style: str) -> bool:
        """Whether a map that runs again is cut in the same way."""
        if self.styles.setdefault(name, style) != style:
            self._fail([name], "it runs several times with inputs that are cut and others that are whole")
        return self.styles[name] == style

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._inside and (outs := tensors_in(out)):
            state = self._after(func, args, kwargs or {}, outs[0])
            for x in outs:
                self._put(x, state if state.cut is None or state.cut.dim < x.dim() else _PLAIN)
        return out

    def _after(self, func: Any, args: Any, kwargs: dict[str, Any], out: Tensor) -> TensorState:
        tensors = tensors_in(args, kwargs)
        states = [self._get(x) for x in tensors]
        made = all(state.parameters or x.dim() == 0 for x, state in zip(tensors, states, strict=True)) and bool(states)
        near = frozenset().union(*(state.near for state in states))
        parameters = frozenset().union(*(state.parameters for state in states))
        origins = frozenset().union(*(state.origins for state in states))
        self.read |= parameters & self._maps
        try:
            cut = through(func, args, kwargs, lambda x: self._get(x).cut, out)
        except Uncut as reason:
            self._fail(origins, str(reason))
            return TensorState(near=near)
        if cut is not None:
            self.partial |= parameters
        return TensorState(cut, origins if cut else frozenset(), near, parameters if made else frozenset())
