import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from harness.foreign_jobs import (
    GPT,
    LLAMA,
    SAVED,
    STEPS,
    Going,
    Trap,
    inside,
    random_state,
    refusals_of_mutants,
    refused,
    rows_of,
    save_dcp,
)
from harness.huggingface import FAMILIES, pretrained, tokens
from harness.oracles import adamw
from harness.pool import run_ranks
from harness.reference import Case, global_batch
from shardwise.checkpoint import Checkpoint
from shardwise.checkpoint.foreign import ResumeSettings, import_checkpoint
from shardwise.cli.main import main
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig
from shardwise.model.huggingface import from_huggingface
from shardwise.model.parameters import foreign_slices, parameters
from shardwise.runtime.job.config import OptimizerConfig
from shardwise.runtime.zero.optimizer import learning_rate

LAYOUTS = ["precision=fp64", "dp=4,zero=3,precision=fp64", "dp=2,tp=2,zero=1,sp,precision=fp64", "tp=4,precision=fp64"]
WORKLOAD = Workload(seq=8, batch=4)
CASES = {2: Case(LLAMA, WORKLOAD), 4: Case(GPT, WORKLOAD)}
"""Ranks of FSDP2 -> what they train: on two under Hugging Face's names, on four under ours, flattened."""


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory):
    """ranks -> (what FSDP2 saved, its folder, the folder of the imported checkpoint)."""
    found = {}
    for ranks, case in CASES.items():
        folder, out = tmp_path_factory.mktemp("fsdp") / "saved", tmp_path_factory.mktemp("fsdp") / "imported"
        theirs = {name: place.tensor for name, place in foreign_slices(LLAMA).items()}
        names = theirs if ranks == 2 else {p.name: p.name for p in parameters(GPT)}
        saved = run_ranks("harness.foreign_jobs:fsdp", ranks, (case, str(folder), names, ranks == 4))[0]
        import_checkpoint(folder, out, case.model)
        found[ranks] = saved, folder, out
    return found


@pytest.mark.parametrize("ranks", CASES)
def test_an_imported_checkpoint_holds_what_fsdp2_held_bit_by_bit(fsdp, ranks):
    saved, _, out = fsdp[ranks]
    checkpoint = Checkpoint.open(out)
    checkpoint.verify()
    assert checkpoint.manifest.step == checkpoint.manifest.optimizer_steps == SAVED
    assert {*checkpoint.tensors} == {*saved.held}
    for name, tensor in saved.held.items():
        assert checkpoint.tensors[name].dtype == "float64"
        assert checkpoint.read(name).tobytes() == tensor.numpy().tobytes(), name
    assert checkpoint.manifest.about["imported"]["ranks"] == ranks


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", CASES)
def test_training_goes_on_from_fsdp2_under_any_layout(fsdp, ranks, layout):
    saved, _, out = fsdp[ranks]
    case, layout = CASES[ranks], Layout.parse(layout)
    rows = [global_batch(case, step) for step in range(SAVED, STEPS)]
    lrs = [learning_rate(case.optimizer, step, STEPS) for step in range(SAVED, STEPS)]
    going = Going(str(out), saved.held, rows, lrs)
    for ((apart, losses),) in run_ranks("harness.foreign_jobs:go_on", layout.ranks, (case, layout, [going])):
        assert apart == 0.0
        assert losses == pytest.approx(saved.losses[SAVED:], rel=1e-9, abs=0)


# Hugging Face's models, transposed, fused and tied tensors among them.


