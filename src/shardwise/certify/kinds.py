"""Guess at a mistake: which wrong sum of the plain model's numbers an engine's numbers are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from shardwise.certify.adapter import OPTIMIZER, Adapter
from shardwise.certify.reference import Reference, Tensors
from shardwise.certify.tiny import IGNORED, STEPS

UNKNOWN = "no sum that was tried"
_CLOSE = 100
"""Times a bound that a candidate may be away."""


@dataclass(frozen=True)
class Evidence:
    """The first wrong thing, as every rank has it."""

    adapter: Adapter
    reference: Reference
    layout: dict[str, Any]
    what: str
    """One of `PROPERTIES`."""
    step: int
    name: str
    """Of the parameter; empty for a number."""
    parts: list[Any]
    """By rank: a number, or name -> tensor."""

    @property
    def axes(self) -> dict[str, int]:
        """Axis -> its size, of those with more than one rank."""
        return {axis: size for axis, size in self.adapter.sizes(self.layout).items() if size > 1}

    def close(self, mine: Tensor, right: Tensor) -> bool:
        """Whether they are equal but for rounding."""
        if mine.shape != right.shape:
            return False
        norm = float(right.double().norm())
        return norm > 0 and float((mine.double() - right.double()).norm()) <= _CLOSE * self.bound * norm

    @property
    def bound(self) -> float:
        return self.reference.bounds[self.what]

    def tensors(self) -> list[Tensor]:
        """The wrong parameter's tensor on the ranks that have it."""
        return [part[self.name] for part in self.parts if self.name in part]

    def groups(self, axes: tuple[str, ...]) -> list[list[int]]:
        """Ranks that differ in these axes alone."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(len(self.parts)):
            at = self.adapter.place(self.layout, rank)
            groups.setdefault(tuple(i for axis, i in at.items() if axis not in axes), []).append(rank)
        return list(groups.values())

    def sets_of_axes(self) -> Iterator[tuple[str, ...]]:
        for count in range(1, len(self.axes) + 1):
            yield from combinations(self.axes, count)

    def size(self, axes: Iterable[str]) -> int:
        return math.prod(self.axes[axis] for axis in axes)


def guess(evidence: Evidence) -> str:
    """One phrase; `UNKNOWN` where nothing fits."""
    kinds = {
        "loss": _loss, "gradients": _gradients, "norm": _norm, "clipped": _clipped, "steps": _steps, "resume": _resume,
    }  # fmt: skip
    return next(kinds[evidence.what](evidence), UNKNOWN)


def _factor(evidence: Evidence, ratio: float) -> Iterator[str]:
    """Words for a factor that is a size, or one over it."""
    for axes in evidence.sets_of_axes():
        size, name = evidence.size(axes), " x ".join(axes)
        for value, words in (
            (size, f"{size} = {name}"),
            (1 / size, f"1/{size} = 1/({name})"),
            (math.sqrt(size), f"the root of {size} = {name}"),
            (1 / math.sqrt(size), f"1 over the root of {size} = {name}"),
        ):
            if abs(ratio - value) <= _CLOSE * evidence.bound * value:
                yield f"factor {words}"
    if abs(ratio - round(ratio)) <= _CLOSE * evidence.bound * abs(ratio) and round(ratio) not in (0, 1):
        yield f"factor {round(ratio)}"


def _loss(evidence: Evidence) -> Iterator[str]:
    reference, step = evidence.reference, evidence.step
    right, mine = reference.trace.losses[step], next(part for part in evidence.parts if part is not None)
    if right and evidence.adapter.global_loss:
        yield from _factor(evidence, mine / right)
    yield from _other_model(evidence)
    if reference.variant == "dropout":
        yield "other dropout masks"
    share = reference.share(*evidence.adapter.data_place(evidence.layout, 0))
    added = mine - reference.of_rows(step, share)[0] if evidence.parts[0] is not None else 0.0
    for axes in evidence.sets_of_axes():
        part = (reference.batches[step][1][share] != IGNORED).sum() / reference.tokens[step]
        if abs(added - part * math.log(evidence.size(axes))) <= _CLOSE * evidence.bound * abs(mine):
            yield f"log of {evidence.size(axes)} = {' x '.join(axes)} is added: a softmax over every rank's copy"
    yield "ranks do not have the weights or buffers of rank 0" if evidence.adapter.broadcasts else "the forward pass"


def _other_model(evidence: Evidence) -> Iterator[str]:
    for rank, part in enumerate(evidence.parts):
        _, count = evidence.adapter.data_place(evidence.layout, rank)
        for other in range(count):
            loss, _ = evidence.reference.of_rows(evidence.step, evidence.reference.share(other, count))
            index = evidence.adapter.data_place(evidence.layout, rank)[0]
            if other != index and part is not None and abs(loss - part) <= evidence.bound * abs(loss):
                yield f"rank {rank} has the rows of data rank {other}"


def _gradients(evidence: Evidence) -> Iterator[str]:
    reference, step, name = evidence.reference, evidence.step, evidence.name
    tensors, right = evidence.tensors(), reference.trace.gradients[step].get(name)
    if not tensors:
        yield "dropped: no rank has a gradient of it"
        return
    if right is None:
        yield "frozen parameter has a gradient"
        return
    first = tensors[0]
    norm = float(right.double().square().sum())
    ratio = float((first.double() * right.double()).sum()) / norm if first.shape == right.shape and norm else 0.0
    if abs(ratio) > 1e-6 and all(evidence.close(item, right * ratio) for item in tensors):
        yield from _factor(evidence, ratio)
        labels = reference.batches[step][1].numel()
        if abs(ratio - reference.tokens[step] / labels) <= _CLOSE * evidence.bound:
            yield f"factor {ratio:.3g}: divided by labels that do not count, too"
        yield f"factor {ratio:.3g}"
    yield from _missing_sum(evidence, right)
    yield from _wrong_rows(evidence)
    if name in ("head.weight", "table.weight") or evidence.reference.variant == "tied":
        yield from _one_side(evidence)
    for last in (trace[step - 1][name] for trace in (reference.trace.gradients, reference.trace.clipped) if step):
        if evidence.close(first, right + last):
            yield "the last step's gradient is still in it"
    for other, gradient in reference.trace.gradients[step].items():
        if other != name and evidence.close(first, gradient):
            yield f"gradient of {other}"
    yield from _micro_batches(evidence, first)
    yield from _dropped(first, right, evidence)


def _missing_sum(evidence: Evidence, right: Tensor) -> Iterator[str]:
    """Ranks have terms of a sum, or of a mean, that was not made."""
    if any(evidence.name not in part for part in evidence.parts):
        return
    for axes in evidence.sets_of_axes():
        sums = [sum(evidence.parts[rank][evidence.name] for rank in ranks) for ranks in evidence.groups(axes)]
        name, size = " x ".join(axes), evidence.size(axes)
        for words, factor in (("sum", 1.0), ("mean", float(size))):
            equal = all(evidence.close(item, evidence.parts[0][evidence.name]) for item in evidence.tensors())
            if not equal and all(evidence.close(total, right * factor) for total in sums):
                yield f"missing {words} over {name}"


def _wrong_rows(evidence: Evidence) -> Iterator[str]:
    """Sums over some data ranks' rows, and means of their means."""
    reference, step, name, mine = evidence.reference, evidence.step, evidence.name, evidence.tensors()[0]
    data = [axis for axis in evidence.axes if axis in evidence.adapter.data]
    count = evidence.size(data)
    if count < 2:
        return
    shares = [reference.share(index, count) for index in range(count)]
    labels = reference.batches[step][1]
    counts = [max(1, int((labels[share] != -100).sum())) for share in shares]
    terms = [reference.of_rows(step, share)[1][name] for share in shares]
    means = [term * reference.tokens[step] / tokens for term, tokens in zip(terms, counts, strict=True)]
    used = sum(int((labels[share] != -100).any()) for share in shares)
    for divisor, words in ((count, "mean over ranks in place of tokens"), (used, "mean over ranks that have tokens"),
                           (1, "sum of ranks' means")):  # fmt: skip
        if evidence.close(mine, sum(means[1:], means[0]) / divisor) and len(set(counts)) > 1:
            yield words
    for axes in (axes for axes in evidence.sets_of_axes() if set(axes) <= set(data)):
        for ranks in evidence.groups(axes):
            places = {evidence.adapter.data_place(evidence.layout, rank)[0] for rank in ranks}
            others = [terms[place] for place in range(count) if place not in places]
            for factor in (1, count, count / evidence.size(axes)):
                for some in (sum((terms[p] for p in places), torch.zeros_like(mine)), *terms,
                             *([sum(others, torch.zeros_like(mine))] if others else [])):  # fmt: skip
                    if evidence.close(mine, some * factor):
                        yield f"missing sum over {' x '.join(data)}: some ranks' rows alone"


