"""Time of collectives inside a step: the schedules' prices on links as fast as a library uses them.

One function, `Collectives.seconds`, prices a collective for every command. Prices come from `shardwise.schedule`. On
top of them go what NCCL was measured to take over them (by collective, ranks and size, over NVLink inside a node), and
the share of a network that training runs reach between nodes (`devices.json`). Over PCIe NCCL takes as many steps as
over NVLink, each of the latency of that kind of link (`cluster.KINDS`). Between nodes of CPUs gloo runs one schedule
for each collective, whatever is cheapest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.arrays import Num
from shardwise.cluster import KINDS, Cluster, Link
from shardwise.cluster.catalog import lookup
from shardwise.errors import UserError
from shardwise.layout import Layout
from shardwise.layout.algorithms import schedule_of
from shardwise.predict.time.constants import Constants
from shardwise.schedule import CommSchedule
from shardwise.schedule.algorithms import Algorithm
from shardwise.schedule.choose import Pricer, pricer
from shardwise.schedule.network import Network
from shardwise.schedule.price import Price, profile

if TYPE_CHECKING:
    from numpy.typing import NDArray


MEASURED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Collectives that a library was measured on."""

GLOO = {"all-gather": "ring", "all-reduce": "ring", "reduce-scatter": "pairwise", "all-to-all": "pairwise"}
"""Collective -> the schedule whose bytes gloo sends: its own rings (gloo, allgather_ring.h, allreduce.cc), and messages
between all pairs; of such messages and a sum the runtime makes reduce-scatters (runtime/transport/process_group.py)."""

_SIZES = 2.0 ** np.arange(8, 43)


