"""The same documents in each format of text that training reads."""

import csv
import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

FORMS = ("folder", "jsonl", "jsonl.gz", "csv", "csv.gz", "tsv", "parquet")


def write(folder: Path, form: str, documents: Sequence[str]) -> Path:
    """The documents in a file, or folder, of a format. The text is in column `text`."""
    rows = [{"id": number, "text": text} for number, text in enumerate(documents)]
    file = folder / f"texts.{form}"
    if form == "folder":
        file.mkdir()
        for row in rows:
            (file / f"{row['id']:04d}.txt").write_bytes(row["text"].encode())
    elif form == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(rows), file)
    else:
        kind, _, packed = form.partition(".")
        with (gzip.open if packed else open)(file, "wt", encoding="utf-8", newline="") as out:
            if kind == "jsonl":
                out.writelines(json.dumps(row) + "\n" for row in rows)
            else:
                table = csv.DictWriter(out, ("id", "text"), delimiter={"csv": ",", "tsv": "\t"}[kind])
                table.writeheader()
                table.writerows(rows)
    return file
