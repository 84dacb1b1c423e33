"""Train a model on text, split over local processes, one per rank of the layout.

Under torchrun, on one host or several, the same command runs one rank: torchrun ... -m shardwise train MODEL ...
"""

from __future__ import annotations

import argparse
import shlex
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn

from shardwise.cli.flags import add_flags, given
from shardwise.cli.interrupts import ended_as_interrupted
from shardwise.cli.models import adapters_of, add_lora, add_model, model_of
from shardwise.cli.output import print_json
from shardwise.cli.plan_file import add_plan, apply_plan
from shardwise.cli.run_file import add_config
from shardwise.errors import UserError
from shardwise.layout import Workload
from shardwise.runtime.job.config import LaunchConfig, OptimizerConfig, TrainConfig

FILE_KEYS = OptimizerConfig
"""Fields that a file of --config may have without a flag."""
_OPTIMIZER = ("lr", "momentum", "warmup", "weight_decay", "clip")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, optional=True)
    add_config(parser)
    group = parser.add_argument_group("model, data and layout")
    add_plan(group)
    add_flags(group, TrainConfig, "layout", "data", "text_field", "max_bytes", "tokenizer")
    group.add_argument("--vocab", type=int, metavar="N", help="vocabulary size instead of the model's")
    add_flags(group, Workload, "seq", "batch", "isolate_documents")
    add_flags(group, TrainConfig, "steps")
    group = parser.add_argument_group("optimizer")
    add_flags(group, Workload, "optimizer")
    add_flags(group, OptimizerConfig, *_OPTIMIZER)
    group = parser.add_argument_group("the run")
    add_flags(group, TrainConfig, "out", "seed", "validate_every", "validate_batches", "save_every", "keep_last")
    add_flags(group, TrainConfig, "save_async", "on_nonfinite", "offload_dir", "weights")
    add_lora(group)
    group.add_argument("--resume", type=Path, metavar="DIR", help="resume a run or a checkpoint, with its settings "
                       "and its text (other text: --data)")  # fmt: skip
    add_flags(group, TrainConfig, "schedule")
    add_flags(group, TrainConfig, "report", "tensorboard", "device", "threads", "matmul", "transport", "overlap")
    add_flags(group, LaunchConfig, "port")
    add_flags(group, TrainConfig, "hang")
    add_flags(group, LaunchConfig, "restarts", "elastic")
    add_flags(parser.add_argument_group("slow ranks"), TrainConfig, "slow", "emulate")


def run(args: argparse.Namespace) -> int:
    from shardwise.api import resume, train, under_torchrun
    from shardwise.runtime.job.output import tolerant_output

    apply_plan(args)
    if under_torchrun():
        _run_as_rank(args)
    # With --json nothing but the result may reach standard output: progress goes where errors go.
    started = given(args, LaunchConfig) | {"rank0_stdout": 2 if args.json else None}
    with ended_as_interrupted():  # while there are no ranks: the launcher of these hears signals itself
        if args.resume is not None:
            result = resume(args.resume, **_changes(args), **started)
        else:
            result = train(**_request(args), **started)
    if args.json:
        print_json({"out": str(result.out), **result.summary})
    else:
        with tolerant_output():  # a run has succeeded, whether or not anybody is there to read it
            _where(result.out)
    return 0


def _run_as_rank(args: argparse.Namespace) -> NoReturn:
    """Be the rank that torchrun has started."""
    from shardwise.api import configure, configure_resumed, train_as_rank
    from shardwise.runtime.job.output import tolerant_output
    from shardwise.runtime.job.rank import leave, number

    if args.port:
        raise UserError("torchrun has its own rendezvous: leave out --port")
    if args.restarts:
        raise UserError("torchrun restarts ranks itself: leave out --restarts, give torchrun --max-restarts N")
    if args.out is None and args.resume is None:
        raise UserError("under torchrun every rank must know the run directory: add --out DIR")
    out: list[str] = []

    def config() -> TrainConfig:
        resumed = args.resume is not None
        made = configure_resumed(args.resume, **_changes(args)) if resumed else configure(**_request(args))
        out.append(made.out)
        return made

    code = train_as_rank(config, elastic=args.elastic)
    if code == 0 and number() == 0 and not args.json:
        with tolerant_output():
            _where(Path(out[0]))
    leave(code)
    raise AssertionError("left")


def _request(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `configure` for a new run."""
    if args.model is None and args.weights is not None:
        args.model = str(Path(args.weights).absolute())
    missing = [f"--{name}" for name in ("data", "seq", "batch") if getattr(args, name) is None]
    if args.model is None or missing:
        raise UserError(f"train needs {', '.join(missing if args.model else ['MODEL', *missing])}, or --resume DIR")
    if args.schedule is not None:
        raise UserError("--schedule is for --resume: the schedule of a new run has --steps")
    if args.seq < 1 or args.batch < 1:
        raise UserError("--seq and --batch must be positive integers")
    vocab = {} if args.vocab is None else {"vocab": args.vocab}
    workload, optimizer = Workload(**given(args, Workload)), OptimizerConfig(**given(args, OptimizerConfig))
    whole: dict[str, Any] = {"model": model_of(args, runs=True), "workload": workload, "optimizer": optimizer}
    if (folder := adapters_of(args)) is not None:
        whole["adapters"] = str(folder)
    return {"layout": "dp=1", **given(args, TrainConfig), **vocab, **whole}


def _changes(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `configure_resumed`: a resumed run has its model, text and sequence length already."""
    fixed = [
        f"--{name.replace('_', '-')}"
        for name in ("vocab", "seq", "batch", "optimizer", *_OPTIMIZER)
        if getattr(args, name) is not None
    ]
    fixed += ["--lora"] * (args.lora is not None)
    if args.model is not None or args.set or fixed or args.isolate_documents:
        named = ", ".join(["MODEL"] * (args.model is not None) + ["--set"] * bool(args.set) + fixed)
        raise UserError(f"a resumed run keeps its model and settings: leave out {named or '--isolate-documents'}")
    return given(args, TrainConfig)


def _where(out: Path) -> None:
    """Name what the run left."""
    run = shlex.quote(str(out))
    known = {
        "events.jsonl": ["every step"],
        "updates.jsonl": [f"gradients and updates: shardwise sync show {run}"],
        "result.json": ["the result"],
        "checkpoints": [f"shardwise checkpoint inspect {run}", f"shardwise train --resume {run} --steps N"],
        "reports": [f"predicted and measured step: shardwise compare {run}"],
        "reports/trace.json": ["a step's timeline: open it in ui.perfetto.dev"],
        "tensorboard": [f"tensorboard --logdir {run}"],
    }
    print(f"the run is in {out}")
    for name, lines in known.items():
        path = out / name
        if path.is_file() or (path.is_dir() and any(path.iterdir())):
            for title, line in zip_longest([name], lines, fillvalue=""):
                print(f"  {title:<20}{line}")
