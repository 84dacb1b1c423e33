"""Output of rank 0 while training: run directory, TensorBoard, and a line of progress."""

import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from shardwise.checkpoint import Checkpoint
from shardwise.checkpoint.huggingface.companions import companions_of, keep_companions
from shardwise.errors import UserError
from shardwise.layout import Workload
from shardwise.model.catalog import catalog
from shardwise.model.flops import MFU
from shardwise.report.exposure import Exposure, exposures
from shardwise.report.files import write_whole
from shardwise.report.run_directory import COMPANIONS, RunDirectory
from shardwise.report.step_memory import StorageEvent, write_snapshot
from shardwise.report.step_report import StepReport
from shardwise.report.strict_json import strict
from shardwise.report.trace import write_trace
from shardwise.report.units import format_time
from shardwise.report.verdict import verdict_of
from shardwise.report.waiting import RankWaiting, waiting_lines
from shardwise.runtime.job.config import OptimizerConfig, TrainConfig
from shardwise.runtime.job.output import say

NAME = "run.toml"

_PATHS = ("data", "tokenizer", "weights", "adapters", "resume", "offload_dir")
_OWN = (
    "model", "workload", "optimizer", "out", "schedule_steps", "corpus", "corpus_fingerprint", "former_corpus",
    "restart", "adapters", "class_plan", "class_parts",
)  # fmt: skip
"""Fields that are written otherwise, or that the run alone has. Without `out`, a repeated run gets a directory."""
_TEXT = ("data", "text_field", "max_bytes", "tokenizer")


def run_file(config: TrainConfig) -> str:
    """The file's text: what differs from the defaults, under the names of the flags. Paths are absolute."""
    values = {name: _absolute(name, value) for name, value in _changed(config).items() if name not in _OWN}
    values["layout"] = str(config.layout)
    lines = ["# shardwise train --config FILE repeats this run; flags take the place of what is here."]
    if config.resume:
        return "\n".join([*lines, *_assignments(_resumed(config))]) + "\n"
    values |= _changed(config.workload) | _changed(config.optimizer)
    model = config.model.replace(lora=None)
    if config.adapters is not None:
        base = config.model.lora.base if config.model.lora else ""
        values["lora"] = _absolute("adapters", config.adapters) + (f",base={base}" if base else "")
    elif config.model.lora:
        values["lora"] = str(config.model.lora)
    if model.counted:
        values = {"model": str(_class_file(config).resolve())} | values
        return "\n".join([*lines, *_assignments(values)]) + "\n"
    if catalog().get(model.name) == model:
        return "\n".join([*lines, *_assignments({"model": model.name} | values)]) + "\n"
    described = {name: value for name, value in model.to_json().items() if value is not None}
    return "\n".join([*lines, *_assignments(values), "", "[model]", *_assignments(described)]) + "\n"


def _class_file(config: TrainConfig) -> Path:
    """The config.json of a model by its class of transformers, under the model's name."""
    return Path(config.out, re.sub(r"[^\w.-]+", "-", config.model.name) + ".json")


def _resumed(config: TrainConfig) -> dict[str, Any]:
    """What a resumed run may have of its own. The rest is the checkpoint's, as are the defaults."""
    without = {*_OWN, "weights", "loss", *(() if config.former_corpus else _TEXT)}
    values = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in without}
    present = {name: _absolute(name, value) for name, value in values.items() if value not in (None, ())}
    return present | {"layout": str(config.layout)}


def _changed(config: TrainConfig | Workload | OptimizerConfig) -> dict[str, Any]:
    values = {}
    for field in fields(config):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if (value := getattr(config, field.name)) != default:
            values[field.name] = value
    return values


def _absolute(name: str, value: Any) -> Any:
    """A path that is there, from the root; "stdlib" is none."""
    return str(Path(value).resolve()) if name in _PATHS and os.path.exists(value) else value  # noqa: PTH110


