"""What is missing is named before anything begins, by every command that cannot do without it."""

import pytest

from harness.command_line import mistake
from shardwise.cli.main import main
from shardwise.runtime import installed

WITHOUT_TORCH = {
    "estimate": "tiny-llama --layout tp=2 --cluster 2xcpu --seq 64 --batch 8 --dry-run",
    "collective": "bench all-reduce --ranks 2",
    "calibrate": "device",
    "calibrate network": "--ranks 2",
    "pipeline": "run 1f1b --ranks 2 --micro 4 --emulate F=2ms,B=4ms",
    "demo": "",
}


@pytest.fixture
def no_torch(monkeypatch):
    monkeypatch.setattr(installed, "find_spec", lambda name: None if name == "torch" else object())


@pytest.mark.parametrize("command", WITHOUT_TORCH)
def test_commands_that_need_torch_say_so_in_one_line(no_torch, capfd, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    code = main([*command.split(), *WITHOUT_TORCH[command].split()])
    mistake((code, *capfd.readouterr()), "needs torch: pip install 'shardwise[train]'")
    assert not list(tmp_path.iterdir())


def test_the_extra_is_named(no_torch):
    with pytest.raises(ValueError, match=r"the page needs torch: pip install 'shardwise\[serve\]'"):
        installed.require("the page", "json", "torch", extra="serve")
    installed.require("the page", "json")