def _micro_batches(evidence: Evidence, mine: Tensor) -> Iterator[str]:
    """A sum over some of the micro-batches."""
    micro, data = evidence.layout.get("micro", 4), evidence.adapter.data_place(evidence.layout, 0)[1]
    if data > 1 or not isinstance(micro, int) or micro > 8:
        return
    of = [evidence.reference.of_rows(evidence.step, evidence.reference.share(i, micro))[1] for i in range(micro)]
    for taken in range(1, micro):
        for some in combinations([item[evidence.name] for item in of], taken):
            if evidence.close(mine, sum(some[1:], some[0])):
                yield f"dropped: {micro - taken} of {micro} micro-batches"


def _one_side(evidence: Evidence) -> Iterator[str]:
    """The gradient of a tied weight from one of its uses."""
    reference, mine = evidence.reference, evidence.tensors()[0]
    model = reference.at(evidence.step)
    shared = model.get_parameter(evidence.name)
    tied = [name for name, p in model.named_parameters(remove_duplicate=False) if p is shared]
    for name in tied[:2] if len(tied) > 1 else ():
        path, _, leaf = name.rpartition(".")
        apart = model.get_submodule(path)
        setattr(apart, leaf, torch.nn.Parameter(shared.detach().clone()))
        model.zero_grad()
        reference.backward(model, evidence.step, slice(None), reference.tokens[evidence.step])
        alone = getattr(apart, leaf).grad
        setattr(apart, leaf, shared)
        if alone is not None:
            whole = reference.trace.gradients[evidence.step][evidence.name]
            for use, gradient in ((name, alone), (f"the other use of {name}", whole - alone)):
                if evidence.close(mine, gradient):
                    yield f"tied weight: from {use} alone"