def _assignments(values: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {_toml(value)}" for name, value in values.items()]


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{name} = {_toml(item)}' for name, item in value.items() if item is not None)} }}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _keep_companions(config: TrainConfig) -> None:
    """Copy what is beside the tokenizer and the weights that a run starts from, or is beside those of the run that it
    resumes. Without the copies exports would lack them; training does not."""
    sources = [Path(each) for each in (config.tokenizer, config.weights) if each is not None]
    sources = [each if each.is_dir() else each.parent for each in sources]
    kept = companions_of(Checkpoint.open(config.resume)) if config.resume else None
    if config.tokenizer is not None:
        with suppress(OSError):
            keep_companions([*([kept] if kept else []), *sources], Path(config.out) / COMPANIONS)


class RunRecorder:
    """The run directory of one run, and its progress on standard output.

    Raises `UserError` when the directory cannot be made or is in use.
    """

    def __init__(self, config: TrainConfig, ranks: int, done: int = 0) -> None:
        self.config = config
        about = {"config": config.to_json(), "ranks": ranks, "status": "running", "started": time.time()}
        if job := os.environ.get("TORCHELASTIC_RUN_ID"):
            about["job"] = job
        here = bool(config.resume or config.restart) and (Path(config.out) / "run.json").exists()
        self.directory = RunDirectory.create(config.out, about, resume=here)
        if not here:
            write_whole(self.directory.path / NAME, run_file(config), "run file")
            _keep_companions(config)
            if config.model.counted:
                from shardwise.runtime.module.class_model import ClassModel

                text = json.dumps(dict(ClassModel.of(config.model).data), indent=1)
                write_whole(_class_file(config), f"{text}\n", "configuration")
        self.loss = self._last_loss(done) if here else float("nan")
        if config.resume or config.restart:
            other = {"corpus": config.corpus, "former_corpus": config.former_corpus} if config.former_corpus else {}
            self.directory.append({"time": time.time(), "resumed": done, "from": config.resume, **other})
        self._board: Any = self._tensorboard() if config.tensorboard else None
        self._live = sys.stdout.isatty()
        self._open = 0
        """Characters of the line that the next one overwrites."""
        self._shown = 0.0
        self._first = True
        self._explained = False
        self._skipped = False

    def _tensorboard(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(Path(self.config.out) / "tensorboard"))  # type: ignore[no-untyped-call]

    def step(
        self, recorded: bool = False, experts: Mapping[str, Any] | None = None, skipped: bool = False,
        shown: bool = True, **event: Any,
    ) -> None:  # fmt: skip
        """Record one training step: numbers by name, `step` and `loss` among them.

        shown: show it, too. skipped: its update was not made. recorded: every storage was followed for the report, so
        that its time says nothing about speed. experts: load of the model's experts, `{"tokens": {block: [tokens of
        each expert]}, "imbalance", "dropped", "balance_loss"}`.
        """
        more = ({"recorded": True} if recorded else {}) | ({"skipped": True} if skipped else {})
        self.directory.append({"time": time.time(), **event, **more, **({"experts": experts} if experts else {})})
        names = ("loss", "outer_loss", "grad_norm", "lr", *(() if recorded else ("tokens_per_s", "mfu")))
        scalars = {f"train/{name}": event[name] for name in names if name in event}
        scalars |= {f"experts/{name}": experts[name] for name in ("imbalance", "dropped")} if experts else {}
        self._draw(event["step"], scalars)
        if skipped and not self._skipped and self.config.on_nonfinite == "skip":
            self._skipped = True
            self.warn(
                f"step {event['step']}: the loss is {event['loss']}, the gradient norm {event['grad_norm']}; its "
                'update was not made (further ones: "skipped" in events.jsonl)',
                event["step"],
            )
        if shown:
            self.show(event, recorded)

    def show(self, event: Mapping[str, Any], recorded: bool = False, whose: str = "") -> None:
        """Show a training step. whose: words after its loss."""
        last = event["step"] == self.config.steps
        # On a terminal one line is rewritten; elsewhere a line every few seconds.
        if self._live or last or self._first or time.monotonic() - self._shown > 5:
            speed = f"{event['tokens_per_s']:,.0f} tokens/s  MFU {event['mfu']:.1%}"
            if recorded:
                speed = f"{format_time(event['seconds'])}, recorded, so slower than others"
            elif not self._explained:
                self._show(MFU)
                self._explained = True
            line = f"step {event['step']:>4}/{self.config.steps}  loss {event['loss']:.4f}{whose}  {speed}"
            self._show(line, stays=last or not self._live)
            self._shown, self._first = time.monotonic(), False

    def _show(self, line: str, stays: bool = True) -> None:
        """A line over the one before, unless that was to stay."""
        print(f"\r{line.ljust(self._open)}" if self._open else line, end="\n" if stays else "", flush=True)
        self._open = 0 if stays else len(line)

    def end_line(self) -> None:
        if self._open:
            print(flush=True)
            self._open = 0

    def validation(self, step: int, loss: float, entropy: float, seconds: float) -> None:
        result = {"validation_loss": loss, "unigram_entropy": entropy, "validation_s": seconds}
        self.directory.append({"time": time.time(), "step": step, **result})
        self._draw(step, {"validation/loss": loss})
        baseline = "no preference" if self.config.minimized.kind == "dpo" else "unigram entropy"
        self._show(f"step {step:>4}  validation loss {loss:.4f} ({baseline} {entropy:.4f})")

    def memory_snapshot(self, events: Sequence[StorageEvent]) -> None:
        """Write storages of the measured step for pytorch.org/memory_viz; a run does not depend on it."""
        with suppress(UserError):
            write_snapshot(self.directory.memory_snapshot, events)

    def saved(self, step: int, seconds: float) -> None:
        self.directory.append({"time": time.time(), "step": step, "saving_s": seconds})

    def verdict(self) -> dict[str, Any] | None:
        """Show what costs the recorded step time; its JSON without tables."""
        judged = verdict_of(self.directory)
        if judged is None:
            return None
        print(judged.text(), flush=True)
        return judged.brief()

    def warn(self, text: str, step: int) -> None:
        """Something that a person should know and that does not end the run."""
        self.directory.append({"time": time.time(), "step": step, "warning": text})
        self.end_line()
        say(f"shardwise: warning: {text}")

    def _draw(self, step: int, scalars: dict[str, float]) -> None:
        """To TensorBoard, which a run does not depend on."""
        if self._board is None:
            return
        try:
            for name, value in scalars.items():
                self._board.add_scalar(name, value, step)
        except OSError as error:
            self._board = None
            self.warn(f"no more TensorBoard files: {error.strerror}", step)

    def _last_loss(self, step: int) -> float:
        losses = [e["loss"] for _, e in self.directory.events() if e.get("step") == step and "loss" in e]
        return float(losses[-1]) if losses else float("nan")

    def report(self, report: StepReport) -> Exposure | None:
        """Write the report, and the trace of its timelines if it has any; show and return the first one's figures."""
        report.write(self.directory.report("measured"))
        exposed = exposures(report)
        if not exposed:
            return None
        write_trace(report, self.directory.trace)
        rank, figures = exposed[0]
        if figures.kinds:
            print(figures.sentence(rank), flush=True)
        return figures

    def waiting(self, ranks: Sequence[RankWaiting], late: tuple[int, float], step: int) -> None:
        """Show how long ranks stood still. late: of the rank with most of them, steps whose arithmetic took longer than
        was emulated, and the most that it took, in seconds."""
        self.end_line()
        for line in waiting_lines(ranks):
            print(line, flush=True)
        steps, seconds = late
        if steps:
            self.warn(
                f"--emulate {self.config.emulate}: arithmetic took longer in {steps} of a rank's steps, up to "
                f"{format_time(seconds)}: give more, or use a smaller model",
                step,
            )

    def end(self, status: str) -> None:
        """The run has ended, for the reason that `status` has in a word."""
        self.directory.update(status=status, finished=time.time())
        if self._board:
            with suppress(OSError):
                self._board.close()
        self.directory.close()

    def finish(self, result: dict[str, Any], status: str = "finished") -> None:
        """The run has made its last step. Raises `UserError` when its result cannot be written."""
        text = json.dumps(strict(result), indent=1, allow_nan=False)
        try:
            write_whole(self.directory.path / "result.json", f"{text}\n")
        except UserError as error:
            raise UserError(f"{error}; its checkpoints are whole") from None
        self.end(status)
