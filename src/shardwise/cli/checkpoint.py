"""Inspect, verify, reshard, compare, export, merge and import checkpoints.

A checkpoint is a folder with a manifest.json. A run directory, or its folder of checkpoints, stands for its newest one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.declare import CommandOptions, arg, word
from shardwise.cli.models import model_of
from shardwise.cli.output import print_result
from shardwise.codec import keyed
from shardwise.errors import UserError
from shardwise.layout import Layout
from shardwise.records import dataclass
from shardwise.report.table import plain_table
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_bytes, format_count, format_things
from shardwise.runtime.job.output import say

if TYPE_CHECKING:
    from shardwise.checkpoint import Checkpoint, TensorDifference
    from shardwise.checkpoint.manifest import Manifest

DTYPES = ("bfloat16", "float32", "float16")
_SHOWN = 20
"""Lines of a table of differences; --json has them all."""


@dataclass
class StoredOptions(CommandOptions):
    """A checkpoint."""

    checkpoint: Path = word("", "CHECKPOINT")


@dataclass
class InspectCheckpoint(StoredOptions):
    """Show what a checkpoint contains."""

    tensors: bool = arg("list every tensor")

    def run(self) -> int:
        from shardwise.checkpoint import find

        checkpoint = find(self.checkpoint)
        tensors = {name: {"shape": spec.shape, "dtype": spec.dtype} for name, spec in checkpoint.tensors.items()}
        return print_result(self, {**_summary(checkpoint), "tensors": tensors}, _contents(checkpoint, self.tensors))


@dataclass
class VerifyCheckpoint(StoredOptions):
    """Read all of a checkpoint and check every checksum."""

    def run(self) -> int:
        from shardwise.checkpoint import DamagedError, find, with_older

        checkpoint = find(self.checkpoint)
        try:
            nonfinite = checkpoint.verify()
        except DamagedError as error:
            raise with_older(error, checkpoint.folder) from None
        lines = [*_lines(checkpoint), "", "every checksum is correct"]
        _warn_of_nonfinite(nonfinite, len(checkpoint.tensors), checkpoint.folder)
        print_result(self, {**_summary(checkpoint), "whole": True, "nonfinite": nonfinite}, lines)
        return 1 if nonfinite else 0


@dataclass
class ReshardCheckpoint(StoredOptions):
    """Rewrite a checkpoint for another layout."""

    layout: str = arg("such as tp=2,dp=2,zero=1", "LAYOUT")
    out: Path = arg("the new checkpoint's folder", "FOLDER")

    def run(self) -> int:
        from shardwise.checkpoint import find, reshard

        layout = Layout.parse(self.layout)
        manifest = reshard(find(self.checkpoint), self.out, layout)
        files = f"{format_things(len(manifest.parts), 'file')}, {format_bytes(manifest.nbytes)}"
        line = f"wrote {self.out}: step {manifest.step} under {layout}, {files}"
        _warn_of_nonfinite(manifest.nonfinite, len(manifest.tensors), self.out)
        return print_result(self, {"checkpoint": str(self.out), "layout": str(layout), **_counts(manifest)}, [line])


@dataclass
class DiffCheckpoints(CommandOptions):
    """Compare two checkpoints by tensor; the exit code is 1 when they differ."""

    a: Path = word("", "A")
    b: Path = word("", "B")

    def run(self) -> int:
        from shardwise.checkpoint import diff, find

        a, b = find(self.a), find(self.b)
        result = diff(a, b)
        differences = [asdict(d) | {"largest": _number(d.largest)} for d in result]
        data = {"a": str(a.folder), "b": str(b.folder), "equal": not result, "differences": differences}
        print_result(self, data, _differences(result, a, b))
        return 1 if result else 0


@dataclass
class ExportCheckpoint(StoredOptions):
    """Write weights for Hugging Face, adapters for peft, or all state for FSDP2 or DeepSpeed."""

    out: Path = arg("the new folder", "FOLDER")
    format: str = arg(
        "dcp: torch.distributed.checkpoint, which FSDP2 loads; weights alone for huggingface",
        default="huggingface",
        choices=("huggingface", "dcp", "deepspeed-universal"),
    )
    dtype: str | None = arg(
        "huggingface: of every tensor (that of the weights that training started from, else bfloat16)", choices=DTYPES
    )
    names: str | None = arg(
        "other formats: whose names parameters have (huggingface)", choices=("huggingface", "shardwise")
    )
    weights_only: bool = arg("dcp: leave the optimizer's state out")

    def run(self) -> int:
        from shardwise.checkpoint import find
        from shardwise.checkpoint.resharding import model_of as model_in

        if self.format != "huggingface":
            return _export_foreign(self)
        if self.names or self.weights_only:
            raise UserError("a Hugging Face folder has weights by its own names: leave out --names and --weights-only")

        from shardwise.checkpoint.huggingface import dtype_of, export, export_adapters

        checkpoint = find(self.checkpoint)
        step = checkpoint.manifest.step
        model = model_in(checkpoint)
        if model.lora:
            made = export_adapters(checkpoint, self.out)
            what = f"peft's adapters of step {step}, {made.tensors} tensors"
            return _written(self, made, what, {"step": step, "dtype": "float32", "files": made.files})
        dtype = dtype_of(checkpoint, self.dtype)
        if model.counted:
            from shardwise.runtime.module.class_export import export_class

            made = export_class(checkpoint, model, self.out, dtype)
        else:
            made = export(checkpoint, self.out, dtype)
        what = f"the weights of step {step}, {made.tensors} tensors in {dtype}"
        notes = [] if "tokenizer.json" in made.files else ["without a tokenizer: the run's own tokenizer is gone"]
        return _written(self, made, what, {"step": step, "dtype": dtype, "files": made.files}, *notes)


@dataclass
class MergeAdapters(CommandOptions):
    """Add low-rank adapters to their weights, as a Hugging Face folder."""

    adapters: Path = word("a run, a checkpoint, or a folder of peft's", "ADAPTERS")
    base: Path | None = arg("their weights, if these are elsewhere by now", "FOLDER")
    out: Path = arg("the new folder", "FOLDER")
    dtype: str | None = arg("of every tensor (that of their weights)", choices=DTYPES)

    def run(self) -> int:
        from shardwise.checkpoint import find
        from shardwise.checkpoint.huggingface import base_of, merge, merge_checkpoint
        from shardwise.checkpoint.resharding import model_of as model_in

        if (self.adapters / "adapter_config.json").exists():
            made = merge(self.adapters, self.out, self.base, self.dtype)
        elif (model := model_in(checkpoint := find(self.adapters))).counted:
            from shardwise.runtime.module.class_export import export_class

            made = export_class(checkpoint, model, self.out, self.dtype, base_of(checkpoint, self.base))
        else:
            made = merge_checkpoint(checkpoint, self.out, self.base, self.dtype)
        what = f"merged weights, {made.tensors} tensors in {made.dtype}"
        return _written(self, made, what, {"dtype": made.dtype, "files": made.files})


@dataclass
class ResumeOptions(CommandOptions):
    """Settings for `train --resume` that another trainer's checkpoint lacks."""

    title = "for train --resume: settings that the other trainer's checkpoint lacks"
    data: str | None = arg("file, folder, saved dataset, or stdlib", "SOURCE", needs="tokenizer seq")
    tokenizer: str | None = arg("the model's tokenizer.json", "FILE", needs="data seq")
    seq: int | None = arg("tokens per sequence", "N", tokens=True, needs="data tokenizer")
    batch: int | None = arg("sequences per step (DeepSpeed's own)", "N", needs="data tokenizer seq")


