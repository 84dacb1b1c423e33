"""The faults of a server, with requests under way. A new server then answers as one that nothing has happened to."""

import json
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from faults.draw import Fault
from faults.inject import HANG
from faults.trial import Space, Trial
from harness.training_process import Process

MODEL = "precision=fp32"
"""Layout of the run that is served."""
PROMPTS = ("one two", "three", "four five six seven")
TOKENS = 48
ANSWER_WITHIN = 60


def answers(fault: Fault, space: Space) -> list[str]:
    trial = Trial(fault, space)
    with _server(trial) as (process, url):
        texts = [ask(url, prompt) for prompt in PROMPTS]
        process.send(signal.SIGTERM)
        trial.ended(process, {0: ""})
    if trial.problems or not all(texts):
        raise RuntimeError(f"the undisturbed server of {fault.layout}: {trial.problems}, answers {texts}")
    return texts


def ask(url: str, prompt: str) -> str:
    """The text of an answer. Raises `OSError` and `ValueError` where there is none."""
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=ANSWER_WITHIN) as answer:
        return str(json.load(answer)["choices"][0]["text"])


@contextmanager
def _server(trial: Trial, *more: str) -> Iterator[tuple[Process, str]]:
    """(process, URL of the API), ready."""
    model = str(trial.space.plain(MODEL))
    words = ["serve", model, "--port", "0", "--precision", "fp32", "--json", "--layout", trial.fault.layout, *more]
    with trial.start(words=words) as process:

        def said() -> list[str]:
            return [line for line in process.written.splitlines() if line.startswith("{") and line.endswith("}")]

        if not trial.until(process, said):
            raise RuntimeError(f"the server did not start: {process.written}")
        yield process, json.loads(said()[0])["url"]


def disturb(trial: Trial, expected: list[str], act: Callable[[Trial, Process], Mapping[int, str]], *more: str) -> None:
    """Have a fault come while requests are answered, then ask a new server. act: makes the fault and returns the exit
    codes that may follow, with the pattern of the last line. expected: answer of each prompt."""
    with ThreadPoolExecutor(len(PROMPTS) * 2) as pool, _server(trial, *more) as (process, url):
        asked = [(pool.submit(ask, url, prompt), text) for prompt, text in zip(PROMPTS * 2, expected * 2, strict=True)]
        time.sleep(trial.random.uniform(0, 0.5))
        allowed = act(trial, process)
        trial.ended(process, allowed)
        for future, text in asked:
            _judge(trial, future, text)
    with _server(trial) as (process, url):
        for prompt, text in zip(PROMPTS, expected, strict=True):
            if (said := ask(url, prompt)) != text:
                trial.problem("lost", f"a new server answers {said!r}, not {text!r}")
        process.send(signal.SIGTERM)
        trial.ended(process, {0: ""})


def _judge(trial: Trial, future: Future[str], text: str) -> None:
    try:
        said = future.result(ANSWER_WITHIN + 10)
    except TimeoutError:
        trial.problem("hung", "a request has no answer")
    except (OSError, ValueError) as error:  # closed connections and bad statuses are OSErrors
        trial.told.append(f"a request ended with {error}")
    else:
        if said != text:
            trial.problem("lost", f"an answer is {said!r}, not {text!r}")


def _signal_rank(trial: Trial, process: Process, number: int, says: str) -> Mapping[int, str]:
    trial.send([trial.random.choice(trial.ranks(process))], number)
    return {1: says}


def _signal_server(trial: Trial, process: Process, number: int, code: int) -> Mapping[int, str]:
    trial.killed = number == signal.SIGKILL
    process.send(number)
    return {code: ""}


KINDS: dict[str, Callable[[Trial, list[str]], object]] = {
    "server rank killed": partial(disturb, act=partial(_signal_rank, number=signal.SIGKILL, says="SIGKILL")),
    "server rank stopped": lambda trial, expected: disturb(
        trial, expected, partial(_signal_rank, number=signal.SIGSTOP, says="suspended by a signal"), "--hang", HANG
    ),
    "server killed": partial(disturb, act=partial(_signal_server, number=signal.SIGKILL, code=-signal.SIGKILL)),
    "server signaled": partial(disturb, act=partial(_signal_server, number=signal.SIGTERM, code=0)),
}
