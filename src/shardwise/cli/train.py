"""Train a model on text, split over the local processes that the layout asks for.

Under torchrun, on one host or several, the same command is one rank: torchrun ... -m shardwise train MODEL ...
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shardwise.cli.models import add_model, model_of
from shardwise.cli.output import print_json
from shardwise.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    _what(parser)
    _optimizer(parser)
    _run(parser)


def _what(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is trained on what")
    group.add_argument("--layout", default="dp=1", metavar="TEXT", help="how it is split, such as dp=2,tp=2,zero=3,sp")
    group.add_argument("--data", required=True, metavar="SOURCE", help="file, folder, saved dataset, or stdlib")
    group.add_argument("--text-field", metavar="NAME", help="field that holds the text of JSONL, Parquet, datasets")
    group.add_argument("--max-bytes", type=int, metavar="N", help="use no more than the first N bytes of text")
    group.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json; left out, one is trained on the text")
    group.add_argument("--vocab", type=int, metavar="N", help="vocabulary in place of the model's")
    group.add_argument("--seq", type=int, required=True, metavar="N", help="tokens a sequence")
    group.add_argument("--batch", type=int, required=True, metavar="N", help="sequences a step, over all ranks")
    group.add_argument("--isolate-documents", action="store_true", help="packed documents do not see each other")
    group.add_argument("--steps", type=int, default=100, metavar="N", help="optimizer steps (100)")


def _optimizer(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("AdamW")
    group.add_argument("--lr", type=float, metavar="X", help="peak learning rate (1e-3)")
    group.add_argument("--warmup", type=int, metavar="N", help="steps of linear warm-up (10)")
    group.add_argument("--weight-decay", type=float, metavar="X", help="decay of matrices (0.1)")
    group.add_argument("--clip", type=float, metavar="X", help="bound of the global gradient norm, 0 for none (1.0)")


def _run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the run")
    group.add_argument("--out", type=Path, metavar="DIR", help="run directory, new or empty (runs/MODEL-N)")
    group.add_argument("--seed", type=int, metavar="N", help="of weights, dropout and the order of the text (0)")
    group.add_argument("--validate-every", type=int, metavar="N", help="steps between validations (0: at the end)")
    group.add_argument("--validate-batches", type=int, metavar="N", help="batches of each validation (4)")
    group.add_argument("--report", action="store_true", help="measure a step, and lay its prediction beside it")
    group.add_argument("--no-tensorboard", action="store_true", help="write no TensorBoard files")
    group.add_argument("--device", choices=("cpu", "cuda"), help="where ranks compute (cpu)")
    group.add_argument("--threads", type=int, metavar="N", help="threads of each rank's matrix products (1)")
    group.add_argument("--matmul", choices=("highest", "high", "medium"), help="fp32 product precision (highest)")
    group.add_argument("--no-overlap", action="store_true", help="do not communicate while computing; same bits")
    group.add_argument("--port", type=int, default=0, metavar="N", help="where the ranks meet; left out, a file serves")
    group.add_argument("--hang", type=float, metavar="S", help="seconds without progress after which to give up (600)")


_PLAIN = (
    "text_field",
    "max_bytes",
    "tokenizer",
    "vocab",
    "seed",
    "validate_every",
    "validate_batches",
    "device",
    "threads",
    "matmul",
    "hang",
)


def run(args: argparse.Namespace) -> int:
    from shardwise.api import configure, train, train_as_rank, under_torchrun

    if under_torchrun():
        from shardwise.runtime.worker import leave

        if args.port or args.out is None:
            raise UserError(
                "under torchrun its own rendezvous counts: leave --port out"
                if args.port
                else "under torchrun every rank must know the run directory: add --out DIR"
            )
        leave(train_as_rank(lambda: configure(**_request(args))))
    # With --json nothing but the result may reach standard output: progress goes where errors go.
    result = train(**_request(args), port=args.port, rank0_stdout=2 if args.json else None)
    if args.json:
        print_json({"out": str(result.out), **result.summary})
    else:
        _where(result.out)
    return 0


def _request(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `configure`: what was not given keeps its default there."""
    from shardwise.layout import Workload
    from shardwise.runtime.config import OptimizerConfig

    if args.seq < 1 or args.batch < 1:
        raise UserError("--seq and --batch must be positive integers")
    chosen = {name: getattr(args, name) for name in ("lr", "warmup", "weight_decay", "clip")}
    options = {name: value for name in _PLAIN if (value := getattr(args, name)) is not None}
    return {
        "model": model_of(args),
        "layout": args.layout,
        "workload": Workload(seq=args.seq, batch=args.batch, isolate_documents=args.isolate_documents),
        "data": args.data,
        "steps": args.steps,
        "out": args.out,
        "optimizer": OptimizerConfig(**{name: value for name, value in chosen.items() if value is not None}),
        "report": args.report,
        "tensorboard": not args.no_tensorboard,
        "overlap": not args.no_overlap,
        **options,
    }


def _where(out: Path) -> None:
    """Name what the run left."""
    known = {
        "events.jsonl": "every step",
        "result.json": "the result",
        "reports": f"predicted and measured step, see: shardwise compare {out}",
        "tensorboard": f"see: tensorboard --logdir {out}",
    }
    print(f"the run lies in {out}")
    for name, what in known.items():
        path = out / name
        if path.is_file() or (path.is_dir() and any(path.iterdir())):
            print(f"  {name:<14}{what}")
