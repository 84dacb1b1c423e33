"""`Front`: the engine as the HTTP side sees it, with a bounded number of places; `Generation`: the sequences of one
request, from the engine's thread to the event loop's, as pieces of text.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from shardwise.errors import UserError
from shardwise.runtime.job.launch import RunFailed
from shardwise.serving.http.bodies import CompletionRequest
from shardwise.serving.http.metrics import Metrics
from shardwise.serving.http.problems import Problem
from shardwise.serving.messages import Finished, Sampling, Token, Top
from shardwise.serving.service import Service
from shardwise.serving.text import Stream, Text

_RETRY_MOST = 60
"""Seconds that a client is asked to wait at most."""


@dataclass(frozen=True)
class Chosen:
    """A token of a text. logprob: natural logarithm of its probability, before any temperature or cut; None for the
    first one of a prompt. offset: the character at which it begins. top: the likeliest ones there. ends: it has ended
    the answer, and is not part of its text."""

    token: int
    logprob: float | None
    offset: int
    top: Top = ()
    ends: bool = False


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt; and, where the answer begins with it, its text, with the character at which each token
    begins."""

    tokens: list[int]
    text: str = ""
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True)
class TextDelta:
    """The next piece of one choice's text. tokens: ids of this text. reason: why nothing follows, None while
    something may."""

    choice: int
    text: str
    tokens: tuple[Chosen, ...] = ()
    reason: str | None = None


