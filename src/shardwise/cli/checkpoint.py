"""Inspect, verify, reshard, compare, export, merge and import checkpoints.

A checkpoint is a folder with a manifest.json. A run directory, or its folder of checkpoints, stands for its newest one.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.actions import actions
from shardwise.cli.models import model_of
from shardwise.cli.output import print_result
from shardwise.cli.quantities import length_of
from shardwise.errors import UserError
from shardwise.layout import Layout
from shardwise.report.table import plain_table
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_bytes, format_count

if TYPE_CHECKING:
    from shardwise.checkpoint import Checkpoint, TensorDifference
    from shardwise.checkpoint.huggingface import Exported
    from shardwise.checkpoint.manifest import Manifest

_SHOWN = 20
"""Lines of a table of differences; --json has them all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    action = actions(parser)
    inspect = action("inspect", "show what a checkpoint contains", _inspect)
    inspect.add_argument("checkpoint", metavar="CHECKPOINT", type=Path)
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    verify = action("verify", "read all of a checkpoint and check every checksum", _verify)
    verify.add_argument("checkpoint", metavar="CHECKPOINT", type=Path)
    rewrite = action("reshard", "rewrite a checkpoint for another layout", _reshard)
    rewrite.add_argument("checkpoint", metavar="CHECKPOINT", type=Path)
    rewrite.add_argument("--layout", required=True, metavar="LAYOUT", help="such as tp=2,dp=2,zero=1")
    rewrite.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="the new checkpoint's folder")
    compare = action("diff", "compare two checkpoints by tensor; the exit code is 1 when they differ", _diff)
    compare.add_argument("a", metavar="A", type=Path)
    compare.add_argument("b", metavar="B", type=Path)
    _export_arguments(action("export", "write weights for Hugging Face, adapters for peft, or all state for FSDP2 or "
                             "DeepSpeed", _export))  # fmt: skip
    merge = action("merge", "add low-rank adapters to their weights, as a Hugging Face folder", _merge)
    merge.add_argument("adapters", metavar="ADAPTERS", type=Path, help="a run, a checkpoint, or a folder of peft's")
    merge.add_argument("--base", type=Path, metavar="FOLDER", help="their weights, if these "
                       "are elsewhere by now")  # fmt: skip
    merge.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="the new folder")
    merge.add_argument(
        "--dtype", choices=("bfloat16", "float32", "float16"), help="of every tensor (that of their weights)"
    )
    _import_arguments(action("import", "convert another trainer's checkpoint (FSDP2, DeepSpeed)", _import))


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path)
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="the new folder")
    parser.add_argument(
        "--format",
        choices=("huggingface", "dcp", "deepspeed-universal"),
        default="huggingface",
        help="dcp: torch.distributed.checkpoint, which FSDP2 loads; weights alone for huggingface (huggingface)",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32", "float16"),
        help="huggingface: of every tensor (that of the weights that training started from, else bfloat16)",
    )
    parser.add_argument(
        "--names", choices=("huggingface", "shardwise"), help="other formats: whose names parameters have (huggingface)"
    )
    parser.add_argument("--weights-only", action="store_true", help="dcp: leave the optimizer's state out")


def _import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the other trainer's checkpoint")
    parser.add_argument("--format", choices=("auto", "dcp", "deepspeed"), default="auto", help="its format (auto)")
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="a name of the catalog, a config.json, or the folder that holds one",
    )
    parser.add_argument("--set", metavar="FIELD=VALUE,...", action="append", default=[], help="change the model")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="the new checkpoint's folder")
    parser.add_argument("--weights-only", action="store_true", help="leave the optimizer's state out")
    group = parser.add_argument_group("for train --resume", "settings that the other trainer's checkpoint lacks")
    group.add_argument("--data", metavar="SOURCE", help="file, folder, saved dataset, or stdlib")
    group.add_argument("--tokenizer", metavar="FILE", help="the model's tokenizer.json")
    group.add_argument("--seq", type=length_of, metavar="N", help="tokens per sequence")
    group.add_argument("--batch", type=int, metavar="N", help="sequences per step (DeepSpeed's own)")


