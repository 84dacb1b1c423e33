"""`ExpertShare`: a rank's share in a mixture of experts, where tensor-parallel ranks have the same tokens.

Without torch: the layout makes it.
"""

from shardwise.records import dataclass


@dataclass(frozen=True)
class ExpertShare:
    """The pairs of a token and an expert that a rank sees to: those whose expert is on a rank of its own place in
    tensor parallelism. Ranks of one place with the same tokens take turns."""

    count: int
    """Experts of a rank."""
    place: int
    places: int
    """Tensor-parallel ranks that have different experts; `place` is this one's number among them."""
    copy: int
    copies: int
    """Groups of such ranks that have the same tokens and the same experts: token t is of group t modulo copies."""
    across: int
    """Ranks of its place that have different experts and tokens, this one included."""
