"""The token files of the splits, while they are written."""

import os
from pathlib import Path
from typing import BinaryIO, Literal, Self, get_args

import numpy as np

from shardwise.data.sampler import uniform
from shardwise.errors import UserError

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = get_args(Split)


class SplitFiles:
    """The two token files while they are written, each document whole in the one that its index chooses."""

    def __init__(self, folder: Path, dtype: str, fraction: float) -> None:
        self.dtype, self.fraction = np.dtype(dtype), fraction
        self.files: dict[Split, BinaryIO] = {split: (folder / f"{split}.bin").open("w+b") for split in SPLITS}
        self.tokens: dict[str, int] = dict.fromkeys(SPLITS, 0)
        self.documents: dict[str, int] = dict.fromkeys(SPLITS, 0)
        self.last_length: dict[str, int] = dict.fromkeys(SPLITS, 0)
        self.index = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files.values():
            file.close()

    def add(self, index: int, ids: list[int]) -> None:
        """Append token ids of document `index`; a document's parts come one after another."""
        split: Split = "validation" if uniform("validation", index) < self.fraction else "train"
        if index != self.index:
            self.index, self.last_length[split] = index, 0
            self.documents[split] += 1
        self.files[split].write(np.array(ids, self.dtype).tobytes())
        self.last_length[split] += len(ids)
        self.tokens[split] += len(ids)

    def finish(self, divides: bool = True) -> None:
        """Give an empty split something, and bring both files to the disk. divides: a single document gives some of
        its tokens. Raises `UserError` without two tokens, or two documents that do not divide."""
        full: Split = "train" if self.tokens["train"] else "validation"
        empty: Split = "validation" if full == "train" else "train"
        if not self.tokens[empty]:
            if self.documents[full] < 2 and not divides:
                raise UserError("training and validation need two records with answers at least")
            if self.documents[full] > 1:
                self._move(self.last_length[full], full, empty)
                self.documents = {full: self.documents[full] - 1, empty: 1}
            else:
                self._divide(full)
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())

    def _divide(self, full: Split) -> None:
        """One document alone: its last tokens are for validation."""
        length = self.tokens[full]
        if length < 2:
            raise UserError("the text encodes to no tokens; give more text, or a tokenizer made for it")
        held_out = min(max(round(length * self.fraction), 1), length - 1)
        if full == "validation":
            self._move(length, "validation", "train")
        self._move(held_out, "train", "validation")
        self.documents = {"train": 1, "validation": 0}

    def _move(self, count: int, source: Split, target: Split) -> None:
        file = self.files[source]
        start = file.seek(0, os.SEEK_END) - count * self.dtype.itemsize
        file.seek(start)
        self.files[target].write(file.read())
        file.truncate(start)
        file.seek(start)
        self.tokens[source] -= count
        self.tokens[target] += count
