import errno
import fcntl
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.errors import UserError
from shardwise.layout import homes
from shardwise.layout.homes import PAGE, Load, StateFile
from shardwise.runtime.offload import file as module
from shardwise.runtime.offload.file import OffloadFile

ARRAYS = 3
QUIET = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def file_of(folder: Path, units: dict[str, int], parameters: dict[str, int] | None = None, **options) -> OffloadFile:
    layout = StateFile(tuple(units.items()), tuple((parameters or {}).items()), 4, 2, ARRAYS)
    return OffloadFile(folder / "rank.state", layout, torch.float32, torch.bfloat16, **options)


@QUIET
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=4), st.data())
def test_any_piece_is_what_was_put_there(tmp_path: Path, sizes: list[int], data: st.DataObject) -> None:
    units = {f"u{i}": size for i, size in enumerate(sizes)}
    file = file_of(tmp_path, units, units)
    assert file.path.stat().st_size == file.layout.nbytes and file.layout.nbytes % PAGE == 0
    plain = {(unit, state): torch.zeros(size) for unit, size in units.items() for state in range(ARRAYS)}
    for number in range(6):
        unit = data.draw(st.sampled_from(sorted(units)))
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, units[unit])] * 2)))
        state, values = data.draw(st.integers(0, 2)), torch.arange(stop - start) + 1000.0 * number
        plain[unit, state][start:stop] = values
        file.put(unit, state, start, values)
        file.put_parameters(unit, start, values)
    for (unit, state), whole in plain.items():
        assert torch.equal(file.get(unit, state, 0, len(whole)), whole)
    file.close(remove=True)


def changes(load: Load, arrays: list[torch.Tensor]) -> None:
    for state, array in enumerate(arrays):
        array.mul_(2).add_(state + 1)


@pytest.mark.parametrize("load", [1024, 4096])
def test_an_update_leaves_the_state_before_it_until_it_is_committed(
    tmp_path: Path, load: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(homes, "LOAD", load)
    units = {"a": 9001, "b": 1, "c": 4096, "d": 0}
    file = file_of(tmp_path, units)
    expected = {unit: torch.randn(3, size) for unit, size in units.items()}
    for unit, whole in expected.items():
        for state in range(3):
            file.put(unit, state, 0, whole[state])
    file.commit({"step": 0})
    for step in (1, 2, 3):
        file.update(changes)
        before = [{slot: about["step"] for slot, about in file.committed().items()}]
        assert max(before[0].values()) == step - 1, "an update that is not committed does not count"
        file.commit({"step": step})
        expected = {unit: whole * 2 + torch.tensor([[1.0], [2.0], [3.0]]) for unit, whole in expected.items()}
        for unit, whole in expected.items():
            assert all(torch.equal(file.get(unit, state, 0, units[unit]), whole[state]) for state in range(3))
        assert sorted(about["step"] for about in file.committed().values()) == [step - 1, step]
    file.close()
    again = file_of(tmp_path, units, keep=True)
    again.slot = next(slot for slot, about in again.committed().items() if about["step"] == 3)
    assert all(torch.equal(again.get(unit, 0, 0, units[unit]), whole[0]) for unit, whole in expected.items())
    again.close(remove=True)
    assert not again.path.exists()


def test_a_torn_header_is_no_state(tmp_path: Path) -> None:
    file = file_of(tmp_path, {"a": 10})
    file.commit({"step": 1})
    with open(file.path, "r+b") as raw:
        raw.seek(file.slot * PAGE + 9)
        raw.write(b"\xff")
    assert file.committed() == {}
    file.close(remove=True)


def test_a_file_of_another_layout_is_not_taken(tmp_path: Path) -> None:
    file_of(tmp_path, {"a": 10}).close()
    with pytest.raises(UserError, match="is the offloaded state of another layout: remove it"):
        file_of(tmp_path, {"a": 10_000}, keep=True)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EFBIG])
def test_what_the_disk_refuses_is_one_line_and_leaves_nothing(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module.os, "posix_fallocate", refuse)
    with pytest.raises(UserError, match=rf"cannot keep 32.8 kB .*{os.strerror(number)}; choose another folder \(--off"):
        file_of(tmp_path / "new", {"a": 10})
    assert not list(tmp_path.rglob("*.state"))


def test_a_disk_that_fails_during_an_update_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_of(tmp_path, {"a": 10})

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(module.os, "pwrite", refuse)
    with pytest.raises(UserError, match=r"cannot write offloaded state in .*: Input/output error"):
        file.update(changes)
    assert file.slot == 0, "the state before it still counts"


@pytest.mark.parametrize("refused", ["flag", "write"])
def test_without_direct_io_the_page_cache_is_used(
    tmp_path: Path, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_fcntl, plain_write = fcntl.fcntl, os.pwrite

    def no_flag(file: int, command: int, flag: int = 0) -> object:
        if refused == "flag" and flag & os.O_DIRECT:
            raise OSError(errno.EINVAL, "invalid")
        return plain_fcntl(file, command, flag)

    def no_write(file: int, data: memoryview, at: int) -> int:
        if refused == "write" and plain_fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "invalid")
        return plain_write(file, data, at)

    monkeypatch.setattr(fcntl, "fcntl", no_flag)
    monkeypatch.setattr(module.os, "pwrite", no_write)
    file = file_of(tmp_path, {"a": 3000})
    file.update(changes)
    assert not file.direct and torch.equal(file.get("a", 1, 0, 3000), torch.full((3000,), 2.0))
    file.close(remove=True)
