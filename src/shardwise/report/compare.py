"""Two step reports against each other, rank by rank: every row of the ledger, every class of bytes.

By convention `a` is the prediction and `b` what was observed; any two reports may be compared.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from shardwise.codec import Json, keyed
from shardwise.errors import UserError
from shardwise.report.exposure import Exposure, exposures
from shardwise.report.printing import Printable
from shardwise.report.step_report import DTYPE_BYTES, HOMES, Bytes, LedgerRow, Role, StepReport
from shardwise.report.terminal import Renderable
from shardwise.report.units import format_ranks

_HEADING = "source model layout workload cluster time"
EXACT_CLASSES = ("parameters", "gradients", "optimizer", "saved", "comm", "cache")
"""The classes that a prediction must meet to the byte."""

PEAK_TOLERANCE = 0.05
"""Largest accepted difference of the predicted from the observed peak, as a share of the observed one."""


class LedgerKey(NamedTuple):
    """Key of one kind of collective: all of `LedgerRow` but the count."""

    phase: str
    op: str
    axes: str
    unit: str
    dtype: str
    elements: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of the full tensor of one call."""
        return self.elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class RolePair:
    """Ranks that have one role in `a` and one in `b`."""

    role: str
    ranks: tuple[int, ...]
    a: Role
    b: Role


@dataclass(frozen=True)
class ComparedRow(Json):
    """One kind of collective on the ranks of one role pair; a count is 0 on the side that lacks it."""

    json_keys = (
        "role phase=key.phase op=key.op axes=key.axes unit=key.unit dtype=key.dtype elements=key.elements "
        "count_a count_b equal"
    )

    role: str
    key: LedgerKey
    count_a: int
    count_b: int

    @property
    def equal(self) -> bool:
        return self.count_a == self.count_b


@dataclass(frozen=True)
class ComparedBytes:
    """Bytes of one class, or of their sum ("peak"), on each rank of one role pair.

    free: this class cannot be predicted, as with the activations of compiled blocks. home: "host" or "disk" for what is
    not on the device.
    """

    role: str
    byte_class: str
    a: int
    b: int
    free: bool = False
    home: str = ""

    @property
    def equal(self) -> bool:
        return self.a == self.b

    @property
    def relative(self) -> float:
        """(a - b) / b; infinite when only b is zero."""
        if self.a == self.b:
            return 0.0
        return (self.a - self.b) / self.b if self.b else math.inf

    @property
    def accepted(self) -> bool | None:
        """Whether the row meets its rule: exact classes to the byte, the peak within 5%. None: the rest has no rule."""
        if self.free:
            return None
        if self.byte_class in EXACT_CLASSES:
            return self.equal
        return abs(self.relative) <= PEAK_TOLERANCE if self.byte_class == "peak" else None

    def to_json(self) -> dict[str, Any]:
        sides = {"a": self.a, "b": self.b, "equal": self.equal}
        relative = self.relative if math.isfinite(self.relative) else None
        home = {"home": self.home} if self.home else {}
        return {"role": self.role, "class": self.byte_class, **home, **sides, "relative": relative}