def _dropped(mine: Tensor, right: Tensor, evidence: Evidence) -> Iterator[str]:
    """A gradient that is zero where it should not be, and right elsewhere."""
    if mine.shape != right.shape:
        yield f"shape {tuple(mine.shape)} in place of {tuple(right.shape)}"
        return
    if not mine.any():
        yield "dropped: it is zero"
        return
    scale = float(right.abs().max())
    wrong = ((mine - right).double().abs() > _CLOSE * evidence.bound * scale).reshape(len(mine), -1).any(1)
    rows = wrong.nonzero().flatten().tolist()
    if 0 < len(rows) < len(mine):
        zero = not mine.reshape(len(mine), -1)[wrong].any()
        yield f"{'dropped' if zero else 'wrong'} part: {len(rows)} of {len(mine)} rows, from {rows[0]} to {rows[-1]}"


def _norm(evidence: Evidence) -> Iterator[str]:
    right = evidence.reference.trace.norms[evidence.step]
    numbers = evidence.parts
    yield from _factor(evidence, numbers[0] / right)
    for axes in evidence.sets_of_axes():
        sums = [math.sqrt(sum(numbers[rank] ** 2 for rank in ranks)) for ranks in evidence.groups(axes)]
        if all(abs(total - right) <= _CLOSE * evidence.bound * right for total in sums):
            yield f"norm of a rank's part: missing sum over {' x '.join(axes)}"
    gradients = evidence.reference.trace.gradients[evidence.step]
    squares = {name: float(gradient.double().square().sum()) for name, gradient in gradients.items()}
    missing = right**2 - numbers[0] ** 2
    for size in {1, *(evidence.size(axes) - 1 for axes in evidence.sets_of_axes())}:
        for name, square in squares.items():
            if abs(abs(missing) - size * square) <= 10 * _CLOSE * evidence.bound * right**2 < square / 10:
                yield f"{name} is {'not in it' if missing > 0 else f'counted {size + 1} times'}"
    if len({round(number, 12) for number in numbers}) > 1:
        yield "ranks have other norms"
    yield "replicated parameters counted more than once" if missing < 0 else "parameters left out"


