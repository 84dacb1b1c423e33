"""Describe a module of your own for `estimate` and `plan`, by steps of the runtime on fake tensors.

No weight is computed with. The file has parts, parameters, operations, saved bytes and communication, for each
tensor-parallel degree; `estimate` and `plan` read it without torch.

shardwise trace model.py:build --out model.json
shardwise plan model.json --cluster 8xH100 --batch 64

shardwise trace Qwen/Qwen3-Next-80B-A3B-Instruct --seq 2048 --tp 1,2 --cuts ep=8 --out model.json

`build` is a function without arguments that returns the module, best on the meta device where it is large. `example`
and `loss`, in the same file, are as for `verify` and `SplitModule.train_step`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from shardwise.cli.declare import arg, leave_out, word
from shardwise.cli.models import OfflineOptions
from shardwise.cli.output import print_result, working
from shardwise.cli.quantities import numbers
from shardwise.cli.verify import SUGGEST, SplitOptions, names_code, plan_of
from shardwise.codec import keyed
from shardwise.layout.keys import APART
from shardwise.layout.usual_workload import usual_workload
from shardwise.model.blueprint import Blueprint
from shardwise.model.blueprint_file import write_blueprint
from shardwise.model.catalog import resolve
from shardwise.model.parameters import count
from shardwise.model.trace import Trace, TraceSource
from shardwise.records import dataclass
from shardwise.report.table import Column, FittedTable
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_bytes, format_count
from shardwise.runtime.installed import require


@dataclass
class TraceOptions(SplitOptions, OfflineOptions):
    model: str = word(
        "the function that builds the module, FILE.py:NAME; or a config.json, a folder with one, a name of the hub or "
        "of `list models`, by its class of transformers",
        "MODEL",
    )
    example: str | None = arg("of FILE.py: inputs of a forward pass, in the same file (example)", "NAME")
    out: str | None = arg("the file that is written: model.json", "FILE")
    loss: str | None = arg("of FILE.py: its loss, in the same file (the sum of the outputs)", "NAME")
    seq: int | None = arg("of a configuration: tokens of a row (the usual ones)", "N", positive=True, tokens=True)
    tp: list[int] | None = arg("tensor-parallel degrees (those of 1, 2, 4, 8 that suit)", "N,...", read=numbers)
    cuts: str = arg(f"values of {', '.join(APART)} under which it is traced, too, with + between", "KEY=N+...", "")
    precision: str = arg("of layouts, by commas", "NAMES", "bf16")


def run(args: TraceOptions) -> int:
    require("trace", "torch")
    from shardwise.runtime.module.trace import trace

    suggested: dict[str, Any] = {}
    cuts, precisions = ["", *filter(None, args.cuts.split("+"))], args.precision.split(",")
    with working(f"tracing {args.model}"):
        request, source = _of_file(args, suggested) if names_code(args.model) else _of_configuration(args, cuts)
        blueprint = trace(**request, tp=args.tp, precisions=precisions, cuts=cuts)
    if args.out:
        assert blueprint.trace is not None
        plan, blocks, parts = (request[name] for name in ("plan", "blocks", "parts"))
        source = replace(
            source, plan=plan and tuple(plan.items()), blocks=blocks and tuple(blocks), parts=parts and tuple(parts)
        )
        write_blueprint(replace(blueprint, trace=replace(blueprint.trace, source=source)), args.out)
    data = {"model": blueprint.name, "out": args.out, "suggestion": suggested or None, **_summary(blueprint)}
    return print_result(args, data, _lines(data))


def _of_file(args: TraceOptions, suggested: dict[str, Any]) -> tuple[dict[str, Any], TraceSource]:
    """The arguments of `trace` for a function in a file. suggested: takes a plan that is suggested."""
    from shardwise.runtime.module.suggest import suggest
    from shardwise.runtime.module.verify import FromFile

    leave_out(args, "seq", "is for a configuration: the example in the file has rows")
    build = FromFile.parse(args.model)
    module, example = build(), FromFile(build.path, args.example or "example")
    blocks, parts = (names.split(",") if names else None for names in (args.blocks, args.parts))
    loss = FromFile(build.path, args.loss).loaded() if args.loss else None
    plan: Mapping[str, str] | None = plan_of(args.plan) if args.plan and args.plan != SUGGEST else None
    if args.plan == SUGGEST:
        plan = suggestion = suggest(module, example, blocks=blocks, loss=loss)
        suggested |= suggestion.to_json()
    request = {"model": module, "example": example, "plan": plan, "loss": loss, "blocks": blocks, "parts": parts}
    return request, TraceSource(build.path, build.name, example.name, args.loss or "")


def _of_configuration(args: TraceOptions, cuts: Sequence[str]) -> tuple[dict[str, Any], TraceSource]:
    """The arguments of `trace` for a model by its class of transformers."""
    from shardwise.runtime.module.class_model import ClassModel
    from shardwise.runtime.module.class_run import check_head
    from shardwise.runtime.module.losses import TokenRows, token_loss

    leave_out(args, "example loss plan blocks parts", "is for FILE.py:NAME: a class of transformers has its own")
    described = resolve(args.model)
    model, seq = ClassModel.of(described), usual_workload(described, args.seq, None, 1).workload.seq
    split = model.widest(cuts, args.tp, seq)
    check_head(model, split)
    request = {"model": split.module, "example": TokenRows(seq), "plan": split.plan, "loss": token_loss, "blocks": None,
               "parts": split.parts}  # fmt: skip
    return request, TraceSource(config=model.data)


def _summary(blueprint: Blueprint) -> dict[str, Any]:
    trace = blueprint.trace
    assert trace is not None
    step = trace.steps[0]
    first = {part: nbytes[0] for part, nbytes in step.saved}
    return {
        "parameters": count(blueprint),
        "rows": list(trace.rows),
        "seq": trace.seq,
        "tp": trace.degrees,
        "cuts": [cut for cut in trace.cuts if cut],
        "sp": sorted({each.tp for each in trace.steps if each.sp}),
        "pipelines": trace.ends is not None,
        "left_out": {key: why for key, why in (("sp", trace.uncut), ("pipelines", trace.unpiped)) if why},
        "precisions": sorted({each.precision for each in trace.steps}),
        "parts": [
            keyed(part, "name module parameters=numel")
            | {"saved": first.get(part.name, 0), **_operations(trace, part.name)}
            for part in blueprint.parts
        ],
    }


def _equal(parts: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, part) of parts in a row that differ in their names alone, as one."""
    for _, group in groupby(parts, lambda part: {**part, "name": ""}):
        first, *others = group
        yield (f"{first['name']} to {others[-1]['name']}" if others else first["name"]), first


