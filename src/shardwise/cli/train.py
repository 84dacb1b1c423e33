"""Train a model on text, split over the local processes that the layout asks for.

Under torchrun, on one host or several, the same command is one rank: torchrun ... -m shardwise train MODEL ...
"""

from __future__ import annotations

import argparse
import shlex
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from shardwise.cli.interrupts import ended_as_interrupted
from shardwise.cli.models import add_model, model_of
from shardwise.cli.output import print_json
from shardwise.errors import UserError
from shardwise.runtime import TRANSPORTS

if TYPE_CHECKING:
    from shardwise.runtime.job.config import TrainConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, optional=True)
    _what(parser)
    _optimizer(parser)
    _run(parser)


def _what(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model, data and layout")
    group.add_argument("--layout", metavar="TEXT", help="how the model is split, such as dp=2,tp=2,zero=3,sp (dp=1)")
    group.add_argument("--data", metavar="SOURCE", help="file, folder, saved dataset, or stdlib")
    group.add_argument("--text-field", metavar="NAME", help="field that holds the text of JSONL, Parquet, datasets")
    group.add_argument("--max-bytes", type=int, metavar="N", help="use no more than the first N bytes of text")
    group.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json; left out, one is trained on the text")
    group.add_argument("--vocab", type=int, metavar="N", help="vocabulary in place of the model's")
    group.add_argument("--seq", type=int, metavar="N", help="tokens per sequence")
    group.add_argument("--batch", type=int, metavar="N", help="sequences per step, over all ranks")
    group.add_argument("--isolate-documents", action="store_true", help="attention does not cross documents")
    group.add_argument("--steps", type=int, metavar="N", help="optimizer steps (100)")


def _optimizer(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("AdamW")
    group.add_argument("--lr", type=float, metavar="X", help="peak learning rate (1e-3)")
    group.add_argument("--warmup", type=int, metavar="N", help="steps of linear warm-up (10)")
    group.add_argument("--weight-decay", type=float, metavar="X", help="weight decay of matrices (0.1)")
    group.add_argument("--clip", type=float, metavar="X", help="maximum global gradient norm, 0 for none (1.0)")


def _run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the run")
    group.add_argument("--out", type=Path, metavar="DIR", help="run directory, new or empty (runs/MODEL-N)")
    group.add_argument("--seed", type=int, metavar="N", help="seed of weights, dropout and the order of the text (0)")
    group.add_argument("--validate-every", type=int, metavar="N", help="steps between validations (0: at the end)")
    group.add_argument("--validate-batches", type=int, metavar="N", help="batches of each validation (4)")
    group.add_argument("--save-every", type=int, metavar="N", help="steps between checkpoints (0: at the end)")
    group.add_argument("--keep-last", type=int, metavar="N", help="checkpoints to keep, 0 for all (3)")
    group.add_argument("--save-async", action="store_true", help="continue training while a checkpoint is written")
    group.add_argument("--weights", metavar="DIR", help="start from a Hugging Face folder's weights, and its tokenizer")
    group.add_argument("--resume", type=Path, metavar="DIR", help="resume a run or a checkpoint, with its settings "
                       "and its text (other text: --data)")  # fmt: skip
    group.add_argument("--report", action="store_true", help="measure a step, for comparison with its prediction")
    group.add_argument("--no-tensorboard", action="store_true", help="write no TensorBoard files")
    group.add_argument("--device", choices=("cpu", "cuda"), help="where ranks compute (cpu)")
    group.add_argument("--threads", type=int, metavar="N", help="threads of each rank's matrix products (1)")
    group.add_argument("--matmul", choices=("highest", "high", "medium"), help="fp32 product precision (highest)")
    group.add_argument("--transport", choices=TRANSPORTS, help="carries collectives between CPU ranks: "
                       "shared memory on one host, or gloo; auto prefers shared memory (auto)")  # fmt: skip
    group.add_argument(
        "--no-overlap", action="store_true", help="do not communicate while computing (results stay equal)"
    )
    group.add_argument("--port", type=int, default=0, metavar="N", help="rendezvous port (none: a file is used)")
    group.add_argument(
        "--hang", type=float, metavar="S", help="seconds without progress after which the run ends (600)"
    )
    group.add_argument("--restarts", type=int, default=0, metavar="N", help="restart from the last good checkpoint "
                       "after a rank died or got stuck, at most N times (0)")  # fmt: skip
    group.add_argument("--elastic", action="store_true", help="restart without ranks that were killed: dp shrinks")


_PLAIN = (
    "text_field",
    "max_bytes",
    "tokenizer",
    "weights",
    "vocab",
    "seed",
    "validate_every",
    "validate_batches",
    "save_every",
    "keep_last",
    "device",
    "threads",
    "matmul",
    "transport",
    "hang",
)


def run(args: argparse.Namespace) -> int:
    from shardwise.api import resume, train, under_torchrun
    from shardwise.runtime.job.output import tolerant_output

    if under_torchrun():
        _run_as_rank(args)
    # With --json nothing but the result may reach standard output: progress goes where errors go.
    started: dict[str, Any] = {
        "port": args.port,
        "restarts": args.restarts,
        "elastic": args.elastic,
        "rank0_stdout": 2 if args.json else None,
    }
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


_OPTIMIZER = ("lr", "warmup", "weight_decay", "clip")


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, by the names of `TrainConfig`: what was not given keeps its value there."""
    names = [*_PLAIN, "data", "steps", "layout", "out"]
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    for name, off in (("report", False), ("save_async", False)):
        if getattr(args, name) is not off:
            options[name] = True
    for name, flag in (("tensorboard", args.no_tensorboard), ("overlap", args.no_overlap)):
        if flag:
            options[name] = False
    return options


def _request(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `configure` for a new run."""
    from shardwise.layout import Workload
    from shardwise.runtime.job.config import OptimizerConfig

    if args.model is None and args.weights is not None:
        args.model = str(Path(args.weights).absolute())
    missing = [f"--{name}" for name in ("data", "seq", "batch") if getattr(args, name) is None]
    if args.model is None or missing:
        raise UserError(f"train needs {', '.join(missing if args.model else ['MODEL', *missing])}, or --resume DIR")
    if args.seq < 1 or args.batch < 1:
        raise UserError("--seq and --batch must be positive integers")
    chosen = {name: value for name in _OPTIMIZER if (value := getattr(args, name)) is not None}
    return {
        "layout": "dp=1",
        **_given(args),
        "model": model_of(args),
        "workload": Workload(seq=args.seq, batch=args.batch, isolate_documents=args.isolate_documents),
        "optimizer": OptimizerConfig(**chosen),
    }


def _changes(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `configure_resumed`: a resumed run has its model, text and sequence length already."""
    fixed = [f"--{name}" for name in ("vocab", "seq", "batch", *_OPTIMIZER) if getattr(args, name) is not None]
    if args.model is not None or args.set or fixed or args.isolate_documents:
        named = ", ".join(["MODEL"] * (args.model is not None) + ["--set"] * bool(args.set) + fixed)
        raise UserError(f"a resumed run keeps its model and settings: leave out {named or '--isolate-documents'}")
    return _given(args)


def _where(out: Path) -> None:
    """Name what the run left."""
    run = shlex.quote(str(out))
    known = {
        "events.jsonl": ["every step"],
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
