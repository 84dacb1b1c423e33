"""Sources of text: each kind becomes an iterator of documents.

A source is a path, or the word `stdlib`:

- a text file is one document;
- `.jsonl` and `.ndjson` files hold one JSON object a line, `.csv` and `.tsv` files a header and rows, `.parquet` files
  rows: one document per record, in the field or column `text_field`. Where the first record has dialogues instead, each
  record is a document, as JSON (`dialogues.py` has their shapes);
- files with `.gz` after one of these suffixes are the same, compressed (Parquet is compressed inside);
- a folder is read recursively in sorted order, each file by its suffix, without hidden files, files that are not
  text, and corpora that `prepare` left there;
- a folder that `datasets.save_to_disk` wrote is read through `datasets` (of several splits, `train`);
- `stdlib` is the sources of the running Python's standard library, without tests: text that every machine has. (A
  folder of that name is `./stdlib`.)
"""

import codecs
import csv
import gzip
import json
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from shardwise.data.extras import require
from shardwise.errors import UserError, near_path, os_errors

STDLIB = "stdlib"
JSONL_SUFFIXES = (".jsonl", ".ndjson")
CSV_SUFFIXES = (".csv", ".tsv")
PARQUET_SUFFIXES = (".parquet",)
GZIP_SUFFIX = ".gz"
_MOST_CELL = 1 << 28
"""Characters of a cell of CSV at most. A quote that is not closed would read the whole file as one cell."""
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}

Kind = Literal["file", "folder", "dataset", "stdlib"]
Shape = Literal["text", "chat", "pairs"]
_SHAPES: tuple[tuple[Shape, set[str]], ...] = (
    ("pairs", {"chosen", "rejected"}),
    ("chat", {"messages"}),
    ("chat", {"prompt", "completion"}),
)
"""Fields of a record -> the shape of the data; text without them."""


class _NotTextError(UserError):
    """A file without text: an error where it was named, skipped where it was found in a folder."""


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
    shape: Shape = "text"

    @property
    def size(self) -> int:
        """Bytes on disk of all files, the hint of how much text there is."""
        return sum(file.size for file in self.files)

    @property
    def compressed(self) -> bool:
        """Whether files have more text than bytes."""
        return any(suffix(file.path).endswith((GZIP_SUFFIX, *PARQUET_SUFFIXES)) for file in self.files)

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
        field = self.text_field if self.shape == "text" else None
        if self.kind == "dataset":
            yield from _dataset(self.root, field)
            return
        for file in self.files:
            try:
                yield from _file(file.path, field, most)
            except _NotTextError as error:
                if self.kind == "file":
                    raise
                reason = str(error).removeprefix(f"{file.path} ")
                skipped.append(f"{file.name}: {reason}")


def open_source(source: str, text_field: str = "text") -> Source:
    """Find the files of a source, and the shape of their data by the first record.

    source: a path, or `stdlib`. text_field: the field, or column, that holds the text of JSONL, CSV, Parquet and
    datasets.
    Raises `UserError` when there is nothing at that path, or nothing in it.
    """
    try:
        opened = _open(source, text_field)
        return replace(opened, shape=_shape(opened))
    except OSError as error:
        raise UserError(f"cannot read {error.filename or source}: {error.strerror}") from None


def _shape(source: Source) -> Shape:
    """The shape of a source's data. A first record that cannot be read is reported when all are."""
    files = [file.path for file in source.files if _has_records(file.path)]
    try:
        of_files = chain.from_iterable(_file(file, None, None) for file in files)
        names = json.loads(next(_dataset(source.root, None) if source.kind == "dataset" else of_files)).keys()
    except (UserError, StopIteration, ValueError):
        return "text"
    return next((shape for shape, fields in _SHAPES if fields <= names and source.text_field not in names), "text")


def _has_records(path: Path) -> bool:
    return suffix(path).removesuffix(GZIP_SUFFIX) in (*JSONL_SUFFIXES, *PARQUET_SUFFIXES)


def _open(source: str, text_field: str) -> Source:
    if source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = tuple(_walk(root, lambda part: part in _NOT_LIBRARY, lambda name: name.endswith(".py")))
        if not files:
            raise UserError(f"this Python has no library sources in {root}; name a file or folder of text instead")
        return Source(source, "stdlib", root, files, text_field)
    root = Path(source).expanduser()
    if not root.exists():
        hint = near_path(root) or f" (the word {STDLIB!r} means Python's own library sources)"
        raise UserError(f"no such file or folder: {source}{hint}")
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


