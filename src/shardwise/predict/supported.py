"""Models, splits and schedules that predictions support."""

from functools import cache
from typing import Any

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.model.blueprint import Blueprint
from shardwise.model.parameters import Model
from shardwise.predict.fixing import SCHEDULES

MOST_DEVICES = 65536
"""Devices of a cluster that is searched."""


def check_size(cluster: Cluster) -> None:
    """Raise `UserError` for more devices than layouts are searched or laid side by side for."""
    if cluster.devices > MOST_DEVICES:
        raise UserError(f"{cluster} has {cluster.devices:,} devices; clusters of up to {MOST_DEVICES:,} are searched")


def why_not_planned(model: Model) -> str | None:
    """The reason why no search knows this model, or None. More can be planned than runs here: ALiBi and a norm
    after the embedding have memory and time, too."""
    if isinstance(model, Blueprint):
        return None if model.trace else "it was not traced; see shardwise.trace"
    if model.counted:
        return None
    usual: dict[str, Any] = {"embedding_norm": False}
    if model.positions == "alibi":
        usual["positions"] = "learned"
    return model.replace(**usual).why_not_runnable()


@cache
def in_closed_form(schedule: str, virtual: int, p: int, m: int) -> bool:
    """Whether a schedule is for m micro-batches on p ranks, and its bubble has an exact closed form there, as far as
    that depends on these numbers."""
    if p == 1:
        return (schedule, virtual) == ("1f1b", 1)
    if schedule not in SCHEDULES:
        return False
    from shardwise.schedule.pipeline import find
    from shardwise.schedule.pipeline.closed_forms import FORMS, PipelineShape

    return not find(schedule).objection(p, m, virtual) and FORMS[schedule].exact(
        PipelineShape(p, m, virtual, 1.0, 1.0, 1.0)
    )
