"""How replicas of a model agree: in lockstep, through parameter servers, or now and then. Free of torch.

A replica is what trains together: under `sync=local` one of `replicas` equal parts of the data-parallel ranks, each
with the layout's other splits; under `ps`, `async` and `ssp` a worker, with one data-parallel rank. Servers keep the
master weights and the optimizer state of a key range each. Sources: Li et al. 2014 (parameter server), Ho et al. 2013
(SSP), Stich 2019 (local SGD), Douillard et al. 2023 (DiLoCo).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.errors import LayoutError
from shardwise.layout.axes import CP, EP, PP
from shardwise.records import dataclass

if TYPE_CHECKING:
    from shardwise.layout.layout import Layout

SYNCS = ("allreduce", "ps", "async", "ssp", "local")
SERVED = ("ps", "async", "ssp")
"""Those with parameter servers."""
OUTERS = ("average", "nesterov")
MOMENTS = ("own", "average")
"""What an outer step does with the inner optimizer's moments: replicas keep their own, or take the mean of all."""
OUTER_BITS = (0, 4, 8)
"""Bits of outer gradients on the wire; 0: full precision."""
OWN = "own"
"""After a number of servers: on ranks of their own."""
_KEYS = {
    "servers": SERVED,
    "staleness": ("ssp",),
    "backup": ("ps",),
    "damped": ("async",),
    "every": ("local",),
    "outer": ("local",),
    "outer_bits": ("local",),
    "moments": ("local",),
    "replicas": ("local",),
}
"""Key -> the values of sync that it means something for."""
_ALONE = (*PP, *CP, *EP, "zero")
"""Keys that a worker of parameter servers leaves as they are by default."""


@dataclass(frozen=True)
class Servers:
    """Parameter servers of a layout."""

    count: int
    own: bool
    """Whether they are ranks of their own, after those of the workers; else server s is in the process of rank s."""

    @classmethod
    def parse(cls, text: str) -> Servers:
        """Read `2` or `2:own`; "" is one server. Raises `LayoutError`."""
        number, colon, word = text.partition(":")
        if not (number or "1").isdecimal() or int(number or 1) < 1 or (word != OWN if colon else word):
            raise LayoutError(f"layout: servers={text} is not a number of servers, such as 2, or 2:{OWN} on own ranks")
        return cls(int(number or 1), bool(colon))

    def __str__(self) -> str:
        return f"{self.count}:{OWN}" if self.own else "" if self.count == 1 else str(self.count)


def names_of(layout: Layout) -> tuple[str, str]:
    """What computes gradients and what they meet in, in words: ("worker", "server")."""
    if layout.sync in SERVED:
        return "worker", "server"
    return ("replica", "outer step") if layout.sync == "local" else ("rank", "all-reduce")


def check_sync(layout: Layout) -> None:
    """Raise `LayoutError` when the keys of `sync` contradict each other or the others; make `servers` and `replicas`
    canonical."""
    if layout.sync not in SYNCS:
        import difflib

        near = difflib.get_close_matches(layout.sync, SYNCS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise LayoutError(f"layout: sync={layout.sync} is unknown; {hint}choices: {', '.join(SYNCS)}")
    for key, values in _KEYS.items():
        value = getattr(layout, key)
        if value != type(layout).__dataclass_fields__[key].default and layout.sync not in values:
            raise LayoutError(f"layout: {key}={value} needs sync={' or sync='.join(values)}, not sync={layout.sync}")
    if layout.sync == "local":
        _check_local(layout)
    elif layout.sync in SERVED:
        _check_served(layout)


def _check_local(layout: Layout) -> None:
    if layout.every < 1:
        raise LayoutError("layout: sync=local needs the number of local steps between two outer ones, such as every=20")
    if layout.outer_bits not in OUTER_BITS:
        raise LayoutError(f"layout: outer_bits={layout.outer_bits} is not one of {', '.join(map(str, OUTER_BITS))}")
    replicas = layout.replicas or layout.dp
    if layout.dp % replicas:
        valid = ", ".join(str(n) for n in range(1, layout.dp + 1) if layout.dp % n == 0)
        raise LayoutError(f"layout: replicas={replicas} does not divide dp={layout.dp}; valid: {valid}")
    object.__setattr__(layout, "replicas", 0 if replicas == layout.dp else replicas)


def _check_served(layout: Layout) -> None:
    servers = Servers.parse(layout.servers)
    workers = layout.dp * layout.tp
    if not servers.own and servers.count > workers:
        raise LayoutError(
            f"layout: servers={servers.count} are more than the {workers} ranks whose processes they share; at most "
            f"servers={workers}, or servers={servers.count}:{OWN} on ranks of their own"
        )
    object.__setattr__(layout, "servers", str(servers))
    for key in _ALONE:
        value = getattr(layout, key)
        if value != type(layout).__dataclass_fields__[key].default:
            why = "its optimizer state is on the servers" if key == "zero" else "only tp and sp split a worker"
            raise LayoutError(f"layout: sync={layout.sync} does not go with {key}={value}: {why}; leave it out")
    if layout.offload != "none":
        raise LayoutError(
            f"layout: sync={layout.sync} does not go with offload={layout.offload}: the optimizer state is on the "
            "servers; leave one of them out"
        )
    if layout.backup and layout.backup >= layout.dp:
        raise LayoutError(
            f"layout: backup={layout.backup} of dp={layout.dp} workers leaves none; at most {layout.dp - 1}"
        )