class Front:
    """An engine with a bounded queue before it.

    places: sequences that run at a time, over all replicas; queue: that may wait besides. context: tokens of the
    longest sequence. Used by the event loop's thread only.
    """

    def __init__(self, engine: Service, text: Text, *, context: int, places: int, queue: int) -> None:
        self.engine, self.text, self.context = engine, text, context
        self.places, self.limit = places, places + queue
        self._longest_text = context * max(map(len, text.tokenizer.get_vocab()))
        self.metrics = Metrics()
        self.stopping = False
        self.open = 0
        """Sequences that the engine has not finished."""
        self.live: set[Generation] = set()
        self.readers: set[asyncio.Task[Any]] = set()
        """Clients whose request is being read."""
        self._seconds = 1.0
        """Seconds of a sequence, smoothed."""

    def refuse_if_closed(self) -> None:
        """Raise `Problem` (503) when nothing new is taken."""
        if self.engine.failure is not None:
            raise Problem(503, f"the engine has failed: {self.engine.failure}", code="engine_failed")
        if self.stopping:
            raise _stopping()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While a request's body and prompt are read. Raises `Problem` (503) where that is broken off as the server
        stops."""
        task = asyncio.current_task()
        assert task is not None
        self.readers.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self.stopping:
                raise _stopping() from None
            raise
        finally:
            self.readers.discard(task)

    def check_count(self, count: int, param: str) -> None:
        """Raise `Problem` (400) for more sequences than there are places, before anything is done for them."""
        if count > self.limit:
            raise Problem(400, f"{count} sequences in one request exceed the {self.limit} of this server", param=param)

    def admit(self, count: int, param: str) -> None:
        """Raise `Problem` unless there is room for `count` sequences: 429 for now, 400 for ever."""
        self.check_count(count, param)
        if self.open + count > self.limit:
            wait = min(_RETRY_MOST, max(1, math.ceil(self._seconds * count / self.places)))
            raise Problem(
                429,
                f"{self.open} of {self.limit} sequences are running or waiting: try again in {wait} s",
                code="queue_full",
                headers={"retry-after": str(wait)},
            )

    def check_length(self, texts: Iterable[str], where: str) -> None:
        """Raise `Problem` (400) for texts that cannot fit the context, before seconds are spent on their tokens."""
        length = sum(map(len, texts))
        if length > self._longest_text:
            raise _too_long(f"{length:,} characters have more tokens than the context of {self.context}", where)

    def max_tokens(self, prompt: list[int], wanted: CompletionRequest, where: str) -> int:
        """Tokens that an answer may have. Raises `Problem` (400) where the context does not allow them."""
        room, asked = self.context - len(prompt), wanted.max_tokens
        if room < (least := int(asked != 0)):
            raise _too_long(
                f"the prompt has {len(prompt)} tokens; with a context of {self.context} the largest has "
                f"{self.context - least}{', and one token of answer' * least}",
                where,
            )
        if asked is not None and asked > room:
            raise _too_long(
                f"{asked} tokens after a prompt of {len(prompt)} exceed the context of {self.context}: ask for at "
                f"most {room}, or shorten the prompt to {max(0, self.context - asked)}",
                where,
            )
        return min(room, wanted.usual or room) if asked is None else asked

    def finished(self, reason: str, seconds: float, reused: int) -> None:
        self.open -= 1
        self._seconds += 0.2 * (seconds - self._seconds)
        self.metrics.finished[(("reason", reason),)] += 1
        self.metrics.reused_tokens += reused

    def gauges(self) -> dict[str, tuple[str, dict[Any, float]]]:
        load = self.engine.load()
        by_replica = {(("replica", str(number)),): each for number, each in load.items()}
        running = min(self.open, sum(each.running for each in load.values()))
        return {
            "sequences_running": ("sequences that the engine works on", {(): running}),
            "sequences_waiting": ("sequences that wait for the engine", {(): self.open - running}),
            "pages_used": ("pages of the cache in use", {key: each.pages for key, each in by_replica.items()}),
            "pages": ("pages of the cache", {key: each.of_pages for key, each in by_replica.items()}),
        }


def _too_long(message: str, where: str) -> Problem:
    return Problem(400, message, param=where, code="context_length_exceeded")


def _stopping() -> Problem:
    return Problem(503, "the server is stopping", code="stopping", headers={"connection": "close"})


@dataclass
class _Sequence:
    """One choice of one prompt. ends: tokens that end it. number: the engine's, 0 where nothing is asked of it.
    counted: tokens so far; last: when the newest came. scored: tokens of the prompt. held: those whose text is held
    back. reason: why nothing more is given out. ended: the engine has finished it.
    """

    prompt: Prompt
    stream: Stream
    ends: tuple[int, ...]
    number: int = 0
    scored: list[Chosen] = field(default_factory=list)
    counted: int = 0
    last: float = 0.0
    held: tuple[Chosen, ...] = ()
    reason: str | None = None
    ended: bool = False
    echoed: bool = False


class Generation:
    """The sequences of one request: `n` choices of each prompt, in the order of prompts.

    continues: whether answers go on with their prompt's text. arrived: when the request came, by
    `time.monotonic`. Raises `Problem` when the engine does not take them.
    """

    def __init__(
        self,
        front: Front,
        prompts: list[Prompt],
        wanted: CompletionRequest,
        param: str,
        arrived: float,
        *,
        continues: bool,
    ) -> None:
        self._front, self._wanted, self._arrived, self._continues = front, wanted, arrived, continues
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[TextDelta | Problem] = asyncio.Queue()
        self._over = asyncio.Event()
        self._sequences: list[_Sequence] = []
        self.prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
        self.reused = 0
        longest = [front.max_tokens(prompt.tokens, wanted, param) for prompt in prompts]
        front.admit(len(prompts) * wanted.n, "n" if wanted.n > 1 else param)
        front.live.add(self)
        try:
            for prompt, most in zip(prompts, longest, strict=True):
                for choice in range(wanted.n):
                    self._submit(prompt, wanted.sampling_of(choice, most, front.text.stop_tokens))
        except UserError as error:
            self.cancel()
            raise Problem(400, str(error), param=param) from None
        except RunFailed as error:
            self.cancel()
            raise Problem(503, f"the engine has failed: {error}", code="engine_failed") from None
        front.metrics.prompt_tokens += self.prompt_tokens * wanted.n
        self._drop_if_over()

    def _submit(self, prompt: Prompt, sampling: Sampling) -> None:
        choice = len(self._sequences)
        before = prompt.tokens if self._continues else ()
        stream = self._front.text.stream(self._wanted.stop, before, least=sampling.min_tokens)
        sequence = _Sequence(prompt, stream, sampling.stop_tokens)
        if self._wanted.echo and not sampling.prompt_logprobs:
            self._pieces.put_nowait(TextDelta(choice, prompt.text))
        if prompt.tokens and not sampling.max_tokens and not (sampling.prompt_logprobs and len(prompt.tokens) > 1):
            # Nothing is left to compute.
            sequence.ended, sequence.reason = True, "length"
            self._sequences.append(sequence)
            self._echo(choice, sequence)
            self._pieces.put_nowait(TextDelta(choice, "", (), "length"))
            return

        def sink(answer: Token | Finished) -> None:
            # The loop is gone when a server has been stopped without waiting for its engine.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._take, choice, answer)

        sequence.number = self._front.engine.submit(prompt.tokens, sampling, sink)
        self._sequences.append(sequence)
        self._front.open += 1

    @property
    def choices(self) -> int:
        return len(self._sequences)

    @property
    def generated(self) -> int:
        """Tokens of all choices so far, those that end an answer among them."""
        return sum(sequence.counted for sequence in self._sequences)

    async def pieces(self) -> AsyncIterator[TextDelta]:
        """Answers of all choices, to the end of the last one. Raises `Problem` when the engine fails."""
        open_choices = len(self._sequences)
        while open_choices:
            piece = await self._pieces.get()
            if isinstance(piece, Problem):
                raise piece
            open_choices -= piece.reason is not None
            yield piece

    def cancel(self) -> None:
        """Cancel what is left. May be called again, and when all is over."""
        for sequence in self._sequences:
            sequence.reason = sequence.reason or "cancelled"
            if not sequence.ended:
                self._front.engine.cancel(sequence.number)
        self._drop_if_over()

    def abort(self, problem: Problem) -> None:
        self._pieces.put_nowait(problem)
        self.cancel()

    async def settled(self) -> None:
        """Wait until the engine has finished all sequences, those that a stop string has ended, too: what of their
        prompts it found in the cache is known then."""
        await self._over.wait()

    def _drop_if_over(self) -> None:
        if all(sequence.ended for sequence in self._sequences):
            self._over.set()
            self._front.live.discard(self)

    # -- on the event loop, one answer of the engine at a time

    def _take(self, choice: int, answer: Token | Finished) -> None:
        sequence = self._sequences[choice]
        if isinstance(answer, Token):
            if answer.prompt:
                offset = sequence.prompt.offsets[len(sequence.scored) + 1]
                sequence.scored.append(Chosen(answer.token, answer.logprob, offset, answer.top))
                return
            self._count(sequence)
            if sequence.reason is None:
                self._echo(choice, sequence)
                self._token(choice, sequence, answer)
            return
        sequence.ended = True
        # The other choices of a prompt find what the first one has computed.
        self.reused += answer.reused if choice % self._wanted.n == 0 else 0
        reason = sequence.reason or answer.reason
        self._front.finished(reason, time.monotonic() - self._arrived, answer.reused)
        self._drop_if_over()
        if sequence.reason is not None:
            return
        sequence.reason = reason
        if answer.reason in ("stop", "length"):
            self._echo(choice, sequence)
            rest = sequence.stream.end()
            # What was held back may have been the half of a stop string, and with its other half in it.
            reason = "stop" if sequence.stream.stopped else reason
            self._pieces.put_nowait(TextDelta(choice, rest, self._kept(sequence), reason))
        else:
            self._pieces.put_nowait(Problem(500, answer.error or "the engine has dropped the request"))

    def _token(self, choice: int, sequence: _Sequence, answer: Token) -> None:
        sequence.counted += 1
        self._front.metrics.generated_tokens += 1
        ends, offset = answer.token in sequence.ends, len(sequence.prompt.text) + sequence.stream.place
        text = sequence.stream.add(answer.token, shown=not ends)
        sequence.held += (Chosen(answer.token, answer.logprob, offset, answer.top, ends),)
        if sequence.stream.stopped:
            sequence.reason = "stop"
            self._front.engine.cancel(sequence.number)
            self._pieces.put_nowait(TextDelta(choice, text, self._kept(sequence), "stop"))
        elif text:
            held, sequence.held = sequence.held, ()
            self._pieces.put_nowait(TextDelta(choice, text, held))

    def _kept(self, sequence: _Sequence) -> tuple[Chosen, ...]:
        """The tokens held back; without those of a stop string and what follows it."""
        if not sequence.stream.stopped:
            return sequence.held
        end = len(sequence.prompt.text) + sequence.stream.given
        return tuple(chosen for chosen in sequence.held if chosen.offset < end)

    def _echo(self, choice: int, sequence: _Sequence) -> None:
        prompt = sequence.prompt
        if self._wanted.sampling.prompt_logprobs and not sequence.echoed:
            sequence.echoed = True
            tokens = (Chosen(prompt.tokens[0], None, prompt.offsets[0]), *sequence.scored)
            self._pieces.put_nowait(TextDelta(choice, prompt.text, tokens))

    def _count(self, sequence: _Sequence) -> None:
        now, metrics = time.monotonic(), self._front.metrics
        if sequence.last:
            metrics.per_token.add(now - sequence.last)
        else:
            metrics.first_token.add(now - self._arrived)
        sequence.last = now
