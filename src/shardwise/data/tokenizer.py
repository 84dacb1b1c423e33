"""The tokenizer of a corpus: a given `tokenizer.json`, or byte-level BPE trained on the text itself.

Every document ends with the end-of-text token, and no text, whatever it spells, encodes to that token.

The ends of text that a Hugging Face folder names: in generation_config.json, config.json and the tokenizer's files.

Models and tokenizers disagree: a chat model's turn may end by the tokenizer's `eos_token` alone, and its
generation_config.json may list more. Generation stops at each of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.data.extras import require
from shardwise.data.sampler import uniform
from shardwise.errors import UserError
from shardwise.small_files import json_object_in

if TYPE_CHECKING:
    from tokenizers import Tokenizer


MODEL_FILES = ("generation_config.json", "config.json")
TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json")


def declared_ends(folder: Path, tokenizer: Tokenizer) -> list[int]:
    """Ids of all tokens that the files of a folder name as ends of text, each once, the model's first.

    Empty where no file names one. Damaged files name none.
    """
    ids: list[int] = []
    for name in MODEL_FILES:
        config = json_object_in(folder / name)
        nested = config.get("text_config")
        for source in (config, nested if isinstance(nested, dict) else {}):
            value = source.get("eos_token_id")
            ids += [token for token in (value if isinstance(value, list) else [value]) if type(token) is int]
    for name in TOKENIZER_FILES:
        word = token_text(json_object_in(folder / name).get("eos_token"))
        token = tokenizer.token_to_id(word) if word is not None else None
        ids += [] if token is None else [token]
    return [token for token in dict.fromkeys(ids) if token >= 0]


def token_text(value: Any) -> str | None:
    """Text of a token in a tokenizer's file, which is the text itself or has it as `content`."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _configured(file: Path) -> dict[str, Any]:
    """Contents of a file beside the tokenizer; empty without one. Raises `UserError`."""
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{file} is not a tokenizer's configuration: it should be a JSON object")
    return config


def read_template(folder: Path) -> tuple[str | None, dict[str, str]]:
    """(source of a chat template, texts of the named tokens); chat_template.jinja comes before tokenizer_config.json.
    Raises `UserError` for a damaged file."""
    config = _configured(folder / "tokenizer_config.json")
    older = _configured(folder / "special_tokens_map.json")
    names = {}
    for name in _NAMED:
        if (token := token_text(config.get(name, older.get(name)))) is not None:
            names[name] = token
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8"), names
        except (OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read: {error}") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    return (template if isinstance(template, str) else None), names


END_OF_TEXT = "<|endoftext|>"
KNOWN_ENDS = (
    END_OF_TEXT,  # GPT-2, GPT-NeoX, Qwen
    "<|end_of_text|>",  # Llama 3
    "</s>",  # Llama 2, Mistral, BLOOM
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek, whose bars and underscores are not ASCII
    "<eos>",  # Gemma
    "[EOS]",
    "<|eos|>",
    "<|im_end|>",
    "<|eot_id|>",
)

SAMPLE_BYTES = 16_000_000
"""Text that a tokenizer is trained on at most: about 3 s on one core, measured, at 0.17 s a megabyte."""
_SAMPLE_PIECE = 1 << 14

_BYTES = 256


def tokenizer_file(path: Path) -> Path:
    """The `tokenizer.json` that a path means, which may be a folder's. Raises `UserError` when there is none."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"no tokenizer at {file}; give a tokenizer.json, or none to train one on the text")
    return file


def load(path: Path) -> Tokenizer:
    """Load a `tokenizer.json`, or the one in a folder. Raises `UserError` when it is missing or damaged.

    Truncation and padding that the file asks for are switched off, and special tokens spelled out in text are text.
    """
    tokenizers = require("tokenizers", "train", "tokenizing text")
    path = tokenizer_file(path)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every defect of the file
        reason = (str(error).splitlines() or ["unknown format"])[0]
        raise UserError(f"{path} is not a tokenizer.json of the tokenizers library: {reason}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def train(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Train byte-level BPE of `vocab` tokens, `<|endoftext|>` and the 256 bytes among them.

    The same texts in the same order give the same tokenizer. Little text gives fewer tokens than asked.
    Raises `UserError` when `vocab` cannot hold the bytes.
    """
    tokenizers = require("tokenizers", "train", "training a tokenizer")
    if vocab <= _BYTES:
        raise UserError(f"a vocabulary of {vocab} is too small: byte-level BPE needs at least {_BYTES + 1} tokens")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def end_of_text(tokenizer: Tokenizer, name: str = "the tokenizer", folder: Path | None = None) -> int:
    """The id of the token that ends a document: the first special one that the files beside the tokenizer name, in
    `folder`, else the first of `KNOWN_ENDS` there is. Raises `UserError` without one.

    A config.json may have the default of the model's family, which is any token of this tokenizer.
    """
    declared = [] if folder is None else declared_ends(folder, tokenizer)
    special = tokenizer.get_added_tokens_decoder()
    ends = [] if folder is None else [prepared_end(folder)]
    for number in [*ends, *(end for end in declared if end in special), named_end(tokenizer)]:
        if number is not None:
            return number
    raise UserError(f"{name} has no end-of-text token; shardwise knows {', '.join(KNOWN_ENDS)}: add one of them")


def named_end(tokenizer: Tokenizer) -> int | None:
    return next((number for name in KNOWN_ENDS if (number := tokenizer.token_to_id(name)) is not None), None)


def prepared_end(folder: Path) -> int | None:
    """The end of text of a corpus that was prepared in a folder; None where there is none."""
    try:
        eos = json.loads((folder / "corpus.json").read_bytes())["eos"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return eos if type(eos) is int else None


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Rows that an embedding of its tokens needs: the highest id plus one, counting ids that no token has."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def encode_without(tokenizer: Tokenizer, text: str, end: int) -> list[int]:
    """Ids of a text, `end` not among them, also where the tokenizer takes a spelling for that token.

    `encode_special_tokens` keeps special tokens alone from that: an added token that is not special, a whole word or a
    piece of a Unigram vocabulary is found in the text all the same. Such a spelling is cut in two, and what is one
    character long left out.
    """
    encoding = tokenizer.encode(text, add_special_tokens=False)
    ids: list[int] = encoding.ids
    found = [offsets for number, offsets in zip(ids, encoding.offsets, strict=True) if number == end]
    cuts = sorted({(start + stop) // 2 for start, stop in found if stop - start > 1})
    if not cuts:
        return [number for number in ids if number != end]
    parts = (text[start:stop] for start, stop in pairwise([0, *cuts, len(text)]))
    return [number for part in parts for number in encode_without(tokenizer, part, end)]


def pieces(text: str, size: int) -> Iterator[str]:
    """Cut text into pieces of at most `size` characters, after a line's end where there is one."""
    start = 0
    while start < len(text):
        end = start + size
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def sample(documents: Iterable[str], limit: int) -> Iterator[str]:
    """Pieces of the documents, of at most `limit` bytes together: those whose place has the smallest hash, in order.

    They depend on the documents alone, and are spread over all of them.
    """
    kept: list[tuple[float, int, int, str]] = []
    taken = 0
    for index, text in enumerate(documents):
        for number, piece in enumerate(pieces(text, _SAMPLE_PIECE)):
            heappush(kept, (-uniform("tokenizer sample", index, number), index, number, piece))
            taken += len(piece.encode())
            while taken > limit:
                taken -= len(heappop(kept)[-1].encode())
    return (piece for *_, piece in sorted(kept, key=itemgetter(1, 2)))
