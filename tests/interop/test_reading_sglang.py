"""SGLang's arguments."""

import pytest

from shardwise.errors import UserError
from shardwise.interop import read

SERVER = "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-70B --tp 8 --context-length 8192"


def test_a_server():
    found = read([f"{SERVER} --mem-fraction-static 0.85 --kv-cache-dtype fp8_e5m2 --quantization fp8 --port 30000"])
    assert (str(found.layout), found.model, found.unknown) == ("tp=8", "meta-llama/Llama-3.1-70B", ())
    assert (found.served.length, found.served.memory) == (8192, 0.85)
    assert (found.served.weights, found.served.cache) == ("fp8", "float8_e4m3fn") and found.ignored == ("--port",)


def test_experts_and_replicas():
    assert str(read([f"{SERVER} --ep-size 8 --dp-size 2"]).layout) == "dp=2,tp=8,ep=8"
    assert read([f"{SERVER} --enable-ep-moe"]).layout.ep == 8
    assert any("16 of the 32" in note for note in read([f"{SERVER} --dp 2"], 32).notes)


def test_attention_dp_is_inside_the_engines_ranks():
    """DeepSeek's usual server: 16 ranks, of which attention has 8 replicas of 2."""
    text = f"{SERVER.replace('--tp 8', '--tp 16')} --dp 8 --enable-dp-attention"
    for more in ("--ep-size 16", ""):
        found = read([f"{text} {more}"], 16)
        assert (str(found.layout), found.layout.ranks) == ("dp=8,tp=2,ep=16", 16)
        assert any("8 replicas of attention, tp=2 each, share experts" in fact for fact in found.facts)
    assert read([f"{text} --max-running-requests 64"]).served.sequences == 8
    assert any("split over all 16 ranks" in fact for fact in read([text]).facts)
    many = read([f"{SERVER} --dp 8 --enable-dp-attention --ep-size 8 --ep-num-redundant-experts 32"])
    assert any("32 redundant experts" in fact for fact in many.facts) and str(many.layout) == "dp=8,ep=8"
    with pytest.raises(UserError, match="tp-size 8 must be a multiple of dp-size 3"):
        read([f"{SERVER} --dp 3 --enable-dp-attention"])


@pytest.mark.parametrize(
    ("more", "line"),
    [("--dp 2", "16 GPUs, but there are 8"), ("--mem-fraction-static 2", "between 0 and 1"), ("--dtype", None)],
)
def test_what_cannot_be_is_one_line(more, line):
    if line is None:
        assert read([f"{SERVER} {more} float32"], 8).layout.precision == "fp32"
        return
    with pytest.raises(UserError, match=line):
        read([f"{SERVER} {more}"], 8)