@dataclass
class ImportCheckpoint(ResumeOptions):
    """Convert another trainer's checkpoint (FSDP2, DeepSpeed)."""

    folder: Path = word("the other trainer's checkpoint", "FOLDER")
    format: str = arg("its format", default="auto", choices=("auto", "dcp", "deepspeed"))
    model: str = arg("a name of the catalog, a config.json, or the folder that holds one", "MODEL")
    set: tuple[str, ...] = arg("change the model", "FIELD=VALUE,...", ())
    out: Path = arg("the new checkpoint's folder", "FOLDER")
    weights_only: bool = arg("leave the optimizer's state out")

    def run(self) -> int:
        from shardwise.checkpoint.foreign import ResumeSettings, import_checkpoint

        run = None
        if self.data is not None and self.tokenizer is not None and self.seq is not None:
            run = ResumeSettings(self.data, self.tokenizer, self.seq, self.batch)
        manifest = import_checkpoint(
            self.folder, self.out, model_of(self), format=self.format, weights_only=self.weights_only, run=run
        )
        for line in _differences_of_import(manifest):
            say(f"shardwise: warning: {line}")
        _warn_of_nonfinite(manifest.nonfinite, len(manifest.tensors), self.out)
        size = format_bytes(manifest.nbytes)
        lines = [f"wrote {self.out}: {len(manifest.tensors)} tensors after {manifest.step} steps, {size}"]
        if run is not None:
            lines.append(f"resume with: shardwise train --resume {self.out} --layout LAYOUT --steps N --out RUN")
        else:
            lines.append(f"its weights for train --weights: shardwise checkpoint export {self.out} --out FOLDER")
        data = {"checkpoint": str(self.out), "imported": manifest.about["imported"], **_counts(manifest)}
        return print_result(self, data, lines)


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


