"""`shardwise serve` refuses what cannot be served, in one line, before anything is loaded."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import HTTPCookieProcessor, build_opener, urlopen

import pytest

from harness.cases import from_table
from harness.command_line import mistake
from harness.hosts import namespaces
from harness.processes import alive
from shardwise.cli import serve
from shardwise.cli.declare import read
from shardwise.cli.main import main
from shardwise.lab.job import is_shardwise
from shardwise.lab.network import remove_abandoned
from shardwise.predict.memory.serving import MemoryFit
from shardwise.runtime import installed

pytestmark = pytest.mark.usefixtures("leftovers")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 4 heads, 2 of keys and values, with a tokenizer of three words."""
    from tokenizers import Tokenizer, models

    from harness.huggingface import pretrained

    folder = tmp_path_factory.mktemp("model")
    pretrained("llama").save_pretrained(folder)
    Tokenizer(models.WordLevel({"a": 0, "b": 1, "<eos>": 2}, unk_token="a")).save(str(folder / "tokenizer.json"))
    return folder


@from_table
def test_what_cannot_be_served_is_said_in_one_line(command, model, arguments, words):
    code, out, err = command("serve", model, "--port", 0, *arguments)
    # What fits is said before: the mistake is the last line.
    mistake((code, out, err.splitlines(keepends=True)[-1]), *words)


def test_what_does_not_fit_hears_what_would(command, model, monkeypatch):
    monkeypatch.setattr("shardwise.cluster.catalog.machine_memory", lambda: 400_000)
    code, out, err = command("serve", model, "--port", 0, "--batch", "64")
    *fit, refusal = err.splitlines(keepends=True)
    mistake((code, out, refusal), "needs", "more than the 400 kB there are")
    assert any(line.startswith("does not fit") for line in fit) and any("valid tp: 1, 2, 4" in line for line in fit)
    largest = int(re.search(r"the largest context for 64 sequences is (\d+) tokens", refusal)[1])
    for context, fits in ((largest, True), (largest + 1, False)):
        assert fit_of(model, "--batch", "64", "--context", str(context)).fits is fits


