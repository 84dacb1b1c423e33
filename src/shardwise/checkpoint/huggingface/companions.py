"""Files that belong to weights beside the weights: tokenizer, chat template, special tokens, generation settings.

A run keeps copies of those beside its tokenizer, and exports of its weights have them: what chats before training must
chat after it.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint.reader import Checkpoint
from shardwise.data.tokenizer import KNOWN_ENDS, declared_ends, prepared_end
from shardwise.report.run_directory import COMPANIONS
from shardwise.small_files import json_object_in

CONFIG, GENERATION, TOKENIZER, SETTINGS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
)  # fmt: skip
OTHERS = (
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json", "tokenizer.model",
    "vocab.json", "merges.txt",
)  # fmt: skip
TEMPLATES = "additional_chat_templates"
"""Folder of further templates."""
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def keep_companions(sources: Sequence[Path], folder: Path) -> None:
    """Copy the files, each from the first folder that has it, to a folder that is made for them."""
    for name in (CONFIG, GENERATION, TOKENIZER, SETTINGS, *OTHERS, TEMPLATES):
        source = next((path / name for path in sources if (path / name).exists()), None)
        if source is None:
            continue
        folder.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, folder / name, dirs_exist_ok=True)
        else:
            shutil.copyfile(source, folder / name)


def companions_of(checkpoint: Checkpoint) -> Path | None:
    """The folder with the files of a checkpoint's weights: its run's, or where the run read its tokenizer; None where
    it trained one."""
    about = checkpoint.manifest.about
    out, tokenizer = (about.get(name) for name in ("out", "tokenizer"))
    places = [checkpoint.folder.absolute().parent.parent / COMPANIONS]
    places += [Path(out) / COMPANIONS] if isinstance(out, str) else []
    if isinstance(tokenizer, str):
        places.append(Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent)
    for place in places:
        with suppress(OSError, ValueError):
            if isinstance(tokenizer, str) and (place / TOKENIZER).is_file():
                return place
    return None


def base_dtype(folder: Path | None, known: Sequence[str]) -> str | None:
    """dtype of the weights that a run started from, according to their config.json; None where it is not `known`."""
    config = json_object_in(folder / CONFIG) if folder is not None else {}
    dtype = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return dtype if dtype in known else None


@dataclass(frozen=True)
class Companions:
    """What an export writes beside weights. tokenizer: its file. folder: with the other files, if there are any."""

    tokenizer: Path
    folder: Path | None = None

    def ids(self) -> dict[str, Any]:
        """The special tokens of config.json, as it had them before; else the end of text. Of a tokenizer that has no
        such token they are defaults of the model's family."""
        config = json_object_in(self.folder / CONFIG) if self.folder is not None else {}
        return {"bos_token_id": None, "eos_token_id": self._end()[1]} | self._known(config)

    def _known(self, config: Mapping[str, Any]) -> dict[str, Any]:
        special = _Vocabulary(json_object_in(self.tokenizer)).special
        ids = {name: config[name] for name in _IDS if config.get(name) is not None}
        return {
            name: value for name, value in ids.items() if {*(value if isinstance(value, list) else [value])} <= special
        }

    def _generation(self) -> dict[str, Any]:
        """generation_config.json as it was before, without ids that are none of the tokenizer's special tokens, and
        with an end of text."""
        config = json_object_in(self.folder / GENERATION) if self.folder is not None else {}
        ids = {name: value for name, value in self.ids().items() if name != "pad_token_id"}
        if not config:
            return ids
        plain = {name: value for name, value in config.items() if name not in _IDS}
        given = {name: value for name, value in ids.items() if name in config or name == "eos_token_id"}
        return plain | given | self._known(config)

    def files(self) -> dict[str, bytes]:
        """Name -> contents. Without tokenizer_config.json transformers takes the family's own class, which splits text
        in the family's own way."""
        found = {
            TOKENIZER: self.tokenizer.read_bytes(),
            SETTINGS: _json({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self._end()[0]}),
            GENERATION: _json(self._generation()),
        }
        if self.folder is not None:
            templates = sorted((self.folder / TEMPLATES).glob("*.jinja"))
            others = [self.folder / name for name in (SETTINGS, *OTHERS)]
            kept = [path for path in [*others, *templates] if path.is_file()]
            found |= {str(path.relative_to(self.folder)): path.read_bytes() for path in kept}
        return found

    def _end(self) -> tuple[str, int] | tuple[None, None]:
        """The token that ends a document, as `data.tokenizer.end_of_text` has it, without the library."""
        vocabulary = _Vocabulary(json_object_in(self.tokenizer))
        folders = [self.tokenizer.parent] if self.folder is None else [self.folder, self.tokenizer.parent]
        declared = [end for folder in folders for end in declared_ends(folder, vocabulary)]  # type: ignore[arg-type]
        ends = [*map(prepared_end, folders), *(end for end in declared if end in vocabulary.special)]
        for end in [*ends, *map(vocabulary.token_to_id, KNOWN_ENDS)]:
            if end in vocabulary.names:
                return vocabulary.names[end], end
        return None, None


class _Vocabulary:
    def __init__(self, content: Mapping[str, Any]) -> None:
        self._ids: dict[str, int] = {}
        self.special = set[int]()
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            vocab = content["model"]["vocab"]
            pairs = vocab.items() if isinstance(vocab, dict) else ((each[0], i) for i, each in enumerate(vocab))
            self._ids = {piece: int(number) for piece, number in pairs}
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            self._ids |= {added["content"]: int(added["id"]) for added in content.get("added_tokens") or []}
            self.special = {int(added["id"]) for added in content.get("added_tokens") or []}
        self.names = {number: piece for piece, number in self._ids.items()}

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