def _clipped(evidence: Evidence) -> Iterator[str]:
    reference, step, name = evidence.reference, evidence.step, evidence.name
    mine, raw = evidence.tensors()[0], reference.trace.gradients[step][name]
    if evidence.close(mine, raw):
        yield "not clipped"
    right = reference.trace.clipped[step][name]
    ratio = float((mine.double() * right.double()).sum() / right.double().square().sum())
    yield from _factor(evidence, ratio)
    if evidence.close(mine, right * ratio):
        yield f"factor {ratio:.3g}: clipped by another norm"


def _steps(evidence: Evidence) -> Iterator[str]:
    reference, step, name = evidence.reference, evidence.step, evidence.name
    before = (reference.trace.parameters[step - 1] if step else reference.start)[name]
    tensors, right = evidence.tensors(), reference.trace.parameters[step][name]
    if not tensors:
        yield "dropped: no rank has it"
        return
    decay = 1 - OPTIMIZER["lr"] * OPTIMIZER["weight_decay"]  # type: ignore[operator]
    if name in reference.frozen and evidence.close(tensors[0], before * decay):
        yield "frozen parameter decayed"
    for words, change in (
        ("stale copy: the weights before the step", before),
        ("decayed twice", right * decay), ("not decayed", right + (1 - decay) * before),
    ):  # fmt: skip
        stale = [_moved(evidence, item, change, before) for item in tensors]
        if all(stale):
            yield words
        elif any(stale):
            yield f"{words}, on {sum(stale)} of {len(stale)} ranks"
    yield from _other_parameter(evidence, tensors[0], reference.trace.parameters[step])
    if not all(torch.equal(item, tensors[0]) for item in tensors):
        yield "copies on ranks differ"


def _moved(evidence: Evidence, mine: Tensor, right: Tensor, before: Tensor) -> bool:
    """Whether a parameter is equal, as a share of a step's length."""
    return float((mine.double() - right.double()).norm()) <= 1e-4 * OPTIMIZER["lr"] * math.sqrt(mine.numel())  # type: ignore[operator]


def _other_parameter(evidence: Evidence, mine: Tensor, parameters: Tensors) -> Iterator[str]:
    others = {name: tensor for name, tensor in parameters.items() if name != evidence.name}
    for name, tensor in others.items():
        if tensor.shape == mine.shape and float((mine - tensor).norm()) < 0.05 * float(tensor.norm()):
            yield f"weights of {name} in its place"


def _resume(evidence: Evidence) -> Iterator[str]:
    """Step `STEPS - 2`: the weights that were loaded; then those after another step."""
    reference, name, step = evidence.reference, evidence.name, evidence.step
    mine, saved = evidence.tensors()[0], reference.trace.parameters[STEPS - 2]
    if step < STEPS - 1:
        yield from _other_parameter(evidence, mine, saved)
        yield "weights not restored"
        return
    anew = reference.train(reference.module(), forget=step).parameters[step][name]
    if _moved(evidence, mine, anew, saved[name]):
        yield "optimizer state not restored"
    if _moved(evidence, mine, saved[name], saved[name]):
        yield "stale copy: the weights before the step"
    yield "optimizer state differs"
