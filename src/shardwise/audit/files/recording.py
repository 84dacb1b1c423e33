"""One rank's recording, read from a file, and the words that files have for operations, dtypes, groups and lines."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import PurePath
from typing import Any

from shardwise.audit.reading import RankRecording

Interval = tuple[int, int]
"""(begin, end) in nanoseconds."""


@dataclass(frozen=True)
class Recording(RankRecording):
    """What a file tells about one rank; `rank` is `UNRANKED` where neither the file nor its name has it."""

    path: str = ""
    kind: str = ""
    """Of file: "Flight Recorder", "Kineto", "execution trace", "Chakra"."""
    groups: int = 0
    """Groups that the file lists."""
    spans: Mapping[str, Sequence[Interval]] | None = None
    """What the rank did, by class (`waterfall.CLASSES`) but for collectives; None where the file has no times."""
    windows: tuple[tuple[str, Interval], ...] = ()
    """(name, window) of the steps that the file marks."""
    device: bool = False
    """Whether spans are a device's."""
    unknown: tuple[str, ...] = ()
    """Questions that the file cannot answer."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for numbers that no program has."""
        if not UNRANKED <= self.rank < MOST_RANKS:
            raise ValueError(f"rank {self.rank}")
        for call in self.calls:
            if not all(0 <= size < 1 << 63 for size in (call.inputs, call.outputs)):
                raise ValueError("a size out of range")
            if not all(0 <= rank < MOST_RANKS for rank in (*call.group, call.peer or 0)):
                raise ValueError("a rank out of range")
            if not all(0 <= moment < 1e10 for moment in (call.begin, call.end) if moment is not None):
                raise ValueError("a time out of range")


UNRANKED = -1
MOST_RANKS = 1 << 24

_OPERATIONS = {
    "sendrecv": "send_recv", "allgatherintotensor": "all_gather_into", "allgatherbase": "all_gather_into",
    "allgathersingle": "all_gather_into", "allgather": "all_gather", "reducescatter": "reduce_scatter",
    "allreducebarrier": "barrier", "allreduce": "all_reduce", "alltoall": "all_to_all",
    "broadcast": "broadcast", "barrier": "barrier", "reduce": "reduce", "gather": "gather",
    "scatter": "scatter", "send": "send", "recv": "recv",
}  # fmt: skip
"""Beginning of a name without all but its letters -> operation; the first that suits."""

KERNEL = re.compile(r"(?:nccl|rccl)x?(?:dev)?kernel_?", re.IGNORECASE)
_WRAPPER = re.compile(r"^(?:\w+::?:?(?=\w))?_*")


def operation(name: str) -> str:
    """torch's name of the collective that an event, a kernel or an entry is; "" where it is none."""
    squeezed = re.sub("[^a-z]", "", _WRAPPER.sub("", KERNEL.sub("", name)).lower())
    return next((op for start, op in _OPERATIONS.items() if squeezed.startswith(start)), "")


_DTYPES = {
    "double": ("float64", 8), "float": ("float32", 4), "half": ("float16", 2), "bfloat16": ("bfloat16", 2),
    "long": ("int64", 8), "longint": ("int64", 8), "int": ("int32", 4), "short": ("int16", 2), "char": ("int8", 1),
    "signedchar": ("int8", 1), "byte": ("uint8", 1), "unsignedchar": ("uint8", 1), "bool": ("bool", 1),
    "float8_e4m3fn": ("float8_e4m3fn", 1), "float8_e5m2": ("float8_e5m2", 1),
    "complexfloat": ("complex64", 8), "complexdouble": ("complex128", 16),
}  # fmt: skip
"""c10's name, or C++'s -> (torch's, bytes)."""


def dtype_of(name: object) -> tuple[str, int]:
    """(torch's name, bytes of an element) of a dtype in the words of c10, C++ or an execution trace; ("", 0)."""
    word = str(name).lower().removeprefix("tensor(").rstrip(")").removeprefix("c10::").replace(" ", "")
    return _DTYPES.get(word, ("", 0))


def nbytes(shapes: Iterable[Any], dtypes: Sequence[object]) -> int:
    """Bytes of tensors; one dtype stands for all of them where there are fewer."""
    total = 0
    for i, shape in enumerate(shapes):
        total += prod(map(int, shape)) * (dtype_of(dtypes[min(i, len(dtypes) - 1)])[1] if dtypes else 0)
    return total


def ranks_of(value: object) -> tuple[int, ...]:
    """Global ranks of a list or its text, "[0, 1]"; () for another text, and for one that leaves out ranks."""
    if isinstance(value, str):
        value = re.findall(r"\d+", value) if re.fullmatch(r"[\[(][\d, ]*[\])]", value) else ()
    return tuple(map(int, value)) if isinstance(value, (list, tuple)) else ()


def rank_in_name(path: str) -> int:
    """The rank in a file's name, or `UNRANKED`: nccl_trace_rank_3, worker3_step_12.json, fr_3.json."""
    name = PurePath(path).name
    match = re.search(r"(?:rank|worker)[-_.]?(\d+)", name) or re.search(r"(?<=[-_.])(\d+)(?:\.[a-z]+)*$", name)
    return int(match[1]) if match else UNRANKED


_LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python\d|^<|[/\\]torch[/\\]")


def user_line(frames: Sequence[Mapping[str, Any]]) -> str:
    """file:line of the innermost frame outside of libraries, of the innermost one where there is no other."""
    lines = [f"{frame.get('filename', '')}:{frame.get('line', 0)}" for frame in frames]
    return next((line for line in lines if not _LIBRARY.search(line)), lines[0] if lines else "")
