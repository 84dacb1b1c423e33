"""One device, and one link between two of them."""

import reprlib
from collections.abc import Mapping
from dataclasses import field, fields, replace
from typing import Any, Literal, NamedTuple

from shardwise.errors import UserError
from shardwise.records import dataclass

LEAST, MOST = 1e-15, 1e24
"""Limits of every number of a device: outside them there is no machine, and times overflow."""


DEVICE_KINDS = ("cuda", "cpu", "tpu", "neuron", "mps")
"""Kinds of devices: NVIDIA's and AMD's GPUs, as torch names them, processors, Google's TPUs, AWS's Trainium, and
Apple's GPUs."""


def check_number(what: str, value: float | None, zero: bool = False) -> None:
    """Raise `UserError` for a figure that no machine has. zero: whether it may be that."""
    if value is None or (0 if zero else LEAST) <= value <= MOST:
        return
    if not 0 <= value < float("inf") or value == 0:
        wanted = "finite and not negative" if zero else "positive"
    else:
        wanted = f"at most {MOST:g}" if value > MOST else f"at least {LEAST:g}"
    raise UserError(f"{what} must be {wanted}, not {reprlib.repr(value)}")


@dataclass(frozen=True)
class Device:
    """One device. A number that was neither measured nor published is None, never a guess.

    memory_bytes: what a program can allocate, in bytes; for kind "cpu" the whole machine's, shared by all its ranks.
    memory_bandwidth: bytes/s. peak_flops: torch's dtype name -> dense FLOP/s (a multiply-add counts as two), "tfloat32"
    apart from "float32". source: where the figures are from. measured: results of `shardwise calibrate device`, tables
    that `predict.time` reads (`docs/prediction.md` describes them); empty if not measured. watts: power limit of the
    board, without the host.
    """

    name: str
    kind: Literal["cuda", "cpu", "tpu", "neuron", "mps"]
    memory_bytes: int | None
    memory_bandwidth: float | None
    peak_flops: Mapping[str, float] = field(default_factory=dict, hash=False)
    source: str = ""
    measured: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False)
    watts: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in DEVICE_KINDS:
            *others, last = DEVICE_KINDS
            raise UserError(f"device {self.name!r}: kind must be {', '.join(others)} or {last}, not {self.kind!r}")
        figures = {"memory_bytes": self.memory_bytes, "memory_bandwidth": self.memory_bandwidth, "watts": self.watts}
        figures |= {f"peak_flops.{dtype}": value for dtype, value in self.peak_flops.items()}
        for what, value in figures.items():
            check_number(f"device {self.name!r}: {what}", value)

    def peak(self, dtype: str) -> float | None:
        """Dense FLOP/s in that dtype, None when not known."""
        return self.peak_flops.get(dtype)


@dataclass(frozen=True)
class Speed:
    """Bytes per second in a collective of `nbytes` bytes per rank: in a core's cache, or not.

    Each in bytes/s, None for what takes no time of its own: bandwidth, of what comes from another rank; addition, of
    what is added, on top of its coming; copy, of what a rank copies within its own memory. again: of what has come
    before and was not written since, as in a benchmark's repeated calls, which find it in their cache; None where that
    is no faster.
    """

    nbytes: float
    bandwidth: float | None
    addition: float | None = None
    copy: float | None = None
    again: float | None = None

    def __post_init__(self) -> None:
        for what in ("nbytes", "bandwidth", "addition", "copy", "again"):
            check_number(f"a link's speed: {what}", getattr(self, what))


class LinkKind(NamedTuple):
    """Constants of one kind of link. alpha: seconds per step of a collective; share: fraction of the bandwidth that
    rings reach, None where it depends on the device; words: name for people; source: of both numbers."""

    alpha: float
    share: float | None
    words: str
    source: str


