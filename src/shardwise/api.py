"""`train`: from a model, a layout and a text to a run directory, by starting one process a rank.

Everything that can be known beforehand is checked before anything is written or started, and without torch. What a run
is made of is decided here once, for the command line, for Python and for `torchrun`:

1. `configure` checks the request and gives a `TrainConfig`; `configure_resumed` does so for a resumed run;
2. `with_corpus` turns the text into tokens, once, beside the run: `<out>/../corpora/`;
3. `train` starts the ranks; `train_as_rank` is one rank that torchrun has started.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from shardwise import predict
from shardwise.calls import in_python
from shardwise.cluster import Cluster, Device, Link
from shardwise.data.sources import open_source
from shardwise.errors import DivergedError, UserError, did_you_mean, os_errors
from shardwise.layout import Layout, Workload, fewer_ranks
from shardwise.layout.legality import suited
from shardwise.layout.modules import check_run
from shardwise.layout.unit import Backend
from shardwise.layout.usual_workload import usual_training
from shardwise.model import ModelConfig
from shardwise.model.catalog import resolve
from shardwise.model.parameters import Model
from shardwise.options import check_type
from shardwise.predict.arguments import Length, as_config, as_length
from shardwise.report.printing import Printable
from shardwise.report.run_directory import RunDirectory, make_next, next_free, occupied
from shardwise.report.step_report import StepReport
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_bytes, format_count, format_share, format_time
from shardwise.runtime.installed import require
from shardwise.runtime.job import restart
from shardwise.runtime.job.config import LaunchConfig, TrainConfig
from shardwise.runtime.job.hosts import HostFile
from shardwise.runtime.job.launch import DIVERGED, INTERRUPTED, RANK_FAILED, USER_MISTAKE, RunFailed, check_port
from shardwise.runtime.job.locks import run_lock
from shardwise.runtime.job.losses import LossConfig, by_class
from shardwise.runtime.job.output import say
from shardwise.runtime.job.text import with_corpus

RUNS = Path("runs")

BESIDES = ("imported", "blueprint")
"""What a checkpoint says beside the configuration of its run."""
_TEXT = ("corpus", "corpus_fingerprint", "former_corpus")
_DECIDED = ("model", "layout", "workload", "data", "restart", "schedule_steps", "class_plan", "class_parts", *_TEXT)
_OPTIONS = [f.name for f in fields(TrainConfig) if f.name not in _DECIDED]


@dataclass(frozen=True, repr=False)
class TrainResult(Printable):
    """A finished run. out: its directory. summary: what the trainer wrote to result.json, in which a loss that is no
    number is the text "NaN"."""

    out: Path
    summary: dict[str, Any]

    def conclusion(self) -> str:
        said = self.summary.get  # older runs wrote less
        layout = f" as {said('layout')}" if said("layout") else ""
        losses = f"loss {_loss(said('loss'))}, {_loss(said('validation_loss'))} on held-out text"
        return f"{said('steps')} steps{layout}: {losses}, in {self.out}"

    def tables(self) -> Iterator[Renderable]:
        """The conclusion, how fast the run was, and, of a run with `report=True`, the measured step."""
        yield self.conclusion()
        rate, share = self.summary.get("tokens_per_s"), self.summary.get("mfu")
        if rate:
            used = f", {format_share(share)} of the matrix products that the ranks reach alone (MFU)" if share else ""
            yield f"{format_time(self.summary['median_step_s'])} per step, {format_count(rate)} tokens/s{used}"
        if RunDirectory(self.out).report("measured").exists():
            yield from self.report.tables()

    @property
    def losses(self) -> list[float]:
        """Training loss of each step, nats a token."""
        events = (event for _, event in RunDirectory.open(self.out).events())
        # A run that was resumed may have done a step twice: the later one counts.
        by_step = {event["step"]: float(event["loss"]) for event in events if "loss" in event}
        return [by_step[step] for step in sorted(by_step)]

    @property
    def report(self) -> StepReport:
        """The measured step report. Raises `UserError` when the run made none (`report=True`)."""
        return StepReport.read(RunDirectory(self.out).report("measured"))

    @property
    def predicted(self) -> StepReport:
        """Prediction for the same run. Raises `UserError` when the run made no reports (`report=True`)."""
        return StepReport.read(RunDirectory(self.out).report("predicted"))

    @classmethod
    def read(cls, out: Path | str) -> TrainResult:
        """The result of a run directory. Raises `UserError` when the run did not finish."""
        out = Path(out)
        try:
            return cls(out, json.loads((out / "result.json").read_text()))
        except OSError as error:
            raise UserError(f"the run in {out} has no result: {error.strerror}") from None
        except ValueError:
            raise UserError(f"{out / 'result.json'} is damaged") from None


def _loss(value: float | str | None) -> str:
    """A loss of `TrainResult.summary` in words: nats a token, or "NaN"."""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def train(
    model: ModelConfig | str,
    layout: Layout | str | Mapping[str, Any] = "dp=1",
    workload: Workload | None = None,
    data: str | Path | None = None,
    *,
    seq: Length = None,
    batch: Length = None,
    steps: int = 100,
    out: Path | str | None = None,
    **options: Any,
) -> TrainResult:
    """Train `model` on `data` in `layout.ranks` local processes, and return when they have ended.

    model: a `ModelConfig`, a name of the catalog, or the path of a config.json. layout: a `Layout`, its text, or a
    dict. seq, batch: tokens per sequence and sequences per step, in place of a workload; usual ones where they are left
    out. data: a file, a folder, JSONL, CSV, Parquet (.gz, too), a saved dataset, or "stdlib".
    options: further fields of `TrainConfig` (steps, out, tokenizer, optimizer, seed, report, device, ...) and of
    `LaunchConfig` (port, restarts, elastic, progress, rank0_stdout), and `vocab`, which replaces the model's. Without
    `out` the run directory is the next free `runs/<model>-N`.
    Raises `UserError` for what cannot be run, `DivergedError` when a loss or gradients are not finite, `RunFailed` when
    a rank dies; no process is left in any case.
    """
    launch, options = _apart(options)
    if data is None:
        raise UserError("train needs --data: a file, a folder, or stdlib")
    if workload is None:
        model, layout = as_config(model), Layout.of(layout)
        usual = usual_training(model, as_length("seq", seq), as_length("batch", batch), layout.dp * layout.micro)
        workload = usual.workload
        for note in usual.notes:
            launch.progress(f"assumed: {in_python(note)}")
    elif seq is not None or batch is not None:
        raise UserError("give either a Workload, or seq and batch")
    config = configure(model, layout, workload, data, steps, out, **options)
    return run(config, launch, series=out is None)


def resume(checkpoint: Path | str, **options: Any) -> TrainResult:
    """Resume a checkpoint, or a run's newest one, under the same layout or any other.

    options: as for `configure_resumed`, and fields of `LaunchConfig`. Raises what `configure_resumed` and `run` raise.
    """
    launch, options = _apart(options)
    return run(configure_resumed(checkpoint, **options), launch)


def run(config: TrainConfig, launch: LaunchConfig | None = None, *, series: bool = False) -> TrainResult:
    """Start the ranks of a configuration and wait for them.

    series: the run directory is the next free one of its series, which may be another by now. Raises as `train` does.
    """
    launch = launch or LaunchConfig()
    if under_torchrun():
        raise UserError("torchrun has started this process as one rank: use torchrun -m shardwise train")
    if not series:
        _check_out(config)
    _check_fits(config)
    if launch.port:
        check_port(launch.port)
    for line in (*_surprises(config), *suited(replace(config.layout, attention="sdpa"), config.model)[1]):
        launch.progress(line)
    with _claimed(config, series=series) as config:
        ending, config = restart.until_done(with_corpus(config, launch.progress), launch)
        _raise_for(ending.code, ending.line)
        _predict(config, nodes=max(1, len(HostFile.from_environment().hosts)))
        if line := _step_times(RunDirectory(Path(config.out))):
            launch.progress(line)
    return TrainResult.read(config.out)


def _apart(options: dict[str, Any]) -> tuple[LaunchConfig, dict[str, Any]]:
    """The fields of `LaunchConfig` among options, and the others."""
    launch = {f.name: options[f.name] for f in fields(LaunchConfig) if f.name in options}
    return LaunchConfig(**launch), {name: value for name, value in options.items() if name not in launch}


def train_as_rank(config: Callable[[], TrainConfig], *, elastic: bool = False) -> int:
    """Train as the rank that torchrun has started. config: as `configure` gives it, with every rank the same `out`.

    When torchrun has restarted its workers, the run resumes from its newest good checkpoint; elastic: with as many
    ranks as there are then, if dp can shrink to them. Returns the exit code; what failed has been written to standard
    error. Leave by `rank.leave(code)`.
    """
    from shardwise.runtime.job.worker import guarded

    first = os.environ["RANK"] == "0"
    prepared: list[TrainConfig] = []
    claim = ExitStack()

    def prepare() -> TrainConfig:
        request = config()
        tell = say if first else lambda line: None
        ranks, restarts = int(os.environ["WORLD_SIZE"]), restart.torchrun_restarts()
        again = restart.begun_by_this_job(request)
        if first and not again:
            _check_out(request)
        if first:
            claim.enter_context(_claimed(request, again))
        for line in [] if again else _surprises(request):
            tell(line)
        if again:
            restart.check_not_diverged(request)
            request = restart.continued(request, max(1, restarts), tell)
            tell(f"restart {'from ' + request.resume if request.resume else 'from the beginning'}")
        if elastic and ranks < request.layout.ranks:
            smaller = fewer_ranks(request.layout, request.model, request.workload, ranks, check_run)
            request = replace(request, layout=smaller or request.layout)
        check_run(request.layout, request.model, request.workload, ranks)
        prepared.append(with_corpus(request, tell))
        return prepared[0]

    with claim:
        code = guarded(prepare)
        if code == 0 and first:
            local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
            _predict(prepared[0], nodes=max(1, prepared[0].layout.ranks // local))
        if code == RANK_FAILED and first and prepared and restart.last_attempt():
            say(f"shardwise: {restart.way_on(Path(prepared[0].out))}")
    return code


def under_torchrun() -> bool:
    """Whether torchrun, or something that speaks its environment, has started this process as one rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def configure(
    model: ModelConfig | str,
    layout: Layout | str | Mapping[str, Any],
    workload: Workload,
    data: str | Path,
    steps: int = 100,
    out: Path | str | None = None,
    *,
    vocab: int | None = None,
    **options: Any,
) -> TrainConfig:
    """Check a request without torch, within milliseconds, writing nothing. Arguments as for `train`.

    Raises `UserError` for the first thing that is wrong. The configuration has no corpus yet.
    """
    _check_options(options)
    model = resolve(model) if isinstance(model, str) else model
    check_type("model", model, ModelConfig)
    if vocab is not None:
        model = model.replace(vocab=vocab)
    subject = {"model": model, "layout": layout, "workload": workload, "data": data, "corpus": ""}
    return _checked(options | subject | {"steps": steps, "out": out})


