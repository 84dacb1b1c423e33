"""Text of a run as tokens: prepared once, next to the run or in the cache, and kept by the run.

A resumed run keeps its corpus, even if the source file has changed or is gone; other text needs `--data`. Imports no
torch, and numpy only when it is used.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from filecmp import cmp
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import UserError, os_errors
from shardwise.runtime.job.config import TrainConfig

if TYPE_CHECKING:
    from shardwise.data import Corpus


Progress = Callable[[str], None]

CACHE = "SHARDWISE_CACHE"
"""Environment variable: folder of prepared corpora, for runs anywhere."""


def with_corpus(config: TrainConfig, progress: Progress) -> TrainConfig:
    """The configuration with its text as tokens: the corpus that it names, or one prepared in `corpora/` beside the run
    directory, where the next run finds it. Text that replaces a run's former one is read by the former tokenizer.

    Processes that prepare one text at the same moment wait for the first one. Raises `UserError` for unusable text, a
    missing corpus, a tokenizer with more tokens than the model has rows, and text that does not fill one sequence.
    """
    from shardwise.data.splits import SPLITS

    corpus = _kept(config, progress) if config.corpus else _prepared(config, progress)
    if corpus.vocab_size > config.model.vocab:
        raise UserError(
            f"the tokenizer has {corpus.vocab_size} tokens, but {config.model.name} has a vocabulary of "
            f"{config.model.vocab}; add --vocab {corpus.vocab_size}, or leave --tokenizer out to train one that fits"
        )
    for split in SPLITS:
        try:
            rows = corpus.sampler(split, config.workload.seq, config.seed, config.workload.isolate_documents)
        except UserError as error:
            raise UserError(f"{config.data}, {split} part: {error}") from None
        if line := rows.summary():
            progress(f"{split}: {line}")
    if corpus.shape != "text":
        progress(f"loss: {config.loss}")
    former = config.former_corpus
    if former and _say_change(config, corpus, progress):
        former = None
    return replace(config, corpus=str(corpus.path), corpus_fingerprint=corpus.fingerprint, former_corpus=former)


def _kept(config: TrainConfig, progress: Progress) -> Corpus:
    """The corpus that a run has had: where it was, beside the run, or prepared again from text that is the same."""
    from shardwise.data import Corpus

    path = _found(config, config.corpus)
    try:
        corpus = Corpus.open(path)
        if config.corpus_fingerprint not in ("", corpus.fingerprint):
            raise UserError(f"{path} is not the run's corpus")
    except UserError:
        try:
            return _prepared(config, progress, only=config.corpus_fingerprint)
        except UserError as error:
            raise UserError(
                f"the run's corpus {path} is gone or damaged and cannot be prepared again from {config.data}: {error}; "
                "name the text to train on with --data"
            ) from None
    for line in (f"the text is the run's own, in {path}; for other text give --data", *corpus.notes):
        progress(line)
    return corpus


def _found(config: TrainConfig, corpus: str) -> Path:
    """Path of a corpus: in its place, or in `corpora` beside the run, where both were moved."""
    places = [Path(corpus), _corpora(config) / Path(corpus).name]
    if config.resume:
        places.append(Path(config.resume).absolute().parents[2] / "corpora" / Path(corpus).name)
    return next(filter(Path.exists, places), places[0])


def _corpora(config: TrainConfig) -> Path:
    """Folder of prepared corpora: in that of `CACHE`, else beside the run."""
    cache = os.environ.get(CACHE)
    return Path(cache or Path(config.out).parent).absolute() / "corpora"


def _prepared(config: TrainConfig, progress: Progress, only: str | None = None) -> Corpus:
    """only: the fingerprint that it must have."""
    from shardwise.data import prepare
    from shardwise.data.corpus import remove_unfinished

    corpora, former = _corpora(config), config.former_corpus
    with _alone_in(corpora) as alone:
        if alone:
            remove_unfinished(corpora)
        return prepare(
            config.data, corpora, tokenizer=None if config.tokenizer is None else Path(config.tokenizer),
            vocab=config.model.vocab, kept=_found(config, former) / "tokenizer.json" if former else None,
            max_bytes=config.max_bytes, text_field=config.text_field, only=only, progress=progress,
        )  # fmt: skip


def _say_change(config: TrainConfig, corpus: Corpus, progress: Progress) -> bool:
    """Report the effect of the requested text on a resumed run. Returns whether it is the run's former text."""
    assert config.former_corpus is not None
    former = _found(config, config.former_corpus)
    if _equal(corpus, former):
        progress("the text is the run's own")
        return True
    since = Path(config.resume).name if config.resume else "here"
    progress(
        f"warning: from {since} on the run trains on other text: {config.data} in place of {former}. Losses from there "
        "on are not comparable with earlier ones"
    )
    return False


def _equal(corpus: Corpus, former: Path) -> bool:
    """Whether two corpora have equal tokens; fingerprints of earlier versions differ for the same text."""
    from shardwise.data import Corpus
    from shardwise.data.splits import SPLITS

    try:
        other = Corpus.open(former)
    except UserError:
        return False
    if corpus.path.samefile(former):
        return True
    return corpus.token_counts == other.token_counts and all(
        cmp(corpus.path / name, former / name, shallow=False)
        for name in (*(f"{split}.bin" for split in SPLITS), "tokenizer.json")
    )


@contextmanager
def _alone_in(folder: Path) -> Iterator[bool]:
    """Wait for the folder's lock, then hold it. Yields whether that worked."""
    with os_errors(f"write to {folder}", "; choose another --out"):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    with file:
        # Some network file systems have no locks: then the same text is merely prepared more than once.
        alone = False
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
            alone = True
        yield alone