def _warn_of_nonfinite(names: Sequence[str], count: int, where: Path) -> None:
    """Say that some of `count` tensors are not finite."""
    if names:
        line = f"{len(names)} of {count} tensors in {where} have NaN or infinite elements, the first being {names[0]}"
        say(f"shardwise: warning: {_plain(line)}")


def _export_foreign(args: ExportCheckpoint) -> int:
    from shardwise.checkpoint import find
    from shardwise.checkpoint.foreign import export_foreign

    if args.dtype:
        raise UserError(f"--format {args.format} keeps every element's bits: leave out --dtype")
    checkpoint, names = find(args.checkpoint), args.names or "huggingface"
    made = export_foreign(checkpoint, args.out, args.format, names=names, weights_only=args.weights_only)
    state = "weights" if args.weights_only else "weights and AdamW's state"
    step = checkpoint.manifest.step
    more = {"step": step, "format": args.format, "names": names, "weights_only": args.weights_only}
    return _written(args, made, f"{state} of step {step}, {made.tensors} tensors", more)


def _written(args: CommandOptions, made: Any, what: str, more: dict[str, Any], *notes: str) -> int:
    """Print what an export or a merge has written, and warn of elements that are not finite."""
    _warn_of_nonfinite(made.nonfinite, made.tensors, made.folder)
    counts = {"tensors": made.tensors, "bytes": made.nbytes, "nonfinite": made.nonfinite}
    line = f"wrote {made.folder}: {what}, {format_bytes(made.nbytes)}"
    return print_result(args, {"folder": str(made.folder), **more, **counts}, [line, *notes])


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
    files = [keyed(part, "name bytes=nbytes") | {"pieces": len(part.pieces)} for part in manifest.parts]
    counts = keyed(manifest, "step samples seed optimizer_steps bytes=nbytes")
    return {"checkpoint": str(checkpoint.folder), **counts, "files": files, "about": manifest.about}


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


ACTIONS = {
    "inspect": InspectCheckpoint, "verify": VerifyCheckpoint, "reshard": ReshardCheckpoint, "diff": DiffCheckpoints,
    "export": ExportCheckpoint, "merge": MergeAdapters, "import": ImportCheckpoint,
}  # fmt: skip