def suffix(path: Path) -> str:
    """The suffix that decides how a file is read, in lower case: `.jsonl`, or `.jsonl.gz`."""
    last = path.suffix.lower()
    return Path(path.stem).suffix.lower() + last if last == GZIP_SUFFIX else last


def _file(path: Path, text_field: str | None, most: int | None) -> Iterator[str]:
    """The documents of one file, by its suffix; records as JSON where there is no `text_field`. most: as in
    `Source.documents`."""
    kind = suffix(path).removesuffix(GZIP_SUFFIX)
    with os_errors(f"read {path}"):
        if text_field is None and kind not in (*JSONL_SUFFIXES, *PARQUET_SUFFIXES):
            raise _NotTextError(f"{path} has no records of dialogues; give .jsonl or .parquet files")
        if kind in JSONL_SUFFIXES:
            yield from _jsonl(path, text_field)
        elif kind in CSV_SUFFIXES and text_field is not None:
            cells = _csv(path, text_field, "\t" if kind == ".tsv" else ",;\t")
            yield from _text_column(cells, path, text_field)
        elif kind in PARQUET_SUFFIXES:
            yield from _parquet(path, text_field)
        else:
            yield _text(path, most)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    if path.suffix.lower() != GZIP_SUFFIX:
        with path.open("rb") as file:
            yield file
        return
    with gzip.open(path) as packed:
        try:
            yield cast(BinaryIO, packed)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            reason = str(error).partition(" (b")[0]
            raise _NotTextError(f"{path} is damaged gzip ({reason}); download or compress it again") from None


def _text(path: Path, most: int | None) -> str:
    # Beyond the limit: a byte order mark, and a character that the end cuts through.
    room = -1 if most is None else most + len(codecs.BOM_UTF8) + 3
    with _opened(path) as file:
        data = file.read(room)
    nul = data.find(b"\0")
    if nul >= 0:
        raise _NotTextError(f"{path} is binary (NUL at byte {nul}); give files of UTF-8 text")
    try:
        return codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=len(data) != room)
    except UnicodeDecodeError as error:
        raise _NotTextError(f"{path} is not UTF-8 (byte {error.start}); convert it with iconv") from None


