"""Blocks that repeat: `trace` runs a few of them and derives what the others do.

A forward pass tells which blocks do the same: their classes, parameters and operations are equal, they read the same
tensors from outside, and each takes what the one before it gives. Where such blocks, or groups of them such as five
with a window and one without, are repeated often, a module with four of the groups stands for the whole one.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.model.trace import TracedMoment, TracedStep
from shardwise.model.traced_stages import Pair, TracedStages, TracedTensors
from shardwise.runtime.module.chain import ENTRY, EXIT
from shardwise.runtime.module.inputs import tensors_in

GROUPS = 4
"""Groups of equal blocks that are traced: the first, whose backward pass frees what all share; two in a row, whose
difference is what a group adds; the last."""
NAMED = re.compile(r"\.\d+(\.|$)")
"""A path that names one module of a list. Blocks that are named so are not left out."""

Row = TypeVar("Row")


class UnlikeRepeats(Exception):
    """Groups of blocks that do the same do not keep the same, so that all of them must be traced."""


@dataclass(frozen=True)
class Repeats:
    """Which blocks of a module are traced. blocks: all, in order. cut: the first one that is left out. width: blocks of
    a group. left_out: how many groups. buffers: bytes of a group's buffers that its forward pass reads."""

    blocks: tuple[str, ...]
    cut: int
    width: int
    left_out: int
    buffers: int = 0

    @property
    def kept(self) -> list[int]:
        """Places of the blocks that are traced."""
        behind = self.cut + self.width * self.left_out
        return [*range(self.cut), *range(behind, len(self.blocks))]


