"""Sources of text: each kind becomes an iterator of documents.

A source is a path, or the word `stdlib`:

- a text file is one document;
- `.jsonl` and `.ndjson` files hold one JSON object a line, `.parquet` files one row a document;
- a folder is read recursively in sorted order, each file by its suffix, without hidden files, files that are not
  text, and corpora that `prepare` left there;
- a folder that `datasets.save_to_disk` wrote is read through `datasets` (of several splits, `train`);
- `stdlib` is the sources of the running Python's standard library, without tests: text that every machine has. (A
  folder of that name is `./stdlib`.)
"""

import codecs
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from shardwise.data.extras import require
from shardwise.errors import UserError

STDLIB = "stdlib"
JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}

Kind = Literal["file", "folder", "dataset", "stdlib"]


class _NotTextError(UserError):
    """A file that is not text: an error where it was named, skipped where it was found in a folder."""


@dataclass(frozen=True)
class SourceFile:
    """A file of a source. name: its path below the source's root, with `/`. size: bytes."""

    name: str
    path: Path
    size: int


@dataclass(frozen=True)
class Source:
    """Documents to be read, as often as wanted, always in the same order. `files` are sorted by name."""

    name: str
    kind: Kind
    root: Path
    files: tuple[SourceFile, ...]
    text_field: str

    @property
    def size(self) -> int:
        """Bytes on disk of all files, the hint of how much text there is."""
        return sum(file.size for file in self.files)

    def documents(self, skipped: list[str] | None = None, most: int | None = None) -> Iterator[str]:
        """Yield every document that is not blank.

        skipped: gets a line for each file of a folder that is not text, its name and the reason. most: UTF-8 bytes
        after which a text file may end; the rest of it is not read.
        Raises `UserError` for a malformed or missing record, naming file and line, and when there is no text at all.
        """
        found, skipped = False, [] if skipped is None else skipped
        for text in self._documents(skipped, most):
            if text and not text.isspace():
                found = True
                yield text
        if not found:
            reason = f" ({len(skipped)} not text, such as {skipped[0]})" if skipped else ", only blank documents"
            files = f"{len(self.files)} file{'s' * (len(self.files) != 1)}"
            raise UserError(f"no text in {self.name}: {files}{reason}; give files of UTF-8 text")

    def _documents(self, skipped: list[str], most: int | None) -> Iterator[str]:
        if self.kind == "dataset":
            yield from _dataset(self.root, self.text_field)
            return
        for file in self.files:
            try:
                yield from _file(file.path, self.text_field, most)
            except _NotTextError as error:
                if self.kind == "file":
                    raise
                reason = str(error).removeprefix(f"{file.path} ")
                skipped.append(f"{file.name}: {reason}")


def open_source(source: str, text_field: str = "text") -> Source:
    """Find the files of a source without reading them.

    source: a path, or `stdlib`. text_field: the field, or column, that holds the text of JSONL, Parquet and datasets.
    Raises `UserError` when there is nothing at that path, or nothing in it.
    """
    try:
        return _open(source, text_field)
    except OSError as error:
        raise UserError(f"cannot read {error.filename or source}: {error.strerror}") from None


def _open(source: str, text_field: str) -> Source:
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = tuple(_walk(root, lambda part: part in _NOT_LIBRARY, lambda name: name.endswith(".py")))
        if not files:
            raise UserError(f"this Python has no library sources in {root}; name a file or folder of text instead")
        return Source(source, "stdlib", root, files, text_field)
    root = Path(source).expanduser()
    if not root.exists():
        raise UserError(f"no such file or folder: {source} (the word {STDLIB!r} means Python's own library sources)")
    if root.is_file():
        file = _stat(root, root.name)
        if not file.size:
            raise UserError(f"{source} is empty; give a file or folder of UTF-8 text")
        return Source(source, "file", root, (file,), text_field)
    if not root.is_dir():
        raise UserError(f"{source} is neither a file nor a folder; save the text to a file first")
    return _open_folder(source, root, text_field)


def _open_folder(source: str, root: Path, text_field: str) -> Source:
    kind: Kind = "folder"
    if (root / "dataset_dict.json").is_file():
        root = _split(root)
    if (root / "dataset_info.json").is_file() or ((root / "state.json").is_file() and any(root.glob("*.arrow"))):
        kind = "dataset"
    files = tuple(_walk(root, lambda part: part == "__pycache__", lambda name: True))
    if not files:
        raise UserError(f"the folder {source} holds no files (hidden ones are not read); put text into it")
    return Source(source, kind, root, files, text_field)


