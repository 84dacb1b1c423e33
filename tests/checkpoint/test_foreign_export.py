import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from harness.foreign_jobs import GPT, LLAMA, SAVED, STEPS, Going, adamw, random_state, save_dcp
from harness.huggingface import pretrained, tokens
from harness.pool import run_ranks
from harness.reference import Case, global_batch
from shardwise.checkpoint import Checkpoint, diff, reshard
from shardwise.checkpoint.foreign import EXPORT_FORMATS, export_foreign, import_checkpoint
from shardwise.cli.main import main
from shardwise.errors import UserError
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig
from shardwise.model.catalog import get
from shardwise.model.huggingface import from_huggingface
from shardwise.model.parameters import foreign_slices, parameters
from shardwise.runtime.zero.optimizer import learning_rate

FEW = ModelConfig("few", vocab=11, hidden=8, layers=1, heads=2, ffn=12, max_positions=8)
OURS = {name: name for name in (p.name for p in parameters(LLAMA))}
THEIRS = {name: place.tensor for name, place in foreign_slices(LLAMA).items()}


def checkpoint_of(model: ModelConfig, folder: Path, dtype: torch.dtype = torch.float32, layout: str = "") -> Checkpoint:
    import_checkpoint(save_dcp(random_state(model, dtype, steps=7), folder / "theirs"), folder / "ours", model)
    checkpoint = Checkpoint.open(folder / "ours")
    if layout:
        reshard(checkpoint, folder / "pieces", Layout.parse(layout))
        checkpoint = Checkpoint.open(folder / "pieces")
    return checkpoint


# Round trips.


@pytest.mark.parametrize("format", EXPORT_FORMATS)
@pytest.mark.parametrize("names", ["huggingface", "shardwise"])
@pytest.mark.parametrize("model", [LLAMA, GPT, get("tiny-mixtral")], ids=lambda model: model.name)
def test_trap_34_an_exported_checkpoint_comes_back_bit_by_bit(model, names, format, tmp_path):
    checkpoint = checkpoint_of(model, tmp_path, layout="dp=2,tp=2,zero=3")
    if model.experts and names == "huggingface":
        with pytest.raises(UserError, match="fuses experts in memory: add --names shardwise"):
            export_foreign(checkpoint, tmp_path / "out", format, names=names)
        return
    made = export_foreign(checkpoint, tmp_path / "out", format, names=names)
    manifest = import_checkpoint(tmp_path / "out", tmp_path / "back", model)
    back = Checkpoint.open(tmp_path / "back")
    assert diff(checkpoint, back) == [] and made.nbytes == checkpoint.manifest.nbytes - headers(checkpoint)
    assert manifest.optimizer_steps == 7
    settings = manifest.about["imported"]["optimizer"]
    assert {group["weight_decay"] for group in settings} == {0.2, 0.0}
    assert all(group["betas"] == [0.8, 0.9] and group["lr"] == 1e-3 and group["eps"] == 1e-7 for group in settings)


def headers(checkpoint: Checkpoint) -> int:
    return sum(part.header for part in checkpoint.manifest.parts)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("format", EXPORT_FORMATS)
def test_elements_keep_their_width(format, dtype, tmp_path):
    checkpoint = checkpoint_of(FEW, tmp_path, dtype)
    export_foreign(checkpoint, tmp_path / "out", format)
    import_checkpoint(tmp_path / "out", tmp_path / "back", FEW)
    back = Checkpoint.open(tmp_path / "back")
    assert {spec.dtype for spec in back.tensors.values()} == {str(dtype).removeprefix("torch.")}
    assert diff(checkpoint, back) == []


def test_weights_alone_have_no_optimizer(tmp_path):
    checkpoint = checkpoint_of(FEW, tmp_path)
    export_foreign(checkpoint, tmp_path / "out", "dcp", weights_only=True)
    index = dcp.FileSystemReader(tmp_path / "out").read_metadata()
    assert {*index.state_dict_metadata} == {f"model.{place.tensor}" for place in foreign_slices(FEW).values()}
    with pytest.raises(UserError, match="holds AdamW's state"):
        export_foreign(checkpoint, tmp_path / "two", "deepspeed-universal", weights_only=True)


# Other trainers resume.


@pytest.mark.parametrize("precision, bound", [("fp64", 1e-12), ("fp32", 1e-6)])
def test_fsdp2_resumes_an_exported_checkpoint(precision, bound, tmp_path):
    case = Case(LLAMA, Workload(seq=8, batch=4), precision)
    first = run_ranks("harness.foreign_jobs:fsdp", 2, (case, str(tmp_path / "saved"), OURS, False))[0]
    import_checkpoint(tmp_path / "saved", tmp_path / "ours", LLAMA)
    reshard(Checkpoint.open(tmp_path / "ours"), tmp_path / "pieces", Layout.parse("dp=2,tp=2,zero=1"))
    checkpoint = Checkpoint.open(tmp_path / "pieces")
    export_foreign(checkpoint, tmp_path / "out", "dcp")
    for loaded in run_ranks("harness.foreign_jobs:fsdp_resume", 2, (case, str(tmp_path / "out"), THEIRS)):
        assert {*loaded.held} == {*checkpoint.tensors}
        for name, tensor in loaded.held.items():
            assert checkpoint.read(name, dtype="float64").tobytes() == tensor.double().numpy().tobytes(), name
        assert loaded.losses == first.losses[SAVED:]
    rows = [global_batch(case, step) for step in range(SAVED, STEPS)]
    lrs = [learning_rate(case.optimizer, step, STEPS) for step in range(SAVED, STEPS)]
    going, layout = Going(str(tmp_path / "pieces"), first.held, rows, lrs), Layout.parse(f"tp=2,precision={precision}")
    ((_, ours),) = run_ranks("harness.foreign_jobs:go_on", 2, (case, layout, [going]))[0]
    assert ours == pytest.approx(loaded.losses, rel=bound)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llama3", "qwen3", "gpt2", "gpt_neox"])
