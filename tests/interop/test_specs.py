"""Engines' files: expressions that name what there is, options that rows name, and an engine that is one file."""

import ast
from collections.abc import Iterator

import pytest

from harness.cases import table
from shardwise.interop import WriteRequest, read, write
from shardwise.interop import spec as specification
from shardwise.interop.expressions import BUILTINS
from shardwise.interop.reading import recognized
from shardwise.interop.spec import EngineSpec, spec, specs
from shardwise.interop.writing import writer
from shardwise.layout import Layout, Workload
from shardwise.model.catalog import get

LAYOUT = {name for name in dir(Layout()) if not name.startswith("_")}
MODEL = {name for name in dir(get("gpt2")) if not name.startswith("_")}
READING = {"value", "meaning", "usual", "raw", "fields", "ranks", "other", "title", "trainer", "preset", "began", "cut"}
WRITING = {
    "word", "words", "usual", "written", "layout", "work", "model", "nodes", "steps", "source", "unnamed", "stored",
    "stored_cache",
    "version", "engine", "file", "launch", "seq", "batch", "optimizer", "isolate_documents", "weights", "cache",
    "length", "sequences", "tokens", "memory", "module", "blocks",
}  # fmt: skip
DERIVED = {"others", "kind", "processes", "machines", "plain"}
"""Names that an engine's functions give, or that the engine which includes a file has."""


def expressions(one: EngineSpec) -> Iterator[tuple[str, set[str]]]:
    """(Expression or message, names that it may have)."""
    common = set(one.functions) | set(BUILTINS)
    rows = common | {name for name, row in one.options.items() if row.kind or row.read or row.check}
    given = common | {name for name, row in one.options.items() if row.write and not row.option}
    for row in one.options.values():
        for text in filter(None, (row.check, row.read)):
            yield text, rows | READING
        for text in filter(None, (row.error, row.fact, row.note)):
            yield f"f{text!r}", rows | READING
        if row.write:
            yield row.write, given | LAYOUT | WRITING
    for kind, remarks in one.remarks.items():
        names = {"comments": LAYOUT | WRITING, "objections": MODEL | {"model", "module", "options", "catalog"}}.get(
            kind, READING
        )
        for remark in remarks:
            known = names | (rows if names is READING else given)
            yield remark.when, known
            yield f"f{remark.say!r}", known
    for limit in one.limits:
        yield limit.when, common | LAYOUT | {"model"}
        yield f"dict({limit.set})", LAYOUT | set(BUILTINS)


def test_every_expression_names_what_there_is():
    checked = 0
    for name in [*specs(), "fsdp", "serving", "fsdp_config"]:
        for text, names in expressions(spec(name)):
            used = {node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name)}
            assert not used - names - DERIVED, (name, text, used - names)
            checked += 1
    assert checked > 500


def test_no_function_has_the_name_of_a_layout_s():
    functions = set(BUILTINS).union(*(one.functions for one in specs().values()))
    assert not functions & (LAYOUT | MODEL | WRITING)


def test_every_word_of_a_file_is_known():
    for name, one in specs().items():
        tables = {row.path[0] for row in one.options.values() if row.option}
        assert set(one.gates) <= tables | {"parallelism_config"}, name
        assert set(one.harmless) - {"top"} <= tables | {""}, name
        assert set(one.left) <= LAYOUT and {limit.key for limit in one.limits} <= LAYOUT, name


NEW = table(__file__, "NEW")


@pytest.fixture
def new_engine(tmp_path, monkeypatch):
    """The engines' folder with one more file, `newtron.toml`, and nothing else."""
    pytest.importorskip("yaml")
    for path in specification._FOLDER.iterdir():
        if path.name.endswith(".toml"):
            (tmp_path / path.name).write_text(path.read_text(encoding="utf-8"))
    (tmp_path / "newtron.toml").write_text(NEW)
    caches = (spec, specs, recognized.engines)
    monkeypatch.setattr(specification, "_FOLDER", tmp_path)
    for cached in caches:
        cached.cache_clear()
    monkeypatch.setitem(writer.WRITERS, "newtron", spec("newtron"))
    yield
    monkeypatch.undo()
    for cached in caches:
        cached.cache_clear()


def test_an_engine_is_one_file(new_engine, tmp_path):
    layout = Layout.parse("dp=4,tp=2,zero=1,micro=2,precision=fp32")
    file = write("newtron", WriteRequest(get("llama-3-8b"), layout, Workload(2048, 32)))
    assert "  shards: 2\n" in file.text and "  dtype: single\n" in file.text
    (tmp_path / "train.yaml").write_text(file.text)
    reading = read([str(tmp_path / "train.yaml")], 8)
    assert (reading.engine, reading.layout, reading.batch) == ("Newtron", layout, 32)
    assert reading.facts == ("2 shards of every matrix",) and not reading.unknown
