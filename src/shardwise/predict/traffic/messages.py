"""The tensor that a stage of a pipeline hands on to the next one; its gradient comes back as large."""

from __future__ import annotations

from shardwise.layout import pipeline
from shardwise.layout.units import UnitPlan
from shardwise.predict.memory.traced import trace_of


def stage_parts(plan: UnitPlan) -> list[list[str]]:
    """The parts of all stages of a pipeline."""
    return plan.blueprint.stages(pipeline.stages(plan.subject, plan.layout).layers)


def message_of(plan: UnitPlan, stage: int) -> tuple[int, str]:
    """(elements, dtype) of what a stage hands on. Of a traced module its last part says it."""
    traced = trace_of(plan)
    if traced is None:
        return plan.stream_tokens * plan.model.hidden, plan.layout.dtype
    trace, step = traced
    assert step.stages is not None
    last = stage_parts(plan)[stage][-1]
    message = next(message for message in step.stages.messages if message.part == last)
    return trace.at(message.elements, plan.layout.micro), message.dtype