def test_a_model_of_transformers_loads_an_exported_checkpoint(family, tmp_path):
    model, adam = trained(family)
    described = tmp_path / "config.json"
    described.write_text(model.config.to_json_string(use_diff=False))
    weights, optimizer = get_state_dict(model, adam)
    save_dcp({"model": weights, "optim": optimizer}, tmp_path / "theirs")
    import_checkpoint(tmp_path / "theirs", tmp_path / "ours", from_huggingface(described))
    export_foreign(Checkpoint.open(tmp_path / "ours"), tmp_path / "out", "dcp")
    other, moved = trained(family, steps=2)
    weights, optimizer = get_state_dict(other, moved)
    template = {"model": weights, "optim": optimizer}
    dcp.load(template, checkpoint_id=tmp_path / "out", no_dist=True)
    set_state_dict(other, moved, model_state_dict=template["model"], optim_state_dict=template["optim"])
    for (name, mine), (_, theirs) in zip(other.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(moved.state[mine][key], adam.state[theirs][key]), (name, key)
    assert [group["weight_decay"] for group in moved.param_groups] == [0.1, 0.0]


def trained(family: str, steps: int = 1):
    model = pretrained(family)
    named = dict(model.named_parameters())
    adam = adamw(Case(FEW, Workload(seq=8, batch=4)), named, {name: p.ndim > 1 for name, p in named.items()})
    for step in range(steps):
        rows = tokens(step)
        logits = model(input_ids=rows[:, :-1]).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
        adam.step()
        adam.zero_grad()
    return model, adam


# The files of DeepSpeed's universal format, beside those that its own `ds_to_universal` wrote.


def test_universal_files_are_those_of_ds_to_universal(tmp_path, deepspeed_universal):
    model = ModelConfig("theirs", vocab=23, hidden=8, layers=1, heads=2, kv_heads=1, head_dim=4, ffn=11,
                        max_positions=16, norm_eps=1e-6)  # fmt: skip
    import_checkpoint(deepspeed_universal, tmp_path / "ours", model)
    export_foreign(Checkpoint.open(tmp_path / "ours"), tmp_path / "out", "deepspeed-universal")
    (tag,) = (path for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert (tmp_path / "out" / "latest_universal").read_text() == tag.name == "step3"
    theirs = {path.relative_to(deepspeed_universal) for path in deepspeed_universal.rglob("*.pt")}
    ours = {path.relative_to(tag) for path in tag.rglob("*.pt")}
    assert ours - theirs == {Path("zero_pp_rank_0_mp_rank_00_model_states.pt")} and theirs <= ours
    for path in theirs:
        if path.name in ("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt"):
            a, b = (torch.load(folder / path, weights_only=True) for folder in (tag, deepspeed_universal))
            assert a.keys() == b.keys() and torch.equal(a["param"], b["param"]) and a["cat_dim"] == b["cat_dim"]
        if path.name == "step.pt":
            assert torch.load(tag / path, weights_only=True) == torch.load(deepspeed_universal / path)


@pytest.fixture
def deepspeed_universal(tmp_path):
    import tarfile

    with tarfile.open(Path(__file__).parent / "data" / "deepspeed.tar.xz") as archive:
        archive.extractall(tmp_path / "fixture", filter="data")
    return tmp_path / "fixture" / "universal-from-zero2"


# Errors, and the command.


def test_what_cannot_be_exported_is_one_line(tmp_path):
    checkpoint = checkpoint_of(FEW, tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("kept")
    with pytest.raises(UserError, match="is not empty"):
        export_foreign(checkpoint, tmp_path / "full", "dcp")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]
    with pytest.raises(UserError, match="unknown format 'zip'; choose one of dcp, deepspeed-universal"):
        export_foreign(checkpoint, tmp_path / "out", "zip")
    alone = replace(checkpoint.manifest, about={"model": FEW.to_json()})
    nameless = Checkpoint(checkpoint.folder, alone)
    with pytest.raises(UserError, match="does not say its AdamW's lr, betas, eps, weight_decay"):
        export_foreign(nameless, tmp_path / "out", "dcp")
    export_foreign(nameless, tmp_path / "weights", "dcp", weights_only=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", EXPORT_FORMATS)
def test_nothing_is_left_of_a_damaged_checkpoint(format, tmp_path):
    checkpoint = checkpoint_of(FEW, tmp_path)
    (part,) = checkpoint.folder.glob("*.safetensors")
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with pytest.raises(UserError, match="damaged"):
        export_foreign(checkpoint, tmp_path / "out", format)
    assert not (tmp_path / "out").exists()


def test_the_command_exports_and_says_what(tmp_path, capsys):
    checkpoint = checkpoint_of(FEW, tmp_path)
    words = ["checkpoint", "export", str(checkpoint.folder), "--out"]
    assert main([*words, str(tmp_path / "a"), "--format", "dcp", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["format"] == "dcp" and told["names"] == "huggingface" and told["step"] == 7
    assert told["tensors"] == len(checkpoint.tensors) == 36
    assert main([*words, str(tmp_path / "b"), "--format", "deepspeed-universal", "--names", "shardwise"]) == 0
    assert "weights and AdamW's state of step 7" in capsys.readouterr().out
    for more in (["--format", "dcp", "--dtype", "float32"], ["--names", "shardwise"], ["--weights-only"]):
        assert main([*words, str(tmp_path / "c"), *more]) == 2
        assert capsys.readouterr().err.count("\n") == 1
