"""Train a model on text, split over local processes, one per rank of the layout.

Under torchrun, on one host or several, the same command runs one rank: torchrun ... -m shardwise train MODEL ...
"""

import os
import shlex
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn

from shardwise.cli.declare import CommandOptions, arg, borrow, given
from shardwise.cli.interrupts import ended_as_interrupted
from shardwise.cli.models import LoraOptions, ModelOptions, adapters_of, model_of
from shardwise.cli.output import print_json
from shardwise.cli.plan_file import apply_plan
from shardwise.cli.run_file import ConfigOptions
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.layout.usual_workload import usual_training
from shardwise.records import dataclass
from shardwise.runtime.job.config import LaunchConfig, OptimizerConfig, TrainConfig
from shardwise.runtime.job.output import say, tolerant_output

FILE_KEYS = OptimizerConfig
"""Fields that a file of --config may have without a flag."""


@dataclass
class DataOptions(ConfigOptions, ModelOptions):
    """A model, its layout and its text."""

    title = "model, data and layout"
    borrowed = borrow(
        (TrainConfig, "layout data text_field max_bytes tokenizer loss steps"),
        (Workload, "seq batch isolate_documents"),
    )
    plan: str | None = arg(
        "take model, layout, --seq, --batch and --optimizer from a file that `plan --out` wrote",
        "FILE",
        excludes="model layout seq batch optimizer set lora resume",
        idle="is decided by --plan: leave it out",
        missing="is a row of a plan: add --plan FILE",
    )
    row: int | None = arg("which layout of the plan; 1 is the best (1)", "N", needs="plan")
    vocab: int | None = arg("vocabulary size instead of the model's", "N")


@dataclass
class OptimizerOptions(CommandOptions):
    """The optimizer."""

    title = "optimizer"
    borrowed = borrow((Workload, "optimizer"), (OptimizerConfig, "lr momentum warmup weight_decay clip"))


@dataclass
class RunOptions(LoraOptions):
    """The run."""

    title = "the run"
    borrowed = borrow(
        (TrainConfig, "out seed validate_every validate_batches save_every keep_last save_async on_nonfinite"),
        (TrainConfig, "offload_dir weights schedule report tensorboard device threads matmul transport overlap hang"),
        (LaunchConfig, "port restarts elastic"),
    )
    resume: Path | None = arg(
        "resume a run or a checkpoint, with its settings and its text (other text: --data)",
        "DIR",
        excludes="model set vocab seq batch isolate_documents optimizer lr momentum warmup weight_decay clip lora loss",
        idle="is a setting of the run that is resumed, which keeps its model and settings: leave it out",
    )


@dataclass
class TrainOptions(RunOptions, OptimizerOptions, DataOptions):
    title = "slow ranks"
    borrowed = borrow((TrainConfig, "slow emulate"))


def run(args: TrainOptions) -> int:
    from shardwise.api import resume, train, under_torchrun

    apply_plan(args)
    if under_torchrun():
        _run_as_rank(args)
    # With --json nothing but the result may reach standard output: progress goes where errors go.
    started = given(args, LaunchConfig) | {"rank0_stdout": 2 if args.json else None}
    with ended_as_interrupted():  # while there are no ranks: the launcher of these hears signals itself
        if args.resume is not None:
            result = resume(args.resume, **given(args, TrainConfig), **started)
        else:
            result = train(**_request(args), **started)
    if args.json:
        print_json({"out": str(result.out), **result.summary})
    else:
        with tolerant_output():  # a run has succeeded, whether or not anybody is there to read it
            _where(result.out)
    return 0


def _run_as_rank(args: TrainOptions) -> NoReturn:
    from shardwise.api import configure, configure_resumed, train_as_rank
    from shardwise.runtime.job.rank import leave, number

    if args.port:
        raise UserError("torchrun has its own rendezvous: leave out --port")
    if args.restarts:
        raise UserError("torchrun restarts ranks itself: leave out --restarts, give torchrun --max-restarts N")
    if args.out is None and args.resume is None:
        raise UserError("under torchrun every rank must know the run directory: add --out DIR")
    out: list[str] = []

    def config() -> TrainConfig:
        if args.resume is None:
            made = configure(**_request(args))
        else:
            made = configure_resumed(args.resume, **given(args, TrainConfig))
        out.append(made.out)
        return made

    code = train_as_rank(config, elastic=args.elastic)
    if code == 0 and number() == 0 and not args.json:
        with tolerant_output():
            _where(Path(out[0]))
    leave(code)
    raise AssertionError("left")


def _request(args: TrainOptions) -> dict[str, Any]:
    """The arguments of `configure` for a new run."""
    if args.model is None and args.weights is not None:
        args.model = str(Path(args.weights).absolute())
    missing = [name for name, value in (("MODEL", args.model), ("--data", args.data)) if value is None]
    if missing:
        raise UserError(f"train needs {', '.join(missing)}, or --resume DIR")
    if args.schedule is not None:
        raise UserError("--schedule is for --resume: the schedule of a new run has --steps")
    vocab = {} if args.vocab is None else {"vocab": args.vocab}
    model, layout = model_of(args, runs=True), Layout.of(args.layout or "dp=1")
    usual = usual_training(model, args.seq, args.batch, layout.dp * layout.micro)
    for note in usual.notes if os.environ.get("RANK", "0") == "0" else ():
        say(f"assumed: {note}")
    workload = Workload(**given(args, Workload) | {"seq": usual.seq, "batch": usual.batch})
    optimizer = OptimizerConfig(**given(args, OptimizerConfig))
    whole: dict[str, Any] = {"model": model, "workload": workload, "optimizer": optimizer}
    if (folder := adapters_of(args)) is not None:
        whole["adapters"] = str(folder)
    return {"layout": "dp=1", **given(args, TrainConfig), **vocab, **whole}


def _where(out: Path) -> None:
    run, predicted = shlex.quote(str(out)), (out / "reports" / "predicted.json").exists()
    known = {
        "events.jsonl": ["every step"],
        "updates.jsonl": [f"gradients and updates: shardwise sync show {run}"],
        "result.json": ["the result"],
        "checkpoints": [f"shardwise checkpoint inspect {run}", f"shardwise train --resume {run} --steps N"],
        "reports": ["predicted and measured step", f"shardwise compare {run}"] if predicted else ["measured step"],
        "reports/trace.json": ["a step's timeline: open it in ui.perfetto.dev"],
        "reports/memory.pickle": ["a step's memory: open it in pytorch.org/memory_viz"],
        "tensorboard": [f"tensorboard --logdir {run}"],
    }
    print(f"the run is in {out}")
    for name, lines in known.items():
        path = out / name
        if path.is_file() or (path.is_dir() and any(path.iterdir())):
            for title, line in zip_longest([name], lines, fillvalue=""):
                print(f"  {title:<23}{line}")
