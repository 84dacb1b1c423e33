"""Files written past the page cache hold what was written, on file systems that refuse to, and on full disks, too."""

import contextlib
import errno
import fcntl
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.checkpoint import direct_io
from shardwise.checkpoint.direct_io import DirectFile


def written(path: Path, parts: list[bytes]) -> bytes:
    file = DirectFile(path)
    for part in parts:
        file.write(memoryview(part))
    assert file.finish() == sum(map(len, parts))
    return path.read_bytes()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 40_000), max_size=8), st.integers(0, 2**32 - 1))
def test_parts_of_any_length_follow_each_other(sizes, seed):
    values = np.random.default_rng(seed)
    parts = [values.bytes(size) for size in sizes]
    # A small chunk, so that parts cross its end in every way.
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_io, "CHUNK", 8192)
        assert written(Path(folder) / "file", parts) == b"".join(parts)


def written_from_image(path: Path, parts: list[bytes]) -> bytes:
    image = direct_io.memory(sum(map(len, parts)) or 1)
    at, file = 0, DirectFile(path, image)
    for part in parts:
        image[at : at + len(part)] = part
        at += len(part)
        file.write(memoryview(part))
    assert file.finish() == at
    return path.read_bytes()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 40_000), max_size=8),
    st.integers(0, 2**32 - 1),
    st.sampled_from([8192, 4097]),
    st.booleans(),
)
def test_what_lies_in_an_image_is_written_from_there(sizes, seed, chunk, direct):
    """Chunks of 4,097 bytes stand in for a disk that wants more than a page; the last bytes never fill one."""
    values = np.random.default_rng(seed)
    parts = [values.bytes(size) for size in sizes]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_io, "CHUNK", chunk)
        if not direct:
            patch.setattr(fcntl, "fcntl", refuse)
        assert written_from_image(Path(folder) / "file", parts) == b"".join(parts)


def refuse(*_):
    raise OSError(errno.EINVAL, "Invalid argument")


def test_a_file_system_that_knows_no_direct_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setattr(direct_io, "CHUNK", 4096)
    parts = [b"a" * 5000, b"b" * 9001]
    assert written(tmp_path / "file", parts) == b"".join(parts)


def test_a_file_system_that_takes_the_flag_and_not_the_writes(tmp_path, monkeypatch):
    """Chunks that are no multiple of what the disk wants stand in for one that wants more than a page."""
    monkeypatch.setattr(direct_io, "CHUNK", 4097)
    parts = [b"a" * 5000, b"b" * 9001]
    assert written(tmp_path / "file", parts) == b"".join(parts)


@pytest.mark.parametrize("from_image", [False, True])
def test_direct_writes_leave_nothing_in_the_page_cache(tmp_path, from_image):
    """What makes it worth having; only the last page goes through it. Skips where the temporary folder's file system
    refuses direct writes. Of three files one is enough: the kernel may take others through the cache on a busy disk."""
    size = 3 * direct_io.CHUNK // 2 + 5
    held = []
    for number in range(3):
        file = DirectFile(tmp_path / f"{number}", direct_io.memory(size) if from_image else None)
        if not file._straight:
            pytest.skip("no direct writes here")
        file.write(memoryview(bytes(size)))
        file.finish()
        held.append([page for page in (0, direct_io.CHUNK, size - 5 - 4096) if cached(tmp_path / f"{number}", page)])
    assert [] in held


def cached(file: Path, page: int) -> bool:
    """Whether the page cache has the 4 KiB at a place of a file."""
    with file.open("rb") as read, contextlib.suppress(BlockingIOError):
        return os.preadv(read.fileno(), [bytearray(4096)], page, os.RWF_NOWAIT) > 0
    return False


def test_a_new_file_never_replaces_one(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "file")


def test_what_the_disk_refuses_is_raised(tmp_path, monkeypatch):
    file = DirectFile(tmp_path / "file")
    monkeypatch.setattr(os, "fsync", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(OSError, match="No space left"):
        file.finish()
    file.close()
