"""Bytes of single tokens, which tell half a character from a U+FFFD that the text itself has. Imports no torch.

A tokenizer decodes both to U+FFFD, the replacement character.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LONGEST = 4
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
            if len(end) >= _LONGEST:
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
        """The bytes of a token's spelling."""
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
