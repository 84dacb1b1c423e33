"""The ends of text that a Hugging Face folder names: in generation_config.json, config.json and the tokenizer's files.

Models and tokenizers disagree: a chat model's turn may end by the tokenizer's `eos_token` alone, and its
generation_config.json may list more. Whoever generates stops at each of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
        config = _content(folder / name)
        nested = config.get("text_config")
        for source in (config, nested if isinstance(nested, dict) else {}):
            value = source.get("eos_token_id")
            ids += [token for token in (value if isinstance(value, list) else [value]) if type(token) is int]
    for name in TOKENIZER_FILES:
        word = token_text(_content(folder / name).get("eos_token"))
        token = tokenizer.token_to_id(word) if word is not None else None
        ids += [] if token is None else [token]
    return [token for token in dict.fromkeys(ids) if token >= 0]


def token_text(value: Any) -> str | None:
    """Text of a token in a tokenizer's file, which is the text itself or has it as `content`."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _content(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
