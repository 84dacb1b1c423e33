"""Commands as functions of Python: they take objects, answer as --json does, and their errors speak Python."""

import inspect
import json
import math

import numpy as np
import pytest

import shardwise
from shardwise import Cluster, Layout, UserError
from shardwise.cli.declare import CommandOptions, command_of, declared
from shardwise.model.catalog import get

CALLS = {
    "explain": (
        (["vllm serve meta-llama/Llama-3.1-70B -tp 8"], {"cluster": "8xH100"}),
        (["vllm serve meta-llama/Llama-3.1-70B -tp 8"], {"cluster": Cluster.parse("8xH100")}),
    ),
    "emit": (
        (["llama-3-8b", {"dp": 8, "zero": 3}], {"engine": "torchtitan", "seq": "4k", "batch": 16}),
        (["llama-3-8b", Layout(dp=8, zero=3)], {"engine": "torchtitan", "seq": 4096, "batch": 16}),
        ([get("llama-3-8b"), Layout(dp=8, zero=3)], {"engine": "torchtitan", "seq": 4096, "batch": 16}),
    ),
}
LINES = {
    "explain": ["explain", "vllm serve meta-llama/Llama-3.1-70B -tp 8", "--cluster", "8xH100"],
    "emit": ["emit", "llama-3-8b", "--layout", "dp=8,zero=3", "--for", "torchtitan", "--seq", "4096", "--batch", "16"],
}


@pytest.mark.parametrize("name", CALLS)
def test_a_function_answers_what_the_command_does(name, command):
    code, out, _ = command(*LINES[name], "--json")
    assert code == 0
    for args, options in CALLS[name]:
        answer = getattr(shardwise, name)(*args, **options)
        assert json.loads(json.dumps(answer.to_json())) == json.loads(out)
        assert repr(answer).startswith("<CommandResult: ") and len(repr(answer)) < 200 and answer._repr_html_()
    assert name != "emit" or "--training.mixed_precision_param" in answer.text


@pytest.mark.parametrize("name", ["explain", "emit", "generate"])
def test_a_signature_has_the_options_of_the_command(name):
    signature = inspect.signature(getattr(shardwise, name))
    items = declared(command_of(name)[0])
    assert set(signature.parameters) <= set(items)
    missing = set(items) - set(signature.parameters) - set(declared(CommandOptions))
    assert all(not items[key].option.help or "SUPPRESS" in items[key].option.help for key in missing)
    assert getattr(shardwise, name).__doc__


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: shardwise.plan("llama-3-8b", "8xH100", seq="4 k"), "seq='4 k': give a whole number"),
        (lambda: shardwise.plan("llama-3-8b", "8xH100", top=0), "top must be a positive integer"),
        (lambda: shardwise.plan_serving("gpt2", "1xL4", ttft=-1.0), "ttft must be a positive number"),
        (lambda: shardwise.plan_serving("gpt2", "1xL4", kv_cache="x"), "kv_cache 'x': must be one of"),
        (lambda: shardwise.emit("gpt2", "tp=2", engin="vllm"), "emit has no option 'engin'; did you mean engine?"),
        (lambda: shardwise.emit("gpt2", "tp=2", engine="vllm", seq=64), "give prompt and output and concurrency"),
        (lambda: shardwise.emit("gpt2", "tp=2"), "emit needs engine"),
        (lambda: shardwise.emit("gpt2", "tp=2", engine="vllm", set="layers=2"), "by its name, which set changes"),
        (lambda: shardwise.emit(get("gpt2").replace(layers=2), "tp=2", engine="vllm"), "and this one is changed"),
        (lambda: shardwise.train("tiny-llama"), "train needs data"),
        (lambda: shardwise.explain("-tp 4", ranks="x"), "ranks='x': "),
    ],
)
def test_errors_name_the_arguments_of_python(call, words):
    with pytest.raises(UserError) as error:
        call()
    assert words in str(error.value) and "--" not in str(error.value)


STEP = {"model": "llama-3.2-1b", "seq": 1024, "batch": 8}
WHOLE = {
    "plan": {**STEP, "cluster": "4xH100"}, "plan_serving": {"model": "llama-3.2-1b", "cluster": "2xH100"},
    "estimate": {**STEP, "layout": "dp=4", "cluster": "4xH100"},
    "emit": {**STEP, "layout": "dp=4", "engine": "megatron"}, "explain": {"config": "vllm serve gpt2 -tp 2"},
}  # fmt: skip
ANY = {"refuses", "slow", "options"}
"""Arguments for objects of this package's own."""


@pytest.mark.parametrize("name", WHOLE)
def test_an_argument_of_another_type_is_one_line(name):
    function = getattr(shardwise, name)
    for argument in inspect.signature(function).parameters.keys() - ANY:
        for value in (object(), b"x", [3], {"a": 1}, math.nan):
            with pytest.raises(UserError) as error:
                function(**WHOLE[name] | {argument: value})
            assert "\n" not in str(error.value), (argument, value)


@pytest.mark.parametrize("stages", ["even", (8, 8), [8, 8], "8/8"])
def test_numbers_of_python_and_numpy_are_taken(stages):
    fix = {"pp": 2, "stages": stages, "zero": 0}
    plan = shardwise.plan("llama-3.2-1b", "4xH100", seq=np.int64(1024), batch=np.int32(8), fix=fix)
    assert plan.winner.layout.pp == 2 and not plan.winner.layout.stages
    assert shardwise.estimate("llama-3.2-1b", {"pp": 2, "stages": (9, 7)}, "2xH100", **{"seq": 1024, "batch": 8})


def test_a_layout_is_short_and_reads_back():
    layout = Layout(dp=8, zero=2, sp=True, tp=2)
    assert eval(repr(layout)) == layout and len(repr(layout)) < 60
    assert Layout.of({"dp": 8, "zero": 2, "sp": True, "tp": 2}) == layout == Layout.of(str(layout))
    with pytest.raises(UserError, match="a text such as tp=2,dp=4, or a dict"):
        Layout.of(8)
