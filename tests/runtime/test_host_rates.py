"""Rates of the host: what is measured is positive, and a disk that cannot be measured is one line."""

import errno
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import UserError
from shardwise.runtime.measure import disk, host


def test_a_disk_is_measured_and_left_as_it_was(tmp_path):
    try:
        rates = disk.disk_rates(tmp_path, 2 * disk.REQUEST)
    except UserError as error:
        assert "no direct I/O" in str(error)
        return
    assert rates.read > 0 and rates.write > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EROFS, "it is read-only"),
        (errno.ENOSPC, "it is full"),
        (errno.EINVAL, "its file system has no direct I/O"),
        (errno.EIO, os.strerror(errno.EIO)),
    ],
)
def test_what_the_disk_says_is_one_line_and_the_file_is_removed(tmp_path, monkeypatch, number, words):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk.os, "pwrite", fail)
    with pytest.raises(UserError, match="choose another folder") as raised:
        disk.disk_rates(tmp_path, disk.REQUEST)
    assert "\n" not in str(raised.value)
    if "no direct I/O" not in str(raised.value):
        assert words in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_short_write_is_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(disk.os, "O_DIRECT", 0)
    monkeypatch.setattr(disk.os, "pwrite", lambda *_: 4096)
    with pytest.raises(UserError, match="it is full"):
        disk.disk_rates(tmp_path, disk.REQUEST)


@pytest.mark.parametrize("elements", [1000, host.CHUNK, host.CHUNK + 1])
def test_the_host_is_measured(elements):
    rates = host.host_rates(torch.device("cpu"), elements, 0.0)
    assert min(rates.down, rates.up, rates.adamw) > 0


RATES = st.floats(1.0, 1e12)


@given(st.lists(st.builds(host.HostRates, RATES, RATES, RATES), min_size=1, max_size=8))
def test_a_nodes_rates_are_those_of_its_ranks(every):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "gather_objects", lambda _: every)
        node = host.of_all_ranks(every[0])
    assert node["adamw_rate"] == pytest.approx(sum(rates.adamw for rates in every))
    slowest, quickest = min(min(r.down, r.up) for r in every), max(min(r.down, r.up) for r in every)
    assert slowest * 0.999 <= node["link_bandwidth"] <= quickest * 1.001