def _checked(values: dict[str, Any]) -> TrainConfig:
    """The configuration of these fields, where layout and paths may be texts. Raises `UserError`."""
    model, layout, workload = values["model"], values["layout"], values["workload"]
    check_type("workload", workload, Workload)
    shape = None
    if not values.get("corpus"):
        shape = open_source(str(values["data"]), values.get("text_field", "text")).shape
        values["loss"] = values.get("loss") or {"text": "", "chat": "sft", "pairs": "dpo"}[shape]
        loss = LossConfig.parse(values["loss"])
        loss.check(shape, Layout.of(layout), model, values.get("report", False))
        if loss.kind == "distill":  # a run may be resumed in another folder
            values["loss"] = f"distill,teacher={Path(loss.teacher).resolve()},temperature={loss.temperature}"
        model = values["model"] = by_class(model) if loss.kind != "sft" else model
    elif values.get("loss"):
        loss = LossConfig.parse(values["loss"])
        loss.check_layout(Layout.of(layout), model, loss.kind != "distill")
    layout, _ = suited(Layout.of(layout), model)
    if not workload.batch:
        raise UserError("training needs a sequence length and a batch (--seq and --batch)")
    if values.get("adapters") is not None and values.get("resume") is None:
        from shardwise.checkpoint.huggingface import PeftAdapters

        model = values["model"] = PeftAdapters.open(Path(values["adapters"]), model).model
        values["adapters"] = str(values["adapters"])
    check_run(layout, model, workload)
    if shape not in (None, "text"):
        values["workload"] = replace(workload, isolate_documents=shape == "chat" and _isolates(model, layout))
    values = {name: value for name, value in values.items() if (name, value) != ("optimizer", None)}
    if values.get("weights") is not None and values.get("resume") is None:
        values["weights"] = Path(values["weights"]).absolute()  # a run may be resumed, or merged, in another folder
        values |= _starting_from(Path(values["weights"]), model, values.get("tokenizer"))
    if values.get("tokenizer") is not None:
        values["tokenizer"] = str(values["tokenizer"])
    out = values.get("out")
    out = next_free(RUNS / (re.sub(r"[^\w.-]+", "-", model.name).strip(".-") or "model")) if out is None else out
    config = TrainConfig(**values | {"layout": layout, "data": str(values["data"]), "out": str(out)})
    if config.slow:
        config.stragglers.check(layout.training_ranks)
    _check_inputs(config)
    if model.counted:
        from shardwise.runtime.module.class_run import planned

        config = planned(config)
    return config