class Collectives:
    """Seconds of collectives on one cluster; curves by size are kept for each group that is asked for.

    layout: whose `algorithm=` says which schedule a collective runs; its price has no library's measurements in it.
    """

    def __init__(self, cluster: Cluster, constants: Constants, layout: Layout | None = None) -> None:
        self._layout = layout or Layout()
        self.per_node, self.over_pcie = cluster.devices_per_node, cluster.over_pcie
        self.base = constants.value("collective_s")
        self._constants = constants
        self._measured, self._timed = constants.collectives, constants.timed
        self._cluster, self._links = _achieved(cluster, constants), {"link": cluster.intra, "network": cluster.inter}
        self._curve = cache(self._sampled)
        self._paths, self._whole = cluster.paths, cluster
        self._seen_by = cache(lambda *group: Collectives(cluster.seen_by(*group), constants, layout))
        self._apart = cache(self._as_apart)

    def seconds(self, op: str, nbytes: Num, ranks: Num, stride: Num = 1, reads_peers: bool = False) -> Num:
        """Seconds of one collective on a full tensor of `nbytes` bytes over `ranks` devices that lie `stride` apart;
        every device of a node is in one such group, and all work at once. Numbers or arrays.

        reads_peers: the software has a kernel for all-reduces of small messages that reads the peers' buffers at once,
        over NVLink inside a node (torch, c10d, intra_node_comm; vLLM, custom_all_reduce.py: "not supported on more than
        two PCIe-only GPUs"); the lesser of both counts.
        """
        if self._paths is not None:
            return self._by_pair(op, nbytes, ranks, stride, reads_peers)
        price = self._library(op, nbytes, ranks, stride)
        if not reads_peers or op != "all_reduce" or self.over_pcie:
            return price
        known, p = self._constants, np.asarray(ranks)
        near = (p > 1) & ((p - 1) * stride < self.per_node)
        link = self._cluster.intra.bandwidth or 1.0  # none where a node has one device: then nothing is near
        read = known.value("read_s") + (p - 1) * (known.value("signal_s") + nbytes / link)
        return np.where(near, np.minimum(read, price), price)[()]

    def _by_pair(self, op: str, nbytes: Num, ranks: Num, stride: Num, reads_peers: bool) -> Num:
        """`seconds` where links inside a node differ: each group's as it sees the cluster."""
        pairs = op == "all_to_all"
        return _by_group(
            nbytes,
            ranks,
            stride,
            lambda n, p, apart: self._seen_by(p, apart, pairs).seconds(op, n, p, apart, reads_peers),
        )

    def _library(self, op: str, nbytes: Num, ranks: Num, stride: Num) -> Num:
        """`seconds` of NCCL, or of what was measured in its place."""
        return _by_group(
            nbytes,
            ranks,
            stride,
            lambda n, p, apart: self._curve_of(op, p, apart).at(n) if p > 1 else 0.0 * np.asarray(n),
        )

    def _curve_of(self, op: str, ranks: int, stride: int) -> _Curve:
        """The curve of the densest group with the same links: inside a node distance does not matter, and neither does
        it between nodes where each has one rank."""
        schedule = schedule_of(self._layout, op, range(0, ranks * stride, stride))
        inside = (ranks - 1) * stride < self.per_node
        return self._curve(op, ranks, 1 if inside else min(stride, self.per_node), schedule)

    def _widening(self, op: str) -> int:
        """On CPUs a schedule sends a reduce-scatter of bf16 in fp32 (`layout.algorithms`): bytes on the wire over those
        of the tensor. At stage 1 what is summed is the accumulator, whose width the caller knows."""
        layout = self._layout
        if layout.algorithm == "auto" or op != "reduce_scatter" or layout.stage == 1:
            return 1
        return 2 if layout.dtype == "bfloat16" and self._cluster.device.kind == "cpu" else 1

    def streamed(self, nbytes: Num, which: str, ranks: Num = 1) -> Num:
        """Seconds in which a kernel of expert parallelism sends `nbytes` bytes over a "link" inside a node, to `ranks`
        devices there, or over the "network", at the share of it that such kernels reach. Raises `UserError` where its
        bandwidth is not known."""
        if which == "link" and self._paths is not None:
            return _by_group(
                nbytes, ranks, 1, lambda n, p, _: self._seen_by(p, 1, True).streamed(n, which) if p > 1 else 0.0 * n
            )
        bandwidth = self._links[which].bandwidth
        if not bandwidth:
            if not np.any(nbytes):
                return 0.0 * nbytes
            name = ", --network 100Gb, or" if which == "network" else ":"
            raise UserError(f"the bandwidth of the {which} is not known{name} give it in a TOML file")
        share = self._cluster.network_share if which == "network" else 1.0
        return nbytes / (bandwidth * share * self._constants.value(f"exchange_{which}_share"))

    def hop(self, nbytes: Num, stride: Num, ranks: Num = 2) -> Num:
        """Seconds that one message takes to a device `stride` ranks away; of a chain of so many ranks, the message that
        has the farthest to go. Raises `UserError` for links not known."""
        if self._paths is not None:
            # Over the slowest pair of devices that far apart.
            return _by_group(nbytes, ranks, stride, lambda n, p, apart: self._apart(apart).hop(n, apart, p))
        away = (np.asarray(ranks) - 1) * stride >= self.per_node
        intra, inter = self._cluster.intra, self._cluster.inter
        if self._cluster.nodes > 1 and not inter.bandwidth and self._cluster.device.kind != "cpu" and np.any(away):
            raise UserError("the bandwidth between nodes is not known: name the network, --network 100Gb")
        across = inter if inter.bandwidth else intra
        if not (intra.bandwidth and across.bandwidth):
            raise UserError("the bandwidth inside a node is not known; give [intra] bandwidth in a TOML file")
        inside = nbytes / intra.bandwidth + (intra.alpha or 0.0) + self.base
        if "message" in self._timed:
            inside = _between(nbytes, self._timed["sizes"], self._timed["message"])
        share = self._cluster.network_share
        return np.where(away, nbytes / (across.bandwidth * share) + (across.alpha or 0.0) + self.base, inside)

    def _as_apart(self, stride: int) -> Collectives:
        whole, cluster = self._whole, self._whole.without_paths()
        if whole.paths is not None and stride < whole.devices_per_node:
            cluster = replace(cluster, intra=whole.paths.apart(stride))
        return Collectives(cluster, self._constants, self._layout)

    def _sampled(self, op: str, ranks: int, stride: int, schedule: CommSchedule | None) -> _Curve:
        group = tuple(index * stride for index in range(ranks))
        on_first = sum(1 for device in group if device < self.per_node)
        sharing = max(1, self.per_node // on_first) if group[-1] >= self.per_node else 1
        prices = pricer(op, group, self._cluster, sharing=sharing)
        if schedule is not None:
            return _Curve(
                _Named(schedule, prices.network, self._widening(op)), [schedule.algorithm], np.ones(len(_SIZES)), 0.0
            )
        names = _names(prices, ranks)
        if group[-1] >= self.per_node:
            if self._cluster.device.kind == "cpu" and prices.collective in GLOO:
                names = [GLOO[prices.collective]]
            return _Curve(prices, names, np.ones(len(_SIZES)), self.base)
        over = self._over(op, ranks)
        if not self.over_pcie or not self._measured:
            return _Curve(prices, names, over, 0.0)
        # What NCCL takes at once, however many steps, is in what was measured over NVLink; the rest is steps.
        nvlink = self._over_nvlink(op, ranks)
        return _Curve(prices, names, np.maximum(over - self.base / nvlink, 1.0), self.base)

    def _over_nvlink(self, op: str, ranks: int) -> NDArray:
        """The schedules' prices at the sampled sizes on the links that NCCL was measured on."""
        entry, known = lookup(self._constants.nccl), self._constants
        cluster = _achieved(Cluster(1, ranks, entry.device, entry.intra, entry.inter), known)
        prices = pricer(op, tuple(range(ranks)), cluster)
        names = _names(prices, ranks)
        return np.array([min(prices.pick(float(n), name)[1].seconds for name in names) for n in _SIZES])

    def _over(self, op: str, ranks: int) -> NDArray:
        """Measured over priced seconds inside a node at the sampled sizes, of the number of ranks that is nearest."""
        name = op.removesuffix("_into")
        if name in self._timed:
            nearest, seconds = _nearest(self._timed[name], ranks)
            host = replace(self._cluster.without_paths(), nodes=1, devices_per_node=max(nearest, self.per_node))
            prices = pricer(op, tuple(range(nearest)), host)
            names, sizes = _names(prices, nearest), self._timed["sizes"]
            priced = [min(prices.pick(float(n), name)[1].seconds for name in names) for n in sizes]
            logs = np.log(np.array(seconds) / priced)
        elif self._measured:
            sizes, (_, logs) = self._measured["sizes"], _nearest(self._measured[name], ranks)
        else:
            return np.ones(len(_SIZES))
        return np.exp(np.interp(np.log(_SIZES), np.log(sizes), logs))


class _Named:
    """The price of one schedule, in the form in which `Pricer` has all algorithms'."""

    def __init__(self, schedule: CommSchedule, network: Network, widening: int) -> None:
        self._profile, self._widening = profile(schedule, network), widening

    def pick(self, nbytes: float, algorithm: str) -> tuple[str, Price]:
        """As `Pricer.pick`."""
        return algorithm, self._profile.at(self._widening * nbytes)


class _Curve:
    """Seconds by size: the cheapest algorithm's price times what was measured over it, and more. Sampled at powers of
    two; a price is the least of lines in the size, straight between the samples but where the least changes."""

    def __init__(self, prices: Pricer | _Named, names: list[str], over: NDArray, more: float) -> None:
        cheapest = [min(prices.pick(float(size), name)[1].seconds for name in names) for size in _SIZES]
        self._seconds = rising(np.array(cheapest) * over + more)

    def at(self, nbytes: Num) -> Num:
        return np.interp(nbytes, _SIZES, self._seconds)


def _by_group(nbytes: Num, ranks: Num, stride: Num, of: Callable[[Num, int, int], Num]) -> Num:
    """Seconds of bytes in groups of so many ranks that lie so far apart, numbers or arrays; `of` is asked once for all
    bytes of equal groups."""
    if np.ndim(ranks) == np.ndim(stride) == 0:
        return of(nbytes, int(ranks), int(stride))
    nbytes, ranks, stride = np.broadcast_arrays(np.asarray(nbytes, dtype=float), ranks, stride)
    seconds = np.zeros(nbytes.shape)
    for p, apart in {*zip(ranks.ravel().tolist(), stride.ravel().tolist(), strict=True)}:
        here = (ranks == p) & (stride == apart)
        seconds[here] = of(nbytes[here], int(p), int(apart))
    return seconds[()]


def rising(readings: NDArray) -> NDArray:
    """Isotonic regression along the first axis: where a reading is above a later one, all between count as their mean.
    Of the stretches that begin up to a place, it is the greatest of their least means from there to any end."""
    first, last = np.ogrid[: len(readings), 1 : len(readings) + 1]
    shape = (*last.shape[1:], *last.shape[1:], *(1,) * (readings.ndim - 1))
    sums = np.concatenate([np.zeros_like(readings[:1]), np.cumsum(readings, 0)])
    means = (sums[None, 1:] - sums[:-1, None]) / np.maximum(last - first, 1).reshape(shape)
    least = np.minimum.accumulate(means[:, ::-1], 1)[:, ::-1]
    return np.asarray(np.where((last > first).reshape(shape), least, -np.inf).max(0))


def _names(prices: Pricer, ranks: int) -> list[str]:
    return [found.name for found in prices.candidates if _worth_asking(found, ranks, prices.network.reads)]


def _worth_asking(found: Algorithm, ranks: int, reads: bool) -> bool:
    """Whether an algorithm can be the cheapest of its collective. The two that take long to price are left out where
    others are never dearer (a test holds them to that): pairwise reduce-scatter sends a ring's bytes in as many steps,
    and for a power of two halving and doubling beat pipelined trees, which send more."""
    if found.name == "double-tree":
        return ranks & (ranks - 1) != 0
    if (found.collective, found.name) == ("reduce-scatter", "pairwise"):
        return False
    return reads or not found.reads


def _nearest(table: Mapping[str, Any], ranks: int) -> tuple[int, Any]:
    """The entry of the number of ranks that is nearest."""
    known = min(table, key=lambda known: (abs(int(known) - ranks), int(known)))
    return int(known), table[known]


def _between(nbytes: Num, sizes: Sequence[float], seconds: Sequence[float]) -> Num:
    """Interpolated in the logarithms; in proportion to the bytes beyond the largest size."""
    found = np.exp(np.interp(np.log(np.maximum(nbytes, 1.0)), np.log(sizes), np.log(seconds)))
    return found * np.maximum(np.asarray(nbytes) / sizes[-1], 1.0)


def _achieved(cluster: Cluster, constants: Constants) -> Cluster:
    """The cluster with the bandwidth that collectives reach, and a latency where the catalog has none: the link kind's,
    else the family's."""
    near = replace(cluster.intra, kind="host") if cluster.over_pcie and not cluster.intra.kind else cluster.intra
    return replace(
        cluster,
        intra=_link(near, constants.value("link_share"), constants.value("link_alpha_s")),
        inter=_link(cluster.inter, constants.value("network_share"), constants.value("network_alpha_s")),
    )


def _link(link: Link, share: float, alpha: float) -> Link:
    if (kind := KINDS.get(link.kind)) and kind.share:
        alpha, share = kind.alpha, kind.share
    bandwidth = None if link.bandwidth is None else link.bandwidth * share
    return replace(link, alpha=alpha if link.alpha is None else link.alpha, bandwidth=bandwidth)
