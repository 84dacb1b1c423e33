"""Loading holds little more than a rank's own share of the weights, whatever layout trained them."""

from pathlib import Path

import pytest

from harness.huggingface import pretrained
from harness.pool import run_ranks
from shardwise.layout import Layout
from shardwise.serving.job import ServingJob, weights_in

MOST = 1.3
SLACK = 4096
"""Bytes of small tables (rotary frequencies, numbers that steer)."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a run on four ranks."""
    root = tmp_path_factory.mktemp("loading")
    pretrained("llama", num_hidden_layers=8).save_pretrained(root / "source")
    model, _ = weights_in(root / "source")
    layout = Layout.parse("dp=2,tp=2,zero=3,precision=fp32")
    run_ranks("harness.huggingface:load_train_save", 4, (root / "source", model, layout, root / "run"))
    return root / "run"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["tp=4", "pp=2", "dp=1", "dp=2,zero=3"])
def test_tensors_take_less_than_one_and_a_third_of_the_share(trained: Path, layout: str, precision: str) -> None:
    model, _ = weights_in(trained)
    job = ServingJob(model, Layout.parse(f"{layout},precision={precision}"), str(trained), context=16, batch=1)
    for rank in run_ranks("harness.loading:load", job.layout.ranks, job):
        assert rank.share <= rank.left
        if job.layout.stage < 3:
            assert rank.left <= rank.share + SLACK
        assert rank.peak < MOST * rank.left, (rank.peak / rank.share, rank)
