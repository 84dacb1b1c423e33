"""A prepared corpus: text as memory-mapped tokens, in a folder that is either whole or does not exist.

    OUT/corpus-FINGERPRINT/
        train.bin, validation.bin   token ids, uint16 or uint32, little endian, documents end with the end-of-text token
                                    (dialogues: `dialogues.py`)
        tokenizer.json              the tokenizer that made them
        corpus.json                 counts, dtype, ids, source, fingerprint

The fingerprint covers the settings and the contents of the source's files: what was prepared once is found again,
wherever its text is now, and changed text goes to a folder of another name, since a running training may still map the
old one.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.data.dialogues import DialogueEncoder, DialogueRows, answer_tokens
from shardwise.data.sampler import Sampler
from shardwise.data.sources import Shape, Source, open_source, suffix
from shardwise.data.splits import SPLITS, Split, SplitFiles
from shardwise.data.tokenizer import (
    SAMPLE_BYTES,
    encode_without,
    end_of_text,
    load,
    named_end,
    pieces,
    read_template,
    sample,
    tokenizer_file,
    train,
    vocabulary_size,
)
from shardwise.errors import UserError, os_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMAT = 1
_READING = 2
"""Version of what is read as text, and what of it a tokenizer is trained on; part of the fingerprint."""
Progress = Callable[[str], None]

_PARTIAL = ".partial-"
_PIECE = 1 << 18
"""Characters that are encoded as one text at most: longer documents are cut after a line, to bound memory."""
_BATCH = 1 << 20
"""Characters that are encoded together."""
_READ, _TELL = 1 << 20, 5_000_000_000
"""Bytes per read for a fingerprint, and bytes between two lines of progress."""


@dataclass(frozen=True)
class Corpus:
    """A corpus on disk, opened.

    token_counts, document_counts: by split; a single document, which both splits share, counts as train's.
    dtype: "<u2" or "<u4". eos: id of the token that ends every document. vocab_size: highest token id plus one.
    text_bytes: UTF-8 bytes that were encoded. source: as it was given.
    """

    path: Path
    source: str
    fingerprint: str
    dtype: str
    eos: int
    vocab_size: int
    text_bytes: int
    token_counts: dict[str, int]
    document_counts: dict[str, int]
    shape: Shape = "text"
    """What a document is: a text, a dialogue (chat) or a pair of dialogues (pairs)."""
    notes: tuple[str, ...] = ()
    """What a reader of any run should know: files that were skipped, and which tokens of dialogues count."""

    @classmethod
    def open(cls, path: Path) -> Corpus:
        """Open the folder of a prepared corpus. Raises `UserError` when it is missing, unfinished or damaged."""
        path = Path(path)
        try:
            data = json.loads((path / "corpus.json").read_text())
            if data.pop("format") != FORMAT:
                raise UserError(f"{path} was prepared by another version of shardwise; prepare the text again")
            corpus = cls(path=path, **data | {"notes": tuple(data.get("notes", ()))})
            expected = {split: corpus.token_counts[split] * np.dtype(corpus.dtype).itemsize for split in SPLITS}
        except FileNotFoundError:
            raise UserError(f"{path} is not a prepared corpus: it has no corpus.json; prepare the text first") from None
        except OSError as error:
            raise UserError(f"cannot read {path / 'corpus.json'}: {error.strerror}") from None
        except UserError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{path / 'corpus.json'} is damaged; delete {path} and prepare the text again") from None
        for split, size in expected.items():
            file = path / f"{split}.bin"
            found = file.stat().st_size if file.is_file() else 0
            if found != size:
                raise UserError(f"{file} has {found} bytes instead of {size}; delete {path} and prepare the text again")
        return corpus

    def tokens(self, split: Split) -> np.memmap:
        """All token ids of a split, memory-mapped and read-only: [token_counts[split]], uint16 or uint32."""
        return np.memmap(self.path / f"{split}.bin", dtype=self.dtype, mode="r")

    def sampler(self, split: Split, seq: int, seed: int, isolate: bool) -> Sampler | DialogueRows:
        """Samples of a split. isolate: with the documents of a row; dialogues are then packed. Raises `UserError` where
        there is none of `seq` tokens."""
        if self.shape == "text":
            return Sampler(self.tokens(split), seq, seed, eos=self.eos if isolate else None)
        return DialogueRows(self.tokens(split), self.shape, seq, seed, packed=isolate)

    def unigram_entropy(self, split: Split = "validation") -> float:
        """Entropy of the split's own token frequencies, of dialogues those of answers, in nats a token.

        No model that ignores context has a lower loss on this text: a lower loss means that context was learned.
        """
        tokens = self.tokens(split) if self.shape == "text" else answer_tokens(self.tokens(split))
        counts = np.zeros(self.vocab_size, np.int64)
        for start in range(0, len(tokens), _BATCH):
            counts += np.bincount(tokens[start : start + _BATCH], minlength=self.vocab_size)
        p = counts[counts > 0] / len(tokens)
        return float(-(p * np.log(p)).sum())


def prepare(
    source: str, out: Path, *, tokenizer: Path | None, vocab: int, kept: Path | None = None, only: str | None = None,
    validation_fraction: float = 0.05, max_bytes: int | None = None, text_field: str = "text",
    progress: Progress | None = None,
) -> Corpus:  # fmt: skip
    """Turn text into a corpus in a folder of its own below `out`, or open the one that is there already.

    source: see `sources`. tokenizer: a `tokenizer.json`; None trains byte-level BPE of `vocab` tokens on the text.
    kept: the one that weights were trained with, to be taken before one is trained on other text than is there already.
    only: the fingerprint that the corpus must have; another one is not prepared.
    validation_fraction: share of the documents, chosen by a hash of their index, that is held out; both splits get at
    least one, and a single document gives its last tokens instead. max_bytes: UTF-8 bytes after which the text is cut.
    progress: called with a line of text now and then.
    Raises `UserError` for unusable settings, source, tokenizer or folder.
    """
    say = progress or (lambda line: None)
    if not 0 < validation_fraction < 1:
        raise UserError(f"a validation fraction of {validation_fraction} is not possible; give one between 0 and 1")
    if max_bytes is not None and max_bytes < 1:
        raise UserError(f"a limit of {max_bytes} bytes leaves no text; give at least 1, or no limit")
    material = open_source(source, text_field)
    settings: dict[str, Any] = {
        "validation_fraction": validation_fraction,
        "max_bytes": max_bytes,
        "text_field": text_field,
    }
    if material.shape != "text":
        tokenizer = _of_dialogues(source, tokenizer, kept)
        settings |= {"dialogues": [material.shape, read_template(tokenizer_file(tokenizer).parent)]}
    text = _digest(material, max_bytes, say)
    fingerprint = _fingerprint(text, settings, tokenizer, vocab)
    if only is not None and fingerprint != only:
        raise UserError("the text or its settings have changed")
    with os_errors(f"write the corpus to {out}"):
        name, found = _place(Path(out), fingerprint, say)
        if found is None and tokenizer is None and kept is not None:
            if kept.is_file():
                tokenizer = kept
                fingerprint = _fingerprint(text, settings, tokenizer, vocab)
                name, found = _place(Path(out), fingerprint, say)
            else:
                say(f"warning: the weights' tokenizer {kept} is gone: a new one is trained, which is equal only if the "
                    "text is; otherwise give theirs with --tokenizer")  # fmt: skip
        if found is not None:
            return found
        made = _Preparation(material, max_bytes, validation_fraction, say)
        return _publish(Path(out), name, lambda folder: made.write(folder, tokenizer, vocab, fingerprint))


def _of_dialogues(source: str, tokenizer: Path | None, kept: Path | None) -> Path:
    """The tokenizer of dialogues, for which none is trained. Raises `UserError` without one."""
    if tokenizer is None and kept is not None and kept.is_file():
        return kept
    if tokenizer is None:
        raise UserError(
            f"{source} has dialogues, which need a tokenizer: give --tokenizer the folder of a model, with its chat "
            "template, or --weights"
        )
    return tokenizer


def _digest(source: Source, max_bytes: int | None, say: Progress) -> list[Any]:
    """Hash of everything that determines the documents of a source: its kind, the names and contents of its files.

    For a limited text, hash of the documents themselves: no more is read than they need.
    """
    if max_bytes is not None:
        documents = hashlib.sha256()
        for text in _limited(source, max_bytes):
            encoded = text.encode()
            documents.update(len(encoded).to_bytes(8, "big") + encoded)
        return ["documents", min(source.size, max_bytes), documents.hexdigest()]
    files, done, told = [], 0, 0
    buffer = bytearray(_READ)
    for file in source.files:
        content = hashlib.sha256()  # 1.6 GB/s here, blake2b 0.9: most processors have instructions for it
        with os_errors(f"read {file.path}"), file.path.open("rb", buffering=0) as data:
            while count := data.readinto(buffer):
                content.update(memoryview(buffer)[:count])
                done += count
                if done - told >= _TELL:
                    told = done
                    say(f"read {done / 1e9:.0f} GB of {source.size / 1e9:.0f} to check whether the text is prepared")
        # The suffix alone decides whether a single file is one document or one per line.
        name = suffix(file.path) if source.kind == "file" else file.name
        files.append([name, content.hexdigest()])
    return [source.kind, files]


def _fingerprint(text: list[Any], settings: dict[str, Any], tokenizer: Path | None, vocab: int) -> str:
    """text: as `_digest` gives it."""
    encoder: int | str = vocab
    if tokenizer is not None:
        file = tokenizer_file(tokenizer)
        encoder = hashlib.sha256(file.read_bytes()).hexdigest()
        # The files beside it may name another end of text than its own tokens do.
        loaded = load(file)
        if (eos := end_of_text(loaded, str(file), file.parent)) != named_end(loaded):
            settings = settings | {"eos": eos}
    covered = json.dumps([FORMAT, _READING, settings, encoder, text])
    return hashlib.sha256(covered.encode()).hexdigest()


def _place(out: Path, fingerprint: str, say: Progress) -> tuple[str, Corpus | None]:
    """The name of the corpus below `out`, and the corpus if it is there and complete.

    A damaged folder is left alone, since another process may map it, and the next free name is used.
    """
    name, number = f"corpus-{fingerprint[:12]}", 1
    while True:
        candidate = name if number == 1 else f"{name}-{number}"
        if not (out / candidate).exists():
            return candidate, None
        try:
            corpus = Corpus.open(out / candidate)
            if corpus.fingerprint == fingerprint:
                for line in (f"the text is prepared already: {out / candidate}", *corpus.notes):
                    say(line)
                return candidate, corpus
        except UserError as error:
            say(f"not used: {error}")
        number += 1


def _publish(out: Path, name: str, write: Callable[[Path], None]) -> Corpus:
    """Let `write` fill a hidden folder and give it its name when it is complete."""
    out.mkdir(parents=True, exist_ok=True)
    partial = out / f"{_PARTIAL}{name}-{secrets.token_hex(4)}"
    partial.mkdir()
    try:
        write(partial)
        try:
            partial.rename(out / name)
        except OSError:
            # Another process may have finished the same corpus meanwhile: then its folder is as good as this one.
            if not (out / name / "corpus.json").is_file():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Corpus.open(out / name)


def remove_unfinished(out: Path) -> None:
    """Remove temporary files of killed preparations below `out`. Call it only when no preparation runs there."""
    for partial in out.glob(f"{_PARTIAL}*"):
        shutil.rmtree(partial, ignore_errors=True)


class _Preparation:
    def __init__(self, source: Source, max_bytes: int | None, validation_fraction: float, say: Progress) -> None:
        self.source, self.max_bytes, self.fraction, self.say = source, max_bytes, validation_fraction, say
        self.size = min(source.size, max_bytes or source.size)
        self.compressed = source.compressed and self.size == source.size
        self.total = f"{self.size / 1e6:.1f} MB{' compressed' * self.compressed}"
        self.text_bytes = 0
        self.skipped: list[str] = []

    def write(self, folder: Path, tokenizer_path: Path | None, vocab: int, fingerprint: str) -> None:
        """Fill `folder`, `corpus.json` last."""
        shape, dialogues = self.source.shape, None
        if tokenizer_path is None:
            tokenizer, name = self._train(vocab), "the trained tokenizer"
        else:
            tokenizer, name = load(tokenizer_path), str(tokenizer_path)
        beside = None if tokenizer_path is None else tokenizer_file(tokenizer_path).parent
        eos, vocab_size = end_of_text(tokenizer, name, beside), vocabulary_size(tokenizer)
        dtype = "<u2" if vocab_size <= 1 << 16 and shape == "text" else "<u4"
        encoded = self._encoded(tokenizer, eos)
        if shape != "text" and tokenizer_path is not None:
            dialogues = DialogueEncoder(tokenizer_path, shape)
            encoded = self._dialogues(dialogues)
        (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True))
        with SplitFiles(folder, dtype, self.fraction) as files:
            for index, ids in encoded:
                files.add(index, ids)
            files.finish(divides=dialogues is None)
        tokens, documents, notes = files.tokens, files.documents, []
        if self.skipped:
            notes.append(f"skipped {len(self.skipped)} of {len(self.source.files)} files, such as {self.skipped[0]}")
        if dialogues is not None:
            notes.append(dialogues.summary(sum(documents.values())))
        said = f"{sum(tokens.values()):,} tokens in {sum(documents.values()):,} documents"
        for line in (*notes, *([said] if dialogues is None else [])):
            self.say(line)
        corpus = Corpus(
            folder, self.source.name, fingerprint, dtype, eos, vocab_size, self.text_bytes, tokens, documents, shape,
            tuple(notes),
        )  # fmt: skip
        data = {"format": FORMAT, **asdict(corpus)}
        del data["path"]
        (folder / "corpus.json").write_text(json.dumps(data, indent=1) + "\n")

    def _train(self, vocab: int) -> Tokenizer:
        large = self.compressed or self.size > SAMPLE_BYTES
        sampled = f", a sample of at most {SAMPLE_BYTES / 1e6:.0f} MB" if large else ""
        self.say(f"training a tokenizer of {vocab} tokens on {self.total}{sampled}")
        tokenizer = train(sample(_limited(self.source, self.max_bytes), SAMPLE_BYTES), vocab)
        made = vocabulary_size(tokenizer)
        if made < vocab:
            self.say(f"the text is too little for {vocab} tokens: the tokenizer has {made}")
        return tokenizer

    def _dialogues(self, encoder: DialogueEncoder) -> Iterator[tuple[int, list[int]]]:
        for index, text in enumerate(_limited(self.source, self.max_bytes, self.skipped)):
            self.text_bytes += len(text.encode())
            if ids := encoder.encode(json.loads(text), f"record {index + 1} of {self.source.name}"):
                yield index, ids

    def _pieces(self) -> Iterator[tuple[int, str, bool]]:
        self.text_bytes = reported = 0
        self.skipped.clear()
        for index, text in enumerate(_limited(self.source, self.max_bytes, self.skipped)):
            parts = list(pieces(text, _PIECE))
            for number, part in enumerate(parts, 1):
                yield index, part, number == len(parts)
                self.text_bytes += len(part.encode())
                if self.text_bytes - reported > self.size / 10:
                    reported = self.text_bytes
                    self.say(f"encoded {reported / 1e6:.1f} MB of {self.total}")

    def _encoded(self, tokenizer: Tokenizer, eos: int) -> Iterator[tuple[int, list[int]]]:
        """Document index and token ids, in order; a long document comes in several parts."""
        encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)
        for batch in _batches(self._pieces()):
            texts = [piece for _, piece, _ in batch]
            for (index, text, last), encoding in zip(batch, encode(texts, add_special_tokens=False), strict=True):
                ids = encoding.ids
                if eos in ids:
                    ids = encode_without(tokenizer, text, eos)
                yield index, [*ids, eos] if last else ids


def _limited(source: Source, max_bytes: int | None, skipped: list[str] | None = None) -> Iterator[str]:
    """The documents of a source, the last one cut so that all together have at most max_bytes."""
    left = max_bytes
    for text in source.documents(skipped, max_bytes):
        if left is None:
            yield text
            continue
        data = text.encode()
        if len(data) >= left:
            # A character that the limit cuts through is dropped, and so is a record.
            if source.shape == "text" or len(data) == left:
                yield data[:left].decode(errors="ignore")
            return
        yield text
        left -= len(data)


def _batches(parts: Iterable[tuple[int, str, bool]]) -> Iterator[list[tuple[int, str, bool]]]:
    batch: list[tuple[int, str, bool]] = []
    held = 0
    for part in parts:
        batch.append(part)
        held += len(part[1])
        if held >= _BATCH:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch
