"""`Lora`: low-rank adapters of a model's linear maps, as a few numbers and a text (Hu et al. 2021)."""

from math import ceil
from pathlib import Path
from typing import Self, TypeVar

from shardwise.errors import UserError, did_you_mean
from shardwise.model.formats import weight_format
from shardwise.records import dataclass

MOST_RANK = 1 << 16
"""Largest rank: more than any model's width."""
INT8, NF4, FP8 = "int8", "nf4", "fp8"
BASES = {INT8: weight_format(INT8), NF4: weight_format(NF4), FP8: weight_format("fp8-block128x128")}
"""Formats of a frozen base: int8 with a scale per output, in the layout's precision; QLoRA's NF4 with double
quantization (Dettmers et al. 2023); e4m3 with a scale in fp32 per 128 x 128 weights (DeepSeek-V3)."""
NESTED = 256
"""Scales of NF4 that share a second one."""
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
    """Format of the frozen weights of the blocks' linear maps, of `BASES`; empty for the layout's precision."""

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
            if not equals and Path(key).is_dir():
                raise UserError(f"lora: {key} is a folder, beside which only base= may be given")
            if key not in _KEYS:
                raise UserError(f"lora: {word!r}: {did_you_mean(key, _KEYS, 'keys:')}")
            if not equals or not value or key in values:
                raise UserError(f"lora: {word!r}: give {key} one value, as in rank=16,alpha=32,targets=q_proj+v_proj")
            values[key] = value
        if "rank" not in values:
            why = ": weights in 8 or 4 bits have no gradients, so that only adapters train" if "base" in values else ""
            raise UserError(f"lora: rank is missing: give rank=16{why}")
        if "alpha" in values and not _number(values["alpha"], "alpha", float):
            raise UserError("lora: alpha must be a positive number, not 0; without it, it is 2 x rank")
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


def block_inputs(base: str) -> int:
    """Inputs that share a scale; 0: all of them."""
    form = BASES[base]
    return form.block[1] if form.block else form.group


def stored_columns(base: str, inputs: int) -> int:
    """Bytes of a row of a matrix. NF4 has a block's scale, of a byte, behind its weights."""
    form = BASES[base]
    return int(inputs * form.each) + (inputs // form.group if form.group else 0)


def scale_elements(base: str, outputs: int, inputs: int) -> int:
    """Elements of the scales beside a matrix: one per output, or the bytes of numbers in fp32. Of NF4 these are the
    mean of the blocks' scales, and the second scales."""
    form = BASES[base]
    if form.block:
        return 4 * ceil(outputs / form.block[0]) * ceil(inputs / form.block[1])
    return 4 * (1 + ceil(outputs * inputs / form.group / NESTED)) if form.group else outputs


def _number(text: str, key: str, kind: type[N]) -> N:
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"lora: {key}={text} is not {'an integer' if kind is int else 'a number'}") from None
