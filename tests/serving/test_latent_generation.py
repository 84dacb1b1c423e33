"""Generation over a cache of latents, with absorbed weights, against the plain decoder: the logits of every token."""

import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from harness.answers import check, requests
from harness.generation import generated, job_of
from harness.pool import run_ranks
from harness.reference import Case
from harness.space import MODELS
from harness.today import some_of
from shardwise.checkpoint import Checkpoint
from shardwise.decoder import Batch, Decoder
from shardwise.layout import Layout, Workload, unit_plan
from shardwise.model import ModelConfig
from shardwise.predict.memory.serving import page_bytes
from shardwise.serving.job import weights_in

NAMES = ["latent", "latent-direct"]
LAYOUTS = ["dp=1", "tp=2", "pp=2", "tp=2,pp=2", "dp=2,zero=3", "cp=2", "tp=2,cp=2"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name in NAMES:
        found[name] = tmp_path_factory.mktemp(name)
        case = Case(MODELS[name], Workload(12, 2), "fp64")
        run_ranks("harness.resume_jobs:straight", 1, (case, Layout(precision="fp64"), str(found[name]), 2, 2))
    return found


def plain(folder: Path, model: ModelConfig) -> Callable[[Tensor], SimpleNamespace]:
    """The decoder, as a function of token ids [1, S], in float64."""
    decoder, checkpoint = Decoder(model).double(), Checkpoint.open(next(folder.glob("step-*")))
    for name, parameter in decoder.named_parameters():
        whole = checkpoint.read(f"model/{name}", dtype="float64")
        parameter.data = torch.from_numpy(whole).view(parameter.shape)

    def logits(ids: Tensor) -> SimpleNamespace:
        places = torch.arange(ids.shape[1])[None]
        return SimpleNamespace(logits=decoder(Batch(ids, places, places, None, places, places)))

    return logits


@pytest.mark.parametrize(("name", "layout"), some_of(product(NAMES, LAYOUTS), 4, "generation with latents"))
def test_logits_and_answers_are_the_decoders(folders: dict[str, Path], name: str, layout: str) -> None:
    model, _ = weights_in(folders[name])
    reuse = LAYOUTS.index(layout) % 2 == 0
    job = job_of(folders[name], layout, "fp64", context=40, pages=24, chunk=7, reuse=reuse)
    asked = requests(8, random.Random(layout), job.replicas)
    ranks = generated(job, asked)
    check(plain(folders[name], model), asked, ranks, reuse, close=1e-9)
    for rank, seen in enumerate(ranks):
        plan = unit_plan(model, job.layout, Workload(), rank=rank)
        assert seen.reserved == 24 * page_bytes(plan, 4)
        numbers = model.latent_attention.kv_rank + model.latent_attention.rope_head_dim
        assert page_bytes(plan, 4) == len(plan.of_kind("block")) * numbers * 4 // job.layout.cp * 8