def _inspect(args: argparse.Namespace) -> int:
    from shardwise.checkpoint import find

    checkpoint = find(args.checkpoint)
    tensors = {name: {"shape": spec.shape, "dtype": spec.dtype} for name, spec in checkpoint.tensors.items()}
    return print_result(args, {**_summary(checkpoint), "tensors": tensors}, _contents(checkpoint, args.tensors))


def _contents(checkpoint: Checkpoint, tensors: bool) -> Iterator[Renderable]:
    yield from _lines(checkpoint)
    files = plain_table(("file", "bytes", "pieces"))
    for part in checkpoint.manifest.parts:
        files.add_row(part.name, format_bytes(part.nbytes), str(len(part.pieces)))
    yield from ("", files)
    if tensors:
        table = plain_table(("tensor", "shape", "dtype"))
        for name, spec in checkpoint.tensors.items():
            table.add_row(_plain(name), " x ".join(map(str, spec.shape)), spec.dtype)
        yield from ("", table)


def _verify(args: argparse.Namespace) -> int:
    from shardwise.checkpoint import DamagedError, find, with_older

    checkpoint = find(args.checkpoint)
    try:
        nonfinite = checkpoint.verify()
    except DamagedError as error:
        raise with_older(error, checkpoint.folder) from None
    lines = [*_lines(checkpoint), "", "every checksum is correct"]
    _warn_of_nonfinite(nonfinite, len(checkpoint.tensors), checkpoint.folder)
    print_result(args, {**_summary(checkpoint), "whole": True, "nonfinite": nonfinite}, lines)
    return 1 if nonfinite else 0


def _warn_of_nonfinite(names: Sequence[str], count: int, where: Path) -> None:
    """Say that some of `count` tensors are not finite."""
    if names:
        line = f"{len(names)} of {count} tensors in {where} have NaN or infinite elements, the first being {names[0]}"
        print(f"shardwise: warning: {_plain(line)}", file=sys.stderr)


def _reshard(args: argparse.Namespace) -> int:
    from shardwise.checkpoint import find, reshard

    layout = Layout.parse(args.layout)
    manifest = reshard(find(args.checkpoint), args.out, layout)
    count = len(manifest.parts)
    files = f"{count} file{'s' * (count != 1)}, {format_bytes(manifest.nbytes)}"
    line = f"wrote {args.out}: step {manifest.step} under {layout}, {files}"
    _warn_of_nonfinite(manifest.nonfinite, len(manifest.tensors), args.out)
    return print_result(args, {"checkpoint": str(args.out), "layout": str(layout), **_counts(manifest)}, [line])


def _import(args: argparse.Namespace) -> int:
    from shardwise.checkpoint.foreign import ResumeSettings, import_checkpoint

    settings = {name: getattr(args, name) for name in ("data", "tokenizer", "seq")}
    missing = [f"--{name}" for name, value in settings.items() if value is None]
    run = None
    if len(missing) < len(settings) or args.batch is not None:
        if missing:
            raise UserError(f"for train --resume the new checkpoint needs {', '.join(missing)} as well")
        run = ResumeSettings(**settings, batch=args.batch)
    manifest = import_checkpoint(
        args.folder, args.out, model_of(args), format=args.format, weights_only=args.weights_only, run=run
    )
    for line in _differences_of_import(manifest):
        print(f"shardwise: warning: {line}", file=sys.stderr)
    _warn_of_nonfinite(manifest.nonfinite, len(manifest.tensors), args.out)
    size = format_bytes(manifest.nbytes)
    lines = [f"wrote {args.out}: {len(manifest.tensors)} tensors after {manifest.step} steps, {size}"]
    if run is not None:
        lines.append(f"resume with: shardwise train --resume {args.out} --layout LAYOUT --steps N --out RUN")
    else:
        lines.append(f"its weights for train --weights: shardwise checkpoint export {args.out} --out FOLDER")
    data = {"checkpoint": str(args.out), "imported": manifest.about["imported"], **_counts(manifest)}
    return print_result(args, data, lines)