def test_a_port_in_use_is_found_before_weights_are_read(command, model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, out, err = command("serve", model, "--port", taken.getsockname()[1])
    mistake((code, out, err), "cannot be used", "--port")


def test_folders_that_hold_no_model_or_no_tokenizer(command, model, tmp_path):
    mistake(command("serve", tmp_path / "none", "--port", 0), "no such folder")
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    mistake(command("serve", tmp_path, "--port", 0), "no tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    mistake(command("serve", tmp_path, "--port", 0), "not a tokenizer.json")
    (tmp_path / "tokenizer.json").write_text((model / "tokenizer.json").read_text())
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    mistake(command("serve", tmp_path, "--port", 0), "chat template", "damaged")
    (tmp_path / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-8])
    mistake(command("serve", tmp_path, "--port", 0), "model.safetensors")


@pytest.mark.parametrize("package", ["starlette", "uvicorn", "jinja2"])
def test_a_missing_extra_is_named(command, model, package, monkeypatch):
    monkeypatch.setattr(installed, "find_spec", lambda name: None if name == package else object())
    mistake(command("serve", model), package, "pip install 'shardwise[serve]'")


def fit_of(model: Path, *arguments: str) -> MemoryFit:
    return serve.fit_of(serve.job_of(read("serve", [str(model), *arguments])[0]))


def test_the_fit_of_a_cache_given_in_bytes_is_that_cache(model):
    one = fit_of(model, "--batch", "1").held.cache
    few = fit_of(model, "--batch", "50", "--cache", str(3 * one + one // 2))
    assert few.held.cache == 3 * one + one // 2 and "cache of 224 tokens" in next(few.lines())
    many = fit_of(model, "--batch", "2", "--cache", "1GB")
    assert many.held.cache == pytest.approx(1e9, rel=1e-4)
    assert many.held.passing == fit_of(model, "--batch", "2").held.passing  # two run, however many it has room for
    far = fit_of(model, "--cache", "99999TB")
    assert not far.fits and re.search(
        r"with a cache of 100 PB needs .*; the largest cache that fits is ", far.refusal()
    )


@pytest.mark.parametrize(("context", "batch"), [(17, 8), (16, 3), (64, 1)])
def test_the_announced_cache_is_the_one_that_will_be_made(model, context, batch):
    """Whole pages for each sequence, and no more sequences than may run."""
    found = fit_of(model, "--context", str(context), "--batch", str(batch))
    one = fit_of(model, "--context", "16", "--batch", "1").held.cache
    assert found.held.cache == batch * -(-context // 16) * one
    assert f"cache of {batch} x {context} tokens" in next(found.lines())


# -- `shardwise studio`: the address, the export, and mistakes in one line


@contextmanager
def _killed(process: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()


COMMAND = [sys.executable, "-m", "shardwise", "studio", "--no-browser", "--json"]


def test_it_serves_until_it_is_interrupted_without_torch(tmp_path: Path) -> None:
    hidden = tmp_path / "torch.py"
    hidden.write_text("raise ImportError('the page needs no torch')\n")
    with (
        subprocess.Popen(
            [*COMMAND, "--view", "memory?zero=1", "--runs", str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": f"{tmp_path}:{':'.join(path for path in sys.path if path)}"},
            # A shell that runs the tests in its background has them ignore SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process,
        _killed(process),
    ):
        assert process.stdout and process.stderr
        address = json.loads("".join(process.stdout.readline() for _ in range(3)))["address"]
        assert address.startswith("http://127.0.0.1:") and address.endswith("#memory?zero=1")
        base, _, token = address.partition("#")[0].partition("?token=")
        with pytest.raises(HTTPError, match="403"):
            urlopen(base, timeout=30)
        browser = build_opener(HTTPCookieProcessor())
        with browser.open(f"{base}?token={token}", timeout=30) as reply:
            assert b"shardwise studio" in reply.read() and reply.url == base
        for view in ("tokens", "memory", "collectives", "pipelines", "runs"):
            with browser.open(f"{base}api/{view}", timeout=60) as reply:
                assert json.load(reply)["tables"]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0
        assert process.stderr.read() == ""


def test_export_writes_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.html"
    assert main(["studio", "--out", str(path), "--view", "pipelines?ranks=2&micro=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"written": str(path)}
    assert '"ranks": "2"' in path.read_text()


# -- `shardwise lab`: where commands run, their exit codes, their end, and mistakes


LIMIT = 60
Command = Callable[..., tuple[int, str, str]]


def started(*words: str) -> subprocess.Popen[str]:
    lab = [sys.executable, "-m", "shardwise", "lab", "--link", "100Mb/s", *words]
    return subprocess.Popen(lab, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(file: Path) -> int:
    deadline = time.monotonic() + LIMIT
    while not (file.exists() and file.read_text().strip()):
        assert time.monotonic() < deadline, f"no {file}"
        time.sleep(0.02)
    return int(file.read_text())


@pytest.mark.usefixtures("several_hosts")
def test_other_commands_run_once_on_each_host_with_the_words_of_torchrun(command: Command, tmp_path: Path) -> None:
    script = (
        f'echo $PET_NNODES $PET_MASTER_ADDR $GLOO_SOCKET_IFNAME $(ip -br -4 addr show eth0) > "{tmp_path}/$NODE_RANK"'
    )
    code, out, err = command("lab", "--nodes", 3, "--link", "1Gb/s", "--json", "--", "sh", "-c", script)
    assert (code, err) == (0, "")
    reported = json.loads(out)
    assert [host["host"] for host in reported["hosts"]] == [0, 1, 2] and reported["forwarded_by"] == "kernel"
    for node in range(3):
        words = (tmp_path / str(node)).read_text().split()
        assert words[:3] == ["3", "10.77.0.1", "eth0"] and words[-1] == f"10.77.0.{node + 1}/24"


@pytest.mark.usefixtures("several_hosts")
def test_the_exit_code_is_that_of_the_command(command: Command) -> None:
    failing = 'if [ "$NODE_RANK" = 1 ]; then exit 7; fi'
    code, out, err = command("lab", "--link", "1Gb/s", "--", "sh", "-c", failing)
    assert (code, out) == (7, "") and "host 1  1Gb/s  sent" in err
    assert command("lab", "--", "no-such-command")[0] == 2
    assert namespaces() == []


@pytest.mark.usefixtures("several_hosts")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_command_and_removes_the_hosts(number: int, tmp_path: Path, heeded: None) -> None:
    lab = started("--", "sh", "-c", f'echo $$ > "{tmp_path}/$NODE_RANK"; exec sleep 100')
    pids = [wait_for(tmp_path / str(node)) for node in range(2)]
    lab.send_signal(number)
    _, err = lab.communicate(timeout=LIMIT)
    assert lab.returncode == 128 + number and "Traceback" not in err
    assert not any(map(alive, pids)) and namespaces(lab.pid) == []


@pytest.mark.usefixtures("several_hosts")
def test_the_command_ends_with_a_killed_lab(tmp_path: Path) -> None:
    lab = started("--", "sh", "-c", f'echo $$ > "{tmp_path}/$NODE_RANK"; exec sleep 100')
    pids = [wait_for(tmp_path / str(node)) for node in range(2)]
    lab.kill()
    lab.communicate(timeout=LIMIT)
    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, pids))
    remove_abandoned()
    assert namespaces(lab.pid) == []


def test_which_commands_are_ours() -> None:
    assert is_shardwise(["shardwise", "train"]) and is_shardwise(["/bin/python3", "-m", "shardwise", "train"])
    assert not is_shardwise(["torchrun", "-m", "shardwise"]) and not is_shardwise(["python", "train.py"])


def test_without_rights_one_line_says_what_is_needed(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.lab.network.os.geteuid", lambda: 1000)
    monkeypatch.setattr("shardwise.lab.network.shutil.which", lambda name: name)
    mistake(command("lab", "--", "true"), "needs root", "sudo")
    monkeypatch.setattr("shardwise.lab.network.shutil.which", lambda name: None)
    mistake(command("lab", "--", "true"), "install iproute2")
