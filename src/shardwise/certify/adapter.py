"""`Adapter`: an engine as a file of functions. Defaults are those of a trainer in PyTorch whose parameters may be
DTensors, so that most adapters say how a model is split and nothing else.

Functions take a `EngineRun` first: one trainer on one rank. Reproductions copy their source, so none uses anything of
shardwise but its arguments.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from shardwise.certify.engines import ENGINES, check_engine
from shardwise.certify.result import PROPERTIES, VARIANTS
from shardwise.certify.tiny import Tiny
from shardwise.errors import UserError, did_you_mean, nearest

OPTIMIZER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}
"""AdamW's settings. eps is large, so that gradients that are zero but for rounding do not move weights."""
MOST_RANKS = 8
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)  # ranks may have other parameters


@dataclass
class EngineRun:
    """One trainer on one rank."""

    model: nn.Module
    """The plain model, which `parallelize` may change in place."""
    layout: dict[str, Any]
    """CaseKey -> size or value, as the layout's text has them."""
    data: tuple[int, int]
    """This rank's place among ranks with different rows, and their number."""
    logits: Callable[[Any, Tensor], Tensor]
    most: float
    """The norm to which gradients are clipped."""
    engine: Any = None
    """Result of `parallelize`."""
    optimizer: Any = None


def logits(engine: Any, ids: Tensor) -> Tensor:
    return engine(ids)


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def backward(run: EngineRun, ids: Tensor, labels: Tensor, tokens: int) -> float | None:
    """As `Adapter.backward`, with engines that average gradients over data ranks."""
    loss = F.cross_entropy(run.logits(run.engine, ids).flatten(0, 1), labels.flatten(), reduction="sum") / tokens
    (loss * run.data[1]).backward()
    return loss.item()


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def joined(tensor: Tensor, shape: Sequence[int], group: Any) -> Tensor:
    """Whole tensor of this shape, from the parts that a group's ranks have of the dimension that is shorter."""
    short = [dim for dim, size in enumerate(tensor.shape) if size != shape[dim]]
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group) if short else 0)]
    if parts:
        dist.all_gather(parts, tensor.detach().contiguous(), group=group)
    return torch.cat(parts, short[0]) if parts else tensor.detach().clone()


def gradients(run: EngineRun) -> dict[str, Tensor]:
    return {name: full(p.grad) for name, p in run.model.named_parameters() if p.grad is not None}


def parameters(run: EngineRun) -> dict[str, Tensor]:
    return {name: full(p) for name, p in run.model.named_parameters()}


def clip(run: EngineRun, most: float) -> float:
    return float(full(nn.utils.clip_grad_norm_(run.model.parameters(), most)))


def clip_mixed(run: EngineRun, most: float) -> float:
    """`clip`, where gradients are of several meshes or of none, of which torch's function takes no mix."""
    norm = torch.stack([full(p.grad.norm()) for p in run.model.parameters() if p.grad is not None]).norm()
    nn.utils.clip_grads_with_norm_(run.model.parameters(), most, norm, foreach=False)
    return float(norm)


def optimizer(run: EngineRun, **settings: Any) -> Any:
    return torch.optim.AdamW(run.model.parameters(), foreach=False, **settings)


def step(run: EngineRun) -> None:
    run.optimizer.step()
    run.optimizer.zero_grad()


def save(run: EngineRun, folder: str) -> None:
    model, state = get_state_dict(run.model, run.optimizer, options=BY_NAME)
    checkpoint.save({"model": model, "optimizer": state}, checkpoint_id=folder)