def _train_theirs(family: str, folder: Path) -> tuple[Case, list[float]]:
    """Train transformers' model in one process, save it after `SAVED` steps; the losses of the steps after that."""
    model = pretrained(family).double()
    described = folder.parent / f"{family}.json"
    described.write_text(model.config.to_json_string(use_diff=False))
    case = Case(from_huggingface(described), Workload(seq=12, batch=4), optimizer=OptimizerConfig(lr=1e-2, clip=0.0))
    named = dict(model.named_parameters())
    adam = adamw(case, named, {name: p.ndim > 1 for name, p in named.items()})
    losses = []
    for step in range(STEPS):
        rows = tokens(step)
        logits = model(input_ids=rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
        if step + 1 == SAVED:
            weights, optimizer = get_state_dict(model, adam)
            dcp.save({"app": {"model": weights, "optim": optimizer}}, checkpoint_id=folder, no_dist=True)
    return case, losses[SAVED:]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3", "gpt2", "gpt_neox", "gpt_neox_sequential"])
def test_a_model_of_transformers_goes_on_as_transformers_would(family, tmp_path):
    assert family in FAMILIES
    case, expected = _train_theirs(family, tmp_path / "saved")
    import_checkpoint(tmp_path / "saved", tmp_path / "out", case.model)
    checkpoint, layout = Checkpoint.open(tmp_path / "out"), Layout.parse("tp=2,precision=fp64")
    held = {name: torch.from_numpy(checkpoint.read(name)).view(spec.shape) for name, spec in checkpoint.tensors.items()}
    going = Going(str(tmp_path / "out"), held, [rows_of(tokens(step)) for step in range(SAVED, STEPS)], [1e-2] * 3)
    ((apart, losses),) = run_ranks("harness.foreign_jobs:go_on", 2, (case, layout, [going]))[0]
    assert apart == 0.0
    # transformers has its norms' statistics and rotary angles in fp32.
    assert losses == pytest.approx(expected, rel=2e-5)


# What is refused, each in one line. One small model in one process serves all of these.

HEAD = "optim/state/head.norm.weight"
SMALL = ModelConfig("small", vocab=11, hidden=8, layers=1, heads=2, ffn=12, max_positions=8)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return save_dcp(random_state(SMALL), tmp_path_factory.mktemp("small") / "saved")


@pytest.fixture
def copied(small, tmp_path):
    return Path(shutil.copytree(small, tmp_path / "copy"))


def _refused(folder: Path, out: Path, model: ModelConfig = SMALL, **options) -> str:
    return refused(folder, out, model, **options)


def test_weights_alone_can_be_imported_whatever_the_optimizer(tmp_path):
    state = random_state(SMALL)
    state["optim"]["state"] = {str(i): entry for i, entry in enumerate(state["optim"]["state"].values())}
    folder = save_dcp(state, tmp_path / "saved")
    assert "by number" in _refused(folder, tmp_path / "out")
    manifest = import_checkpoint(folder, tmp_path / "out", SMALL, weights_only=True)
    assert manifest.step == manifest.optimizer_steps == 0
    assert {*manifest.tensors} == {f"model/{p.name}" for p in parameters(SMALL)}
    expected = state["model"]["head.norm.weight"].numpy()
    assert np.array_equal(Checkpoint.open(tmp_path / "out").read("model/head.norm.weight"), expected)


def test_a_checkpoint_without_optimizer_gives_weights(tmp_path):
    folder = save_dcp(random_state(SMALL)["model"], tmp_path / "saved")
    assert {*import_checkpoint(folder, tmp_path / "out", SMALL).tensors} == {
        f"model/{p.name}" for p in parameters(SMALL)
    }


def test_bfloat16_is_kept(tmp_path):
    state = {"net": {name: tensor.bfloat16() for name, tensor in random_state(SMALL)["model"].items()}}
    import_checkpoint(save_dcp(state, tmp_path / "saved"), tmp_path / "out", SMALL)
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert {spec.dtype for spec in checkpoint.tensors.values()} == {"bfloat16"}
    expected = state["net"]["head.out.weight"].float().reshape(-1).numpy()
    assert np.array_equal(checkpoint.read("model/head.out.weight", dtype="float32"), expected)


@pytest.mark.parametrize(
    "path, change, words",
    [
        (HEAD, lambda d: d.pop("exp_avg_sq"), "has no optim.state.head.norm.weight.exp_avg_sq"),
        (HEAD, lambda d: d.update(step=torch.tensor(7.0)), "7"),
        (HEAD, lambda d: d.update(step=torch.tensor(1.5)), "no number of steps"),
        (HEAD, lambda d: d.update(momentum_buffer=torch.zeros(8)), "which AdamW has not"),
        (HEAD, lambda d: d.update(exp_avg=torch.zeros(9)), "has shape (9,)"),
        ("model", lambda d: d.update({"head.extra": torch.zeros(2)}), "which small lacks"),
        ("model", lambda d: d.update({"head.norm.weight": torch.zeros(8, dtype=torch.int32)}), "int32"),
        ("", lambda d: d.update(ema=d["model"]), "2 models"),
        ("model", lambda d: d.pop("head.norm.weight"), "has no model.head.norm.weight"),
        ("model", lambda d: d.pop("embedding.tokens.weight"), "nor model.embed_tokens.weight"),
    ],
)
def test_what_is_not_the_models_adamw_state_is_refused(path, change, words, tmp_path):
    state = random_state(SMALL)
    change(inside(state, path))
    assert words in _refused(save_dcp(state, tmp_path / "saved"), tmp_path / "out")


def test_a_stored_head_must_be_the_tied_embedding(tmp_path):
    tied = SMALL.replace(tied=True)
    state = random_state(tied)["model"]
    state = {foreign_slices(tied)[name].tensor: tensor for name, tensor in state.items()}
    same = state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}
    import_checkpoint(save_dcp(same, tmp_path / "same"), tmp_path / "fine", tied)
    other = state | {"lm_head.weight": state["model.embed_tokens.weight"] + 1}
    assert "tied=false" in _refused(save_dcp(other, tmp_path / "other"), tmp_path / "out", tied)


