"""Text to tokens and back: what a front end needs of a tokenizer, and answers as text while they come.

Control tokens that a prompt spells are tokens, as `transformers` has it: who completes a text writes all of it. A
stream gives out no half of a character, and nothing that may still become a stop string. Imports no torch.

Bytes of single tokens, which tell half a character from a U+FFFD that the text itself has. Imports no torch.

A tokenizer decodes both to U+FFFD, the replacement character.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.data.tokenizer import declared_ends
from shardwise.errors import UserError
from shardwise.serving.job import tokenizer_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_CHARACTER_BYTES = 4
"""Bytes of a character of UTF-8, at most."""
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")
"""A token of one byte in SentencePiece's vocabularies."""


class TokenBytes:
    """Bytes of the tokens of a tokenizer, by how its decoder reads their spelling."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # The decoder's settings, which it has for pickling; the whole tokenizer's would be megabytes.
        settings = tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else b""
        self._letters = _byte_level() if b'"ByteLevel"' in settings else {}
        self._fallback = b'"ByteFallback"' in settings
        self._added = tokenizer.get_added_tokens_decoder()

    def half(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(tokens, letters of text) at the end that are the beginning of a character and no more; (0, 0) for none.

        ByteFallback has a token for each byte and ByteLevel U+FFFD for all of them: one of the two numbers is 0.
        """
        end = b""
        for token in reversed(tokens):
            end = (b"" if self.special(token) is not None else self.of(token)) + end
            if len(end) >= _CHARACTER_BYTES:
                break
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(end)
        half = len(decoder.getstate()[0])
        return (half, 0) if self._fallback else (0, min(1, half))

    def special(self, token: int) -> str | None:
        """The text of a special token; None for any other one."""
        added = self._added.get(token)
        return added.content if added is not None and added.special else None

    def of(self, token: int) -> bytes:
        if token in self._added:
            content: str = self._added[token].content
            return content.encode()
        spelling = self._tokenizer.id_to_token(token) or ""
        if self._fallback and (byte := _FALLBACK.fullmatch(spelling)):
            return bytes([int(byte[1], 16)])
        if self._letters and all(letter in self._letters for letter in spelling):
            return bytes(self._letters[letter] for letter in spelling)
        return spelling.encode()