def load(run: EngineRun, folder: str) -> None:
    """Set model and optimizer, in place, from what `save` wrote under any layout."""
    model, state = get_state_dict(run.model, run.optimizer, options=BY_NAME)
    checkpoint.load({"model": model, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(run.model, run.optimizer, model_state_dict=model, optim_state_dict=state, options=BY_NAME)


@dataclass(frozen=True)
class Adapter:
    """An engine: constants and functions of a file, by these names."""

    name: str
    axes: Sequence[str]
    """Keys of a layout whose product is the number of ranks, outermost first, as ranks are numbered."""
    data: Sequence[str]
    """Those of the axes whose ranks have different rows."""
    space: Mapping[str, Sequence[Any]]
    """CaseKey of a layout -> its values, of which layouts are made; axes count 1 where they are left out."""
    parallelize: Callable[[nn.Module, dict[str, Any]], Any]
    """(plain model, layout) -> what computes. What it raises counts as refused by the engine."""
    needs: Sequence[str] = ("torch",)
    """Distributions whose versions the result has."""
    models: Mapping[str, Callable[[str], nn.Module]] = field(default_factory=lambda: {"tiny": Tiny})
    """Name -> function of a variant that builds the plain model, with the same weights for the same seed."""
    variants: Sequence[str] = ("plain", "uneven", "tied", "frozen", "padded")
    """Those of `result.VARIANTS` that its models and its engine have."""
    skips: Sequence[str] = ()
    """Properties that the engine cannot show."""
    exact: bool = True
    """Whether it computes in float64; else in float32, with a bound derived from the plain model's rounding."""
    broadcasts: bool = False
    """Whether the engine gives all ranks the weights and buffers of rank 0. Other ranks then start with others."""
    rebuilds: bool = False
    """Whether the result of `parallelize` has the model's parameters, in place of the model that it was given."""
    saves_frozen: bool = True
    """Whether frozen parameters are in its checkpoints."""
    within: Mapping[str, str] = field(default_factory=dict)
    """CaseKey of a layout -> the key without which it means nothing."""
    sequence: Callable[[Mapping[str, Any]], str] = lambda layout: ""
    """Layout -> the axis whose ranks apply dropout to other parts of the sequence, with other masks; else none."""
    global_loss: bool = False
    """Whether `backward` returns the loss of all ranks' rows, not of this rank's."""
    decays: Callable[[str, Tensor], bool] = lambda name, parameter: True
    """Whether weight decay applies to a parameter."""
    logits: Callable[[Any, Tensor], Tensor] = logits
    """(model or engine, ids) -> logits [batch, seq, vocab]."""
    loss: Callable[[Tensor, Tensor], Tensor] = loss
    """(logits, labels) -> the plain model's loss, summed over labels."""
    backward: Callable[[EngineRun, Tensor, Tensor, int], float | None] = backward
    """(run, ids and labels of this rank's rows, labels that count on all ranks): compute the gradients of the sum over
    all ranks' rows divided by the labels that count. Returns the loss; None where a rank has none."""
    gradients: Callable[[EngineRun], dict[str, Tensor]] = gradients
    """Name in the plain model -> whole gradient; of a pipeline's rank those it has."""
    parameters: Callable[[EngineRun], dict[str, Tensor]] = parameters
    clip: Callable[[EngineRun, float], float] = clip
    """(run, maximum norm): clip the gradients. Returns the norm before."""
    optimizer: Callable[..., Any] = optimizer
    """AdamW with `OPTIMIZER`'s settings."""
    step: Callable[[EngineRun], None] = step
    """Update, and forget the gradients."""
    save: Callable[[EngineRun, str], None] = save
    load: Callable[[EngineRun, str], None] = load

    @classmethod
    def of(cls, module: Any) -> Adapter:
        """The adapter of a file's module, or of any object with these attributes. Raises `UserError`."""
        values = {item.name: getattr(module, item.name) for item in fields(cls) if hasattr(module, item.name)}
        if missing := [name for name in ("name", "axes", "data", "space", "parallelize") if name not in values]:
            where = getattr(module, "__file__", module)
            raise UserError(f"{where} is no adapter: it has no {', '.join(missing)} (docs/certify.md)")
        adapter = cls(**values)
        mine = [
            name for name, value in vars(module).items()
            if name not in values and name[0] != "_" and getattr(value, "__module__", "") == vars(module)["__name__"]
        ]  # fmt: skip
        for mistake in adapter._mistakes([name for name in mine if not isinstance(vars(module)[name], type)]):
            raise UserError(f"{adapter.name}: {mistake} (docs/certify.md)")
        return adapter

    def _mistakes(self, others: Collection[str]) -> Iterator[str]:
        """Errors of the constants. others: functions of the file that an adapter does not have."""
        known = [item.name for item in fields(self)]
        for name in others:
            if near := nearest(name, known, cutoff=0.85):
                yield f"it defines {name}, which nothing calls; did you mean {near[0]}? Else name it _{name}"
        for name in known:
            kind = str(Adapter.__annotations__[name])
            if kind.startswith("Callable") and not callable(getattr(self, name)):
                yield f"{name} is {getattr(self, name)!r}, and must be a function"
            if kind.startswith("Mapping") and not isinstance(getattr(self, name), Mapping):
                yield f"{name} is {getattr(self, name)!r}, and must be a dict"
        lists = {"axes": self.space, "data": self.axes, "variants": VARIANTS, "skips": PROPERTIES}
        for name, values in [*((name, getattr(self, name)) for name in ("axes", "data", "variants", "skips", "needs")),
                             *((f"space[{key!r}]", values) for key, values in self.space.items())]:  # fmt: skip
            if not isinstance(values, Sequence) or isinstance(values, str):
                yield f"{name} is {values!r}, and must be a list or a tuple, as in ({values!r},)"
            elif wrong := [item for item in values if name in lists and item not in lists[name]]:
                yield f"{name} has {wrong[0]!r}; {did_you_mean(str(wrong[0]), list(lists[name]), 'one of')}"
        if wrong := [key for key in (*self.within, *self.within.values()) if key not in self.space]:
            yield f"within has {wrong[0]!r}; {did_you_mean(str(wrong[0]), list(self.space), 'one of')}"
        if "plain" not in self.variants or not self.models:
            yield "variants must have 'plain', and models at least one"
        if self.loss is not loss and self.backward is backward:
            yield "an adapter that defines loss must define backward, too"

    @classmethod
    def load_from(cls, text: str) -> Adapter:
        """The adapter of one of `ENGINES`, or of a file. Raises `UserError`."""
        return cls.of(module_of(text))

    def parse(self, text: str) -> dict[str, Any]:
        """A layout of KEY=VALUE,... Raises `UserError` for keys and sizes that the engine does not have."""
        layout: dict[str, Any] = {}
        for item in text.split(","):
            key, equals, value = item.strip().partition("=")
            if key not in self.space or not equals:
                hint = did_you_mean(key, list(self.space), "one of")
                raise UserError(f"layout {text!r}: {self.name} has no {item!r}; {hint}, as KEY=VALUE")
            layout[key] = int(value) if value.isdecimal() else value
        sizes = [layout.get(axis, 1) for axis in self.axes]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise UserError(f"layout {text!r}: sizes of {', '.join(self.axes)} are positive integers")
        if math.prod(sizes) > 64:
            raise UserError(f"layout {text!r} has {math.prod(sizes)} ranks: give one with at most 64")
        return layout

    def sizes(self, layout: Mapping[str, Any]) -> dict[str, int]:
        """Axis -> its size."""
        return {axis: layout.get(axis, 1) for axis in self.axes}

    def ranks(self, layout: Mapping[str, Any]) -> int:
        return math.prod(self.sizes(layout).values())

    def place(self, layout: Mapping[str, Any], rank: int) -> dict[str, int]:
        """Axis -> index of a rank along it."""
        at = {}
        for axis, size in reversed(self.sizes(layout).items()):
            rank, at[axis] = divmod(rank, size)
        return at

    def data_place(self, layout: Mapping[str, Any], rank: int) -> tuple[int, int]:
        """(place of a rank among those with different rows, their number)."""
        sizes, at, index, count = self.sizes(layout), self.place(layout, rank), 0, 1
        for axis in (axis for axis in self.axes if axis in self.data):
            index, count = index * sizes[axis] + at[axis], count * sizes[axis]
        return index, count

    def masks(self, layout: Mapping[str, Any], rank: int = 0) -> tuple[int, int, int]:
        """(data ranks, parts of the sequence, this rank's part): what dropout masks depend on."""
        axis, place = self.sequence(layout), self.place(layout, rank)
        return self.data_place(layout, 0)[1], self.sizes(layout).get(axis, 1), place.get(axis, 0)

    def layouts(self, most: int, seed: int = 0) -> list[str]:
        """Layouts of the space on 2 to `MOST_RANKS` ranks: the small ones first, equally small ones in random order."""
        texts = {}
        for values in itertools.product(*self.space.values()):
            layout = dict(zip(self.space, values, strict=True))
            if 2 <= self.ranks(layout) <= MOST_RANKS:
                plain = {key: value for key, value in layout.items() if value != self.space[key][0]}
                if all(self.within.get(key, key) in plain for key in plain):
                    texts[text_of(plain)] = self.ranks(layout)
        order = list(texts)
        random.Random(seed).shuffle(order)
        return sorted(order, key=lambda text: (texts[text] > 4, texts[text] if not seed else 0))[:most]

    def smaller(self, layout: Mapping[str, Any]) -> list[str]:
        """Layouts that are `layout` with axes shortened or left out, the smallest first; on at least two ranks."""
        choices = [
            [item for item in range(1, value + 1) if not value % item] if key in self.axes else [value]
            for key, value in layout.items()
        ]
        choices_of = [dict(zip(layout, values, strict=True)) for values in itertools.product(*choices)]
        smaller = [item for item in choices_of if self.ranks(item) >= 2 and item != layout]
        return [text_of({k: v for k, v in item.items() if k not in self.axes or v > 1})
                for item in sorted(smaller, key=self.ranks)]  # fmt: skip


def text_of(layout: Mapping[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in layout.items())


def module_of(text: str) -> ModuleType:
    """The module of one of `ENGINES`, or of a file. Raises `UserError` where there is none, or it fails."""
    name = f"_certified_{Path(text).stem}"
    check_engine(text)
    try:
        if text in ENGINES:
            return importlib.import_module(f"shardwise.certify.engines.{text}")
        spec = importlib.util.spec_from_file_location(name, text)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except ModuleNotFoundError as error:
        raise UserError(f"{text} needs {error.name}: pip install {error.name}") from None
    except Exception as error:
        raise UserError(f"{text} cannot be imported: {type(error).__name__}: {error}") from None
