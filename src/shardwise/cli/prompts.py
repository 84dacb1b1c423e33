"""Prompts on a command line: texts, files or tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cli.declare import CommandOptions, arg
from shardwise.errors import UserError, os_errors
from shardwise.records import dataclass

if TYPE_CHECKING:
    from shardwise.serving.text import Text


@dataclass
class PromptOptions(CommandOptions):
    """Prompts; each may be given several times."""

    title = "what is continued; several options, several prompts"
    prompt: tuple[str, ...] = arg("a text", "TEXT", ())
    prompt_file: tuple[Path, ...] = arg("a file's text", "FILE", ())
    tokens: tuple[str, ...] = arg("token ids; needs no tokenizer", "1,2,3", ())


def read_prompts(args: PromptOptions) -> tuple[list[list[int]], Text | None]:
    """(token ids of every prompt, what makes text of tokens where something does). Raises `UserError`."""
    from shardwise.serving.job import tokenizer_of
    from shardwise.serving.text import Text

    texts = list(args.prompt)
    for file in args.prompt_file:
        try:
            with os_errors(f"read {file}", typed=file):
                texts.append(file.read_text())
        except UnicodeDecodeError:
            raise UserError(f"{file} is not UTF-8 text") from None
    if not texts and not args.tokens:
        raise UserError("nothing to continue: give --prompt TEXT, --prompt-file FILE or --tokens 1,2,3")
    text = Text.open(args.model) if texts or args.stop or tokenizer_of(args.model) else None
    prompts = [text.encode(item) for item in texts] if text else []
    return prompts + [_ids(item) for item in args.tokens], text


def _ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"--tokens {text}: give token ids, such as 1,2,3") from None
