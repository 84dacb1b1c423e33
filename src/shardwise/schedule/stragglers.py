"""Slow ranks: by which factor the arithmetic of a rank's step is longer than usual. Free of torch and of clocks.

`--slow rank=1,factor=3` is a rank that is always slow; `rank=all,factor=3,probability=0.25` slows each step of each
rank now and then; `rank=all,spread=0.3` makes steps uneven by a log-normal factor. The factor is a function of seed,
rank and step alone: a run that waits for it and the prediction of that run draw the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from shardwise.errors import UserError, did_you_mean

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ALL, NONE = "all", "none"
"""Value of `rank` for every rank; text for no slow rank, which a resumed run may be given."""
MOST_FACTOR, MOST_SPREAD = 1000.0, 3.0
_KEYS = ("rank", "factor", "probability", "spread")
_EXAMPLE = "such as rank=1,factor=3 or rank=all,factor=3,probability=0.25"
_STEPS = 1 << 40
"""Random numbers of a rank before those of the next one."""


@dataclass(frozen=True)
class SlowRank:
    """One `--slow`."""

    rank: int | None
    """None: every rank, each with random numbers of its own."""
    factor: float = 1.0
    """At least 1."""
    probability: float = 1.0
    """Of a step to be slowed by `factor`."""
    spread: float = 0.0
    """Standard deviation of the logarithm of a further factor, whose median is 1."""

    @classmethod
    def parse(cls, text: str) -> SlowRank:
        """Read `rank=1,factor=3,probability=0.25,spread=0.3`, where factor or spread is required. Raises
        `UserError`."""
        values: dict[str, str] = {}
        for item in text.split(","):
            key, _, value = (word.strip() for word in item.partition("="))
            if key not in _KEYS:
                raise UserError(f"--slow {text}: no key {key!r}; {did_you_mean(key, _KEYS, 'keys:')}")
            if key in values:
                raise UserError(f"--slow {text}: {key} is there twice")
            values[key] = value
        rank = values.get("rank", "")
        if rank != ALL and not rank.isdecimal():
            raise UserError(f"--slow {text}: give rank=N or rank={ALL}, {_EXAMPLE}")
        if not values.keys() & {"factor", "spread"}:
            raise UserError(f"--slow {text}: by how much? Give factor or spread, {_EXAMPLE}")
        if "probability" in values and "factor" not in values:
            raise UserError(f"--slow {text}: probability needs the factor of a slow step, {_EXAMPLE}")
        limits = {"factor": (1.0, MOST_FACTOR), "probability": (0.0, 1.0), "spread": (0.0, MOST_SPREAD)}
        numbers = {name: _number(text, name, values[name], *span) for name, span in limits.items() if name in values}
        return cls(None if rank == ALL else int(rank), **numbers)

    def __str__(self) -> str:
        parts = [f"rank={ALL if self.rank is None else self.rank}"]
        for name, usual in (("factor", 1.0), ("probability", 1.0), ("spread", 0.0)):
            if (value := getattr(self, name)) != usual:
                parts.append(f"{name}={value:g}")
        return ",".join(parts)


@dataclass(frozen=True)
class Stragglers:
    """All slow ranks of a run; where several apply to one rank, their factors are multiplied."""

    slow: tuple[SlowRank, ...]
    seed: int = 0
    """Of the run."""

    @classmethod
    def parse(cls, texts: Sequence[str], seed: int = 0) -> Stragglers:
        """Read each `--slow`; `none` alone is no slow rank. Raises `UserError`."""
        return cls(() if tuple(texts) == (NONE,) else tuple(map(SlowRank.parse, texts)), seed)

    def check(self, ranks: int) -> None:
        """Raise `UserError` for a rank that is none of the `ranks` that compute."""
        for one in self.slow:
            if one.rank is not None and one.rank >= ranks:
                raise UserError(
                    f"--slow {one}: the ranks that compute are 0 to {ranks - 1}; --slow {NONE} for no slow rank"
                )

    @property
    def most(self) -> float:
        """The largest factor of a rank, as far as there is a largest one: without `spread`."""
        return math.prod(one.factor for one in self.slow)

    def factor(self, rank: int, step: int) -> float:
        import numpy as np

        return float(self.factors(range(rank, rank + 1), np.array([step]))[0, 0])

    def factors(self, ranks: range, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """Factors [ranks, steps]. steps: numbers of steps; of asynchronous workers, numbers of shares of the text."""
        import numpy as np

        rows = np.arange(ranks.start, ranks.stop, dtype=np.uint64)[:, None]
        counter = rows * np.uint64(_STEPS) + steps.astype(np.uint64)[None, :]
        found = np.ones(counter.shape)
        for number, one in enumerate(self.slow):
            applies = slice(None) if one.rank is None else rows[:, 0] == one.rank
            if one.factor > 1:
                slowed = self._uniform(number, "slow", counter[applies]) < one.probability
                found[applies] *= np.where(slowed, one.factor, 1.0)
            if one.spread:
                found[applies] *= np.exp(one.spread * self._normal(number, counter[applies]))
        return found

    def _uniform(self, number: int, what: str, counter: Any) -> Any:
        """A number in [0, 1) for each counter."""
        import numpy as np

        from shardwise.data.sampler import splitmix64

        digest = blake2b(repr((self.seed, "stragglers", number, what)).encode(), digest_size=8).digest()
        bits = splitmix64(splitmix64(counter) ^ np.uint64(int.from_bytes(digest, "little")))
        return (bits >> np.uint64(11)) / 2.0**53

    def _normal(self, number: int, counter: Any) -> Any:
        """A standard normal number for each counter (Box and Muller 1958)."""
        import numpy as np

        radius = np.sqrt(-2 * np.log1p(-self._uniform(number, "radius", counter)))
        return radius * np.cos(2 * np.pi * self._uniform(number, "angle", counter))

    def __str__(self) -> str:
        return "; ".join(map(str, self.slow)) or NONE


def emulated_seconds(text: str | None) -> float | None:
    """Seconds of `--emulate TIME`; None where it was not given. Raises `UserError`."""
    from shardwise.schedule.pipeline.times import seconds_of

    if text is None:
        return None
    seconds = seconds_of(text)
    if not seconds:
        raise UserError(f"--emulate {text}: give the time of a step's arithmetic, such as 300ms")
    return seconds


def _number(text: str, name: str, value: str, least: float, most: float) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    # A probability or a spread of zero would have no effect, factor=1 leaves a step as it is.
    if not least <= number <= most or not number:
        above = "above 0" if least == 0 else f"at least {least:g}"
        raise UserError(f"--slow {text}: {name} must be {above} and at most {most:g}, not {value!r}")
    return number