def _split(root: Path) -> Path:
    """The folder of the split to train on, of a saved `DatasetDict`."""
    try:
        splits = list(json.loads((root / "dataset_dict.json").read_text())["splits"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"damaged saved dataset: {root / 'dataset_dict.json'} lists no splits; save it again") from None
    if "train" in splits:
        return root / "train"
    if len(splits) == 1:
        return root / splits[0]
    raise UserError(f"{root} has no split 'train'; name the folder of one of its splits: {', '.join(splits)}")


def _walk(root: Path, prune: Callable[[str], bool], keep: Callable[[str], bool]) -> Iterator[SourceFile]:
    """The regular files below `root`, sorted by name, without hidden ones."""

    def unreadable(error: OSError) -> None:
        raise UserError(f"cannot read the folder {error.filename}: {error.strerror}")

    found = []
    for folder, subfolders, names in os.walk(root, onerror=unreadable):
        if "corpus.json" in names and "train.bin" in names:
            # A corpus prepared inside its own source would otherwise become part of the next one.
            subfolders.clear()
            continue
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and not prune(name)]
        paths = (Path(folder, name) for name in names if not name.startswith(".") and keep(name))
        found += [_stat(path, path.relative_to(root).as_posix()) for path in paths if path.is_file()]
    yield from sorted(found, key=lambda file: file.name)


def _stat(path: Path, name: str) -> SourceFile:
    return SourceFile(name, path, path.stat().st_size)


def _file(path: Path, text_field: str, most: int | None) -> Iterator[str]:
    """The documents of one file, by its suffix. most: as in `Source.documents`."""
    suffix = path.suffix.lower()
    try:
        if suffix in JSONL_SUFFIXES:
            yield from _jsonl(path, text_field)
        elif suffix in PARQUET_SUFFIXES:
            yield from _parquet(path, text_field)
        else:
            yield _text(path, most)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def _text(path: Path, most: int | None) -> str:
    # Beyond the limit: a byte order mark, and a character that the end cuts through.
    room = None if most is None else most + len(codecs.BOM_UTF8) + 3
    with path.open("rb") as file:
        data = file.read(room)
    nul = data.find(b"\0")
    if nul >= 0:
        raise _NotTextError(f"{path} is binary (NUL at byte {nul}); give files of UTF-8 text")
    try:
        return codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=len(data) != room)
    except UnicodeDecodeError as error:
        raise _NotTextError(f"{path} is not UTF-8 (byte {error.start}); convert it with iconv") from None


def _jsonl(path: Path, text_field: str) -> Iterator[str]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                reason = error.msg if isinstance(error, json.JSONDecodeError) else "not readable UTF-8"
                raise UserError(f"{place} is not JSON ({reason}); JSONL has one object a line") from None
            if not isinstance(record, dict):
                raise UserError(
                    f'{place} is not a JSON object but {type(record).__name__}; use {{"{text_field}": ...}}'
                )
            if text_field not in record:
                raise _missing(place, text_field, list(record))
            yield _checked(record[text_field], place, text_field)


def _parquet(path: Path, text_field: str) -> Iterator[str]:
    parquet = require("pyarrow.parquet", "data", "reading Parquet")
    arrow = require("pyarrow", "data", "reading Parquet")
    try:
        with parquet.ParquetFile(path) as file:
            if text_field not in file.schema_arrow.names:
                raise _missing(str(path), text_field, file.schema_arrow.names)
            batches = file.iter_batches(batch_size=1024, columns=[text_field])
            yield from _rows((batch.column(0).to_pylist() for batch in batches), path, text_field)
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not readable Parquet: {_first_line(error)}") from None


def _dataset(root: Path, text_field: str) -> Iterator[str]:
    datasets = require("datasets", "data", "reading a saved Hugging Face dataset")
    try:
        dataset = datasets.load_from_disk(str(root))
    except Exception as error:  # datasets, pyarrow, json and the file system each raise their own for a damaged folder
        raise UserError(f"{root} is not a readable saved dataset: {_first_line(error)}") from None
    if text_field not in dataset.column_names:
        raise _missing(str(root), text_field, dataset.column_names)
    batches = dataset.with_format(None).select_columns([text_field]).iter(batch_size=1024)
    yield from _rows((batch[text_field] for batch in batches), root, text_field)


def _rows(batches: Iterable[list[Any]], path: Path, text_field: str) -> Iterator[str]:
    for row, text in enumerate(chain.from_iterable(batches), 1):
        yield _checked(text, f"{path}, row {row}", text_field)


def _missing(place: str, text_field: str, present: list[str]) -> UserError:
    names = ", ".join(map(repr, present[:12])) + (", ..." if len(present) > 12 else "")
    return UserError(
        f"{place} has no field {text_field!r}; name the one with the text (--text-field): {names or 'none'}"
    )


def _checked(text: Any, place: str, text_field: str) -> str:
    if not isinstance(text, str):
        raise UserError(f"{place}: field {text_field!r} is {type(text).__name__}, not text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{place}: field {text_field!r} holds half of a surrogate pair, which is not text") from None
    return text


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
