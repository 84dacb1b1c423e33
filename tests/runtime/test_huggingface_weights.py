"""Weights from Hugging Face folders and back, with `transformers` as the judge: what it wrote gives its logits under
four layouts (one a day for each family), and what is exported after training is, bit by bit, what it then loads."""

import json
import os
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from torch import Tensor

from harness import forked
from harness.huggingface import FAMILIES, MIXTURES, STEPS, pretrained, tokens
from harness.pool import run_ranks
from harness.today import some_of
from shardwise.checkpoint import Checkpoint
from shardwise.checkpoint.huggingface import export
from shardwise.layout import Layout
from shardwise.model.huggingface import from_huggingface
from shardwise.model.parameters import parameters

LAYOUTS = {
    "dp=1,precision=fp32": "single",
    "tp=2,precision=fp32": "indexed",
    "dp=2,zero=3,precision=fp32": "indexed",
    "dp=2,tp=2,zero=1,sp,precision=fp32": "single",
}
EXPERT_LAYOUTS = {
    "dp=2,ep=2,zero=3,precision=fp32": "single",
    "dp=2,tp=2,sp,ep=2,zero=1,precision=fp32": "indexed",
    "dp=2,tp=2,sp,precision=fp32": "single",
}
"""Layout -> which of a model's folders is read under it."""


