"""Text to tokens and back: what a front end needs of a tokenizer, and answers as text while they come.

A stream gives out no half of a character, and nothing that may still become a stop string. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import UserError
from shardwise.serving.job import tokenizer_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_LONGEST = 4
"""Tokens that a character of UTF-8 takes at most: what is no character by then will be none."""


class Text:
    """A tokenizer. stop_tokens: ids after which an answer is over."""

    def __init__(self, tokenizer: Tokenizer, stop_tokens: Sequence[int]) -> None:
        self.tokenizer, self.stop_tokens = tokenizer, tuple(stop_tokens)

    @classmethod
    def open(cls, folder: Path | str) -> Text:
        """The tokenizer that belongs to a folder of weights. Raises `UserError` where there is none."""
        from shardwise.data import tokenizer as files

        folder = Path(folder)
        path = tokenizer_of(folder)
        if path is None:
            raise UserError(f"{folder} has no tokenizer.json: put one there, or give the prompt as token ids")
        tokenizer = files.load(path)
        stops = _stop_tokens(folder)
        if not stops:
            found = (tokenizer.token_to_id(token) for token in files.KNOWN_ENDS)
            stops = [next((token for token in found if token is not None), -1)]
        return cls(tokenizer, [token for token in stops if token >= 0])

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, with those that the tokenizer puts around every text."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each of several prompts. Other threads run meanwhile, as they do not with `Tokenizer.encode`:
        a prompt of megabytes takes seconds."""
        return [found.ids for found in self.tokenizer.encode_batch(list(texts))]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones left out."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def spelled(self, token: int) -> str:
        """One token as text."""
        text: str = self.tokenizer.decode([token], skip_special_tokens=False)
        return text

    def stream(self, stop: Sequence[str] = ()) -> Stream:
        """An answer to come, which ends before the stop string that is complete first."""
        return Stream(self, stop)


class Stream:
    """Tokens of one answer on their way to text. stopped: a stop string has come, and nothing follows."""

    def __init__(self, text: Text, stop: Sequence[str]) -> None:
        self._text, self._stop = text, tuple(filter(None, stop))
        self._tokens: list[int] = []
        self._start = self._given = 0
        """Tokens before `_start` have no influence on the text of those from `_given` on, which is still to come."""
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that has become certain with this token."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        new = self._new()
        if new.endswith(_UNKNOWN) and len(self._tokens) - self._given < _LONGEST:
            return ""
        self._start, self._given = self._given, len(self._tokens)
        return self._certain(new)

    def end(self) -> str:
        """What was held back, now that no token follows; half a character is left out."""
        if self.stopped:
            return ""
        certain = self._certain(self._new().rstrip(_UNKNOWN))
        rest, self._held = self._held, ""
        return certain if self.stopped else certain + rest

    def _new(self) -> str:
        """Text of the tokens that have not been given out. Some tokens' text depends on those before them."""
        before = self._text.decode(self._tokens[self._start : self._given])
        return self._text.decode(self._tokens[self._start :])[len(before) :]

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


def _stop_tokens(folder: Path) -> list[int]:
    """What a Hugging Face folder says ends an answer."""
    for name in ("generation_config.json", "config.json"):
        try:
            content = json.loads((folder / name).read_text())
        except (OSError, ValueError):
            continue
        found = content.get("eos_token_id") if isinstance(content, dict) else None
        found = found if isinstance(found, list) else [found]
        if stops := [token for token in found if type(token) is int]:
            return stops
    return []
