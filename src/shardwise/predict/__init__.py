"""Predictions: memory and traffic of one training step in closed form, without torch."""

from typing import TYPE_CHECKING

from shardwise.lazy import lazily

if TYPE_CHECKING:
    from shardwise.predict.estimate import estimate
    from shardwise.predict.memory.states import zero_table

__all__ = ["estimate", "zero_table"]

lazily(__name__)
