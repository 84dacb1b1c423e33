"""Files that are there whole or not at all."""

from pathlib import Path

import pytest

from shardwise.errors import UserError
from shardwise.report.files import check_place, write_whole


def test_what_was_there_is_replaced(tmp_path):
    for text in ("first", "second"):
        write_whole(tmp_path / "a", text)
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": text}


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"cannot write report .*folder: Is a directory"):
        write_whole(tmp_path / "folder", "text", "report")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_place_is_known_before_there_is_anything_to_write(tmp_path):
    (tmp_path / "a").write_text("first")
    check_place(tmp_path / "a")
    check_place(tmp_path / "b")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "first"}
    with pytest.raises(UserError, match="cannot write table /proc/a: No such file"):
        check_place(Path("/proc/a"), "table")


@pytest.mark.parametrize("path", [".", "/", ""])
def test_a_folder_is_no_file(path):
    with pytest.raises(UserError, match="it is a folder; name a file"):
        write_whole(Path(path), "text")
