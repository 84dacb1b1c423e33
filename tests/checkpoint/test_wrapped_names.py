"""Names of parameters that wrappers have changed."""

from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file

from harness.huggingface import pretrained
from harness.pool import run_ranks
from shardwise.checkpoint import Checkpoint
from shardwise.checkpoint.huggingface import HuggingFaceWeights
from shardwise.checkpoint.names import unwrapped_names


def test_wrappers_and_common_prefixes_go() -> None:
    names = ("_orig_mod.a.w", "_orig_mod.b._fsdp_wrapped_module._checkpoint_wrapped_module.w")
    assert unwrapped_names(dict.fromkeys(names)) == dict.fromkeys(("a.w", "b.w"))
    assert unwrapped_names({"module._orig_mod.a": 1, "module.b": 2}) == {"a": 1, "b": 2}
    assert unwrapped_names({"base_model.model.model.a": 1}) == {"model.a": 1}
    assert unwrapped_names({"module.a": 1, "b": 2}) == {"module.a": 1, "b": 2}
    # Two of one name stay what they are.
    assert unwrapped_names({"_orig_mod.a": 1, "a": 2}) == {"_orig_mod.a": 1, "a": 2}


def test_weights_of_a_compiled_model_are_read(tmp_path: Path) -> None:
    pretrained("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    plain = HuggingFaceWeights.open(tmp_path).read("model/head.norm.weight")
    renamed = {
        f"_orig_mod.{name}".replace(".self_attn.", "._orig_mod.self_attn."): t for name, t in load_file(file).items()
    }
    save_file(renamed, file, {"format": "pt"})
    assert np.array_equal(HuggingFaceWeights.open(tmp_path).read("model/head.norm.weight"), plain)


def test_a_compiled_split_is_saved_without_its_wrapper(tmp_path: Path) -> None:
    assert run_ranks("harness.diverged_jobs:save_compiled", 1, str(tmp_path)) == [True]
    names = Checkpoint.open(tmp_path / "step-1").tensors
    assert {name for name in names if name.startswith("model/")} == {
        f"model/{i}.{leaf}" for i in (0, 1) for leaf in ("weight", "bias")
    }