def _diff(args: argparse.Namespace) -> int:
    from shardwise.checkpoint import diff, find

    a, b = find(args.a), find(args.b)
    result = diff(a, b)
    differences = [asdict(d) | {"largest": _number(d.largest)} for d in result]
    data = {"a": str(a.folder), "b": str(b.folder), "equal": not result, "differences": differences}
    print_result(args, data, _differences(result, a, b))
    return 1 if result else 0


def _export(args: argparse.Namespace) -> int:
    from shardwise.checkpoint import find
    from shardwise.checkpoint.resharding import model_of as model_in

    if args.format != "huggingface":
        return _export_foreign(args)
    if args.names or args.weights_only:
        raise UserError("a Hugging Face folder has weights by its own names: leave out --names and --weights-only")

    from shardwise.checkpoint.huggingface import dtype_of, export, export_adapters

    checkpoint = find(args.checkpoint)
    if model_in(checkpoint).lora:
        return _export_adapters(args, checkpoint, export_adapters(checkpoint, args.out))
    dtype = dtype_of(checkpoint, args.dtype)
    made = export(checkpoint, args.out, dtype)
    _warn_of_nonfinite(made.nonfinite, made.tensors, made.folder)
    what = f"{made.tensors} tensors in {dtype}, {format_bytes(made.nbytes)}"
    lines = [f"wrote {made.folder}: the weights of step {checkpoint.manifest.step}, {what}"]
    if "tokenizer.json" not in made.files:
        lines.append("without a tokenizer: the run's own tokenizer is gone")
    data = {
        "folder": str(made.folder), "step": checkpoint.manifest.step, "dtype": dtype, "files": made.files,
        "tensors": made.tensors, "bytes": made.nbytes, "nonfinite": made.nonfinite,
    }  # fmt: skip
    return print_result(args, data, lines)


def _export_foreign(args: argparse.Namespace) -> int:
    from shardwise.checkpoint import find
    from shardwise.checkpoint.foreign import export_foreign

    if args.dtype:
        raise UserError(f"--format {args.format} keeps every element's bits: leave out --dtype")
    checkpoint, names = find(args.checkpoint), args.names or "huggingface"
    made = export_foreign(checkpoint, args.out, args.format, names=names, weights_only=args.weights_only)
    _warn_of_nonfinite(made.nonfinite, made.tensors, made.folder)
    state = "weights" if args.weights_only else "weights and AdamW's state"
    data = {
        "folder": str(made.folder), "step": checkpoint.manifest.step, "format": args.format, "names": names,
        "weights_only": args.weights_only, "tensors": made.tensors, "bytes": made.nbytes, "nonfinite": made.nonfinite,
    }  # fmt: skip
    line = f"wrote {made.folder}: {state} of step {checkpoint.manifest.step}, {made.tensors} tensors"
    return print_result(args, data, [f"{line}, {format_bytes(made.nbytes)}"])


def _export_adapters(args: argparse.Namespace, checkpoint: Checkpoint, made: Exported) -> int:
    step = checkpoint.manifest.step
    _warn_of_nonfinite(made.nonfinite, made.tensors, made.folder)
    line = f"wrote {made.folder}: peft's adapters of step {step}, {made.tensors} tensors, {format_bytes(made.nbytes)}"
    data = {"folder": str(made.folder), "step": step, "dtype": "float32", "files": made.files,
            "tensors": made.tensors, "bytes": made.nbytes, "nonfinite": made.nonfinite}  # fmt: skip
    return print_result(args, data, [line])


