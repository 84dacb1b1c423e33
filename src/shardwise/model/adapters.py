"""A blueprint with low-rank adapters: all else in it is frozen."""

from collections.abc import Iterator
from dataclasses import replace

from shardwise.errors import UserError, did_you_mean
from shardwise.model.blueprint import Blueprint, Cut, ForeignSlice, Parameter, Part
from shardwise.model.lora import INT8, Lora, scale_elements, stored_columns
from shardwise.model.operations import AttentionCore, Elementwise, Operation

A, B = "lora_a", "lora_b"
"""Last names of an adapter's parameters: [rank, inputs] and [outputs, rank]."""
SCALE = "weight_scale"
"""Last name of the scales beside a weight in fewer bits (`lora.scale_elements`)."""
PEFT_NAMES = {A: "lora_A.weight", B: "lora_B.weight"}
"""Their last names in `peft`'s files."""
PEFT_TRUNK = "base_model.model."
"""Prefix of every name in `peft`'s files."""


def scale_of(weight: str) -> str:
    """Name of the scales of a weight in fewer bits."""
    return f"{weight.removesuffix('weight')}{SCALE}"


def is_scale(name: str) -> bool:
    """Whether it is the name of such scales, which no file has."""
    return name.rpartition(".")[2] == SCALE


def with_adapters(whole: Blueprint, lora: Lora) -> Blueprint:
    """The blueprint with adapters beside the linear maps that `lora` names. Raises `UserError` for an unknown name."""
    names = [name for part in whole.of_kind("block") for p in _maps(part) for name in names_of_map(p)]
    for target in lora.targets:
        if target not in names:
            raise UserError(
                f"lora: {whole.name} has no linear map {target!r}; {did_you_mean(target, sorted(set(names)), 'maps:')}"
            )
    return replace(whole, parts=tuple(_adapted(part, lora) for part in whole.parts))


def stacked_target(name: str) -> str:
    """The target that names stacked experts' weights: the last two steps of their path, as `experts.down_proj`."""
    return ".".join(name.split(".")[-2:])


def factor_of(name: str) -> tuple[str, str]:
    """(the name of the weight beside which an adapter's factor is, A or B); empty ones for another parameter."""
    factor = next((factor for factor in (A, B) if name.endswith(factor)), "")
    owner = name.removesuffix(factor)
    if not factor:
        return "", ""
    return (f"{owner}weight" if owner.endswith(".") else owner.removesuffix("_")), factor


def names_of_map(weight: Parameter) -> list[str]:
    """Names by which a map can be a target: ours, and that of Hugging Face's module; of stacked experts one alone."""
    if weight.cut == "expert":
        return [stacked_target(weight.name)]
    theirs = [weight.foreign.tensor.split(".")[-2]] if weight.foreign else []
    return [weight.name.split(".")[-2], *theirs]


def _maps(part: Part) -> list[Parameter]:
    """The weights of the linear maps of a block, in the order of its operations, and stacked experts."""
    two = [p for p in part.parameters if len(p.shape) == 2]
    # Of a convolution per channel a dim of one element is left out.
    return [p for p in two if p.cut == "expert" or (p.name.endswith(".weight") and "conv" not in p.name.split(".")[-2])]


def _adapted(part: Part, lora: Lora) -> Part:
    maps = _maps(part) if part.kind == "block" else []
    named = {p.name: {*lora.targets} & {*names_of_map(p)} for p in maps}
    ranks = {p.name: lora.rank for p in maps if named[p.name] or not (lora.targets or p.cut == "expert")}
    narrow = {p.name for p in maps if p.cut != "expert"} if lora.base else set()
    weights: list[Parameter] = []
    for p in part.parameters:
        weights.append(replace(p, frozen=True, dtype=lora.base if p.name in narrow else ""))
        if p.name in narrow:
            weights.append(_scales(p, lora.base))
        if p.name in ranks:
            weights += _factors(p, lora.rank)
    operations = tuple(_operations(part, [(p.shape, ranks.get(p.name, 0)) for p in maps], lora.base))
    return replace(part, parameters=tuple(weights), operations=operations)


