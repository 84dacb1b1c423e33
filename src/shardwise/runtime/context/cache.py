"""A cache whose pages are cut over context-parallel ranks, for generation.

Each rank computes its part of a step's rows. Their queries, keys and values are gathered; a rank stores the keys of its
own part of the pages, and attends with all queries to the keys that it stores. An all-to-all returns the outputs to the
ranks of their rows, which merge them by their log-sum-exp (decode context parallelism in vLLM).
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardwise.layout.axes import CP
from shardwise.layout.context import PageCut
from shardwise.ops.blockwise import Explicit, FlashOnCPU, Kernel, ScoreRule, Scores
from shardwise.ops.cache_shape import CacheShape
from shardwise.ops.limits import SCORES
from shardwise.ops.paged import AttentionGroup, PagedCache, Rows, keys_and_values
from shardwise.runtime.transport.comms import Comms, gather_dim


@dataclass
class ContextRows(Rows):
    """A rank's rows of an engine step of T tokens, n of them with padding at the end of the last rank's.

    `slots` and `groups` are those of the keys on this rank; `wanted` counts all T rows.
    """

    queries: Tensor = field(default_factory=lambda: torch.empty(0))
    """[T]: positions of all rows."""
    kept: Tensor = field(default_factory=lambda: torch.empty(0))
    """Those of the T rows whose keys and values go to `slots`."""


class ContextCache(PagedCache):
    """Keys and values of one block on one rank: the rank's slots of every page."""

    def __init__(
        self, comms: Comms, cut: PageCut, part: str, shape: CacheShape, pages: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(shape, pages, cut.slots, dtype, device)
        self._comms, self._cut, self._part, self._rank = comms, cut, part, comms.index(CP)

    def attend(self, heads: Tensor, rows: Rows, rule: ScoreRule) -> Tensor:
        """Keep the keys and values of this rank's slots, and attend. heads: [n, H + planes K, D] of this rank's rows,
        queries first; returns [n, H V]."""
        assert isinstance(rows, ContextRows)
        every = gather_dim(self._comms, heads, 0, CP, self._part)
        self.store(every[:, -self.shape.rows :].index_select(0, rows.kept), rows)
        q = every[:, : -self.shape.rows]
        wide = torch.promote_types(q.dtype, torch.float32)
        partial = torch.zeros(*q.shape[:2], self.shape.values + 1, dtype=wide, device=q.device)
        for group in rows.groups:
            self._attend_group(q, group, rows, rule, partial[group.first : group.last])
        mine = torch.empty_like(partial)
        self._comms.all_to_all(mine, partial, CP, self._part)
        mine = mine.unflatten(0, (self._comms.size(CP), -1))
        shares = torch.softmax(mine[..., -1:], 0)
        return (mine[..., :-1] * shares).sum(0).to(heads.dtype).flatten(1)

    def _attend_group(self, q: Tensor, group: AttentionGroup, rows: ContextRows, rule: ScoreRule, out: Tensor) -> None:
        """Attention to the keys on this rank. out: [rows of the group, H, V + 1], the output and its log-sum-exp."""
        if not group.length:  # none of its keys are here: no weight in the sum
            out[..., -1] = -torch.inf
            return
        keys, values = keys_and_values(self.gathered(group).permute(0, 2, 3, 1, 4), self.shape.values)
        queries = q[group.first : group.last].unflatten(0, (group.sequences, -1))
        seen = rows.shared(
            f"keys of {group.first} in window {rule.window}", lambda: self._seen(group, rows.queries, rule)
        )
        kernel, step = self._kernel(rule, q, group.length * group.sequences)
        into = out.unflatten(0, (group.sequences, -1))
        for a in range(0, queries.shape[1], step):
            some = slice(a, a + step)
            result, lse = kernel.forward(queries[:, some], keys, values, Scores(False, seen[:, some]))
            into[:, some, :, :-1] = result
            into[:, some, :, -1] = lse.transpose(1, 2)

    def _seen(self, group: AttentionGroup, queries: Tensor, rule: ScoreRule) -> Tensor:
        """[sequences, rows, keys]: whether a row sees a key on this rank. Keys after the last token of a sequence have
        positions that none of its rows sees."""
        slots = torch.arange(group.length, device=queries.device)
        pages, rest = slots // self.size, slots % self.size
        positions = pages * self._cut.page + self._rank * self.size + rest
        return rule.seen(queries[group.first : group.last].view(group.sequences, -1, 1), positions)

    def _kernel(self, rule: ScoreRule, q: Tensor, keys: int) -> tuple[Kernel, int]:
        if self._cpu and not rule.softcap and q.dtype != torch.bfloat16:
            return FlashOnCPU(rule.scale), len(q)
        return Explicit(rule.scale, rule.softcap), max(1, SCORES // (q.shape[1] * keys))


def collect(comms: Comms, x: Tensor, rows: ContextRows, part: str) -> tuple[Tensor, ContextRows]:
    """The residual stream [1, B, hidden] of the rows whose logits are wanted, on every rank, from that of a rank's rows
    [1, n, hidden]; and these rows, all wanted."""
    wanted = torch.arange(len(rows.queries), device=x.device) if rows.wanted is None else rows.wanted
    owner, local = wanted // x.shape[1], wanted % x.shape[1]
    mine = owner == comms.index(CP)
    out = x.new_zeros(1, len(wanted), x.shape[2])
    out[:, mine] = x[:, local[mine]]
    comms.all_reduce(out, CP, part)
    return out, replace(rows, wanted=None)