def _lines(path: Path) -> Iterator[str]:
    number = 0
    try:
        with _opened(path) as lines:
            for number, line in enumerate(lines, 1):
                yield line.decode("utf-8" if number > 1 else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, line {number} is not UTF-8 (byte {error.start}); convert it with iconv") from None
    except _NotTextError as error:
        raise UserError(f"{error}; the last whole line is {number}") from None


def _jsonl(path: Path, text_field: str | None) -> Iterator[str]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", "too deep, or too long a number")
            raise UserError(f"{place} is not JSON ({reason}); JSONL has one object a line") from None
        if not isinstance(record, dict):
            raise UserError(
                f'{place} is not a JSON object but {type(record).__name__}; use {{"{text_field or "messages"}": ...}}'
            )
        if text_field is None:
            yield json.dumps(record)
            continue
        if text_field not in record:
            raise _missing(place, text_field, list(record))
        yield _checked(record[text_field], place, text_field)


def _csv(path: Path, text_field: str, delimiters: str) -> Iterator[str]:
    """Cells of a column. delimiters: the first one by which the header has that column is used."""
    lines = _lines(path)
    first = next(lines, "")
    table, number = csv.reader([]), 0
    try:
        fitting = (mark for mark in delimiters if text_field in (_row(csv.reader([first], delimiter=mark)) or []))
        table = csv.reader(chain([first], lines), delimiter=next(fitting, delimiters[0]), strict=True)
        rows = filter(None, table)
        header = _row(rows) or []
        column = _column(str(path), text_field, header, _NotTextError)
        while True:
            number += 1
            if (row := _row(rows)) is None:
                return
            if len(row) != len(header):
                raise csv.Error(f"{len(row)} cells, {len(header)} in the header")
            yield row[column]
    except csv.Error as error:
        place = f"row {number} (line {table.line_num})" if number else "header"
        reason = str(error).partition(" - ")[0]
        raise UserError(
            f"{path}, {place} is not CSV: {reason}; is a cell with quotes, delimiters or line ends not quoted?"
        ) from None


def _row(rows: Iterator[list[str]]) -> list[str] | None:
    """The next row. The limit of a cell is the whole process's, so others have theirs back after it."""
    limit = csv.field_size_limit(_MOST_CELL)
    try:
        return next(rows, None)
    finally:
        csv.field_size_limit(limit)


def _text_column(cells: Iterator[str], path: Path, text_field: str) -> Iterator[str]:
    """Cells that are not all numbers, the type of which CSV does not tell."""
    leading = []
    for cell in cells:
        leading.append(cell)
        if cell.strip() and not _is_number(cell):
            break
    else:
        for row, cell in enumerate(leading, 1):
            if _is_number(cell):
                raise UserError(f"{path}, row {row}: column {text_field!r} has numbers alone, such as {cell!r}")
    yield from chain(leading, cells)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _as_json(record: dict[str, Any]) -> str:
    """A record of a table; dates, bytes and whatever else JSON has not are texts."""
    return json.dumps(record, default=str)


def _parquet(path: Path, text_field: str | None) -> Iterator[str]:
    parquet = require("pyarrow.parquet", "data", "reading Parquet")
    arrow = require("pyarrow", "data", "reading Parquet")
    try:
        with parquet.ParquetFile(path) as file:
            if text_field is None:
                for batch in file.iter_batches(batch_size=1024):
                    yield from map(_as_json, batch.to_pylist())
                return
            _column(str(path), text_field, file.schema_arrow.names)
            batches = file.iter_batches(batch_size=1024, columns=[text_field])
            columns = (batch.column(0) for batch in batches)
            if str(file.schema_arrow.field(text_field).type) in ("string", "large_string"):
                columns = (column.cast("large_binary") for column in columns)
            yield from _rows((column.to_pylist() for column in columns), path, text_field)
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not readable Parquet: {_first_line(error)}") from None


def _dataset(root: Path, text_field: str | None) -> Iterator[str]:
    datasets = require("datasets", "data", "reading a saved Hugging Face dataset")
    try:
        dataset = datasets.load_from_disk(str(root))
    except Exception as error:  # datasets, pyarrow, json and the file system each raise their own for a damaged folder
        raise UserError(f"{root} is not a readable saved dataset: {_first_line(error)}") from None
    if text_field is None:
        yield from map(_as_json, dataset.with_format(None))
        return
    _column(str(root), text_field, dataset.column_names)
    batches = dataset.with_format(None).select_columns([text_field]).iter(batch_size=1024)
    yield from _rows((batch[text_field] for batch in batches), root, text_field)


def _rows(batches: Iterable[list[Any]], path: Path, text_field: str) -> Iterator[str]:
    for row, text in enumerate(chain.from_iterable(batches), 1):
        yield _checked(text, f"{path}, row {row}", text_field)


def _column(place: str, text_field: str, names: list[str], error: type[UserError] = UserError) -> int:
    """Index of the column with the text. Raises `error` where none, or more than one, has its name."""
    if text_field not in names:
        raise _missing(place, text_field, names, error)
    if names.count(text_field) > 1:
        raise UserError(f"{place} has {names.count(text_field)} columns {text_field!r}; rename all but one")
    return names.index(text_field)


def _missing(place: str, text_field: str, present: list[str], error: type[UserError] = UserError) -> UserError:
    names = ", ".join(repr(name[:40]) for name in present[:12]) + (", ..." if len(present) > 12 else "")
    line = f"{place} has no field {text_field!r}; name the one with the text (--text-field): {names or 'none'}"
    return error(f"{line}; dialogues have messages, prompt and completion, or chosen and rejected")


def _checked(text: Any, place: str, text_field: str) -> str:
    if isinstance(text, bytes):
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{place}: field {text_field!r} is not UTF-8 (byte {error.start})") from None
    if not isinstance(text, str):
        raise UserError(f"{place}: field {text_field!r} is {type(text).__name__}, not text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{place}: field {text_field!r} holds half of a surrogate pair, which is not text") from None
    return text


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
