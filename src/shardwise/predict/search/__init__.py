"""The planner: every legal layout of a model on a cluster, held against memory, priced, ranked (docs/planner.md)."""

from shardwise.predict.capacity import RESERVED_BYTES
from shardwise.predict.search.plan import Plan, plan
from shardwise.predict.search.pricing import Priced, price_one
from shardwise.predict.search.ranking import Found, search
from shardwise.predict.search.space import Space

__all__ = ["RESERVED_BYTES", "Found", "Plan", "Priced", "Space", "plan", "price_one", "search"]
