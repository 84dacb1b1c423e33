"""Plans as files: `plan --out FILE` writes one, `train --plan FILE` trains one of its layouts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.engine import cuda_memory
from shardwise.errors import UserError, os_errors
from shardwise.layout import Workload
from shardwise.model import ModelConfig
from shardwise.report.files import write_whole
from shardwise.report.strict_json import strict
from shardwise.small_files import read_small

if TYPE_CHECKING:
    from shardwise.planner.plan import Plan

FORMAT = "shardwise plan 1"


def write_plan(out: str, plan: Plan) -> list[str]:
    """Write a plan of a model with a configuration. Returns the lines that say so. Raises `UserError`."""
    if plan.model.trace:
        raise UserError("--out writes plans that train can run; a traced module has split: leave it out")
    device = plan.cluster.device
    about = {
        "format": FORMAT, "model_config": plan.model.to_json(), "device": device.name, "device_kind": device.kind,
        "nodes": plan.cluster.nodes,
    }  # fmt: skip
    write_whole(Path(out), json.dumps(strict(about | plan.to_json()), indent=1, allow_nan=False) + "\n", "plan")
    trained = f"shardwise train --plan {out} --data ... trains the first, --row N another"
    return [f"\n{out}: {len(plan.ranked)} layouts. {trained}."]


def apply_plan(args: Any, here: bool = True) -> None:
    """Put what the plan of --plan decides into the arguments of `train`. here: whether this machine runs it. Raises
    `UserError` for a file that is no plan, and for a layout that cannot run, or not here."""
    if args.plan is None:
        return
    path = Path(args.plan)
    data = _read(path)
    try:
        number, rows, workload = 1 if args.row is None else args.row, data["ranked"], Workload(**data["workload"])
        if not 1 <= number <= len(rows):
            raise UserError(f"the plan has rows 1 to {len(rows)}, not {args.row}")
        _check_row(args, data, rows[number - 1], number, here)
        args.model, args.layout = ModelConfig.from_json(data["model_config"]), rows[number - 1]["layout"]
        args.seq, args.batch, args.optimizer = workload.seq, workload.batch, workload.optimizer
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{path} is a damaged plan: write it again with plan --out") from None


def _read(path: Path) -> dict[str, Any]:
    with os_errors(f"read {path}", typed=path):
        text = read_small(path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UserError(f"{path} is no plan: write one with shardwise plan MODEL ... --out {path}")
    return data


def _check_row(args: Any, plan: dict[str, Any], row: dict[str, Any], number: int, here: bool) -> None:
    """Raise `UserError` for a row that `train` rejects, or for devices that are not here."""
    if reason := row["not_runnable"]:
        raise UserError(f"row {number}, {row['layout']}, does not run: {reason}")
    if plan["device_kind"] != "cuda" or args.device == "cpu" or not here:
        return
    launched = "WORLD_SIZE" in os.environ
    if plan["nodes"] > 1 and not launched:
        raise UserError(
            f"it is for {plan['cluster']}, which is {plan['nodes']} machines: start it there with shardwise launch, or "
            "try it on this machine's cores with --device cpu"
        )
    found = len(cuda_memory())
    needed = row["devices"] // plan["nodes"]
    if found < needed:
        has = f"{found} GPU{'s' * (found != 1)}" if found else "no GPU"
        raise UserError(
            f"row {number} needs {needed} GPUs of {plan['cluster']}, and this machine has {has}: start it there with "
            "shardwise launch, plan for this machine, or try it on its cores with --device cpu"
        )
    args.device = "cuda"
