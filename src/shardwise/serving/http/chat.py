"""Conversations as prompts: the chat template of a tokenizer, rendered as `transformers` does it.

A template is Jinja that came with the weights, so it runs in Jinja's sandbox. Control tokens that it writes are tokens;
spelled out in somebody's message, or in a variable of the template, they are text (`transformers` has that as
`sanitize_control_tokens`, and knows them the same way: special tokens, and added ones that the template spells). Of the
latter an assistant's message may have some, as those around a model's thoughts, for which templates look.
"""

import json
import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.data.tokenizer import read_template
from shardwise.errors import UserError
from shardwise.serving.http.problems import Problem

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_OWN = ("messages", "tools", "documents")
"""Variables of a template that are the server's own."""

# Of a private use area: from the rendering to the encoding it stands inside of every control token that a message has
# spelled out, so that no template that cuts messages can free one.
_MARK = "\U000f5a00"


class Chat:
    """The chat template of a tokenizer. file: its tokenizer.json, beside which the template lies."""

    def __init__(self, file: Path) -> None:
        """Raises `UserError` for a damaged tokenizer, configuration or template."""
        from shardwise.data.tokenizer import load

        self._plain: Tokenizer = load(file)
        self._tokens: Tokenizer = load(file)
        self._tokens.encode_special_tokens = False
        source, self._names = read_template(file.parent)
        added = self._tokens.get_added_tokens_decoder().values()
        long = [token for token in added if len(token.content) > 1]
        self._special = {token.content for token in long if token.special}
        spelled = {token.content for token in long if token.content in (source or "")}
        self._control, self._of_assistants = _any(self._special | spelled), _any(self._special)
        self._broken = re.compile(f"({_any(map(_broken, self._special | spelled)).pattern})|{_MARK}")
        self._template = _compiled(source, file.parent) if source is not None else None

    @property
    def known(self) -> bool:
        return self._template is not None

    def encode(self, messages: list[dict[str, Any]], variables: dict[str, Any] | None = None) -> list[int]:
        """The prompt for an assistant's answer to a conversation. messages: with role and content, a text or parts.
        variables: of the template, besides the usual ones.

        Raises `Problem` (400) where there is no template, or it refuses the conversation.
        """
        if self._template is None:
            raise Problem(
                400,
                "this model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): "
                "use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        if taken := sorted(set(variables or {}) & {*_OWN, *self._names}):
            message = f"chat_template_kwargs cannot set {taken[0]}, which the server does"
            raise Problem(400, message, param=f"chat_template_kwargs.{taken[0]}")
        try:
            given = {"add_generation_prompt": True, **self._marked(variables or {}, self._control)}
            conversation = [self._message(message) for message in messages]
            text = self._template.render(messages=conversation, tools=None, documents=None, **self._names, **given)
        except Exception as error:  # a template is a program of somebody else's
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise Problem(400, f"the model's chat template refuses the messages: {reason}", param="messages") from None
        return self._encode(text)

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message["content"] or ""
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content)
        # The role of OpenAI's newer models for what all templates call system.
        role = "system" if message["role"] == "developer" else message["role"]
        control = self._of_assistants if role == "assistant" else self._control
        name = {"name": message["name"]} if message.get("name") is not None else {}
        return {"role": role, **self._marked({"content": content, **name}, control)}

    def _marked(self, value: Any, control: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return control.sub(lambda match: _broken(match[0]), value.replace(_MARK, ""))
        if isinstance(value, list):
            return [self._marked(item, control) for item in value]
        if isinstance(value, dict):
            return {self._marked(key, control): self._marked(item, control) for key, item in value.items()}
        return value

    def _encode(self, text: str) -> list[int]:
        # Odd pieces were spelled out, or are None where a template has left a mark alone by cutting a message.
        ids: list[int] = []
        for index, piece in enumerate(self._broken.split(text)):
            if piece:
                tokenizer = self._plain if index % 2 else self._tokens
                word = piece.replace(_MARK, "")
                # An added token that is not special is a token wherever it is whole.
                parts = [word[0], word[1:]] if index % 2 and word not in self._special else [word]
                # Unlike `encode`, this lets other threads run meanwhile.
                for found in tokenizer.encode_batch(parts, add_special_tokens=False):
                    ids += found.ids
        return ids


def _any(words: Iterable[str]) -> re.Pattern[str]:
    """Any of them, the longest that there is; nothing where there are none."""
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "(?!)")


def _broken(word: str) -> str:
    return word[0] + _MARK + word[1:]


def _compiled(source: str, folder: Path) -> Any:
    """The template in an environment as that of transformers (utils/chat_template_utils.py)."""
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_blocks(), loopcontrols]
    )
    # Jinja's own filter escapes for HTML.
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise UserError(f"the chat template in {folder} is damaged: {error}") from None


def _generation_blocks() -> Any:
    """`{% generation %}`, which marks answers for training, and adds nothing to the text."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)

    return Generation
