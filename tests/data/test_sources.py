import csv
import gzip
import json

import pytest

from harness.cases import from_table
from harness.texts import FORMS, write
from shardwise.data import sources
from shardwise.data.sources import open_source
from shardwise.errors import UserError


def read(path, text_field="text"):
    return list(open_source(str(path), text_field).documents())


def error(path, text_field="text") -> str:
    with pytest.raises(UserError) as caught:
        read(path, text_field)
    message = str(caught.value)
    assert "\n" not in message
    return message


def write_lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_text_file_is_one_document_without_its_byte_order_mark(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert read(file) == ["one\r\ntwo\n"]


def test_a_folder_is_read_in_sorted_order_without_hidden_blank_and_binary_files(tmp_path):
    for name in ("b.txt", "a/z.md", "a/.hidden", ".git/config", "c/__pycache__/x.txt", "a.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "nul.bin").write_bytes(b"text\0text")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    skipped = []
    source = open_source(str(tmp_path))
    assert list(source.documents(skipped)) == ["a.txt", "a/z.md", "b.txt"]
    assert list(source.documents()) == ["a.txt", "a/z.md", "b.txt"]
    (latin, nul) = sorted(skipped)
    assert nul.startswith("nul.bin: ") and "NUL at byte 4" in nul
    assert latin.startswith("latin.txt: ") and "byte 3" in latin


def test_a_folder_reads_records_by_suffix_and_leaves_prepared_corpora_out(tmp_path):
    write_lines(tmp_path / "r.jsonl", {"text": "r1"}, {"text": "r2"})
    (tmp_path / "s.txt").write_text("s")
    corpus = tmp_path / "out" / "corpus-1"
    corpus.mkdir(parents=True)
    for name in ("corpus.json", "train.bin", "tokenizer.json"):
        (corpus / name).write_text("not a source")
    assert read(tmp_path) == ["r1", "r2", "s"]


def test_jsonl_skips_blank_lines_and_takes_the_named_field(tmp_path):
    file = tmp_path / "r.jsonl"
    file.write_text('{"body": "x", "text": 1}\n\n{"body": "\\u00fc"}')
    assert read(file, "body") == ["x", "ü"]


@from_table
def test_a_bad_jsonl_line_is_named(tmp_path, line, reason):
    file = tmp_path / "r.jsonl"
    file.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    message = error(file)
    assert f"{file}, line 3" in message and reason in message


DOCUMENTS = ["one, two", '"quoted"\r\nü', "42", " ", "a;b\tc\n\nd", "end"]


@pytest.mark.parametrize("form", FORMS)
def test_documents_are_equal_in_every_format(tmp_path, form):
    assert read(write(tmp_path, form, DOCUMENTS)) == [text for text in DOCUMENTS if text.strip()]


def test_csv_as_spreadsheets_write_it(tmp_path):
    file = tmp_path / "t.csv"
    file.write_bytes(b'\xef\xbb\xbftext;id\r\n"a, b";7\r\n\r\nc;8')
    assert read(file) == ["a, b", "c"]
    file.write_text("text\n" + "x" * 200_000)
    assert read(file) == ["x" * 200_000]
    with pytest.raises(csv.Error):  # others' limit is as it was
        next(csv.reader(["x" * 200_000]))
    packed = tmp_path / "t.txt.gz"
    packed.write_bytes(gzip.compress(b"one\r\ntwo\n"))
    assert read(packed) == ["one\r\ntwo\n"]


@from_table
def test_a_bad_csv_names_its_row(tmp_path, monkeypatch, content, field, reason):
    monkeypatch.setattr(sources, "_MOST_CELL", 1000)
    file = tmp_path / "t.csv"
    file.write_bytes(content)
    message = error(file, field)
    assert str(file) in message and reason in message


def test_a_table_without_the_column_is_left_out_of_a_folder(tmp_path):
    (tmp_path / "a.csv").write_text("size,price\n1,2\n")
    (tmp_path / "b.txt").write_text("text")
    skipped = []
    assert list(open_source(str(tmp_path)).documents(skipped)) == ["text"]
    assert len(skipped) == 1 and skipped[0].startswith("a.csv: has no field 'text'")


@pytest.mark.parametrize("form", ["jsonl.gz", "csv.gz"])
def test_damaged_gzip_names_the_last_line(tmp_path, form):
    file = write(tmp_path, form, [f"{number} {number**7:x}" for number in range(5000)])
    whole = file.read_bytes()
    for damaged, reason in ((whole[: len(whole) // 2], "ended before"), (whole[:-8] + bytes(8), "CRC check failed")):
        file.write_bytes(damaged)
        message = error(file)
        assert f"{file} is damaged gzip" in message and reason in message
        assert int(message.rpartition(" ")[2]) > 1000
    file.write_bytes(whole[:1000] + b"\xff" * 100 + whole[1100:])
    assert f"{file} is damaged gzip" in error(file)
    file.write_bytes(b"text")
    assert "Not a gzipped file" in error(file) and error(file).endswith("the last whole line is 0")


def test_damaged_gzip_of_a_text_is_an_error_where_it_is_named(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"text" * 1000)[:-9])
    (tmp_path / "b.txt").write_text("text")
    assert "is damaged gzip (Compressed file ended" in error(tmp_path / "a.txt.gz")
    assert read(tmp_path) == ["text"]


def test_parquet_whose_text_is_bytes(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "t.parquet"
    column = arrow.array([b"a", "ü".encode(), b"caf\xe9"])
    parquet.write_table(arrow.table({"text": column}), file)
    assert "row 3: field 'text' is not UTF-8 (byte 3)" in error(file)
    parquet.write_table(arrow.table({"text": column.view("string")}), file)
    assert "row 3: field 'text' is not UTF-8 (byte 3)" in error(file)
    parquet.write_table(arrow.table({"text": column[:2]}), file)
    assert read(file) == ["a", "ü"]


def test_parquet_rows_and_its_errors(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "t.parquet"
    parquet.write_table(arrow.table({"text": ["a", "b"], "body": ["c", None], "n": [1, 2]}), file)
    assert read(file) == ["a", "b"]
    assert "no field 'words'" in error(file, "words") and "'text', 'body', 'n'" in error(file, "words")
    assert "row 2: field 'body' is NoneType" in error(file, "body")
    file.write_bytes(b"PAR1 but not really")
    assert "not readable Parquet" in error(file)


def test_a_saved_dataset_and_its_train_split(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "n": [1, 2]})
    rows.save_to_disk(tmp_path / "one")
    other = datasets.Dataset.from_dict({"text": ["held out"], "n": [3]})
    datasets.DatasetDict({"test": other, "train": rows}).save_to_disk(tmp_path / "both")
    datasets.DatasetDict({"x": other, "y": rows}).save_to_disk(tmp_path / "neither")
    assert read(tmp_path / "one") == read(tmp_path / "both") == ["a", "b"]
    assert "no split 'train'" in error(tmp_path / "neither") and "x, y" in error(tmp_path / "neither")
    assert "no field 'words'" in error(tmp_path / "one", "words")
    (tmp_path / "one" / "state.json").write_text("{")
    assert "not a readable saved dataset" in error(tmp_path / "one")


def test_a_missing_optional_package_names_its_extra(tmp_path, monkeypatch):
    file = tmp_path / "t.parquet"
    file.write_bytes(b"PAR1")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    assert "pip install 'shardwise[data]'" in error(file)


def test_the_standard_library_is_text_without_tests():
    source = open_source("stdlib")
    names = [file.name for file in source.files]
    assert names == sorted(names) and {"argparse.py", "json/decoder.py"} <= set(names)
    assert not any({"test", "tests", "site-packages", "__pycache__"} & set(name.split("/")) for name in names)
    assert source.size > 5_000_000
    assert next(source.documents())


def test_sources_without_text_are_refused(tmp_path):
    assert "no such file or folder" in error(tmp_path / "missing")
    (tmp_path / "empty.txt").touch()
    assert "is empty" in error(tmp_path / "empty.txt")
    (tmp_path / "blank.txt").write_text("\n\n")
    assert "only blank documents" in error(tmp_path / "blank.txt")
    (tmp_path / "program").write_bytes(b"\x7fELF\0\0")
    assert "is binary" in error(tmp_path / "program")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert "not UTF-8 (byte 3)" in error(tmp_path / "latin.txt")
    (tmp_path / "folder" / ".hidden").mkdir(parents=True)
    assert "holds no files" in error(tmp_path / "folder")
    (tmp_path / "folder" / "a.bin").write_bytes(b"\0")
    assert "1 file (1 not text, such as a.bin" in error(tmp_path / "folder")
    assert "neither a file nor a folder" in error("/dev/null")