@dataclass(frozen=True, repr=False)
class ReportComparison(Printable):
    """Differences between two step reports, or that there are none.

    pairs: the ranks that both reports know, split as finely as either report splits them. rows: ledger rows of each
    pair, in `a`'s order. bytes: the classes and the peak of each pair, the cache's where one has it. ranks_only_a,
    ranks_only_b: ranks that one report lacks. differences: in which settings (model, layout, workload, cluster) the
    reports differ, a text each.
    """

    a: StepReport
    b: StepReport
    pairs: tuple[RolePair, ...]
    rows: tuple[ComparedRow, ...]
    bytes: tuple[ComparedBytes, ...]
    ranks_only_a: tuple[int, ...]
    ranks_only_b: tuple[int, ...]
    differences: tuple[str, ...]

    @property
    def same_ranks(self) -> bool:
        """Both reports know the same ranks, and at least one."""
        return bool(self.pairs) and not self.ranks_only_a and not self.ranks_only_b

    @property
    def equal_ledger(self) -> bool:
        return self.same_ranks and all(row.equal for row in self.rows)

    @property
    def exact_classes_equal(self) -> bool:
        """Every rank holds the same bytes in every class of `EXACT_CLASSES`, but for what is free to differ."""
        exact = (row for row in self.bytes if row.byte_class in EXACT_CLASSES and not row.free)
        return self.same_ranks and all(row.equal for row in exact)

    @property
    def peak_error(self) -> float:
        """The largest |a - b| / b of any rank's peak; infinite when the reports share no rank."""
        return max((abs(row.relative) for row in self.bytes if row.byte_class == "peak"), default=math.inf)

    @property
    def labels(self) -> tuple[str, str]:
        """Names of the two sides for column heads: their sources, with A and B where these are the same."""
        if self.a.source != self.b.source:
            return self.a.source, self.b.source
        return f"A ({self.a.source})", f"B ({self.b.source})"

    @property
    def exposures(self) -> tuple[tuple[str, int, Exposure], ...]:
        """(side, lowest rank, figures) of each role of either side ("a", "b") that has a timeline."""
        sides = (("a", self.a), ("b", self.b))
        return tuple((side, rank, figures) for side, report in sides for rank, figures in exposures(report))

    def tables(self) -> Iterator[Renderable]:
        from shardwise.report.predictions import are_predictions, prediction_tables
        from shardwise.report.tables import comparison_tables

        if are_predictions(self.a, self.b):
            return prediction_tables(self.a, self.b)
        return iter([comparison_tables(self)])

    def conclusion(self) -> str:
        from shardwise.report.predictions import are_predictions, prediction_conclusion
        from shardwise.report.tables import verdict

        if are_predictions(self.a, self.b):
            return prediction_conclusion(self.a, self.b)
        return verdict(self).plain

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary; an infinite relative difference is null."""
        pairs = [{"role": p.role, "ranks": list(p.ranks), "role_a": p.a.role, "role_b": p.b.role} for p in self.pairs]
        return {
            "a": keyed(self.a, _HEADING),
            "b": keyed(self.b, _HEADING),
            **keyed(self, "equal_ledger exact_classes_equal"),
            "peak_error": self.peak_error if math.isfinite(self.peak_error) else None,
            **keyed(self, "differences ranks_only_a ranks_only_b"),
            "roles": pairs,
            **keyed(self, "rows bytes"),
            "exposures": [{"side": side, "rank": rank} | result.to_json() for side, rank, result in self.exposures],
        }


def compare(a: StepReport, b: StepReport) -> ReportComparison:
    """Compare two reports. Raises `UserError` when one of them gives a rank to two roles."""
    roles_a, roles_b = _role_of_rank(a), _role_of_rank(b)
    pairs = tuple(_pairs(roles_a, roles_b))
    compiled = any(report.source == "measured" and "compile=" in report.layout for report in (a, b))
    return ReportComparison(
        a=a,
        b=b,
        pairs=pairs,
        rows=tuple(row for pair in pairs for row in _ledger_rows(pair)),
        bytes=tuple(row for pair in pairs for row in _byte_rows(pair, compiled)),
        ranks_only_a=tuple(sorted(roles_a.keys() - roles_b.keys())),
        ranks_only_b=tuple(sorted(roles_b.keys() - roles_a.keys())),
        differences=tuple(_differences(a, b)),
    )


def _role_of_rank(report: StepReport) -> dict[int, Role]:
    roles = {rank: role for role in report.roles for rank in role.ranks}
    if len(roles) != sum(len(role.ranks) for role in report.roles):
        raise UserError(f"damaged StepReport ({report.source}): a rank belongs to more than one role")
    return roles


def _pairs(roles_a: dict[int, Role], roles_b: dict[int, Role]) -> Iterator[RolePair]:
    """One pass over the ranks; what follows costs one step a pair, however many ranks share it."""
    ranks_of: dict[tuple[int, int], list[int]] = {}
    for rank in sorted(roles_a.keys() & roles_b.keys()):
        ranks_of.setdefault((id(roles_a[rank]), id(roles_b[rank])), []).append(rank)
    taken: set[str] = set()
    for ranks in map(tuple, ranks_of.values()):
        a, b = roles_a[ranks[0]], roles_b[ranks[0]]
        names = [role.role for role in (a, b) if len(role.ranks) == len(ranks) and role.role not in taken]
        name = names[0] if names else format_ranks(ranks)
        taken.add(name)
        yield RolePair(name, ranks, a, b)


def _ledger_rows(pair: RolePair) -> Iterator[ComparedRow]:
    a, b = _counts(pair.a.ledger), _counts(pair.b.ledger)
    for key in {**a, **b}:
        yield ComparedRow(pair.role, key, a[key], b[key])


def _counts(ledger: tuple[LedgerRow, ...]) -> Counter[LedgerKey]:
    counts: Counter[LedgerKey] = Counter()
    for row in ledger:
        counts[LedgerKey(row.phase, row.op, row.axes, row.unit, row.dtype, row.elements)] += row.count
    return counts


def _byte_rows(pair: RolePair, compiled: bool) -> Iterator[ComparedBytes]:
    a, b = asdict(pair.a.bytes), asdict(pair.b.bytes)
    for name in Bytes.__dataclass_fields__:
        if name == "cache" and not (a[name] or b[name]):
            continue
        yield ComparedBytes(pair.role, name, a[name], b[name], free=compiled and name == "saved")
    yield ComparedBytes(pair.role, "peak", pair.a.peak_bytes, pair.b.peak_bytes, free=compiled)
    for home in HOMES:
        a, b = asdict(getattr(pair.a, home)), asdict(getattr(pair.b, home))
        for name in EXACT_CLASSES:
            if a[name] or b[name]:
                yield ComparedBytes(pair.role, name, a[name], b[name], home=home)


def _differences(a: StepReport, b: StepReport) -> Iterator[str]:
    for name in ("model", "layout", "workload", "cluster"):
        # A report read from a file has lists where one built in memory may have tuples: compare their JSON.
        x, y = (json.loads(json.dumps(getattr(report, name), default=str)) for report in (a, b))
        if isinstance(x, dict) and isinstance(y, dict):
            changed = [k for k in x | y if x.get(k) != y.get(k)]
            if changed:
                yield f"{name}: " + ", ".join(f"{k} {x.get(k)!r} / {y.get(k)!r}" for k in changed)
        elif x != y:
            yield f"{name}: {x or 'none'} / {y or 'none'}"
