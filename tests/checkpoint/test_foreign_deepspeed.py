"""DeepSpeed's checkpoints, as DeepSpeed wrote them (`make_deepspeed_fixture.py` says how), go on here bit by bit."""

import json
import shutil
import sys
import tarfile
from itertools import accumulate
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from harness.cases import from_table
from harness.foreign_jobs import Going, Trap, inside, refusals_of_mutants, refused, rows_of
from harness.pool import run_ranks
from harness.reference import Case
from shardwise.checkpoint import Checkpoint
from shardwise.checkpoint.foreign import import_checkpoint
from shardwise.cli.main import main
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig
from shardwise.model.parameters import foreign_slices
from shardwise.runtime.job.config import OptimizerConfig

MODEL = ModelConfig(
    "tiny", vocab=23, hidden=8, layers=1, heads=2, kv_heads=1, ffn=11, max_positions=16, norm_eps=1e-6, head_dim=4
)
SAVED = {"zero1": (1, 2), "zero2-bf16": (2, 2), "zero3": (3, 2), "zero3-odd": (3, 3)}
"""Folder -> (stage, ranks)."""
UNIVERSAL = {"universal-from-zero2": "zero2-bf16", "universal-from-zero3": "zero3-odd"}
"""Folder -> what it was made of."""
LAYOUTS = ["precision=fp32", "dp=2,zero=3,precision=fp32", "dp=3,zero=1,precision=fp32", "tp=2,precision=fp32"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(Path(__file__).parent / "data" / "deepspeed.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def imported(root):
    for name in [*SAVED, *UNIVERSAL]:
        import_checkpoint(root / name, root / "imported" / name, MODEL)
    return root / "imported"


def _expected(root: Path, name: str) -> dict[str, torch.Tensor]:
    """What DeepSpeed says that it held, by our names; no parameter of a Llama is transposed or fused."""
    theirs = load_file(root / UNIVERSAL.get(name, name) / "expected.safetensors")
    kinds = ("model", "first", "second")
    return {f"{kind}/{n}": theirs[f"{kind}/{p.tensor}"] for kind in kinds for n, p in foreign_slices(MODEL).items()}


@pytest.mark.parametrize("name", [*SAVED, *UNIVERSAL])
def test_weights_and_moments_are_what_deepspeed_held_bit_by_bit(root, imported, name):
    checkpoint, expected = Checkpoint.open(imported / name), _expected(root, name)
    checkpoint.verify()
    assert {*checkpoint.tensors} == {*expected}
    for tensor, values in expected.items():
        assert values.any(), tensor
        assert checkpoint.read(tensor).tobytes() == values.numpy().tobytes(), tensor
    manifest = checkpoint.manifest
    assert (manifest.step, manifest.optimizer_steps, manifest.samples) == (3, 3, 18)
    stage, ranks = SAVED[UNIVERSAL.get(name, name)]
    about = manifest.about["imported"]
    assert about["zero"] == stage and about["version"] == "0.19.8"
    assert about.get("ranks", ranks) == ranks
    assert [group["weight_decay"] for group in about["optimizer"]] == [0.1, 0.0]


@pytest.mark.parametrize("text", LAYOUTS)
def test_training_goes_on_under_any_layout_as_in_deepspeed(root, imported, text):
    layout, sources, losses = Layout.parse(text), [], []
    for name in (*SAVED, *UNIVERSAL):
        later = json.loads((root / UNIVERSAL.get(name, name) / "continuation.json").read_text())
        rows = [rows_of(torch.tensor(step)) for step in later["tokens"]]
        sources.append(Going(str(imported / name), _expected(root, name), rows, [1e-2] * len(rows)))
        losses.append(later["losses"])
    case = Case(MODEL, Workload(seq=7, batch=6), "fp32", optimizer=OptimizerConfig(lr=1e-2, clip=0.0))
    for found in run_ranks("harness.foreign_jobs:go_on", layout.ranks, (case, layout, sources)):
        for name, (apart, ours), theirs in zip((*SAVED, *UNIVERSAL), found, losses, strict=True):
            assert apart == 0.0, name
            # One of them computes in bf16.
            bf16 = UNIVERSAL.get(name, name) == "zero2-bf16"
            assert ours == pytest.approx(theirs, rel=1e-2 if bf16 else 1e-5), name


def test_the_newest_tag_stands_for_the_folder(root, tmp_path):
    import_checkpoint(root / "zero3" / "step3", tmp_path / "tag", MODEL, format="deepspeed")
    import_checkpoint(root / "zero3", tmp_path / "top", MODEL)
    assert main(["checkpoint", "diff", str(tmp_path / "tag"), str(tmp_path / "top")]) == 0


def test_weights_alone(root, tmp_path):
    for name in ("zero2-bf16", "zero3-odd", "universal-from-zero3"):
        manifest = import_checkpoint(root / name, tmp_path / name, MODEL, weights_only=True)
        assert {tensor.partition("/")[0] for tensor in manifest.tensors} == {"model"}
        values = Checkpoint.open(tmp_path / name).read("model/head.norm.weight")
        assert np.array_equal(values, _expected(root, name)["model/head.norm.weight"].numpy())


# What is refused, each in one line.


@pytest.fixture
def copied(root, tmp_path):
    def copy(name: str) -> Path:
        source = root / name if name in UNIVERSAL else root / name / "step3"
        return Path(shutil.copytree(source, tmp_path / name))

    return copy


def _refused(folder: Path, model: ModelConfig = MODEL) -> str:
    return refused(folder, folder.parent / "out", model)


def _optimizer(folder: Path, rank: int) -> Path:
    (path,) = folder.glob(f"*zero_pp_rank_{rank}_*_optim_states.pt")
    return path


@pytest.fixture
def changed(monkeypatch):
    """Write a file again with something else in it, under DeepSpeed's names, whether DeepSpeed is there or not."""
    names = []
    for name in ("runtime.fp16.loss_scaler.LossScaler", "utils.tensor_fragment.fragment_address"):
        module, _, leaf = f"deepspeed.{name}".rpartition(".")
        stand_in = type(leaf, (), {"__module__": module})
        for parent in accumulate(module.split("."), "{}.{}".format):
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        setattr(sys.modules[module], leaf, stand_in)
        names.append((stand_in, f"{module}.{leaf}"))
    names.append((int, "deepspeed.runtime.zero.config.ZeroStageEnum"))

    def write(path: Path, change) -> None:
        with torch.serialization.safe_globals(names):
            content = torch.load(path, weights_only=True)
        change(content)
        torch.save(content, path)

    return write


def test_a_file_that_names_anything_else_is_refused_and_does_nothing(copied, tmp_path):
    folder = copied("zero3")
    torch.save({"module": Trap(tmp_path / "made")}, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    assert "posix.mkdir" in _refused(folder)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["zero1", "zero3-odd"])
def test_missing_and_damaged_files_are_named(copied, name):
    folder = copied(name)
    path = _optimizer(folder, 1)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    assert path.name in _refused(folder)
    path.write_bytes(b"")
    assert path.name in _refused(folder)
    path.unlink()
    # The last rank's file is missed by what the others say, any other by its number.
    assert ("2 ranks" if name == "zero1" else "rank 1") in _refused(folder)
    for other in folder.glob("*_optim_states.pt"):
        other.unlink()
    assert "no *_optim_states.pt" in _refused(folder)
    for other in folder.glob("*_model_states.pt"):
        other.unlink()
    assert "neither .metadata" in _refused(folder)


def test_tensor_parallel_checkpoints_are_named_as_not_supported(copied):
    folder = copied("zero1")
    shutil.copy(_optimizer(folder, 0), folder / "zero_pp_rank_0_mp_rank_01_optim_states.pt")
    assert "ds_to_universal" in _refused(folder)


@from_table
def test_a_file_with_other_contents_is_refused(copied, changed, path, change, words):
    folder = copied("zero1")
    changed(_optimizer(folder, 0), lambda content: change(inside(content, path)))
    assert words in _refused(folder)


@pytest.mark.parametrize("name", ["zero1", "zero3-odd", "universal-from-zero3"])
def test_mutated_files_are_refused_or_read_and_never_raise_anything_else(copied, tmp_path, name):
    folder = copied(name)
    refusals_of_mutants(folder, sorted(folder.rglob("*.pt")), tmp_path / "out", MODEL, 60)


def test_a_universal_folder_must_be_whole(copied):
    folder = copied("universal-from-zero2")
    (folder / "zero" / "model.norm.weight" / "exp_avg.pt").unlink()
    assert "exp_avg.pt is missing" in _refused(folder)
    shutil.rmtree(folder / "zero" / "model.norm.weight")
    assert "has no model.norm.weight" in _refused(folder)


def test_another_model_is_refused(copied):
    folder = copied("zero3-odd")
    assert "has shape (23, 8)" in _refused(folder, MODEL.replace(vocab=24))
    assert "layers.1" in _refused(folder, MODEL.replace(layers=2))
    universal = copied("universal-from-zero3")
    assert "184 elements" in _refused(universal, MODEL.replace(vocab=24))