def _isolates(model: ModelConfig, layout: Layout) -> bool:
    """Whether dialogues can share a row without seeing each other."""
    if model.counted is None:
        return True
    from shardwise.runtime.module.class_model import ClassModel

    return ClassModel.of(model).isolates_documents(layout)


def configure_resumed(checkpoint: Path | str, out: Path | str | None = None, **changes: Any) -> TrainConfig:
    """The configuration that resumes a checkpoint, or a run's newest one.

    out: the run directory; None continues in the checkpoint's own. changes: `layout`, `workload`, `data`, `steps` and
    further fields of `TrainConfig` that shall differ; the rest is as it was. Raises `UserError` when there is no whole
    checkpoint, or the changes cannot be run.
    """
    from shardwise.checkpoint import find

    if changes.get("weights") is not None:
        raise UserError("a resumed run takes its weights from its checkpoint: leave out --weights")
    source = find(Path(checkpoint))
    before = source.manifest.about
    try:
        config = TrainConfig.from_json({name: value for name, value in before.items() if name not in BESIDES})
    except (KeyError, TypeError, UserError):
        raise UserError(f"{source.folder} does not say how its run was configured; start a new run") from None
    if out is None:
        if source.folder.parent.name != "checkpoints":
            raise UserError(f"{source.folder} is in no run: give the new run a directory with --out")
        out = source.folder.parent.parent
    _check_options({name: value for name, value in changes.items() if name not in ("layout", "workload", "data")})
    wrote = config.workload.optimizer
    kept = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in ("restart", *_TEXT)}
    if "schedule" in changes or changes.get("steps", config.steps) != config.steps:
        former = config.schedule_steps or config.steps
        kept["schedule_steps"] = former if changes.get("schedule", config.schedule) == "keep" else 0
    config = _checked(kept | changes | {"out": out, "resume": str(source.folder)} | _text_of(config, changes))
    if config.workload.optimizer != wrote:
        source.unused_states(config.workload.optimizer)  # raises where it lacks moments
    if config.steps <= source.manifest.step:
        raise UserError(f"{source.folder} is at step {source.manifest.step} already: give a larger --steps")
    return config


