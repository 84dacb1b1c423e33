"""A block with latent attention in bytes, as `decoder/attention.py` allocates and frees them."""

from shardwise.layout.units import UnitPlan
from shardwise.model.config import LatentAttention
from shardwise.predict.memory.block_tensors import BlockTensors
from shardwise.predict.memory.sizes import Sizes
from shardwise.predict.memory.transients import rolled


def block_tensors(plan: UnitPlan, s: Sizes, part: str, apart: bool = False, adds: bool = False) -> BlockTensors:
    """The tensors of a block, by its attention."""
    kind = LatentBlockTensors if plan.model.latent_attention else BlockTensors
    return kind(plan, s, part, apart, adds)


class LatentBlockTensors(BlockTensors):
    """A block whose queries, keys and values come through low ranks, which are in shards as the residual stream is."""

    @property
    def _latent(self) -> LatentAttention:
        latent = self.plan.model.latent_attention
        assert latent
        return latent

    def _low(self, width: int) -> int:
        """Bytes of a low rank."""
        return self.s.stream * width * self.s.element

    @property
    def _shared(self) -> int:
        """Bytes of the keys' shared part of whole sequences."""
        return self.s.tokens * self._latent.rope_head_dim * self.s.element

    @property
    def _up(self) -> int:
        """Width of keys without their shared part and of values, of all heads here."""
        return self.s.heads * (self._latent.nope_head_dim + self._latent.v_head_dim)

    def _project(self, saves: bool) -> None:
        self._queries(saves)
        self._keys_and_values(saves)

    def _queries(self, saves: bool) -> None:
        live, rank = self.live, self._latent.q_rank
        if rank:
            live.allocate(self._low(rank))
            self._normed(self.s.stream, rank)
            live.free(0 if saves else self._low(rank) + self.s.stream * self.statistics)
        self._column([self.q], rank)
        live.free(0 if saves or not rank else self._low(rank))
        live.allocate(self.q)
        live.transient(rolled(self.plan, self.q))
        live.free(self.q)

    def _keys_and_values(self, saves: bool) -> None:
        live, latent, s = self.live, self._latent, self.s
        before = live.now
        live.allocate(self._low(latent.kv_rank + latent.rope_head_dim))
        self._normed(s.stream, latent.kv_rank)
        gathered = self._gathered(latent.rope_head_dim)
        live.allocate(self._shared)
        live.transient(self._shared)
        live.free(gathered)
        up = s.tokens * self._up * s.element
        self._column([up], latent.kv_rank)
        live.allocate(self.k + self.v)
        live.free(up + self._shared if saves else live.now - before - self.k - self.v)

    def _queries_backward(self) -> None:
        self.attention.backward(self.live, self.apart)
        copied = self.attention.math and not self.attention.selective and self.s.heads > 1
        self._keys_and_values_backward()
        live, rank = self.live, self._latent.q_rank
        live.allocate(self.q)
        live.transient(rolled(self.plan, self.q))
        live.free(self.q)
        live.allocate(self.q if copied else 0)  # heads side by side
        self._column_backward([self.s.q], self.q * (1 + copied), rank)
        live.free(self.q if copied and self.apart else 0)
        if rank:
            self._norm_backward(rank)
            live.free(2 * self._low(rank))  # the gradient of its output, and its input
            self._map_backward(rank)
            live.free(0 if self.apart else self.stream)
        self._sum()

    def _keys_and_values_backward(self) -> None:
        """From the gradients of keys and values to a first one of the norm's output."""
        live, latent, s = self.live, self._latent, self.s
        live.allocate(self._shared)  # summed over heads
        up = s.tokens * self._up * s.element
        live.allocate(up)
        live.free(self.k + self.v)
        self._column_backward([self._up], up, latent.kv_rank)
        live.allocate(self._shared)
        live.transient(self._shared)
        live.free(self._shared)
        self._scattered(latent.rope_head_dim)
        self._norm_backward(latent.kv_rank)
        live.free(self._low(latent.kv_rank))
        both = latent.kv_rank + latent.rope_head_dim
        live.allocate(self._low(both))
        live.free(2 * self._low(both))  # its two pieces, and what the norm was given
        self._map_backward(both)

    def _map_backward(self, width: int) -> None:
        """A map of the norm's output to a low rank, of whole weights."""
        self.live.allocate(self.stream)
        self.live.transient(self._piece([width * self.pieces], self.s.hidden))
        self.live.free(0 if self.apart else self._low(width))

    def _columns(self) -> list[tuple[list[int], int]]:
        latent = self._latent
        return [([self.s.q], latent.q_rank or self.s.hidden), ([self._up], latent.kv_rank)]
