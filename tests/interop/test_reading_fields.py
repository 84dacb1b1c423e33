"""Values of a table: what they may be, and what is said of keys that nobody takes."""

import pytest

from shardwise.errors import UserError
from shardwise.interop.reading.fields import ConfigFields, Known
from shardwise.interop.spec import specs
from shardwise.layout import Layout


def test_values_are_read_as_they_are_written():
    fields = ConfigFields({"a": "8", "b": 5e8, "c": "true", "d": "Full", "e": "auto", "f": None, "g": "0.5"})
    assert fields.integer("a") == 8 and fields.integer("b") == 500_000_000
    assert fields.flag("c") and fields.word("d", choices=["full"]) == "Full" and fields.number("g") == 0.5
    assert ConfigFields({"x": ["core_attn", "mlp"]}).word("x") == "core_attn mlp"
    assert fields.integer("e", 3) == 3 and fields.integer("f", 4) == 4 and fields.automatic("e")


@pytest.mark.parametrize("value", [True, "x", 1.5, 0, -1, [1], {}, float("inf"), "1e400"])
def test_what_is_no_positive_integer_is_one_line(value):
    with pytest.raises(UserError, match=r"^top\.size must be an integer of at least 1, not "):
        ConfigFields({"size": value}, where="top.").integer("size")


def test_other_values_that_are_refused():
    fields = ConfigFields({"a": "maybe", "b": "selectiv", "c": 3, "d": "nan", "e": {}, "f": [1]})
    for call, line in (
        (lambda: fields.flag("a"), "a must be true or false, not 'maybe'"),
        (lambda: fields.word("b", choices=["full", "selective"]), "b=selectiv is unknown; did you mean selective?"),
        (lambda: fields.table("c"), "c must be a table, not 3"),
        (lambda: fields.word("e"), "e must be a text, not a table"),
        (lambda: fields.flag("f"), "f must be true or false, not a list"),
        (lambda: fields.number("d"), "d must be a number, not 'nan'"),
    ):
        with pytest.raises(UserError) as raised:
            call()
        assert str(raised.value) == line


def test_keys_that_nobody_takes_are_harmless_or_unknown():
    fields = ConfigFields(
        {"taken": 1, "lr": 2, "lr_decay": 3, "takn": 4, "in": {"x": 1}}, Known(frozenset({"lr"}), ("lr_",))
    )
    fields.integer("taken")
    fields.table("in")
    assert fields.left() == (
        ("lr", "lr_decay"), ("takn (did you mean taken?)", "in.x"), (), ("takn (did you mean taken?)",),
    )  # fmt: skip


def test_keys_named_like_the_layout_change_something():
    known = Known(frozenset({"bucket_size"}), ("moe_", "zero_init"))
    keys = {"bucket_size": 1, "moe_x": 1, "moe_parallel": 1, "zero_init_flag": 1}
    fields = ConfigFields(keys, known)
    assert fields.left() == (("moe_x",), ("moe_parallel",), ("bucket_size", "zero_init_flag"), ("moe_parallel",))
    found = fields.reading("x", Layout())
    assert found.unsettled == ("moe_parallel is not known here and may change this",)
    assert any("bucket_size, zero_init_flag" in fact for fact in found.facts)


def test_every_engine_has_harmless_keys_that_no_row_reads():
    for name, one in specs().items():
        rows = {row.option for row in one.options.values() if row.kind}
        tables = {"top": one.known(), **{table: one.known(table) for table in one.harmless}}
        for table, known in tables.items():
            path = "" if table == "top" else f"{table}."
            assert not rows & {f"{path}{key}" for key in known.keys}, (name, table)