def _byte_level() -> dict[str, int]:
    """The byte that each letter of GPT-2's alphabet stands for: printable ones for themselves, the rest in order."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = {letter: ord(letter) for letter in alphabet if ord(letter) < 256}
    others = sorted(set(range(256)) - set(printable.values()))
    return printable | dict(zip(alphabet[len(printable) :], others, strict=True))


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
        places = dict.fromkeys((folder, path.parent))
        stops = [token for place in places for token in declared_ends(place, tokenizer)]
        if not stops:
            known = (tokenizer.token_to_id(token) for token in files.KNOWN_ENDS)
            stops = [token for token in known if token is not None][:1]
        return cls(tokenizer, list(dict.fromkeys(stops)))

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

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=not special)
        return text

    def spelled(self, token: int) -> str:
        before: str = self.tokenizer.decode(self._anchor, skip_special_tokens=False)
        text: str = self.tokenizer.decode([*self._anchor, token], skip_special_tokens=False)
        return text[len(before) :]

    def spelled_in_bytes(self, token: int) -> tuple[str, bytes]:
        """One token as text and as bytes, which may be a part of a character."""
        text = self.spelled(token)
        return text, self.bytes.of(token) if "\N{REPLACEMENT CHARACTER}" in text else text.encode()

    def echo(self, tokens: Sequence[int], given: str | None = None) -> tuple[str, list[int]]:
        """(text of a prompt, the character at which each token begins). given: the text that the prompt was; without
        one, special tokens are text, too."""
        stream = Stream(self, (), (), special=given is None)
        offsets, pieces = [], []
        for token in tokens:
            offsets.append(stream.place)
            pieces.append(stream.add(token))
        text = given if given is not None else self.decode(tokens, special=True)
        if given is not None and "".join(pieces) + stream.end() != given:
            # Special tokens that the text spells, or a tokenizer that changes texts.
            offsets = list(accumulate((start for start, _ in self.tokenizer.encode(given).offsets), max))
        return text, [min(offset, len(text)) for offset in offsets]

    def stream(self, stop: Sequence[str] = (), prompt: Sequence[int] = (), *, least: int = 0) -> Stream:
        """An answer to come, which ends before the stop string that is complete first. prompt: the tokens that it
        continues; none for one that stands for itself. least: tokens that no stop string ends."""
        return Stream(self, stop, prompt, least=least)


class Stream:
    """Tokens of one answer on their way to text. Stop strings are looked for in the text and in what it would be with
    the tokens that are not shown: special tokens and ends of answers.

    stopped: a stop string has come, and nothing follows. place: the character of the text at which the next token
    begins; tokens within one character begin where it does. given: characters given out.
    """

    def __init__(
        self, text: Text, stop: Sequence[str], prompt: Sequence[int] = (), *, special: bool = False, least: int = 0
    ) -> None:
        self._text, self._stop, self._special, self._least = text, tuple(filter(None, stop)), special, least
        self._tokens = list(prompt[-_CONTEXT:])
        self._start, self._done = 0, len(self._tokens)
        """Tokens before `_start` have no influence on the text of those from `_done` on, which is still to come."""
        self._held = ""
        self._shown: list[bool] = []
        """Whether each character of the held text, which may still become a stop string, is shown."""
        self._made = self.place = self.given = 0
        self.stopped = False

    def add(self, token: int, *, shown: bool = True) -> str:
        """The text that has become certain with this token. shown: False for one that ends the answer."""
        if self.stopped:
            return ""
        self._least -= 1
        word = None if self._special else self._text.bytes.special(token)
        if word is not None or not shown:
            return self._certain(word or self._text.spelled(token), shown=False)
        self._tokens.append(token)
        tokens, letters = self._text.bytes.half(self._tokens)
        if not (tokens or letters):
            new = self._new()
            self._start, self._done = self._done, len(self._tokens)
            return self._certain(new)
        if len(self._tokens) - self._done < _LONGEST:
            self.place = self._made + max(0, len(self._new(len(self._tokens) - tokens)) - letters)
            return ""
        # The first of them has become no character, and the last ones still may.
        new = self._new(self._done + 1)
        self._done += 1
        self._start = max(self._start, self._done - _CONTEXT)
        return self._certain(new)

    def end(self) -> str:
        """The text that was held back, now that no token follows; half a character is left out."""
        if self.stopped:
            return ""
        tokens, letters = self._text.bytes.half(self._tokens)
        new = self._new(len(self._tokens) - tokens)
        certain = self._certain(new[: len(new) - letters])
        return certain if self.stopped else certain + self._give(len(self._held))

    def _new(self, stop: int | None = None) -> str:
        """Text of the tokens before `stop` that have not been given out. Some tokens' text depends on those before
        them."""
        before = self._decoded(self._done)
        return self._decoded(stop)[len(before) :]

    def _decoded(self, stop: int | None) -> str:
        return self._text.decode(self._tokens[self._start : stop], special=self._special)

    def _certain(self, new: str, *, shown: bool = True) -> str:
        if shown:
            self._made += len(new)
            self.place = self._made
        self._held += new
        self._shown += [shown] * len(new)
        if not self._stop or self._least >= 0:
            return self._give(len(self._held))
        places = [place for text, at in self._readings() for word in self._stop if (place := _found(text, at, word))]
        if places:
            # The one that is complete first, however the text was cut into tokens; of two at a time the longer.
            text = self._give(min(places)[1])
            self.stopped, self._held, self._shown = True, "", []
            return text
        certain = (at[len(text) - _overlap(text, word)] for text, at in self._readings() for word in self._stop)
        return self._give(min(certain))

    def _readings(self) -> list[tuple[str, list[int]]]:
        """The held text with and without what is not shown, each with the places of its characters and of its end."""
        size = len(self._held)
        whole = self._held, [*range(size + 1)]
        if all(self._shown):
            return [whole]
        at = [place for place in range(size) if self._shown[place]]
        return [whole, ("".join(self._held[place] for place in at), [*at, size])]

    def _give(self, count: int) -> str:
        text = "".join(letter for letter, shown in zip(self._held[:count], self._shown, strict=False) if shown)
        self._held, self._shown = self._held[count:], self._shown[count:]
        self.given += len(text)
        return text


def _found(text: str, at: list[int], word: str) -> tuple[int, int] | None:
    """(end, start) of a stop string in a text with the places of its characters."""
    start = text.find(word)
    return None if start < 0 else (at[start + len(word) - 1] + 1, at[start])


def _overlap(text: str, word: str) -> int:
    """The longest end of `text` with which `word` begins."""
    for length in range(min(len(text), len(word) - 1), 0, -1):
        if text.endswith(word[:length]):
            return length
    return 0
