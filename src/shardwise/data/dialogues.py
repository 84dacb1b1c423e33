"""Dialogues and preference pairs: records as tokens, where the loss counts those in answers, and rows of them.

A record has `messages`, or `prompt` with `completion`, or `prompt` (which the answers may have in common instead) with
`chosen` and `rejected`. Each is a text, or a list of messages, which `transformers` renders by the tokenizer's chat
template. A stored dialogue is its length n and n numbers 2 x token + (1 for a token of an answer); a stored pair is two
dialogues.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwise.data.sampler import permute
from shardwise.data.tokenizer import end_of_text, load, read_template, tokenizer_file
from shardwise.errors import UserError

if TYPE_CHECKING:
    from shardwise.data.sources import Shape

IGNORED = -100
"""Target of a token that does not count."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]
"""First character of an answer, and the one after its last."""


class DialogueEncoder:
    """From records to stored dialogues, by the tokenizer and the chat template of a folder."""

    def __init__(self, tokenizer: Path, shape: Shape) -> None:
        """Raises `UserError` for a damaged tokenizer."""
        self._file, self._shape = tokenizer_file(tokenizer), shape
        self._tokenizer = load(self._file)
        self._tokenizer.encode_special_tokens = False  # templates spell them
        self._template, self._names = read_template(self._file.parent)
        end = end_of_text(self._tokenizer, str(self._file), self._file.parent)
        self._end = self._tokenizer.id_to_token(end)
        self.left_out = self.without = self.tokens = self.answers = 0
        """Answers that the template shows otherwise in a longer dialogue; records without answers; tokens; tokens of
        answers."""

    def encode(self, record: dict[str, Any], place: str) -> list[int]:
        """A stored dialogue or pair; empty without a token of an answer. place: of the record, for errors. Raises
        `UserError`."""
        try:
            texts = self._texts(record, place)
            dialogues = [self._numbers(text, spans, plain) for text, spans, plain in texts]
        except (KeyError, TypeError, AttributeError, UnicodeEncodeError) as error:
            missing = "messages" if self._shape == "chat" else str(error).strip("'")
            what = f"it has {', '.join(record)} and no {missing}" if isinstance(error, KeyError) else str(error)
            raise UserError(
                f"{place} is no dialogue ({what}); messages have a role and content, and all records one shape"
            ) from None
        if not all(any(number & 1 for number in dialogue) for dialogue in dialogues):
            self.without += 1
            return []
        self.tokens += sum(map(len, dialogues))
        self.answers += sum(number & 1 for dialogue in dialogues for number in dialogue)
        return [number for dialogue in dialogues for number in (len(dialogue), *dialogue)]

    def summary(self, count: int) -> str:
        """What `count` records have become, in words."""
        kind = "preference pairs" if self._shape == "pairs" else "dialogues"
        line = f"{self.answers:,} of {self.tokens:,} tokens in {count:,} {kind} are answers, whose loss counts"
        line += f"; {self.without:,} without an answer are left out" if self.without else ""
        if self.left_out:
            line += (
                f"; {self.left_out:,} answers do not count, which the chat template shows otherwise in longer dialogues"
            )
        return line

    def _texts(self, record: dict[str, Any], place: str) -> list[tuple[str, list[Span], bool]]:
        """Text, answers, and whether it is plain, of the dialogues of a record."""
        if self._shape == "chat" and "messages" in record:
            return [(*self._dialogue(record["messages"], record, place), False)]
        answers = [record[name] for name in (("completion",) if self._shape == "chat" else ("chosen", "rejected"))]
        prompt = record.get("prompt")
        if prompt is None and len(answers) == 1:
            raise KeyError("prompt")
        if prompt is None or (isinstance(prompt, str) and isinstance(answers[0], list)):
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*answers, strict=False)))
            if isinstance(answers[0], list):  # the last message is the answer, whatever another one has
                common = min(common, *(len(answer) - 1 for answer in answers))
            prompt, answers = answers[0][:common], [answer[common:] for answer in answers]
        if isinstance(prompt, str):
            texts = [prompt + answer + self._end for answer in answers]
            return [(text, [(len(prompt), len(text))], True) for text in texts]
        before, made = self._render(prompt, record, place, add_generation_prompt=True), []
        for answer in answers:
            text = self._render([*prompt, *answer], record, place)
            if not text.startswith(before):
                raise UserError(f"{place}: the chat template shows its prompt otherwise once there is an answer")
            made.append((text, [(len(before), len(text))], False))
        return made

    def _dialogue(self, messages: list[dict[str, Any]], record: dict[str, Any], place: str) -> tuple[str, list[Span]]:
        """Text of a dialogue and its answers: what the template marks by `{% generation %}`, else what a longer
        dialogue adds to a shorter one."""
        if not messages:
            return "", []
        if not isinstance(messages, list):
            raise TypeError("its messages are no list")
        if _GENERATION.search(self._template or ""):
            return self._rendered(messages, record, place, return_assistant_tokens_mask=True)
        text, spans = self._render(messages, record, place), []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                if not index:  # some templates have no dialogue that begins so
                    self.left_out += 1
                    continue
                before = self._render(messages[:index], record, place, add_generation_prompt=True)
                after = self._render(messages[: index + 1], record, place)
                if text.startswith(after) and after.startswith(before):
                    spans.append((len(before), len(after)))
                else:
                    self.left_out += 1
        return text, spans

    def _render(self, messages: list[dict[str, Any]], record: dict[str, Any], place: str, **options: Any) -> str:
        return self._rendered(messages, record, place, **options)[0]

    def _rendered(
        self, messages: list[dict[str, Any]], record: dict[str, Any], place: str, **options: Any
    ) -> tuple[str, list[Span]]:
        try:
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError:
            raise UserError("dialogues are rendered by transformers: pip install transformers jinja2") from None
        if self._template is None:
            raise UserError(
                f"{place} has messages, but there is no chat template beside {self._file} (chat_template.jinja, or in "
                "tokenizer_config.json): give --tokenizer the folder of a chat model"
            )
        for number, message in enumerate(messages, 1):
            names = message if isinstance(message, dict) else ()
            if "role" not in names or not {"content", "tool_calls"} & set(names):  # a template may show nothing of it
                lacks = "role" if "role" not in names else "content"
                raise TypeError(f"message {number} has {', '.join(map(str, names)) or 'no fields'} and no {lacks}")
        options |= {"tools": record.get("tools"), "chat_template": self._template, **self._names}
        try:
            rendered: Any = render_jinja_template([messages], **options)  # declared as a text
            texts, spans = rendered
        except Exception as error:  # a template is a program of somebody else's
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"{place}: the chat template rejects it: {reason}") from None
        return str(texts[0]), spans[0] if spans else []

    def _numbers(self, text: str, spans: list[Span], plain: bool) -> list[int]:
        """A token counts if one of its characters is an answer's. plain: no template has written the first token."""
        encoding = self._tokenizer.encode(text, add_special_tokens=plain)
        counts = np.zeros(len(text) + 1, bool)
        for start, stop in spans:
            counts[start:stop] = True
        numbers, last = [], 0
        for number, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            # Offsets may leave out spaces: they are of the token that has them.
            numbers.append(2 * number + bool(counts[min(last, start) : stop].any()))
            last = max(last, stop)
        return numbers


