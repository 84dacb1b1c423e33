"""Runs: the load of experts that a training run has written into its events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardwise.studio.columns import How, Table

EXPERT_COLUMNS = dict.fromkeys(("step", "imbalance", "dropped", "balance_loss"), "")
"""Columns of the steps with experts, as events have them, with their units."""
MOST_LOADS = 1 << 18
"""Numbers of tokens up to which the loads of every step are sent; of a longer run, those of every n-th step."""

Event = Mapping[str, Any]


def with_experts(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Step and load of the training steps of a model with experts: those with the layers and experts of the last."""
    steps = [
        {"step": event["step"], **event["experts"]}
        for event in events
        if "step" in event and isinstance(event.get("experts"), dict) and event["experts"].get("tokens")
    ]
    return [step for step in steps if _shape(step) == _shape(steps[-1])]


def _shape(step: Event) -> dict[str, int]:
    return {layer: len(tokens) for layer, tokens in step["tokens"].items()}


def loads(events: Sequence[Event]) -> dict[str, Any] | None:
    """Tokens of each expert of each layer: {steps, layers, experts, counts: [steps x layers x experts]}; None without
    experts. The last step is among them."""
    steps = with_experts(events)
    if not steps:
        return None
    layers = list(steps[-1]["tokens"])
    counts = np.array([[step["tokens"][layer] for layer in layers] for step in steps], dtype=np.int32)
    every = -(-counts.size // MOST_LOADS)
    kept = np.s_[(len(steps) - 1) % every :: every]
    return {
        "steps": [step["step"] for step in steps[kept]],
        "layers": layers,
        "experts": counts.shape[-1],
        "counts": counts[kept].ravel(),
    }


def loads_table(found: Mapping[str, Any]) -> Table:
    """Tokens of each expert at the last step of `loads`."""
    last = found["counts"].reshape(len(found["steps"]), len(found["layers"]), -1)[-1]
    columns: dict[str, Any] = {"expert": list(range(found["experts"]))}
    columns |= {layer: counts.tolist() for layer, counts in zip(found["layers"], last, strict=True)}
    return Table(f"Tokens of each expert, by layer, at step {found['steps'][-1]}", columns)


def how_loads(command: str) -> How:
    """Where the load of experts comes from. command: shows the events."""
    return How(
        [
            "The router's choices of a step, summed over its micro-batches and all ranks, as the training wrote them.",
            "imbalance: tokens of a layer's busiest expert over the mean of its experts; of all layers the largest.",
        ],
        command,
    )
