"""Mixtures of experts against `transformers`: logits, every gradient, and files in both directions.

Both compute in float64: hence 1e-12, for gradients of their norm or 3% of all gradients' norm. Gradients are compared
as their files hold them, read as weights are.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from harness.float64 import oracle
from harness.huggingface import MIXTURES, SEQ, pretrained, tokens
from shardwise.checkpoint import Checkpoint, Manifest, PartEntry, Piece, TensorSpec, commit, write_part
from shardwise.checkpoint.geometry import full
from shardwise.checkpoint.huggingface import HuggingFaceWeights, export
from shardwise.decoder import Batch, Decoder

pytestmark = pytest.mark.parametrize("family", MIXTURES)


def saved(family: str, folder: Path, **options: Any) -> Any:
    """A model of the family in float64, which it leaves in `folder`."""
    theirs = oracle(pretrained(family))
    theirs.save_pretrained(folder, **options)
    return theirs


def decoder_of(folder: Path) -> Decoder:
    weights = HuggingFaceWeights.open(folder)
    decoder = Decoder(weights.model).double()
    for name, parameter in decoder.named_parameters():
        values = weights.read(f"model/{name}", dtype="float64").reshape(parameter.shape)
        parameter.data = torch.from_numpy(values)
    return decoder


def checkpoint_of(decoder: Decoder, folder: Path) -> Checkpoint:
    """A checkpoint of one rank, weights alone, in float32."""
    arrays = {f"model/{name}": p.detach().float().numpy() for name, p in decoder.named_parameters()}
    entries = [
        PartEntry(name, TensorSpec(values.shape, "float32"), Piece.whole(full(values.shape)))
        for name, values in arrays.items()
    ]
    record = write_part(folder, 0, entries, [values.reshape(-1) for values in arrays.values()])
    about = {"model": decoder.config.to_json(), "layout": "dp=1", "workload": {"seq": SEQ, "batch": 1}}
    commit(folder, Manifest.of([record], step=1, samples=1, seed=0, optimizer_steps=1, about=about))
    return Checkpoint.open(folder)


def logits_of(decoder: Decoder, ids: Tensor) -> Tensor:
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    return decoder(Batch(ids, positions, positions, None, positions, positions))


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def test_logits_and_every_gradient(family: str, tmp_path: Path) -> None:
    theirs, ids = saved(family, tmp_path / "weights"), tokens(1)
    ours = decoder_of(tmp_path / "weights")
    expected, got = theirs(ids[:, :-1]).logits, logits_of(ours, ids[:, :-1])
    assert expected.shape[1] == SEQ and expected.std() > 0.1
    assert (got - expected).abs().max() < 1e-12 * expected.abs().max()
    loss_of(expected, ids).backward()
    loss_of(got, ids).backward()
    for parameter in theirs.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    theirs.save_pretrained(tmp_path / "gradients")
    gradients = HuggingFaceWeights.open(tmp_path / "gradients")
    least = 0.03 * torch.nn.utils.get_total_norm([p.grad for p in ours.parameters() if p.grad is not None]).item()
    compared = 0
    for name, parameter in ours.named_parameters():
        if name.endswith("router.bias"):
            assert parameter.grad is None
            continue
        read = gradients.read(f"model/{name}", dtype="float64").reshape(parameter.shape)
        assert parameter.grad is not None and parameter.grad.norm() > 0, name
        assert np.linalg.norm(parameter.grad.numpy() - read) < 1e-12 * max(np.linalg.norm(read), least), name
        compared += 1
    assert compared >= 9 * ours.config.layers


def test_experts_as_transformers_has_them_in_memory(family: str, tmp_path: Path) -> None:
    theirs = saved(family, tmp_path / "files")
    theirs.save_pretrained(tmp_path / "memory", save_original_format=False)
    assert any("experts.gate_up_proj" in name for name in load_file(tmp_path / "memory" / "model.safetensors"))
    one, other = (HuggingFaceWeights.open(tmp_path / name) for name in ("files", "memory"))
    assert one.tensors == other.tensors
    assert all(np.array_equal(one.read(name), other.read(name)) for name in one.tensors)


def test_export_gives_the_files_back(family: str, tmp_path: Path) -> None:
    import transformers

    theirs = pretrained(family)
    theirs.save_pretrained(tmp_path / "weights")
    decoder = decoder_of(tmp_path / "weights").float()
    export(checkpoint_of(decoder, tmp_path / "step-1"), tmp_path / "out", dtype="float32")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("weights", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        assert torch.equal(again(tokens(1)).logits, theirs(tokens(1)).logits)
