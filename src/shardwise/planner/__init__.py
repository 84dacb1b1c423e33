"""The planner: every legal layout of a model on a cluster, held against memory, priced, ranked (docs/planner.md)."""

from typing import TYPE_CHECKING

from shardwise.lazy import lazily

if TYPE_CHECKING:
    from shardwise.planner.plan import Plan, plan
    from shardwise.planner.pricing import Priced, price_one
    from shardwise.planner.ranking import Found, search
    from shardwise.planner.space import Space
    from shardwise.predict.memory.capacity import RESERVED_BYTES

__all__ = ["RESERVED_BYTES", "Found", "Plan", "Priced", "Space", "plan", "price_one", "search"]

lazily(__name__)
