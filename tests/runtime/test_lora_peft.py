"""Adapters against `peft`: its gradients under every kind of layout, its files in both directions, and its merge.

Both compute in float64 throughout: hence 1e-12. Files have float32: hence 1e-6 after training.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.cases import table
from harness.float64 import oracle
from harness.huggingface import STEPS, pretrained, tokens
from harness.lora_jobs import LoraJob, LoraResult, wrapped_llama
from harness.own_modules import token_example
from harness.pool import run_ranks
from harness.today import some_of
from shardwise import verify
from shardwise.checkpoint import Checkpoint
from shardwise.checkpoint.huggingface import PeftAdapters, export_adapters, merge, merge_checkpoint
from shardwise.errors import UserError
from shardwise.layout import Layout
from shardwise.model.huggingface import from_huggingface
from shardwise.model.parameters import parameters

# It is imported where it is used: that takes seconds, in which no other test could be collected.
pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed: pip install peft")

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = table(__file__, "CASES")


def adapted(name: str, targets: list[str], folder: Path) -> Any:
    """A model of `transformers` with random adapters, both in `folder`."""
    import peft

    model = pretrained(name)
    model.save_pretrained(folder / "base")
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if "lora_" in key:
                tensor.add_(torch.randn_like(tensor), alpha=0.2)
    model.save_pretrained(folder / "adapters")
    return oracle(model)


def gradients(model: Any, ours: dict[str, str]) -> tuple[dict[str, Tensor], float]:
    """The gradients of the first step by our names, and its loss. ours: our name -> the name in `peft`'s file."""
    rows = tokens(0)
    logits = model(rows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    theirs = {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(theirs) == len(ours)
    return {name: theirs[at] for name, at in ours.items()}, float(loss.detach())


def names(weights: Path, adapters: Path) -> dict[str, str]:
    model = PeftAdapters.open(adapters, from_huggingface(weights)).model
    return {p.name: p.foreign.tensor for p in parameters(model) if not p.frozen and p.foreign}


@pytest.mark.parametrize("text", some_of(CASES, 3, "peft"))
def test_gradients_and_files_are_pefts(text: str, tmp_path: Path) -> None:
    name, targets = CASES[text]
    theirs, layout = adapted(name, targets, tmp_path), Layout.parse(text)
    base, folder = tmp_path / "base", tmp_path / "adapters"
    expected = logits(theirs)
    grads, loss = gradients(theirs, names(base, folder))
    job = LoraJob(base, folder, layout, grads, tmp_path / "out")
    ranks: list[LoraResult] = run_ranks("harness.lora_jobs:train_adapters", layout.ranks, job)
    assert abs(ranks[0].losses[0] - loss) < 1e-12
    for key, grad in grads.items():
        error = sum(rank.errors.get(key, 0.0) for rank in ranks) ** 0.5
        assert grad.norm() > 0 and error <= 1e-12 * float(grad.norm()), (key, error)
    distance(ranks, "before", expected, 1e-12)
    checkpoint = Checkpoint.open(tmp_path / "out" / f"step-{job.steps}")
    assert {at.partition("/")[2] for at in checkpoint.tensors} == set(grads), "a checkpoint has adapters alone"
    written = export_adapters(checkpoint, tmp_path / "trained")
    again = load(base, tmp_path / "trained")
    assert json.loads((written.folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert not torch.equal(logits(again), expected), "training must have moved the adapters"
    distance(ranks, "after", logits(again), 1e-6)
    whole = merge_checkpoint(checkpoint, tmp_path / "merged", dtype="float32")
    assert whole.folder.joinpath("config.json").exists()
    assert (logits(plain(tmp_path / "merged")) - logits(again)).abs().max() < 1e-5


def test_merging_is_pefts(tmp_path: Path) -> None:
    theirs = adapted("llama", ALL, tmp_path)
    merge(tmp_path / "adapters", tmp_path / "merged", tmp_path / "base", "float32")
    expected, mine = theirs.merge_and_unload().state_dict(), plain(tmp_path / "merged").state_dict()
    assert expected.keys() == mine.keys()
    for key, tensor in expected.items():
        assert np.allclose(tensor.numpy(), mine[key].numpy(), rtol=1e-6, atol=1e-6), key


def test_a_wrapped_module_splits_as_it_is() -> None:
    assert verify(wrapped_llama, "dp=2,zero=3", example=token_example())


def test_settings_that_are_not_supported_are_named(tmp_path: Path) -> None:
    adapted("llama", ["q_proj"], tmp_path)
    path, base = tmp_path / "adapters" / "adapter_config.json", from_huggingface(tmp_path / "base")
    config = json.loads(path.read_text())
    for change, words in (
        ({"use_rslora": True}, "use_rslora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_modules": ".*q_proj"}, "target_modules"),
        ({"target_modules": ["q_proj", "v_proj"]}, "lacks base_model"),
        ({"r": 4}, "shape"),
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' changes the base"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"layers_to_transform": 0}, "layers_to_transform=0"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"a_later_kind": {"rate": 1}}, "a_later_kind={'rate': 1} is not supported here"),
    ):
        path.write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=words):
            PeftAdapters.open(path.parent, base)
    off = {"a_later_kind": None, "another": False, "lora_dropout": 0.5, "init_lora_weights": "gaussian"}
    path.write_text(json.dumps(config | off))
    assert PeftAdapters.open(path.parent, base).dropout == 0.5


def load(base: Path, adapters: Path) -> Any:
    from peft import PeftModel

    return oracle(PeftModel.from_pretrained(plain(base), adapters))


def plain(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(tokens(STEPS)[:, :-1]).logits.double()


def distance(ranks: list[LoraResult], when: str, expected: Tensor, within: float) -> None:
    for rank in ranks:
        if (mine := getattr(rank, when)) is not None:
            start, stop = rank.vocabulary
            assert (mine[..., : stop - start] - expected[..., start:stop]).abs().max() < within * expected.abs().max()
