"""From a training to answers, as a user goes: a rank is killed, the run resumes under another layout, and is served."""

import json
import os
import signal
import time
import urllib.request
from pathlib import Path

import pytest

from harness import forked
from harness.training_process import LIMIT, Process, command, environment, losses, manifests, shardwise, write_text

pytestmark = [pytest.mark.usefixtures("leftovers"), pytest.mark.every_day]
STEPS = 12
PROMPT, TOKENS = "one two", 6


def test_train_kill_resume_serve(tmp_path: Path) -> None:
    write_text(tmp_path)
    whole, killed, resumed = (tmp_path / name for name in ("whole", "killed", "resumed"))
    shardwise(*command(tmp_path, whole, "precision=fp32", STEPS))
    with Process(
        command(tmp_path, killed, "dp=2,zero=3,precision=fp32", STEPS, "--save-every", "2"), killed
    ) as training:
        training.wait_for(lambda: manifests(killed).get(2))
        os.kill(training.workers()[1], signal.SIGKILL)
        code, output = training.end()
    assert code not in (0, 2) and "rank 1" in output and "Traceback" not in output, output
    shardwise("train", "--resume", str(killed), "--layout", "tp=2,sp,precision=fp32", "--out", str(resumed))
    after = losses(resumed)
    assert set(after) == set(range(min(after), STEPS + 1)) and min(after) >= 3
    assert {**losses(killed), **after} == pytest.approx(losses(whole), rel=1e-4)
    asked = ("--prompt", PROMPT, "--max-new-tokens", TOKENS, "--precision", "fp32", "--json")
    (answer,) = json.loads(shardwise("generate", resumed, *asked).stdout)["answers"]
    assert served(resumed) == answer["text"] != ""


def served(model: Path) -> str:
    words = ["serve", str(model), "--layout", "tp=2", "--precision", "fp32", "--port", "0", "--json"]
    server = forked.Started(words, environment())
    try:
        deadline = time.monotonic() + LIMIT
        while not (said := server.printed()).endswith("\n"):
            assert server.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.02)
        told = json.loads(said)
        body = {"model": told["model"], "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        request = urllib.request.Request(
            f"{told['url']}/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text: str = json.loads(answer.read())["choices"][0]["text"]
        server.send_signal(signal.SIGTERM)
        assert server.communicate(60)[1].endswith("stopped\n") and server.returncode == 0
    finally:
        server.kill()
    return text
