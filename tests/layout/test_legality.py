import pytest
from hypothesis import given

from harness.cases import from_table
from harness.strategies import split_models
from shardwise.errors import LayoutError, UserError
from shardwise.layout import Layout, Workload, check, check_runnable
from shardwise.layout.legality import fewer_ranks, valid_tp
from shardwise.model import ModelConfig
from shardwise.model.config import Experts

LLAMA = ModelConfig("llama", vocab=53, hidden=32, layers=4, heads=8, kv_heads=2, ffn=44, max_positions=64)
GPT = ModelConfig(
    "gpt", vocab=53, hidden=32, layers=4, heads=6, ffn=44, max_positions=64, head_dim=4, norm="layernorm",
    positions="learned", activation="gelu", gated=False, bias="all",
)  # fmt: skip
EXPERTS = LLAMA.replace(experts=Experts(count=8, active=2, ffn=16))


@given(split_models())
def test_what_is_legal_and_runnable_is_accepted(split: tuple[ModelConfig, Layout, Workload]) -> None:
    model, layout, workload = split
    check_runnable(layout, model, workload, layout.ranks)


def test_valid_tp_divides_heads_and_suits_key_value_heads() -> None:
    assert valid_tp(LLAMA) == [1, 2, 4, 8]
    assert valid_tp(GPT) == [1, 2, 3, 6]
    assert valid_tp(LLAMA.replace(heads=6, kv_heads=2)) == [1, 2, 6]


@pytest.mark.parametrize(
    ("model", "layout", "workload", "message"),
    [
        (LLAMA, "tp=3", None, "valid tp: 1, 2, 4, 8"),
        (LLAMA, "pp=8", None, "8 stages for 4 layers; give at most 4, or 6"),
        (LLAMA, "pp=2,stages=3/2", None, "adds up to 5 layers"),
        (LLAMA, "stages=2", None, "adds up to 2 layers"),
        (LLAMA, "dp=2,ep=2", None, "a model without experts"),
        (EXPERTS, "dp=3,ep=3", None, "ep=3 does not divide its 8 experts; valid ep: 1"),
        (GPT.replace(attention_dropout=0.1), "tp=2", None, "add attention=math"),
        (LLAMA, "dp=4,micro=2", Workload(8, 12), "nearest that can: 8 or 16"),
        (LLAMA, "dp=4", Workload(8, 3), "nearest that can: 4"),
        (GPT, "dp=1", Workload(65, 1), "use at most 64"),
        (LLAMA, "tp=4,sp", Workload(10, 1), "nearest that can: 8 or 12"),
        (LLAMA, "tp=4,sp", Workload(3, 1), "nearest that can: 4"),
    ],
)
def test_refusals_name_the_nearest_legal_values(
    model: ModelConfig, layout: str, workload: Workload | None, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        check(Layout.parse(layout), model, workload)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "ranks", "message"),
    [("dp=2,tp=2", 8, "dp=4 would use them all"), ("dp=2,tp=4", 6, "= 4 would have to divide 6")],
)
def test_the_number_of_devices_must_fit(layout: str, ranks: int, message: str) -> None:
    check(Layout.parse(layout), LLAMA, ranks=Layout.parse(layout).ranks)
    with pytest.raises(LayoutError, match=message):
        check(Layout.parse(layout), LLAMA, ranks=ranks)


@pytest.mark.parametrize("word", ["qwz", "qgz"])
def test_packed_numbers_run_beside_tensor_parallelism(word: str) -> None:
    check_runnable(Layout.parse(f"dp=2,tp=2,zero=3,{word}"), LLAMA, Workload(8, 2))


def test_compiled_blocks_save_where_hooks_do_not_see() -> None:
    layout = Layout.parse("dp=2,offload_activations=cpu,compile=block")
    check(layout, LLAMA, Workload(8, 2))
    with pytest.raises(LayoutError, match=r"compile=block saves tensors .*; choose|leave .* out"):
        check_runnable(layout, LLAMA, Workload(8, 2))


def test_a_model_without_a_decoder_is_refused() -> None:
    with pytest.raises(LayoutError, match="ALiBi"):
        check_runnable(Layout(), LLAMA.replace(positions="alibi"), Workload(8, 1))


@from_table
def test_only_experts_are_split_over_ep(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        check(Layout.parse(text), LLAMA)
    check(Layout.parse(text), EXPERTS)


def test_an_expert_is_whole_or_split_as_all_else() -> None:
    with pytest.raises(LayoutError, match=r"etp=2 must be 1, .*, or tp=4"):
        Layout.parse("tp=4,etp=2")
    with pytest.raises(LayoutError, match="ep x etp = 4 must divide dp x cp x tp = 2"):
        Layout.parse("tp=2,ep=2,etp=2")
    assert str(Layout.parse("tp=2,etp=2")) == "tp=2" and str(Layout.parse("tp=2,ep=2,etp=1")) == "tp=2,ep=2"
    with pytest.raises(LayoutError, match="tpkind=gathered has no form for the experts"):
        check(Layout.parse("tp=2,tpkind=gathered"), EXPERTS)


@from_table
def test_fewer_ranks(text: str, batch: int, ranks: int, expected: str | None) -> None:
    model = ModelConfig("small", vocab=32, hidden=8, layers=1, heads=2, ffn=16, max_positions=16)
    found = fewer_ranks(Layout.parse(text), model, Workload(seq=4, batch=batch), ranks)
    assert (str(found) if found else None) == (str(Layout.parse(expected)) if expected else None)
    assert found is None or found.ranks <= ranks
