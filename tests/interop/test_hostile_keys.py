"""Unknown keys, on every engine: one named like the layout is never harmless, and a mistyped option is in doubt,
with the nearest name."""

import json
import re

import pytest

from harness.cases import from_table, table
from shardwise.errors import UserError
from shardwise.interop import ENGINES, read
from shardwise.interop.spec import spec
from shardwise.interop.writing.canonical import DEFAULTS

TELLING = ("parallel", "degree", "size", "shard", "stage", "fsdp", "zero")
INPUTS = table(__file__, "INPUTS")


@pytest.fixture
def with_key(tmp_path):
    """The reading of an engine's input with one more key, under dotted tables."""

    def of(engine, key, value=2):
        given = INPUTS[engine]
        if isinstance(given, str):
            return read([f"{given} --{key.replace('_', '-')} {value}"], 8, engine)
        table = whole = json.loads(json.dumps(given))
        *path, last = key.split(".")
        for one in path:
            table = table.setdefault(one, {})
        table[last] = value
        (tmp_path / "x.json").write_text(json.dumps(whole))
        return read([str(tmp_path / "x.json")], 8, engine)

    return of


def tables(value, path=""):
    yield path
    for key, inner in value.items() if isinstance(value, dict) else ():
        if isinstance(inner, dict):
            yield from tables(inner, f"{path}{key}.")


@pytest.mark.parametrize("engine", INPUTS)
def test_a_key_named_like_the_layout_is_never_harmless(with_key, engine):
    for of_file in tables(INPUTS[engine]):
        known = spec(engine).harmless.get(of_file[:-1] or "top", {})
        names = {
            name for word in TELLING for name in (word, f"my{word.capitalize()}", f"{word.upper()}_X", f"a_{word}_b")
        }
        names |= {f"{begun}{word}" for begun in known.get("prefixes", "").split() for word in TELLING}
        names |= {key for key in known.get("keys", "").split() if re.search("|".join(TELLING), key)}
        for name in names:
            try:
                found = with_key(engine, of_file + name)
            except UserError:
                continue
            assert not [key for key in found.ignored if key.replace("-", "_").endswith(name.replace("-", "_"))], name


@pytest.mark.parametrize("engine", INPUTS)
def test_a_mistyped_option_is_in_doubt(with_key, engine):
    one = spec(engine)
    options = [row.option for name, row in one.options.items() if row.option and row.kind
               and (name in DEFAULTS or re.search("|".join(TELLING), row.option))]  # fmt: skip
    for option in options:
        if one.gates.get(option.split(".")[0], "FSDP").find("FSDP") < 0:
            continue
        for typed in (option[:-1], f"{option}x", re.sub(r"(\w)(\w)(\w*)$", r"\1\2\2\3", option)):
            if typed in one.options or one.plain_name(typed) in options:
                continue
            try:
                found = with_key(engine, typed)
            except UserError:
                continue
            key = typed.rpartition(".")[2].replace("_", "-")
            assert key in " ".join(found.unsettled).replace("_", "-"), typed
            assert "did you mean" in " ".join(found.unsettled), typed


def test_every_engine_is_tried():
    assert set(INPUTS) == set(ENGINES) - {"ddp", "fsdp2"}  # programs, whose tables we write ourselves


def test_sizes_inside_harmless_tables_are_said(with_key):
    found = with_key("deepspeed", "aio", {"block_size": 1, "deep": {"zero_stage": 1, "tensor_parallel": 2}})
    assert "aio.deep.tensor_parallel" in " ".join(found.unsettled)
    assert "aio.block_size, aio.deep.zero_stage" in " ".join(found.facts)


@from_table
def test_short_and_dotted_flags(words, layout, doubt):
    found = read([words])
    assert str(found.layout) == layout
    assert doubt in " ".join(found.unsettled) if doubt else not found.unsettled


@pytest.mark.parametrize("words", ["vllm serve x -pt 2", "python -m sglang.launch_server --model x -tp 8"])
def test_a_short_flag_that_an_engine_has_not_is_an_error(words):
    with pytest.raises(UserError, match=r"did you mean -{1,2}tp\?"):
        read([words])