def _surprises(config: TrainConfig) -> Iterator[str]:
    """What a run does otherwise than may be expected: adapters of a random base, newer checkpoints that a resumed run
    leaves out, and a learning rate whose schedule has changed."""
    if config.resume is None:
        if config.model.lora and not config.weights:
            yield "warning: adapters of a random base: give its weights with --weights"
        return
    from shardwise.checkpoint import Checkpoint, unfinished

    source = Checkpoint.open(config.resume)
    for path in unfinished(source.folder):
        yield f"{path} is unfinished, its save was cut off: resuming {source.folder.name}"
    with suppress(KeyError, TypeError, ValueError):
        before = TrainConfig.from_json({k: v for k, v in source.manifest.about.items() if k not in BESIDES})
        step = source.manifest.step
        old, new = before.learning_rate(step), config.learning_rate(step)
        if old != new:
            steps = config.schedule_steps or config.steps
            hint = "" if config.schedule == "keep" else f"; --schedule keep leaves it at {old:.3g}"
            yield (
                f"the learning rate of step {step + 1} is {new:.3g}, that of step {step} was "
                f"{before.learning_rate(step - 1):.3g}: its schedule is of {steps} steps now, not "
                f"{before.schedule_steps or before.steps}{hint}"
            )


def _text_of(before: TrainConfig, changes: dict[str, Any]) -> dict[str, Any]:
    """The corpus of a resumed run: its own, unless other text, or another preparation of it, is requested."""
    if not before.corpus or not changes.keys() & {"data", "text_field", "max_bytes", "tokenizer"}:
        return {"corpus": before.corpus, "corpus_fingerprint": before.corpus_fingerprint}
    # Its weights mean nothing for tokens that a tokenizer of other text would make.
    return {"corpus": "", "former_corpus": before.corpus}