def _merge(args: argparse.Namespace) -> int:
    from shardwise.checkpoint import find
    from shardwise.checkpoint.huggingface import merge, merge_checkpoint

    if (args.adapters / "adapter_config.json").exists():
        made = merge(args.adapters, args.out, args.base, args.dtype)
    else:
        made = merge_checkpoint(find(args.adapters), args.out, args.base, args.dtype)
    _warn_of_nonfinite(made.nonfinite, made.tensors, made.folder)
    line = f"wrote {made.folder}: merged weights, {made.tensors} tensors in {made.dtype}, {format_bytes(made.nbytes)}"
    data = {"folder": str(made.folder), "dtype": made.dtype, "files": made.files, "tensors": made.tensors,
            "bytes": made.nbytes, "nonfinite": made.nonfinite}  # fmt: skip
    return print_result(args, data, [line])


def _differences(differences: list[TensorDifference], a: Checkpoint, b: Checkpoint) -> Iterator[Renderable]:
    if not differences:
        yield f"equal bit by bit: {len(a.tensors)} tensors"
        return
    table = plain_table(("tensor", "differs in", "elements", "largest difference"))
    for d in differences[:_SHOWN]:
        elements = "" if d.elements is None else f"{d.elements:,}"
        table.add_row(_plain(d.tensor), _plain(d.what), elements, "" if d.largest is None else f"{d.largest:.3g}")
    count = len({*a.tensors, *b.tensors})
    hidden = "; --json lists them" if len(differences) > _SHOWN else ""
    yield from (table, "", f"{len(differences)} of {count} tensors differ{hidden}")


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def _counts(manifest: Manifest) -> dict[str, Any]:
    return {"step": manifest.step, "files": len(manifest.parts), "bytes": manifest.nbytes}


def _summary(checkpoint: Checkpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    files = [{"name": part.name, "bytes": part.nbytes, "pieces": len(part.pieces)} for part in manifest.parts]
    return {
        "checkpoint": str(checkpoint.folder), "step": manifest.step, "samples": manifest.samples,
        "seed": manifest.seed, "optimizer_steps": manifest.optimizer_steps, "bytes": manifest.nbytes, "files": files,
        "about": manifest.about,
    }  # fmt: skip


def _differences_of_import(manifest: Manifest) -> list[str]:
    """Sentences on what an imported run does otherwise here than where it began."""
    imported = manifest.about.get("imported")
    differs = imported.get("differs") if isinstance(imported, dict) else None
    return [_plain(line) for line in differs] if isinstance(differs, list) else []


def _lines(checkpoint: Checkpoint) -> list[str]:
    """The checkpoint in a few lines: one for it, one for its run, one for each kind of tensor."""
    manifest = checkpoint.manifest
    model = manifest.about.get("model")
    name = model.get("name") if isinstance(model, dict) else None
    lines = [
        f"{checkpoint.folder}: step {manifest.step}, {manifest.samples:,} samples seen, seed {manifest.seed}",
        _plain(f"{name or 'model unknown'}, written under {manifest.about.get('layout', 'an unknown layout')}"),
    ]
    kinds: dict[str, list[Any]] = {}
    for tensor, spec in checkpoint.tensors.items():
        kinds.setdefault(tensor.partition("/")[0], []).append(spec)
    for kind, specs in kinds.items():
        dtypes = ", ".join(sorted({spec.dtype for spec in specs}))
        elements, size = sum(spec.numel for spec in specs), sum(spec.nbytes for spec in specs)
        lines.append(f"{kind}: {len(specs)} tensors, {format_count(elements)} elements, {dtypes}, {format_bytes(size)}")
    if bad := manifest.nonfinite:
        lines.append(_plain(f"not finite: {len(bad)} of {len(manifest.tensors)} tensors, the first being {bad[0]}"))
    return [*lines, *(f"imported: {line}" for line in _differences_of_import(manifest))]


def _plain(text: str) -> str:
    """Text from a file without what would steer a terminal."""
    return "".join(c if c.isprintable() else "?" for c in str(text))
