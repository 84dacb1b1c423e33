"""`Scheduler`: which tokens of which requests an engine step computes.

Requests join and leave at every engine step (continuous batching, Yu et al. 2022): a step has one token of every
sequence that is being continued, and as many tokens of prompts beside them as `chunk` allows (Agrawal et al. 2023). A
request is admitted when the cache has pages for all its tokens; when pages run out, the youngest sequence gives its own
back and is computed again later.

A request may want the probabilities of its prompt's tokens: every row of the prompt then has logits, `rows` of them in
an engine step, and nothing of it is found in the cache. `max_tokens=0` ends it there.

Under a pipeline the tokens that a step has chosen are known `depth` steps later: a sequence that waits for its token is
left out meanwhile, and a step takes one `depth`-th of the sequences, so that the stages always have something to do.

Every rank of a replica runs the same scheduler on the same messages and tokens, and decides the same: nothing here
depends on time or on what a rank holds.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from shardwise.serving.messages import NOTHING, Answer, Finished, Reason, ReplicaLoad, Request, Sampling, Token, Top
from shardwise.serving.pages import START, Key, Pages, page_key


@dataclass(eq=False)
class Sequence:
    """A request on its way. order: of arrival, from 1. tokens: of the prompt and those chosen since. computed: how many
    of them have keys and values in `pages`, or will have when the steps that are under way are over. keys: of its full
    pages, as far as they were asked for; known: so many of them are known to others. in_flight: its next token is being
    computed. reused: tokens found in the cache."""

    request: Request
    order: int
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    known: int = 0
    computed: int = 0
    in_flight: bool = False
    finished: bool = False
    reused: int = 0
    scored: int = 0
    """Rows of the prompt whose logits have told the probability of the next token."""

    @property
    def to_score(self) -> int:
        """Rows of the prompt whose logits tell the probability of the next token: all but its last, or none."""
        return len(self.request.prompt) - 1 if self.request.sampling.prompt_logprobs else 0

    @property
    def first_row(self) -> int:
        """The next row whose logits matter; all later ones of `tokens` do, too."""
        return max(self.computed, self.scored) if self.scored < self.to_score else len(self.tokens) - 1

    @property
    def num_uncomputed(self) -> int:
        """Tokens to be computed before the next one can be chosen."""
        return len(self.tokens) - self.computed

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def max_cached(self) -> int:
        """Tokens that will be in the cache in the end, at most: nothing follows on the last one."""
        return len(self.request.prompt) + self.request.sampling.max_tokens - 1


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, stop) of a sequence. wanted: a token is chosen from the logits of the last one. scored: rows of a
    prompt whose logits tell the probability of the next token."""

    sequence: Sequence
    start: int
    stop: int
    wanted: bool
    scored: range = range(0)

    @property
    def rows(self) -> list[int]:
        return [*self.scored, self.stop - 1] if self.wanted else [*self.scored]


@dataclass(frozen=True)
class LogitRow:
    """A row of logits. place: number of tokens before the one that it predicts. target: that token, where it is one of
    the prompt; None where it is to be chosen."""

    sequence: Sequence
    place: int
    target: int | None = None

    @property
    def sampling(self) -> Sampling:
        return self.sequence.request.sampling

    @property
    def banned(self) -> tuple[int, ...]:
        """Tokens that must not be chosen yet."""
        sampling = self.sampling
        return sampling.stop_tokens if self.sequence.num_generated < sampling.min_tokens else ()


@dataclass(frozen=True)
class EngineStep:
    """Tokens of one forward pass: single tokens first, then chunks of prompts."""

    chunks: tuple[Chunk, ...]

    @property
    def tokens(self) -> int:
        return sum(chunk.stop - chunk.start for chunk in self.chunks)

    @cached_property
    def wanted(self) -> list[LogitRow]:
        return [row for chunk in self.chunks for row in _logit_rows(chunk)]

    @cached_property
    def top(self) -> int:
        """Likeliest tokens that are reported with each token, the most of all requests."""
        reported = (row for row in self.wanted if row.sampling.logprobs or row.target is not None)
        return max((row.sampling.top_logprobs for row in reported), default=0)

    @property
    def prefill(self) -> bool:
        """Whether it computes more than the latest token of sequences that are being continued."""
        return any(c.stop - c.start > 1 or c.stop <= len(c.sequence.request.prompt) for c in self.chunks)