def _starting_from(folder: Path, model: ModelConfig, tokenizer: Path | str | None) -> dict[str, str]:
    """The options `weights` and `tokenizer`: weights mean nothing for tokens that another tokenizer has made."""
    from shardwise.checkpoint.huggingface import open_weights

    if model.counted is None:
        open_weights(folder, model)
    elif not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} has no safetensors files of weights")
    if tokenizer is None:
        tokenizer = folder / "tokenizer.json"
        if not tokenizer.exists():
            raise UserError(f"there is no {tokenizer}: name the weights' own tokenizer.json with --tokenizer")
    return {"weights": str(folder), "tokenizer": str(tokenizer)}


def _check_options(options: dict[str, Any]) -> None:
    for name in options:
        if name not in _OPTIONS:
            raise UserError(f"train has no option {name!r}; {did_you_mean(name, _OPTIONS, 'known options:')}")


def _check_inputs(config: TrainConfig) -> None:
    if not config.corpus:
        from shardwise.data.tokenizer import tokenizer_file

        if config.tokenizer is not None:
            tokenizer_file(Path(config.tokenizer))
    require("training", "torch", "tokenizers")


def _check_out(config: TrainConfig) -> None:
    """Check that a new run has a folder of its own, and that a resumed one continues its newest checkpoint."""
    from shardwise.checkpoint import Checkpoint, latest

    out = Path(config.out)
    if not (config.resume and out.resolve() in Path(config.resume).resolve().parents):
        check_unused(out)
        return
    # Two branches in one folder: a request for the newest checkpoint would get one or the other.
    newest, resumed = latest(out / "checkpoints"), Checkpoint.open(config.resume)
    if newest and newest.manifest.step > resumed.manifest.step:
        raise UserError(
            f"{out} has continued to step {newest.manifest.step}: to resume from step {resumed.manifest.step}, give "
            "the new run a directory with --out"
        )


def _check_fits(config: TrainConfig) -> None:
    """Raise `UserError` for what this machine cannot hold: the system would end ranks without a word, or others'."""
    cluster = _cluster(config, nodes=1)
    room = cluster.device.memory_bytes
    if room is None or config.layout.compile != "off":
        return
    try:
        predicted = predict.estimate(config.model, config.layout, config.workload, cluster)
    except UserError:
        if config.model.counted is None:
            raise
        return  # its class divides it in a way that no decoder here can
    held = sum(len(role.ranks) * (role.peak_bytes + role.host.total) for role in predicted.roles)
    if held > room:
        raise UserError(
            f"{config.model.name} under {config.layout} needs {format_bytes(held)}, this machine has "
            f"{format_bytes(room)}: train a smaller model (such as --set layers=2), or use fewer or shorter sequences "
            "per micro-batch; `shardwise estimate` shows what needs the memory"
        )


