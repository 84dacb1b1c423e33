"""The workload of a training step on a command line, with what the model suggests where nothing is given."""

from __future__ import annotations

import argparse

from shardwise.cli.flags import given
from shardwise.errors import UserError
from shardwise.layout import Workload
from shardwise.layout.usual_workload import usual_workload
from shardwise.model.parameters import Model


def workload_of(args: argparse.Namespace, model: Model, multiple: int = 1) -> tuple[Workload, tuple[str, ...]]:
    """The workload of --seq, --batch and the flags of a training step, and a note for each number that was not given.

    multiple: a usual batch is a multiple of it. Raises `UserError`.
    """
    if min(1 if n is None else n for n in (args.seq, args.batch)) < 1:
        raise UserError("--seq and --batch must be positive integers")
    usual = usual_workload(model, args.seq, args.batch, multiple)
    return Workload(**given(args, Workload) | {"seq": usual.seq, "batch": usual.batch}), usual.notes