def find_repeats(module: nn.Module, blank: nn.Module, blocks: Sequence[str], run: Callable[[], object]) -> Repeats:
    """The longest repetition of a module's blocks. run: a forward pass of a copy without values."""
    signatures, best = _signatures(blank, blocks, run), Repeats(tuple(blocks), len(blocks), 1, 0)
    follows = [signature is not None and signature[0] for signature in signatures]
    for width in range(1, len(blocks) // (GROUPS + 1) + 1):
        pairs = zip(signatures, signatures[width:], follows[width:], strict=False)
        equal = [behind and one is not None and one[1:] == (other or ())[1:] for one, other, behind in pairs]
        start = 0
        for place in range(len(equal) + 1):
            if place < len(equal) and equal[place]:
                continue
            left_out = (place + width - start) // width - GROUPS
            if left_out * width > best.left_out * best.width:
                best = Repeats(tuple(blocks), start + (GROUPS - 1) * width, width, left_out)
            start = place + 1
    if best.left_out:
        group = zip(blocks[best.cut - best.width : best.cut], signatures[best.cut - best.width :], strict=False)
        read = [module.get_submodule(block).get_buffer(name) for block, known in group if known for name in known[1]]
        best = replace(best, buffers=sum(buffer.untyped_storage().nbytes() for buffer in read))
    return best


def shortened(module: nn.Module, repeats: Repeats) -> nn.Module:
    """A copy without the blocks that are left out; its parameters are the module's."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    short = copy.deepcopy(module, memo)
    kept = set(repeats.kept)
    for place in reversed(range(len(repeats.blocks))):
        if place not in kept:
            path, _, name = repeats.blocks[place].rpartition(".")
            del short.get_submodule(path)[int(name)]  # type: ignore[operator]  # a list of modules
    return short


class _Observer(TorchDispatchMode):
    """Notes what each block does with which tensors."""

    def __init__(self, module: nn.Module, blocks: Sequence[str]) -> None:
        super().__init__()
        self.now = ""
        self.done: dict[str, list[Any]] = {}
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []
        """So that no two storages have one address."""
        self._within: set[int] = set()
        self._buffers: dict[int, str] = {}
        self.buffers: dict[str, set[str]] = {}
        """Block -> the names of its buffers that it reads."""
        self._given: int | None = None
        self._givers: dict[int, str] = {}
        self.read: set[str] = set()
        """Blocks whose output is read by others than the next block."""
        self._between = False
        for name in blocks:
            block = module.get_submodule(name)
            block.register_forward_pre_hook(self._enter(name), with_kwargs=True)
            block.register_forward_hook(self.leave)

    def _key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._alive.append(storage)
        return self._numbers.setdefault(storage._cdata, len(self._numbers))

    def _enter(self, name: str) -> Callable[..., None]:
        def enter(block: nn.Module, args: Any, kwargs: Any) -> None:
            stream, *_ = tensors_in(args, kwargs)
            taken, self.now = self._key(stream), name
            again = name in self.done
            self._buffers = {self._key(x): buffer for buffer, x in block.named_buffers()}
            self._within = {taken, *self._buffers, *(self._key(x) for x in block.parameters())}
            # What comes between two blocks belongs to neither, and the second does not follow the first.
            follows = not self._between and taken == self._given and not again
            self.done[name] = [follows, tuple(stream.shape), str(stream.dtype)]

        return enter

    def leave(self, block: nn.Module, args: Any, out: Any) -> None:
        self._given = self._key(out) if isinstance(out, Tensor) else None
        if self._given is not None:
            self._givers[self._given] = self.now
        self.now, self._between = "", False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = tensors_in(args, kwargs)
        if not self.now:
            self._between = True
            self.read |= {self._givers[self._key(x)] for x in tensors if self._key(x) in self._givers}
            return out
        words: list[Any] = [str(func)]
        for x in _pytree.tree_leaves((args, kwargs)):
            if isinstance(x, Tensor):
                outside = self._key(x) if self._key(x) not in self._within else None
                self.read |= {self._givers[outside]} if outside in self._givers else set()
                words.append((tuple(x.shape), str(x.dtype), outside))
            else:
                words.append(repr(x))
        read = {self._buffers[self._key(x)] for x in tensors if self._key(x) in self._buffers}
        self.buffers.setdefault(self.now, set()).update(read)
        self._within |= {self._key(x) for x in tensors_in(out)}
        self.done[self.now].append(tuple(words))
        return out


def _signatures(module: nn.Module, blocks: Sequence[str], run: Callable[[], object]) -> list[tuple[Any, ...] | None]:
    """Of each block whether it takes what the one before it gives, the buffers that it reads, what it is and does; None
    where it must be traced for itself."""
    owners: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        home = next((block for block in blocks if name.startswith(f"{block}.")), "")
        owners.setdefault(id(parameter), set()).add(home)
    observer, found = _Observer(module, blocks), list[tuple[Any, ...] | None]()
    with observer:
        run()
    for name in blocks:
        block = module.get_submodule(name)
        path, _, place = name.rpartition(".")
        alone = all(len(owners[id(x)]) == 1 for x in block.parameters())
        listed = isinstance(module.get_submodule(path), nn.ModuleList) and place.isdecimal()
        follows, *done = observer.done.get(name, [False])
        if not (alone and listed) or (name in observer.read and name != blocks[-1]):
            found.append(None)
            continue
        tensors = (*block.named_parameters(), *block.named_buffers())
        held = [(n, tuple(x.shape), str(x.dtype), x.requires_grad) for n, x in tensors]
        kinds = [type(child) for child in block.modules()]
        found.append((follows, observer.buffers.get(name, set()), path, kinds, held, done))
    return found


class Whole:
    """From traced steps of a shortened module to those of the whole one. short: its blocks, in order."""

    def __init__(self, repeats: Repeats, short: Sequence[str]) -> None:
        if len(short) != len(repeats.kept):
            raise UnlikeRepeats
        self.repeats, self.groups, self.width = repeats, repeats.left_out, repeats.width
        self.buffers = repeats.buffers, repeats.buffers
        self.places = {name: place for place, name in enumerate(short)}
        self.again = range(repeats.cut - self.width, repeats.cut)
        """Places, in the short module, of the group that stands for those left out."""
        self.order = {name: place for place, name in enumerate(repeats.blocks)}

    def step(self, step: TracedStep) -> TracedStep:
        """The whole module's. Raises `UnlikeRepeats`."""
        return replace(
            step,
            saved=self._bytes(step.saved),
            received=self._bytes(step.received),
            moments=tuple(self._moments(step.moments)),
            collectives=tuple(replace(c, unit=name) for c, name, _ in self._copies(step.collectives, lambda c: c.unit)),
            operations=tuple(replace(part, parts=self._with_copies(part.parts)) for part in step.operations),
            stages=step.stages and self._stages(step.stages),
        )

    def _bytes(self, rows: Sequence[tuple[str, Pair]]) -> tuple[tuple[str, Pair], ...]:
        return tuple((name, pair) for (_, pair), name, _ in self._copies(rows, lambda row: row[0]))

    def _name(self, part: str, groups: int = 0) -> str:
        """The name in the whole module of the part that is so many groups behind one of the short module."""
        if part not in self.places:
            return part
        return self.repeats.blocks[self.repeats.kept[self.places[part]] + groups * self.width]

    def _copies(self, rows: Iterable[Row], part: Callable[[Row], str]) -> Iterator[tuple[Row, str, int]]:
        """(row, name in the whole module, groups behind its own) for all parts that the part of a row stands for."""
        for row in rows:
            stands = self.places.get(part(row), -1) in self.again
            for groups in range(1 + self.groups * stands):
                yield row, self._name(part(row), groups), groups

    def _with_copies(self, parts: Iterable[str]) -> tuple[str, ...]:
        names = [name for _, name, _ in self._copies(parts, str)]
        return tuple(sorted(names, key=lambda name: self.order.get(name, len(self.order) * (name != ENTRY) or -1)))

    def _moments(self, rows: Sequence[TracedMoment]) -> Iterator[TracedMoment]:
        """A backward pass goes from the last part to the first, with all before it alive."""
        chunk = [place for place, row in enumerate(rows) if self.places.get(row.part, -1) in self.again]
        if chunk != list(range(chunk[0], chunk[-1] + 1)):
            raise UnlikeRepeats
        adds = [
            self._growth({(row.when, row.part): getattr(row, field) for row in rows if row.part in self.places})
            for field in ("first", "later", "received")
        ]
        if any(len(set(grown.values())) > 1 for grown in adds):
            raise UnlikeRepeats
        first, later, received = (next(iter(grown.values())) for grown in adds)

        def grown(row: TracedMoment, part: str, groups: int) -> TracedMoment:
            pairs = (_plus(pair, more, groups) for pair, more in ((row.first, first), (row.later, later)))
            one, other = (_plus(pair, self.buffers, self.groups) for pair in pairs)
            return TracedMoment(row.when, part, one, other, _plus(row.received, received, groups))

        yield from (grown(row, self._name(row.part), self.groups) for row in rows[: chunk[0]])
        for groups in reversed(range(1 + self.groups)):
            yield from (grown(row, self._name(row.part, groups), groups) for row in map(rows.__getitem__, chunk))
        yield from (grown(row, self._name(row.part), 0) for row in rows[chunk[-1] + 1 :])

    def _growth(self, at: dict[tuple[str, str], Pair]) -> dict[str, Pair]:
        """Moment -> bytes that a group adds to what is alive. Raises `UnlikeRepeats` where its blocks do not agree."""
        names, grown = list(self.places), dict[str, Pair]()
        for (when, part), pair in at.items():
            if self.places[part] in self.again:
                before = at.get((when, names[self.places[part] - self.width]), pair)
                if grown.setdefault(when, _plus(pair, before, -1)) != _plus(pair, before, -1):
                    raise UnlikeRepeats
        return grown

    def _stages(self, stages: TracedStages) -> TracedStages:
        grown = self._growth({(peak.when, peak.part): peak.nbytes for peak in stages.peaks if peak.part in self.places})
        peaks = []
        for peak, name, groups in self._copies(stages.peaks, lambda peak: peak.part):
            behind = peak.part == EXIT or self.places.get(peak.part, -1) > self.again[-1]
            nbytes = _plus(peak.nbytes, grown[peak.when], self.groups if behind else groups)
            if peak.when == "inputs":  # what gradients of weights need stays, and is part of `backward` alone
                kept = _plus(grown["backward"], grown["inputs"], -1)
                nbytes = _plus(nbytes, kept, self.groups)
            peaks.append(replace(peak, part=name, nbytes=nbytes))
        sizes: dict[TracedTensors, Pair] = {}
        for row in (copied for recorded in stages.tensors for copied in self._tensors(recorded)):
            who = replace(row, nbytes=(0, 0))
            sizes[who] = _plus(row.nbytes, sizes.get(who, (0, 0)), 1)
        tensors = tuple(replace(who, nbytes=nbytes) for who, nbytes in sizes.items())
        messages = [replace(row, part=name) for row, name, _ in self._copies(stages.messages, lambda row: row.part)]
        buffers = _plus(stages.buffers, self.buffers, self.groups)
        return TracedStages(tensors, tuple(peaks), tuple(messages), buffers)

    def _tensors(self, row: TracedTensors) -> Iterator[TracedTensors]:
        """The rows of memory that the same parts keep: of one group, of two neighboring ones, or of all."""
        who = row.savers, row.holders, row.keepers
        places = {self.places[part] for parts in who for part in parts if part in self.places}
        begin, end = self.again[0], self.again[-1] + 1
        early, late, here = min(places, default=end) < begin, max(places, default=0) >= end, places & {*self.again}
        if early and late:
            if not here or {place - self.width for place in here} - places:
                raise UnlikeRepeats
            savers, holders, keepers = (self._with_copies(parts) for parts in who)
            yield replace(row, savers=savers, holders=holders, keepers=keepers)
            return
        for groups in range(self.groups * late, 1 + self.groups) if here else range(1):
            savers, holders, keepers = (
                tuple(self._name(part, groups * (self.places.get(part, end) < end)) for part in parts) for parts in who
            )
            yield replace(row, savers=savers, holders=holders, keepers=keepers)


def _plus(one: Pair, other: Pair, times: int) -> Pair:
    return one[0] + other[0] * times, one[1] + other[1] * times