KINDS = {
    "nvlink": LinkKind(
        (10.4e-6 - 5.2e-6) / 6, None, "NVLink",
        "alpha: as NVLink4's, ai-dynamo/aiconfigurator 095f58a51c4c, nccl_perf.parquet: small all-gathers, "
        "(t(8 ranks) - t(2)) / 6",
    ),
    "pcie": LinkKind(
        2.1e-6, 0.82, "PCIe, through switches",
        "alpha: haohervchb/sglang-V100 PR 2, NCCL on 4 GPUs behind one PCIe switch, 4 to 16 KB in 19.4 to 22.3 µs, "
        "less 8 µs, over 6 steps; share: flashinfer PR 4870, a ring of 4 over PCIe 4.0 at 25.46 GB/s",
    ),
    "host": LinkKind(
        4.25e-6, 0.67, "PCIe, through the host",
        "alpha: vllm issue 50576, NCCL on 8 GPUs in two PCIe 4.0 islands, 8 to 64 KB in 49.8 to 95.8 µs, the mean less "
        "8 µs, over 14 steps; share: flashinfer PR 4870, a ring of 8 over two islands at 20.75 GB/s",
    ),
    "network": LinkKind(
        2.7e-6, None, "the network between nodes", "alpha: NCCL, src/graph/tuning.cc, hwLat, NET, ring, LL"
    ),
    "omni-path": LinkKind(
        2.7e-6, 0.405, "Omni-Path between nodes",
        "alpha: as network's; share: bigscience-workshop/bigscience 9e64ede, experiments/bandwidth/"
        "all_reduce_bench-a100-n4.txt, NCCL 2.10 on 32 A100: 40.5 Gb/s through hfi1_3, one of a node's four links of "
        "100 Gb/s (\"[send] via NET/IB/3\" on both channels)",
    ),
}  # fmt: skip
"""Kinds of links. Where a cluster does not give a link's alpha, it is its kind's."""

PCIE = ("pcie", "host")
MOST_OVER_PCIE = 64e9
"""Bytes/s up to which a link of unknown kind between GPUs of a node counts as PCIe through the host: PCIe 5.0 x16."""


@dataclass(frozen=True)
class Link:
    """Connection between two devices, in one direction: a message of n bytes takes alpha + n / bandwidth.

    alpha: seconds per message; bandwidth: bytes/s per device. None where not known. source: where the figures are from.
    kind: one of `KINDS`, empty where not known.

    Measured values only: startup, seconds of a collective with no rounds; copy_alpha, additional seconds of a round in
    which a rank copies within its memory; reads, whether ranks read each other's memory instead of sending messages;
    speeds, by size, smallest first; `bandwidth` replaces them where only one number can be used.

    name: what people call it, such as "NVLink4" or "NDR400"; empty where it has none.
    """

    alpha: float | None
    bandwidth: float | None
    source: str = ""
    startup: float = 0.0
    copy_alpha: float = 0.0
    reads: bool = False
    speeds: tuple[Speed, ...] = ()
    kind: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        if self.kind and self.kind not in KINDS:
            raise UserError(f"a link's kind must be one of {', '.join(KINDS)}, not {self.kind!r}")
        for what in ("alpha", "startup", "copy_alpha"):
            check_number(f"a link's {what}", getattr(self, what), zero=True)
        check_number("a link's bandwidth", self.bandwidth)
        sizes = [speed.nbytes for speed in self.speeds]
        if sizes != sorted(set(sizes)):
            raise UserError("a link's speeds must stand in the order of their sizes, each size once")


RATES = ("link_bandwidth", "links_bandwidth", "adamw_rate", "disk_read", "disk_write")


@dataclass(frozen=True)
class Host:
    """Host of one node. A number that was neither measured nor published is None, never a guess."""

    memory_bytes: int | None = None
    """Bytes of the node's memory, shared by its ranks. None for a CPU cluster: its devices' memory is the host's."""
    link_bandwidth: float | None = None
    """Bytes/s between the host and one device, in one direction, from pinned memory. On a CPU, of a copy in memory."""
    links_bandwidth: float | None = None
    """Bytes/s between the host and all devices of the node at once, in one direction."""
    adamw_rate: float | None = None
    """Parameters/s that the node's cores update by AdamW in fp32, all ranks together."""
    disk_read: float | None = None
    """Bytes/s read from the node's disks by direct I/O, all ranks together."""
    disk_write: float | None = None
    """Bytes/s written to the node's disks by direct I/O, all ranks together."""
    source: str = ""
    """Source of the numbers."""

    def __post_init__(self) -> None:
        for name in ("memory_bytes", *RATES):
            check_number(f"host.{name}", getattr(self, name))

    def part(self, devices: int, of_all: int) -> "Host":
        """Part of a host of `of_all` devices that comes with `devices` of them."""
        share = min(1.0, devices / of_all)
        if share == 1.0:
            return self
        shared = ("links_bandwidth", "adamw_rate", "disk_read", "disk_write")
        rates = {name: value * share for name in shared if (value := getattr(self, name)) is not None}
        memory = None if self.memory_bytes is None else int(self.memory_bytes * share)
        return replace(self, memory_bytes=memory, source=f"{devices} of {of_all} devices' part: {self.source}", **rates)


UNKNOWN = Host()
HOST_FIELDS = tuple(field.name for field in fields(Host))