def test_another_model_is_refused(small, tmp_path):
    assert "shape" in _refused(small, tmp_path / "out", SMALL.replace(vocab=12))
    assert "blocks.1" in _refused(small, tmp_path / "out", SMALL.replace(layers=2))
    assert "bias" in _refused(small, tmp_path / "out", SMALL.replace(bias="qkv"))


def test_a_pickle_that_names_anything_else_is_refused_and_does_nothing(copied, tmp_path):
    (copied / ".metadata").write_bytes(pickle.dumps(Trap(tmp_path / "made")))
    assert "posix.mkdir" in _refused(copied, tmp_path / "out")
    assert not (tmp_path / "made").exists()


def test_a_saved_object_that_names_anything_else_is_refused_and_does_nothing(tmp_path):
    state = random_state(SMALL)
    state["optim"]["param_groups"][0]["lr"] = Trap(tmp_path / "made")
    assert "posix.mkdir" in _refused(save_dcp(state, tmp_path / "saved"), tmp_path / "out")
    assert not (tmp_path / "made").exists()


def test_damaged_folders_are_refused_in_one_line(copied, tmp_path):
    (part,) = copied.glob("*.distcp")
    data = part.read_bytes()
    part.write_bytes(data[: len(data) // 2])
    assert part.name in _refused(copied, tmp_path / "out")
    part.unlink()
    assert "missing" in _refused(copied, tmp_path / "out")
    (copied / ".metadata").unlink()
    assert "neither .metadata" in _refused(copied, tmp_path / "out")
    assert "no whole torch.distributed.checkpoint" in _refused(copied, tmp_path / "out", format="dcp")
    assert "no such folder" in _refused(tmp_path / "nowhere", tmp_path / "out")
    (copied / ".metadata").write_bytes(b"\x80\x04N.")
    assert "not the metadata" in _refused(copied, tmp_path / "out")


def test_the_index_cannot_lead_out_of_the_folder(copied, tmp_path):
    (part,) = copied.glob("*.distcp")
    outside = b"../" + b"x" * (len(part.name) - 3)
    path = copied / ".metadata"
    path.write_bytes(path.read_bytes().replace(part.name.encode(), outside))
    assert "no file of this folder" in _refused(copied, tmp_path / "out")


def test_mutated_indexes_are_refused_or_read_and_never_raise_anything_else(copied, tmp_path):
    assert refusals_of_mutants(copied, [copied / ".metadata"], tmp_path / "out", SMALL, 400) > 200


@pytest.mark.parametrize("name, text", [("metadata.json", '{"sharded_backend": "torch_dist"}'),
                                        ("latest_checkpointed_iteration.txt", "10")])  # fmt: skip
def test_megatron_checkpoints_are_named_as_not_supported(copied, tmp_path, name, text):
    (copied / name).write_text(text)
    assert "Megatron-LM" in _refused(copied, tmp_path / "out")


def test_a_folder_in_use_is_left_alone(small, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        import_checkpoint(small, tmp_path, SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# The command, and what it gives to train --resume.


def _model_arguments() -> list[str]:
    return ["--model", "tiny-llama", "--set", "vocab=11,hidden=8,layers=1,heads=2,kv_heads=2,ffn=12,max_positions=8"]


def test_the_command_imports(small, tmp_path, capsys):
    arguments = ["checkpoint", "import", str(small), "--out", str(tmp_path / "out"), *_model_arguments(), "--json"]
    assert main(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step"] == 2 and told["imported"]["format"] == "dcp"
    assert told["imported"]["optimizer"] == [{"lr": 1e-3, "betas": [0.8, 0.9], "eps": 1e-7, "weight_decay": 0.2}]
    assert main(["checkpoint", "verify", str(tmp_path / "out")]) == 0
    assert main([*arguments[:4], str(tmp_path / "other"), *_model_arguments(), "--data", "stdlib"]) == 2
    assert "--data needs --tokenizer FILE, --seq N" in capsys.readouterr().err


@pytest.mark.parametrize("now", [1e-4, 0.0])
def test_a_run_goes_on_at_the_rate_that_its_schedule_had_come_to(tmp_path, now):
    """Not at the peak, which schedulers keep beside it."""
    tokenizer, state = tmp_path / "tokenizer.json", random_state(SMALL)
    tokenizer.write_text("{}")
    state["optim"]["param_groups"][0] |= {"lr": now, "initial_lr": 1e-2}
    run = ResumeSettings(data="stdlib", tokenizer=str(tokenizer), seq=8, batch=4)
    saved = save_dcp(state, tmp_path / "saved")
    if not now:
        with pytest.raises(UserError, match="schedule has ended, at a learning rate of 0"):
            import_checkpoint(saved, tmp_path / "out", SMALL, run=run)
        return
    assert import_checkpoint(saved, tmp_path / "out", SMALL, run=run).about["optimizer"]["lr"] == now


def test_decay_of_norms_that_a_resumed_run_lacks_is_said(tmp_path, capsys):
    """One group, as `torch.optim.AdamW(model.parameters())` makes it, decays norms as well."""
    state = random_state(SMALL)
    decayed = save_dcp(state, tmp_path / "decayed")
    assert main(["checkpoint", "import", str(decayed), "--out", str(tmp_path / "a"), *_model_arguments()]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("shardwise: warning: its AdamW decays every parameter (weight_decay 0.2), norms")
    assert main(["checkpoint", "inspect", str(tmp_path / "a")]) == 0
    assert "imported: its AdamW decays every parameter" in capsys.readouterr().out
    alone = ["checkpoint", "import", str(decayed), "--weights-only", "--out", str(tmp_path / "b"), *_model_arguments()]
    state["optim"]["param_groups"][0]["weight_decay"] = 0.0
    plain = save_dcp(state, tmp_path / "plain")
    none = ["checkpoint", "import", str(plain), "--out", str(tmp_path / "c"), *_model_arguments()]
    for arguments in (alone, none):
        assert main(arguments) == 0 and capsys.readouterr().err == ""


def test_a_resumed_run_takes_the_other_optimizers_settings(small, tmp_path):
    from shardwise.api import configure_resumed

    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    run = ResumeSettings(data="stdlib", tokenizer=str(tokenizer), seq=8, batch=4)
    manifest = import_checkpoint(small, tmp_path / "out", SMALL, run=run)
    assert manifest.samples == 8
    config = configure_resumed(tmp_path / "out", tmp_path / "run", layout="dp=2,precision=fp32", steps=5)
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.betas, optimizer.eps, optimizer.weight_decay) == (1e-3, (0.8, 0.9), 1e-7, 0.2)
    assert [learning_rate(optimizer, step, 5) for step in (2, 3, 4)] == pytest.approx([1e-3] * 3)
    assert optimizer.clip == 0
    assert config.model == SMALL and config.workload == Workload(seq=8, batch=4)
    with pytest.raises(UserError, match="does not say how its run was configured"):
        import_checkpoint(small, tmp_path / "bare", SMALL)
        configure_resumed(tmp_path / "bare", tmp_path / "run", steps=5)