@pytest.fixture(scope="module")
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model, and where it lies in one file and in several."""
    model, root = pretrained(request.param), tmp_path_factory.mktemp(request.param)
    model.save_pretrained(root / "single")
    model.save_pretrained(root / "indexed", max_shard_size="10KB")
    assert len(list((root / "indexed").glob("model-*.safetensors"))) > 2
    return model, root


# Mixtral's here has 5 experts, which two ranks cannot share.
PAIRS = [(name, text) for name, text in product(MIXTURES, EXPERT_LAYOUTS) if name != "mixtral" or "ep=2" not in text]
CASES = some_of(product(FAMILIES, LAYOUTS), 2, "weights") + some_of(PAIRS, 1, "experts")


@pytest.mark.parametrize(("folders", "text"), CASES, indirect=["folders"])
def test_logits_training_and_export(folders: tuple[Any, Path], text: str, tmp_path: Path) -> None:
    theirs, root = folders
    source, layout = root / (LAYOUTS | EXPERT_LAYOUTS)[text], Layout.parse(text)
    model = from_huggingface(source)
    ranks = run_ranks("harness.huggingface:load_train_save", layout.ranks, (source, model, layout, tmp_path))
    assert _distance(ranks, "before", theirs) < 1e-5

    checkpoint = Checkpoint.open(tmp_path / f"step-{STEPS}")
    export(checkpoint, tmp_path / "out", dtype="float32", max_shard_bytes=10_000 if "tp=2" in text else 10**9)
    import transformers

    eager = {"experts_implementation": "eager"} if model.experts else {}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, **eager).eval()
    expected = _ours(again)
    assert expected.keys() == {p.name for p in parameters(model)}
    moved = 0
    before = _ours(theirs)
    for name, tensor in expected.items():
        saved = checkpoint.read(f"model/{name}", dtype="float32").reshape(checkpoint.tensors[f"model/{name}"].shape)
        assert np.array_equal(tensor.numpy().view(np.uint32), saved.view(np.uint32)), name
        moved += not torch.equal(tensor, before[name])
    still = [name for name in expected if name.endswith("router.bias")]
    assert moved == len(expected) - len(still), "training must have moved every tensor"
    assert _distance(ranks, "after", again) < 1e-5


def _distance(ranks: list[Any], when: str, model: Any) -> float:
    """The largest difference of any rank's logits from the model's own; NaN counts as infinite."""
    with torch.no_grad():
        whole = model(tokens(STEPS)[:, :-1]).logits
    assert whole.std() > 0.3
    worst = 0.0
    for rank in ranks:
        start, stop = rank.vocabulary
        apart = (getattr(rank, when)[..., : stop - start] - whole[..., start:stop]).abs().nan_to_num(torch.inf)
        worst = max(worst, float(apart.max()))
    assert {i for rank in ranks for i in range(*rank.vocabulary)} == set(range(whole.shape[-1]))
    return worst


def _ours(model: Any) -> dict[str, Tensor]:
    """A model of transformers under our names, through its modules and torch alone."""
    config = model.config
    gpt2, neox = config.model_type == "gpt2", config.model_type == "gpt_neox"
    trunk = model.transformer if gpt2 else model.gpt_neox if neox else model.model
    found: dict[str, Tensor] = {}

    def put(name: str, module: Any, turn: bool = False) -> None:
        for leaf, tensor in module.named_parameters():
            found[f"{name}.{leaf}"] = tensor.detach().T if turn and leaf == "weight" else tensor.detach()

    put("embedding.tokens", trunk.wte if gpt2 else trunk.embed_in if neox else trunk.embed_tokens)
    if gpt2:
        found["embedding.positions"] = trunk.wpe.weight.detach()
    for i, layer in enumerate(trunk.h if gpt2 else trunk.layers):
        at = f"blocks.{i}"
        if gpt2:
            names = {"attention_norm": layer.ln_1, "mlp_norm": layer.ln_2}
            turned = {"attention.out": layer.attn.c_proj, "mlp.up.up": layer.mlp.c_fc, "mlp.down": layer.mlp.c_proj}
            for name, module in turned.items():
                put(f"{at}.{name}", module, turn=True)
            for leaf, fused in layer.attn.c_attn.named_parameters():
                for part, tensor in zip("qkv", fused.detach().split(config.n_embd, dim=-1), strict=True):
                    found[f"{at}.attention.qkv.{part}.{leaf}"] = tensor.t()
        elif neox:
            attention, mlp = layer.attention, layer.mlp
            names = {
                "attention_norm": layer.input_layernorm, "mlp_norm": layer.post_attention_layernorm,
                "attention.out": attention.dense, "mlp.up.up": mlp.dense_h_to_4h, "mlp.down": mlp.dense_4h_to_h,
            }  # fmt: skip
            for leaf, fused in attention.query_key_value.named_parameters():
                heads = fused.detach().unflatten(0, (config.num_attention_heads, 3, -1))
                for index, part in enumerate("qkv"):
                    found[f"{at}.attention.qkv.{part}.{leaf}"] = heads[:, index].flatten(0, 1)
        else:
            attention, mlp = layer.self_attn, layer.mlp
            names = {"attention.out": attention.o_proj}
            if config.model_type.startswith("deepseek"):
                found |= {f"{at}.{name}": tensor for name, tensor in _latent(attention, config).items()}
            else:
                names |= {
                    "attention.qkv.q": attention.q_proj, "attention.qkv.k": attention.k_proj,
                    "attention.qkv.v": attention.v_proj,
                }  # fmt: skip
            dense = {"mlp": mlp}
            if hasattr(mlp, "experts"):
                found |= {f"{at}.{name}": tensor for name, tensor in _experts(mlp).items()}
                dense = {"mlp.shared": mlp.shared_experts} if hasattr(mlp, "shared_experts") else {}
            for name, maps in dense.items():
                names |= {f"{name}.gate_up.gate": maps.gate_proj, f"{name}.gate_up.up": maps.up_proj}
                names |= {f"{name}.down": maps.down_proj}
            if config.model_type.startswith("qwen3"):
                names |= {"attention.q_norm": attention.q_norm, "attention.k_norm": attention.k_norm}
            if config.model_type == "olmo2":
                names |= {"attention.qk_norm.q": attention.q_norm, "attention.qk_norm.k": attention.k_norm}
            if config.model_type in ("olmo2", "gemma2"):
                names |= {
                    "attention_post_norm": layer.post_attention_layernorm,
                    "mlp_post_norm": layer.post_feedforward_layernorm,
                }
            before = {"olmo2": "", "gemma2": "pre_feedforward_layernorm"}.get(
                config.model_type, "post_attention_layernorm"
            )
            if before:
                names |= {"attention_norm": layer.input_layernorm, "mlp_norm": getattr(layer, before)}
        for name, module in names.items():
            put(f"{at}.{name}", module)
    put("head.norm", trunk.ln_f if gpt2 else trunk.final_layer_norm if neox else trunk.norm)
    if not config.tie_word_embeddings:
        put("head.out", model.get_output_embeddings())
    return {name: tensor.contiguous() for name, tensor in found.items()}


def _experts(mlp: Any) -> dict[str, Tensor]:
    gate, up = mlp.experts.gate_up_proj.detach().chunk(2, dim=1)
    found = {"mlp.router.weight": mlp.gate.weight.detach()}
    if hasattr(mlp.gate, "e_score_correction_bias"):
        found["mlp.router.bias"] = mlp.gate.e_score_correction_bias
    for name, matrices in {"gate": gate.mT, "up": up.mT, "down": mlp.experts.down_proj.detach()}.items():
        found[f"mlp.experts.{name}"] = matrices.flatten(0, 1)
    return found


def _latent(attention: Any, config: Any) -> dict[str, Tensor]:
    """Latent attention without its output, the rotated rows of every head by halves."""
    rope = config.qk_rope_head_dim

    def halves(weight: Tensor, heads: int) -> Tensor:
        rows = weight.detach().unflatten(0, (heads, -1))
        plain, turned = rows[:, :-rope], rows[:, -rope:]
        return torch.cat([plain, turned[:, 0::2], turned[:, 1::2]], 1).flatten(0, 1)

    down, up = attention.kv_a_proj_with_mqa.weight, attention.kv_b_proj.weight
    found = {"kv_down": halves(down, 1), "kv_down_norm": attention.kv_a_layernorm.weight, "kv_up": up}
    if config.q_lora_rank is None:
        found["q"] = halves(attention.q_proj.weight, config.num_attention_heads)
    else:
        found["q_down"], found["q_down_norm"] = attention.q_a_proj.weight, attention.q_a_layernorm.weight
        found["q_up"] = halves(attention.q_b_proj.weight, config.num_attention_heads)
    return {f"attention.{name}.weight": tensor.detach() for name, tensor in found.items()}


def _shardwise(*args: object) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return forked.shardwise(*map(str, args), environment={**clean, "OMP_NUM_THREADS": "1"}, timeout=120)


def _always(token: int) -> Any:
    """A processor of `generate` for which nothing but a token is likely."""

    def only(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -1e9).index_fill_(1, torch.tensor([token]), 0.0)

    return only


def test_commands_from_a_folder_to_a_folder(tmp_path: Path) -> None:
    import transformers

    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {n} holds {n * n}" for n in range(4000)))
    folder, run, out = tmp_path / "start", tmp_path / "run", tmp_path / "out"
    pretrained("llama", vocab_size=300).save_pretrained(folder)
    train = ("train", "--weights", folder, "--data", text, "--seq", 16, "--batch", 4, "--no-tensorboard", "--steps")
    refused = _shardwise(*train, 2, "--out", run)
    assert refused.returncode == 2 and "tokenizer.json" in refused.stderr, refused.stderr
    assert refused.stderr.count("\n") == 1 and not run.exists()

    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train([str(text)], vocab_size=300, special_tokens=["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    layout = ("--layout", "tp=2,precision=fp32", "--validate-batches", "1", "--out", run)
    done = _shardwise(*train, 2, *layout, "--json")
    assert done.returncode == 0, done.stderr
    again = _shardwise("train", "--resume", run, "--steps", "3", "--json")
    assert again.returncode == 0, again.stderr

    made = _shardwise("checkpoint", "export", run, "--out", out, "--dtype", "bfloat16", "--json")
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["step"] == 3
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16 and model.config.vocab_size == 300
    saved = Checkpoint.open(run / "checkpoints" / "step-3").read("model/head.norm.weight", dtype="bfloat16")
    assert np.array_equal(model.model.norm.weight.detach().view(torch.uint16).numpy(), saved)
    theirs, ids = transformers.AutoTokenizer.from_pretrained(out), tokenizer.encode("line 77 holds 5929").ids
    assert theirs("line 77 holds 5929").input_ids == ids and theirs.eos_token == "<|endoftext|>"
    for token, count in ((tokenizer.token_to_id("<|endoftext|>"), 1), (2, 4)):  # 2 ends Llama's own answers
        assert model.generate(torch.tensor([ids]), max_new_tokens=4, logits_processor=[_always(token)]).shape[1] == (
            len(ids) + count
        )

    # So small a step changes no bit: what comes out is what went in, and nothing that the seed has drawn.
    still = _shardwise(*train, 1, *layout[:-1], tmp_path / "still", "--lr", "1e-30")
    assert still.returncode == 0, still.stderr
    same = _shardwise("checkpoint", "export", tmp_path / "still", "--out", tmp_path / "same", "--dtype", "float32")
    assert same.returncode == 0, same.stderr
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "same"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)

    twice = _shardwise("checkpoint", "export", run, "--out", out)
    assert twice.returncode == 2 and "nothing was overwritten" in twice.stderr
    other = _shardwise("train", "tiny-llama", *train[1:], 1, "--out", tmp_path / "x")
    assert other.returncode == 2 and "its vocab is 300, not 2048" in other.stderr
    late = _shardwise("train", "--resume", run, "--weights", folder, "--steps", "9")
    assert late.returncode == 2 and "leave out --weights" in late.stderr