def _operations(trace: Trace, part: str) -> dict[str, int]:
    """Operations of a part on one device, for the smaller micro-batch."""
    found = (each for each in trace.steps[0].operations if part in each.parts)
    operations = [op for each in found for op in each.operations]
    return {
        "operations": sum(op.count for op in operations),
        "flops": sum(op.count * op.flops[0] for op in operations),
        "bytes": sum(op.count * op.nbytes[0] for op in operations),
    }


def _lines(data: dict[str, Any]) -> Iterator[Renderable]:
    if found := data["suggestion"]:
        yield "suggested plan"
        yield from (f"  {pattern}: {style}" for pattern, style in found["plan"].items())
        yield from (f"  {pattern} is whole: {why}" for pattern, why in found["whole"].items())
        yield ""
    rows = data["rows"][0]
    traced = [f"tp={','.join(map(str, data['tp']))}"]
    traced += [f"sp with tp={','.join(map(str, data['sp']))}"] if data["sp"] else []
    traced += data["cuts"]
    traced += ["pipelines"] if data["pipelines"] else []
    yield (
        f"{data['model']}: {format_count(data['parameters'])} parameters; a step on one device with {rows} rows of "
        f"{data['seq']}, traced for {', '.join([*traced, *data['precisions']])}\n"
    )
    names = Column("part", left=True), Column("class", left=True, drop=1), Column("parameters")
    table = FittedTable((*names, Column("operations", drop=2), *map(Column, ("FLOPs", "bytes moved", "bytes saved"))))
    for name, part in _equal(data["parts"]):
        numbers = (format_count(part["parameters"]), str(part["operations"]), format_count(part["flops"]))
        table.add_row(name, part["module"], *numbers, format_bytes(part["bytes"]), format_bytes(part["saved"]))
    yield table
    yield from (f"\nnot traced for {key}: {why}" for key, why in data["left_out"].items())
    yield f"\nwritten to {data['out']}" if data["out"] else "\nnothing was written: give --out model.json"
