"""In which order: collectives as rounds of transfers, lowered to one `Program` of per-rank actions.

The same description is verified (`verify`), priced on a cluster (`price`, `choose`), shown (`show`, `frames`), and
lowered to what a rank does (`lower`). `docs/collectives.md` explains it.
"""

from typing import TYPE_CHECKING

from shardwise.lazy import lazily

if TYPE_CHECKING:
    from shardwise.schedule.algorithms import Algorithm, algorithms, build, collective_name, find
    from shardwise.schedule.comm import CommSchedule, Draft, RepeatedRounds, Round

__all__ = [
    "Algorithm",
    "CommSchedule",
    "Draft",
    "RepeatedRounds",
    "Round",
    "algorithms",
    "build",
    "collective_name",
    "find",
]

lazily(__name__)
