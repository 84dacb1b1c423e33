"""Which planned layouts the runtime here can run: a plan is for a cluster and its software, which do more."""

from __future__ import annotations

from shardwise.errors import UserError
from shardwise.layout import Layout, Workload, check_runnable
from shardwise.layout.legality import unsupported
from shardwise.model import ModelConfig

_WORDS = {"cp": "context parallelism", "ep": "expert parallelism"}
"""Of the keys that are searched and may not run here."""


def why_not_trained(layout: Layout, model: ModelConfig, workload: Workload) -> str | None:
    """Why `train` refuses a layout, in words that follow on it, with what to fix instead; None where it runs it."""
    try:
        check_runnable(layout, model, workload)
    except UserError as error:
        if reason := model.why_not_runnable():
            return f"not runnable by `train` yet: {reason}"
        keys = [word.partition("=")[0] for word in unsupported(layout)]
        if not keys:
            return f"not runnable by `train`: {error}"
        words = " and ".join(_WORDS.get(key, key) for key in keys)
        fix = ",".join(f"{key}=1" for key in keys)
        return f"not runnable by `train` yet: {words}; --fix {fix} plans without it"
    return None