def stored(tokens: NDArray[Any]) -> Iterator[tuple[int, int]]:
    """(start, length) of every stored dialogue."""
    at = 0
    while at < len(tokens):
        length = int(tokens[at])
        yield at + 1, length
        at += 1 + length


def answer_tokens(tokens: NDArray[Any]) -> NDArray[np.int64]:
    """Tokens of all answers."""
    parts = [np.asarray(tokens[start : start + length], np.int64) for start, length in stored(tokens)]
    numbers = np.concatenate(parts)
    chosen: NDArray[np.int64] = numbers[numbers & 1 == 1] // 2
    return chosen


class DialogueRows:
    """Rows of `seq` tokens of a corpus of dialogues, in place of `Sampler`'s windows, and in its order.

    packed: as many dialogues in a row as fit, every one with positions from 0; else one. Pairs have the chosen dialogue
    in the first half of a row and the rejected one in the second. What does not fit is cut at its end, and left out
    when no answer remains. Raises `UserError` where nothing does.
    """

    def __init__(self, tokens: NDArray[Any], shape: Shape, seq: int, seed: int, packed: bool) -> None:
        self.tokens, self.seq, self.seed, self.packed = tokens, seq, seed, packed
        self.room = seq // 2 if shape == "pairs" else seq
        dialogues, parts = list(stored(tokens)), 2 if shape == "pairs" else 1
        if shape == "pairs" and seq % 2:
            raise UserError(f"--seq {seq} must be even: half of a row has one answer of a pair")
        groups = list(zip(*(dialogues[part::parts] for part in range(parts)), strict=True))
        kept = [group for group in groups if all(map(self._counts, group))]
        self.cut = sum(length - 1 > self.room for group in kept for _, length in group)
        """Dialogues whose end is cut."""
        self.count, self.left_out = len(kept), len(groups) - len(kept)
        """Dialogues, or pairs, with an answer in a row, and without."""
        if not kept:
            raise UserError(f"no answer begins within a row of {self.room} tokens; give longer rows (--seq)")
        self.places = _packed(kept, seq) if packed and parts == 1 else kept
        self.windows = len(self.places)
        """Rows of one epoch."""
        self.reference: NDArray[np.float64] | None = None
        """By pair, log p(chosen) - log p(rejected) of the reference; None without one."""

    def _counts(self, dialogue: tuple[int, int]) -> bool:
        start, length = dialogue
        targets = self.tokens[start + 1 : start + min(length, self.room + 1)]
        return bool((np.asarray(targets) & 1).any())

    def summary(self) -> str:
        """The rows in words."""
        kind = "preference pairs" if self.room < self.seq else "dialogues"
        how = "packed" if self.packed else "one in a row, padded"
        line = f"{self.count:,} {kind}, {how}: {self.windows:,} rows of {self.seq} tokens"
        line += f"; the end of {self.cut:,} longer than {self.room} is cut" if self.cut else ""
        return line + (f"; {self.left_out:,} have no answer there and are left out" if self.left_out else "")

    def batch(self, indices: ArrayLike) -> dict[str, NDArray[Any]]:
        """Rows in the order of `indices` [n] of samples, any from 0, as of `Sampler.batch`."""
        index = np.asarray(indices, np.int64)
        return self.rows(permute(index % self.windows, index // self.windows, self.windows, self.seed))

    def rows(self, numbers: ArrayLike) -> dict[str, NDArray[Any]]:
        """Rows by their numbers [n]: inputs and targets int64 [n, seq], `IGNORED` where no answer's; documents and
        positions where they are packed, what pads a row being one more document; pairs' reference [n]."""
        numbers = np.asarray(numbers, np.int64)
        inputs, documents, positions = (np.zeros((len(numbers), self.seq), np.int64) for _ in range(3))
        targets = np.full_like(inputs, IGNORED)
        for row, number in enumerate(numbers):
            at = 0
            for document, (start, length) in enumerate(self.places[number]):
                count = min(length - 1, self.room)
                values = np.asarray(self.tokens[start : start + count + 1], np.int64)
                span = slice(at, at + count)
                inputs[row, span] = values[:-1] // 2
                targets[row, span] = np.where(values[1:] & 1, values[1:] // 2, IGNORED)
                documents[row, span], positions[row, span] = document, np.arange(count)
                at += count if self.packed else self.room
            documents[row, at:], positions[row, at:] = len(self.places[number]), np.arange(max(0, self.seq - at))
        made = {"inputs": inputs, "targets": targets}
        if self.packed:
            made |= {"documents": documents, "positions": positions}
        return made if self.reference is None else {**made, "reference": self.reference[numbers]}


def _packed(groups: list[tuple[tuple[int, int], ...]], seq: int) -> list[tuple[tuple[int, int], ...]]:
    """Rows of dialogues, the longest first, in the fullest row that has room for it."""
    rows: list[list[tuple[int, int]]] = []
    by_room: list[list[int]] = [[] for _ in range(seq + 1)]
    """Tokens of room -> rows that have it."""
    there = 0
    """The rooms that some row has, as bits."""
    for (dialogue,) in sorted(groups, key=lambda group: -group[0][1]):
        count = min(dialogue[1] - 1, seq)
        if fits := there >> count:
            room = count + (fits & -fits).bit_length() - 1
            row = by_room[room].pop()
            there ^= 0 if by_room[room] else 1 << room
        else:
            room, row = seq, len(rows)
            rows.append([])
        rows[row].append(dialogue)
        by_room[room - count].append(row)
        there |= 1 << (room - count)
    return [tuple(row) for row in rows]
