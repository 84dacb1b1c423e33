"""Text to tokens and back: what a front end needs of a tokenizer, and answers as text while they come.

Control tokens that a prompt spells are tokens, as `transformers` has it: who completes a text writes all of it. A
stream gives out no half of a character, and nothing that may still become a stop string. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.data.ends import declared_ends
from shardwise.errors import UserError
from shardwise.serving.job import tokenizer_of
from shardwise.serving.token_bytes import TokenBytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LONGEST = 4
"""Tokens that a character of UTF-8 takes at most: what is no character by then will be none."""
_CONTEXT = 8
"""Tokens of a prompt that an answer's text may depend on: tokenizers of SentencePiece drop a text's first blank."""
_ANCHOR = "a"
"""Text before a token whose spelling is asked for."""


class Text:
    """A tokenizer. stop_tokens: ids after which an answer is over. bytes: of its tokens."""

    def __init__(self, tokenizer: Tokenizer, stop_tokens: Sequence[int]) -> None:
        self.tokenizer, self.stop_tokens = tokenizer, tuple(stop_tokens)
        tokenizer.encode_special_tokens = False
        self.bytes = TokenBytes(tokenizer)
        self._anchor: list[int] = tokenizer.encode(_ANCHOR, add_special_tokens=False).ids

    @classmethod
    def open(cls, folder: Path | str) -> Text:
        """The tokenizer that belongs to a folder of weights. Raises `UserError` where there is none."""
        from shardwise.data import tokenizer as files

        folder = Path(folder)
        path = tokenizer_of(folder)
        if path is None:
            raise UserError(f"{folder} has no tokenizer.json: put one there, or give the prompt as token ids")
        tokenizer = files.load(path)
        # A run's tokenizer is elsewhere, with files of its own beside it.
        stops = [*declared_ends(folder, tokenizer), *declared_ends(path.parent, tokenizer)]
        if not stops:
            found = (tokenizer.token_to_id(token) for token in files.KNOWN_ENDS)
            stops = [next((token for token in found if token is not None), -1)]
        return cls(tokenizer, [token for token in dict.fromkeys(stops) if token >= 0])

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, with those that the tokenizer puts around every text."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each of several prompts. Other threads run meanwhile, as they do not with `Tokenizer.encode`:
        a prompt of megabytes takes seconds. Raises `UserError` for what is no text."""
        try:
            "".join(texts).encode()
        except UnicodeEncodeError:
            raise UserError("a prompt has bytes that are not UTF-8, and so no text; write it anew as UTF-8") from None
        return [found.ids for found in self.tokenizer.encode_batch(list(texts))]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones left out."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def spelled(self, token: int) -> str:
        """One token as text, with the blank that it begins with in the middle of a text."""
        before: str = self.tokenizer.decode(self._anchor, skip_special_tokens=False)
        text: str = self.tokenizer.decode([*self._anchor, token], skip_special_tokens=False)
        return text[len(before) :]

    def stream(self, stop: Sequence[str] = (), prompt: Sequence[int] = ()) -> Stream:
        """An answer to come, which ends before the stop string that is complete first. prompt: the tokens that it
        continues; none for one that stands for itself."""
        return Stream(self, stop, prompt)


class Stream:
    """Tokens of one answer on their way to text. stopped: a stop string has come, and nothing follows."""

    def __init__(self, text: Text, stop: Sequence[str], prompt: Sequence[int] = ()) -> None:
        self._text, self._stop = text, tuple(filter(None, stop))
        self._tokens = list(prompt[-_CONTEXT:])
        self._start, self._given = 0, len(self._tokens)
        """Tokens before `_start` have no influence on the text of those from `_given` on, which is still to come."""
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that has become certain with this token."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        new = self._new()
        if not any(self._text.bytes.half(self._tokens)):
            self._start, self._given = self._given, len(self._tokens)
            return self._certain(new)
        if len(self._tokens) - self._given < _LONGEST:
            return ""
        # The first of them has become no character, and the last ones still may.
        new = self._new(self._given + 1)
        self._given += 1
        self._start = max(self._start, self._given - _CONTEXT)
        return self._certain(new)

    def end(self) -> str:
        """The text that was held back, now that no token follows; half a character is left out."""
        if self.stopped:
            return ""
        tokens, letters = self._text.bytes.half(self._tokens)
        new = self._new(len(self._tokens) - tokens)
        certain = self._certain(new[: len(new) - letters])
        rest, self._held = self._held, ""
        return certain if self.stopped else certain + rest

    def _new(self, stop: int | None = None) -> str:
        """Text of the tokens before `stop` that have not been given out. Some tokens' text depends on those before
        them."""
        before = self._text.decode(self._tokens[self._start : self._given])
        return self._text.decode(self._tokens[self._start : stop])[len(before) :]

    def _certain(self, new: str) -> str:
        text = self._held + new
        # The one that is complete first, however the text was cut into tokens; of two at a time the longer.
        places = [(at + len(word), at) for word in self._stop if (at := text.find(word)) >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)[1]]
        hold = max((_overlap(text, word) for word in self._stop), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]


def _overlap(text: str, word: str) -> int:
    """The longest end of `text` with which `word` begins."""
    for length in range(min(len(text), len(word) - 1), 0, -1):
        if text.endswith(word[:length]):
            return length
    return 0
