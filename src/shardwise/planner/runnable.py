"""Planned layouts that `train` can run, and the search for models that it cannot run yet."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardwise.cluster import Cluster
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.layout.modules import check_run, why_no_class
from shardwise.model.blueprint import Blueprint
from shardwise.model.parameters import Model
from shardwise.planner.space import Space
from shardwise.predict.memory.engine_bytes import OWN
from shardwise.predict.memory.engine_settings import USUAL, EngineSettings, check_optimizer
from shardwise.predict.step_seconds import own_engine
from shardwise.predict.time.features import EVERYTHING, Features
from shardwise.predict.time.profiles import ENGINES, EngineProfile
from shardwise.predict.time.profiles import engine as engine_of
from shardwise.predict.traced_layout import RECOMPUTE, check_piped, check_traced, piped

TRACED = Features(context=("ring",), copies=True, recompute=RECOMPUTE, listed=False, bare_ends=False, uneven=False)
"""Features that a search over a traced module uses, if the engine has them; pipelines where its parts have an order."""


def widened(engine: EngineProfile) -> EngineProfile:
    """The engine as if its software had every feature that is searched."""
    return replace(engine, features=EVERYTHING)


def why_not_trained(layout: Layout, model: Model, workload: Workload) -> str | None:
    """Reason why `train` rejects a layout, with the fix, worded to follow the layout; None if it runs."""
    try:
        if isinstance(model, Blueprint):
            check_traced(layout, model, workload)
        else:
            check_run(layout, model, workload)
    except UserError as error:
        if reason := why_no_class(model):
            return f"not runnable by `train` yet: {reason}"
        return f"not runnable by `{'split' if model.trace else 'train'}`: {error}"
    return None


def space_for(
    model: Model, cluster: Cluster, workload: Workload, engine: str | None, fixed: Mapping[str, Any],
    settings: EngineSettings = USUAL,
) -> tuple[Space, str]:  # fmt: skip
    """The candidates for an engine, this project's runtime if None; and why none of them runs here, empty where that is
    not known of all. Raises `UserError`."""
    profile = training_engine(engine or own_engine(cluster))
    settings.check(engine or "")
    check_optimizer(engine or "", workload.optimizer)
    if settings.layers:
        profile = replace(profile, features=replace(profile.features, recompute=("none",)))
    if settings.modules:
        raise UserError("no search has the time of recomputed modules: leave them out; estimate has their memory")
    if isinstance(model, Blueprint):
        check_piped(fixed.get("pp", 1), model)
        features = TRACED if piped(model) else replace(TRACED, schedules=())
        profile = replace(profile, features=profile.features.common(features))
    here = profile.name in OWN
    none_runs = re.sub(r" (is|are) counted but not runnable here( yet)?$", "", why_no_class(model)) if here else ""
    profile = widened(profile) if none_runs else profile
    if (
        here
        and fixed.get("recompute") != "selective"
        and not (profile.attention == "scores" or model.attention_dropout)
    ):
        # Beside a fused kernel it frees the log-sum-exp alone.
        kept = tuple(kind for kind in profile.features.recompute if kind != "selective")
        profile = replace(profile, features=replace(profile.features, recompute=kept))
    return Space(model, cluster, workload, profile, dict(fixed), settings), none_runs


def training_engine(name: str) -> EngineProfile:
    """The profile of that name. Raises `UserError` for one that there is not, and for one that only serves."""
    profile = engine_of(name)
    if not _trains(profile):
        training = [each.name for each in ENGINES.values() if _trains(each)]
        raise UserError(f"{name} does not train; profiles that do are {', '.join(training)}")
    return profile


def _trains(profile: EngineProfile) -> bool:
    return not profile.facts["optimizer_bytes"].startswith("not used")