def check_unused(out: Path) -> None:
    """Raise `UserError` when `out` is not a new or empty folder."""
    if out.is_dir():
        if occupied(out):
            raise UserError(f"{out} is not empty; nothing was overwritten: choose another --out")
    elif out.exists() or out.is_symlink():
        raise UserError(f"{out} is not a folder; nothing was overwritten: choose another --out")


@contextmanager
def _claimed(config: TrainConfig, again: bool = False, series: bool = False) -> Iterator[TrainConfig]:
    """The configuration, with a run directory that no other training uses meanwhile and that is removed when it stays
    empty, and with a checkpoint to resume that its own run does not remove.

    again: the run in it is the configuration's own. series: as in `run`.
    """
    from shardwise.checkpoint import kept

    out = Path(config.out)
    with os_errors(f"make the run directory {out}", "; choose another --out"):
        if series:
            out = make_next(out.with_name(out.name.rpartition("-")[0]))
            config = replace(config, out=str(out))
        else:
            out.mkdir(parents=True, exist_ok=True)
    try:
        source = Path(config.resume).resolve() if config.resume else None
        elsewhere = source is not None and out.resolve() not in source.parents
        with run_lock(out), kept(source) if source and elsewhere else nullcontext():
            if not again:
                _check_out(config)  # another run may have taken it since the first check
            yield config
    finally:
        with suppress(OSError):
            out.rmdir()


def _raise_for(code: int, line: str) -> None:
    if code == USER_MISTAKE:
        raise UserError(line)
    if code == RANK_FAILED:
        raise RunFailed(line)
    if code == DIVERGED:
        raise DivergedError(line)
    if code == INTERRUPTED:
        raise KeyboardInterrupt(line)
    if code:
        say(f"shardwise: {line}")
        raise SystemExit(code)


def _predict(config: TrainConfig, nodes: int) -> None:
    """Write the prediction next to the measurement: the runtime itself has no predictions."""
    if config.report:
        directory = RunDirectory(Path(config.out))
        backend, measured = _carried_by(directory), directory.report("measured")
        roles = StepReport.read(measured).roles if measured.exists() else ()
        recorded = roles if any(role.routed for role in roles) else ()
        try:
            subject: Model = config.model
            if config.model.counted:
                from shardwise.runtime.module.class_run import traced

                subject = traced(config)
            report = predict.estimate(
                subject, config.layout, config.workload,
                _cluster(config, nodes), backend, recorded=recorded, slow=config.stragglers, emulated=config.emulated,
            )  # fmt: skip
        except UserError as error:
            if config.model.counted is None:
                raise
            say(f"shardwise: no prediction to compare with: {error}")
            return
        report.write(directory.report("predicted"))


def _step_times(directory: RunDirectory) -> str:
    """Measured and predicted seconds of a step on a line; empty where one of them is not known."""
    files = [directory.report(name) for name in ("measured", "predicted")]
    measured, predicted = (StepReport.read(file).time if file.exists() else None for file in files)
    if not measured or not predicted:
        return ""
    off = format_share(predicted / measured - 1, signed=True)
    return f"step: {format_time(measured)} measured, {format_time(predicted)} predicted ({off})"


def _carried_by(directory: RunDirectory) -> Backend | None:
    """Transport of the measured step's collectives: gloo where memory could not be shared, or was not to; staged where
    ranks shared a GPU."""
    if not directory.report("measured").exists():
        return None
    from shardwise.layout.transport_buffers import STAGED

    measured = StepReport.read(directory.report("measured"))
    used = {row.algorithm for role in measured.roles for row in role.transport}
    if any(name.endswith(STAGED) for name in used):
        return "staged"
    return "gloo" if used and not used & {"shared", "nccl"} else None


def _cluster(config: TrainConfig, nodes: int) -> Cluster:
    """Hardware of the run, as far as it is known without torch."""
    per_node = config.layout.ranks // nodes
    if config.device == "cpu":
        measured = HostFile.from_environment().cluster if nodes > 1 else None
        return replace(
            Cluster.parse(measured or f"{per_node}xcpu").without_paths(), nodes=nodes, devices_per_node=per_node
        )
    gpu = Device("GPU", "cuda", None, None)
    return Cluster(nodes, per_node, gpu, Link(None, None), Link(None, None))