def _logit_rows(chunk: Chunk) -> Iterator[LogitRow]:
    sequence = chunk.sequence
    for row in chunk.scored:
        yield LogitRow(sequence, row + 1, sequence.request.prompt[row + 1])
    if chunk.wanted:
        yield LogitRow(sequence, chunk.stop)


class Scheduler:
    """pages: of the cache. batch: most sequences at a time. chunk: tokens of a step that may be prompts' (single tokens
    count, too, but are never left out for it). depth: steps from a token's computation until it is known. rows: rows of
    an engine step that may have logits, at least `batch`; 0 for as many as `chunk` and `batch`. whole: no prompt is
    cut, so the last one of a step may exceed chunk and rows."""

    def __init__(
        self, pages: Pages, *, batch: int, chunk: int, depth: int = 1, rows: int = 0, whole: bool = False
    ) -> None:
        self.pages, self.batch, self.chunk, self.depth, self.whole = pages, batch, chunk, depth, whole
        self.rows = max(batch, rows or chunk + batch)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._arrived = 0

    @property
    def active(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def load(self) -> ReplicaLoad:
        return ReplicaLoad(len(self.waiting), len(self.running), self.pages.used, self.pages.count)

    # -- messages

    def add(self, request: Request) -> None:
        self._arrived += 1
        # Nothing follows on the last token of a prompt that is only scored.
        tokens = list(request.prompt if request.sampling.max_tokens else request.prompt[:-1])
        self.waiting.append(Sequence(request, self._arrived, tokens))

    def cancel(self, number: int) -> list[Answer]:
        """End a request now; what is under way for it is forgotten."""
        for sequence in [*self.running, *self.waiting]:
            if sequence.request.id == number:
                return [self._end(sequence, "cancelled")]
        return []

    def process_output(
        self, step: EngineStep, tokens: list[int], logprobs: list[float], tops: list[Top] | None = None
    ) -> list[Answer]:
        """The tokens of a step, chosen or of prompts, one for each of `step.wanted`. tops: the likeliest ones there."""
        answers: list[Answer] = []
        for row, token, logprob, top in zip(step.wanted, tokens, logprobs, tops or [()] * len(tokens), strict=True):
            sequence = row.sequence
            if sequence.finished:
                continue
            if row.target is None:
                sequence.in_flight = False
            if token == NOTHING:
                answers.append(self._end(sequence, "error", "the logits are no numbers: its weights may be damaged"))
                continue
            top = top[: row.sampling.top_logprobs]
            answer = Token(sequence.request.id, token, logprob, top, row.target is not None)
            if not answer.prompt:
                answers += self._append_token(sequence, answer)
            elif row.place > sequence.scored:  # a row of pages that were given back comes again
                answers += self._append_scored(sequence, row.place, answer)
        return answers

    def _append_token(self, sequence: Sequence, answer: Token) -> list[Answer]:
        sampling = sequence.request.sampling
        sequence.tokens.append(answer.token)
        if answer.token in sampling.stop_tokens:
            return [answer, self._end(sequence, "stop")]
        if sequence.num_generated == sampling.max_tokens:
            return [answer, self._end(sequence, "length")]
        return [answer]

    def _append_scored(self, sequence: Sequence, rows: int, answer: Token) -> list[Answer]:
        sequence.scored = rows
        if rows == sequence.to_score and not sequence.request.sampling.max_tokens:
            return [answer, self._end(sequence, "length")]
        return [answer]

    def _end(self, sequence: Sequence, reason: Reason, error: str = "") -> Finished:
        sequence.finished = True
        self._release_pages(sequence)
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        return Finished(sequence.request.id, reason, sequence.reused, error)

    # -- an engine step

    def schedule(self) -> EngineStep:
        """The next engine step; it may be empty."""
        ready = [s for s in self.running if not s.in_flight]
        single: list[Chunk] = []
        most = -(-len(self.running) // self.depth)
        for sequence in ready:
            if (
                sequence.num_uncomputed == 1
                and len(single) < most
                and sequence in self.running
                and self._append_page_or_preempt(sequence)
            ):
                single.append(self._chunk(sequence, 1))
        step = EngineStep(
            tuple(sorted([*single, *self._schedule_prefills(ready, single)], key=lambda c: c.stop - c.start > 1))
        )
        for chunk in step.chunks:
            self._cache_full_pages(chunk.sequence)
        return step

    def _schedule_prefills(self, ready: list[Sequence], single: list[Chunk]) -> list[Chunk]:
        """Chunks of prompts beside single tokens: as many tokens, and rows of logits, as an engine step may have."""
        budget = max(1, self.chunk - len(single))
        rows = max(1, self.rows - sum(len(chunk.rows) for chunk in single))
        prefills: list[Chunk] = []

        def add(sequence: Sequence) -> None:
            nonlocal budget, rows
            room = min(budget, sequence.first_row - sequence.computed + rows)
            chunk = self._chunk(sequence, sequence.num_uncomputed if self.whole else min(room, sequence.num_uncomputed))
            budget -= chunk.stop - chunk.start
            rows -= len(chunk.rows)
            prefills.append(chunk)

        for sequence in ready:
            if min(budget, rows) > 0 and sequence.num_uncomputed > 1 and sequence in self.running:
                add(sequence)
        while (
            min(budget, rows) > 0 and self.waiting and len(self.running) < self.batch and self._admit(self.waiting[0])
        ):
            sequence = self.waiting.pop(0)
            insort(self.running, sequence, key=lambda each: each.order)
            add(sequence)
        return prefills

    def _chunk(self, sequence: Sequence, count: int) -> Chunk:
        start, stop = sequence.computed, sequence.computed + count
        scored = range(max(start, sequence.scored), min(stop, sequence.to_score))
        sequence.computed = stop
        sequence.in_flight = stop == len(sequence.tokens)
        return Chunk(sequence, start, stop, sequence.in_flight and sequence.request.sampling.max_tokens > 0, scored)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.pages.size)

    def _admit(self, sequence: Sequence) -> bool:
        """Give a sequence pages for all its tokens, and the next one, if there are so many."""
        size = self.pages.size
        self._extend_keys(sequence, (len(sequence.tokens) - 1) // size)
        found = self.pages.find(sequence.keys[: sequence.first_row // size])
        wanted = self._pages_for(min(len(sequence.tokens) + 1, sequence.max_cached)) - len(found)
        if wanted > self.pages.free - self.pages.idle(found):
            return False
        self.pages.share(found)
        last = found[-1] if found else None
        room = self._pages_for(sequence.max_cached) - len(found)
        sequence.pages = found + self.pages.take(sequence.order, wanted, last, room)
        sequence.computed, sequence.known = len(found) * size, len(found)
        sequence.reused = max(sequence.reused, min(sequence.computed, len(sequence.request.prompt)))
        return True

    def _append_page_or_preempt(self, sequence: Sequence) -> bool:
        """Allocate a page for the next token; preempt younger sequences where none is free."""
        while self._pages_for(sequence.computed + 1) > len(sequence.pages):
            if self.pages.free:
                sequence.pages += self.pages.take(sequence.order, 1, sequence.pages[-1])
                continue
            younger = [s for s in self.running if s.order > sequence.order and not s.in_flight]
            if not younger:
                return False  # those that wait for a token come back
            victim = younger[-1]
            self._release_pages(victim)
            self.running.remove(victim)
            insort(self.waiting, victim, key=lambda each: each.order)
        return True

    def _release_pages(self, sequence: Sequence) -> None:
        self.pages.release(sequence.order, sequence.pages)
        sequence.pages, sequence.computed, sequence.known, sequence.in_flight = [], 0, 0, False

    def _extend_keys(self, sequence: Sequence, count: int) -> None:
        size, keys = self.pages.size, sequence.keys
        for index in range(len(keys), count if self.pages.reuse else 0):
            before = keys[-1] if keys else START
            keys.append(page_key(before, sequence.tokens[index * size : (index + 1) * size]))

    def _cache_full_pages(self, sequence: Sequence) -> None:
        full = sequence.computed // self.pages.size
        if self.pages.reuse and full > sequence.known:
            self._extend_keys(sequence, full)
            for index in range(sequence.known, full):
                self.pages.know(sequence.pages[index], sequence.keys[index])
            sequence.known = full
