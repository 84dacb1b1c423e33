"""Resume from offloaded state on disk: a run whose process was killed loses no step that had ended.

Each rank's file has two slots, and an update writes the one that does not count. A rank begins an update only after a
sum over all ranks, the gradients' norm, and so only when all of them have committed the update before: the newest
update that every rank has committed is whole on all of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import UserError
from shardwise.layout.homes import state_file
from shardwise.layout.units import UnitPlan
from shardwise.runtime.offload.file import file_of, open_file
from shardwise.runtime.transport.process_group import gather_objects


@dataclass(frozen=True)
class Kept:
    """State of a finished step in the files of all ranks."""

    slot: int
    """The slot of this rank's file that holds it."""
    about: dict[str, Any]
    """What was committed with it: its run, step, samples and updates."""


def newest_kept(plan: UnitPlan, folder: Path, rank: int, run: str, after: int) -> Kept | None:
    """The newest state of `run` that the files of all ranks hold, of a step later than `after`; None where there is
    none, or state is not on disk as a whole (a fraction of it is elsewhere, or residuals of packed gradients).

    All ranks of the job call this together. Every step of theirs must have a gradient norm.
    """
    layout = state_file(plan)
    if layout is None or plan.layout.offload != "nvme" or plan.feeds_back:
        return None
    mine: dict[int, Kept] = {}
    path = file_of(folder, rank)
    if path.exists():
        try:
            file = open_file(plan, path)
            mine = {
                about["step"]: Kept(slot, about)
                for slot, about in file.committed().items()
                if about.get("run") == run and about["step"] > after
            }
            file.close()
        except (UserError, KeyError, TypeError, json.JSONDecodeError):
            mine = {}
    common = set.intersection(*map(set, gather_objects(set(mine))))
    return mine[max(common)] if common else None
