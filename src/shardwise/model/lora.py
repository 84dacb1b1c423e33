"""`Lora`: low-rank adapters of a model's linear maps, as a few numbers and a text (Hu et al. 2021)."""

from typing import Self, TypeVar

from shardwise.errors import UserError, did_you_mean
from shardwise.model.formats import weight_format
from shardwise.records import dataclass

MOST_RANK = 1 << 16
"""Largest rank: more than any model's width."""
INT8 = "int8"
"""dtype of a frozen base in 8 bits (Dettmers et al. 2023, QLoRA, with one scale per output in place of NF4)."""
NF4 = "nf4"
"""dtype of a frozen base in 4 bits (QLoRA's own), which is counted and not trained here yet."""
NF4_BYTES = weight_format(NF4).width
"""Bytes per weight: half of one, a scale in 8 bits per 64 weights, and one in fp32 per 256 scales."""
BASES = (INT8, NF4)
_KEYS = ("rank", "alpha", "targets", "base")
N = TypeVar("N", int, float)


@dataclass(frozen=True)
class Lora:
    """Adapters y + alpha / rank · (x Aᵀ) Bᵀ beside linear maps whose own weights stay as they are.

    Raises `UserError` for values that are none.
    """

    rank: int
    """Rows of A, which are columns of B."""
    alpha: float = 0.0
    """The adapters' output is multiplied by alpha / rank; 0 means 2 x rank."""
    targets: tuple[str, ...] = ()
    """Names of the maps, ours (`q`) or Hugging Face's (`q_proj`); empty for all linear maps of the blocks."""
    base: str = ""
    """dtype of the frozen weights of the blocks' linear maps: int8, nf4, or empty for the layout's precision."""

    def __post_init__(self) -> None:
        if type(self.rank) is not int or not 1 <= self.rank <= MOST_RANK:
            raise UserError(f"lora: rank must be a positive integer, at most {MOST_RANK}, not {self.rank!r}")
        if not isinstance(self.alpha, (int, float)) or not 0 <= self.alpha < float("inf"):
            raise UserError(f"lora: alpha must be a positive number, not {self.alpha!r}")
        object.__setattr__(self, "alpha", float(self.alpha or 2 * self.rank))
        object.__setattr__(self, "targets", tuple(dict.fromkeys(self.targets)))
        if not all(isinstance(target, str) and target for target in self.targets):
            raise UserError(f"lora: targets must be names of linear maps, not {self.targets!r}")
        if self.base not in ("", *BASES):
            raise UserError(f"lora: base={self.base} is not supported; {did_you_mean(str(self.base), BASES, 'bases:')}")

    def check_trains(self) -> None:
        """Raise `UserError` for a base that is counted only."""
        if self.base == NF4:
            raise UserError(
                "lora: base=nf4 is counted by estimate and plan, and not trained here yet: choose base=int8"
            )

    @property
    def scale(self) -> float:
        """Factor of the adapters' output."""
        return self.alpha / self.rank

    @classmethod
    def parse(cls, text: str) -> Self:
        """The adapters of a text such as `rank=16,alpha=32,targets=q_proj+v_proj`. Raises `UserError`."""
        values: dict[str, str] = {}
        for word in filter(None, (word.strip() for word in text.split(","))):
            key, equals, value = (part.strip() for part in word.partition("="))
            if key not in _KEYS:
                raise UserError(f"lora: {word!r}: {did_you_mean(key, _KEYS, 'keys:')}")
            if not equals or not value or key in values:
                raise UserError(f"lora: {word!r}: give {key} one value, as in rank=16,alpha=32,targets=q_proj+v_proj")
            values[key] = value
        if "rank" not in values:
            why = ": weights in 8 bits have no gradients, so that only adapters train" if "base" in values else ""
            raise UserError(f"lora: rank is missing: give rank=16{why}")
        targets = values.get("targets", "")
        return cls(
            _number(values["rank"], "rank", int),
            _number(values.get("alpha", "0"), "alpha", float),
            tuple(filter(None, targets.split("+"))),
            values.get("base", ""),
        )

    def __str__(self) -> str:
        short = f"{self.alpha:g}"
        words = [f"rank={self.rank}", f"alpha={short if float(short) == self.alpha else repr(self.alpha)}"]
        words += [f"targets={'+'.join(self.targets)}"] if self.targets else []
        return ",".join([*words, f"base={self.base}"] if self.base else words)


def _number(text: str, key: str, kind: type[N]) -> N:
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"lora: {key}={text} is not {'an integer' if kind is int else 'a number'}") from None