def _operations(part: Part, ranks: list[tuple[tuple[int, ...], int]], base: str) -> Iterator[Operation]:
    """A part's operations. ranks: (shape of a map, rank of its adapter, 0 for none), those of one shape in order. base:
    dtype of their weights."""
    rest: dict[tuple[int, ...], list[int]] = {}
    for shape, rank in ranks:
        rest.setdefault(shape, []).append(rank)
    for operation in part.operations:
        if isinstance(operation, AttentionCore) or (isinstance(operation, Elementwise) and operation.kind != "lookup"):
            if operation.kind != "bias gradients":
                yield operation
        elif isinstance(operation, Elementwise):
            yield replace(operation, frozen=True)
        elif ranks:
            shapes = ((operation.count * out.size, operation.inputs.size) for out in operation.outputs)
            adapters = tuple(rest[shape].pop(0) if rest.get(shape) else 0 for shape in shapes)
            yield replace(operation, frozen=True, adapters=adapters, base=base)
        else:
            yield replace(operation, frozen=True)


def is_narrow(parameter: Parameter) -> bool:
    """Whether it is a weight in fewer bits."""
    return bool(parameter.dtype) and not is_scale(parameter.name)


def stored(parameter: Parameter) -> Parameter:
    """A parameter whose elements are those of its storage: of a weight in fewer bits its bytes."""
    if not is_narrow(parameter):
        return parameter
    return replace(parameter, shape=(parameter.shape[0], stored_columns(parameter.dtype, parameter.shape[1])))


def _scales(weight: Parameter, base: str) -> Parameter:
    """The scales of a weight. Of int8 they are of whole rows, and cut with its outputs; else every rank has them all: a
    block may be on several ranks."""
    whole = base != INT8 or weight.cut in ("row", "replicated")
    return Parameter(
        scale_of(weight.name),
        (scale_elements(base, *weight.shape),),
        decay=False,
        cut="replicated" if whole else weight.cut,
        heads=0 if whole else weight.heads,
        frozen=True,
        dtype="" if base == INT8 else base,
    )


def _factors(weight: Parameter, rank: int) -> Iterator[Parameter]:
    """A and B of a map. The factor at the side that tensor parallelism cuts is cut with it; of the other one each rank
    has a part of the gradient, since it sees its own outputs, or inputs, alone.

    As in `peft`, B starts at zero; A has the variance of its default, uniform within ± 1 / sqrt(inputs). Those of
    stacked experts are stacked.
    """
    outputs, inputs = weight.shape
    row, replicated, stacks = weight.cut == "row", weight.cut == "replicated", weight.cut == "expert"
    cuts: dict[str, Cut] = {A: "row" if row else "replicated", B: "replicated" if row else weight.cut}
    cuts = dict.fromkeys(cuts, weight.cut) if stacks else cuts
    owner = f"{weight.name}_" if stacks else weight.name.removesuffix("weight")
    for name, shape in ((A, ((weight.heads if stacks else 1) * rank, inputs)), (B, (outputs, rank))):
        whole = cuts[name] == "replicated"
        yield Parameter(
            f"{owner}{name}",
            shape,
            init="normal" if name == A else "zeros",
            std=(3 * inputs) ** -0.5,
            cut=cuts[name],
            heads=0 if whole else weight.heads,
            partial=whole and not replicated,
            foreign=_place_in_peft(weight, name, shape),
        )


def _place_in_peft(weight: Parameter, name: str, shape: tuple[int, int]) -> ForeignSlice | None:
    """Where `peft` stores a factor; None where Hugging Face's map is not this one alone, so that its adapter is shared
    with other maps."""
    theirs = weight.foreign
    if theirs is None or theirs.shape != weight.shape or theirs.transposed or theirs.tensors > 1 or theirs.paired:
        return None
    tensor = f"{PEFT_TRUNK}{theirs.tensor.removesuffix('weight')}{PEFT_NAMES[name]}"
    return ForeignSlice(tensor, shape, 0, shape[0], shape[0])
