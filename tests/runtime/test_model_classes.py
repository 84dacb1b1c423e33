"""Models by their classes of transformers, without a line of Python: `verify`, `train`, checkpoints and exports."""

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import forked
from harness.cases import from_table, table
from harness.class_jobs import CUT, LAYOUT, PIPED, at_full_width, check, resumed
from harness.today import some_of
from shardwise.api import TrainResult
from shardwise.checkpoint import find
from shardwise.errors import LayoutError, UserError
from shardwise.layout import Layout
from shardwise.report.compare import compare
from shardwise.runtime.module.class_model import ROUNDED, ClassModel

TABLES = ("FAMILIES", "CUT", "CHAINS", "GENERATING", "WIDE")
FAMILIES, CUTS, CHAINS, GENERATING, WIDE = (table(__file__, name) for name in TABLES)
"""Families that pass; families with tests of cut sequences, pipelines, generation (keys beside tp=2), and of memory
at the published width."""


@pytest.mark.parametrize("family", some_of(FAMILIES, 4, "classes of transformers"))
def test_a_class_trains_as_it_does_on_one_device(family: str) -> None:
    """Outputs, gradients, two steps' losses and gradient norms, in float64; and what was predicted."""
    result = check(family)
    assert result.verification, str(result.verification)
    assert result.error < result.tolerance
    assert result.predicted is not False and result.peak <= 0.05


@pytest.mark.parametrize("family", some_of(WIDE, 1, "classes at their published width"))
def test_a_class_at_its_published_width_needs_the_predicted_memory(family: str) -> None:
    """Two layers, on fake tensors."""
    result = compare(*at_full_width(family))
    assert result.equal_ledger and result.exact_classes_equal
    assert result.peak_error < 0.05


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *((family, PIPED) for family in some_of(CHAINS, 1, "pipelines of classes")),
        *((family, CUT) for family in some_of(CUTS, 2, "classes with cut sequences")),
    ],
)
def test_a_class_trains_in_a_pipeline_and_with_cut_sequences(family: str, layout: str) -> None:
    result = check(family, layout)
    assert result.verification, str(result.verification)
    assert result.error < result.tolerance


@pytest.mark.parametrize("family", some_of(FAMILIES, 2, "resumed classes"))
def test_a_class_resumes_under_another_layout(family: str, tmp_path: Path) -> None:
    assert resumed(family, (LAYOUT, "dp=2,zero=1"), tmp_path) < ROUNDED


def test_a_tiny_configuration_whose_sizes_cannot_shrink_alone_is_its_own_small_one() -> None:
    """Falcon-H1 rejects heads that do not fill Mamba's inner width, and says so once, whole."""
    sizes = {"hidden_size": 64, "mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "num_hidden_layers": 2}
    model = ClassModel({"model_type": "falcon_h1", **sizes}, "tiny")
    assert model.small(Layout.parse("tp=2")).config.mamba_d_head == 32
    with pytest.raises(UserError, match=r"^tiny: transformers cannot read.*Mamba head state do not match"):
        ClassModel({"model_type": "falcon_h1", **sizes, "mamba_d_head": 16}, "tiny")()


def test_heads_that_tp_does_not_divide_are_named_before_a_job() -> None:
    """A plan that is found in place of the published one must run, too."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = ClassModel({"model_type": "granite", **sizes, "num_key_value_heads": 2, "vocab_size": 64}, "g")
    with pytest.raises(LayoutError, match=r"tp=4 does not divide the 2 of num_key_value_heads .* valid tp: 1, 2$"):
        model.split(Layout.parse("tp=4"), 32)


def shardwise(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return forked.shardwise(*words, environment={"OMP_NUM_THREADS": "1"}, timeout=240, folder=folder)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A small OLMoE: `olmoe/config.json`."""
    config = ClassModel({"model_type": "olmoe"}, "olmoe").small(Layout.parse("tp=2")).config.to_dict()
    folder = tmp_path / "olmoe"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 300, "eos_token_id": 2}))
    return folder


@pytest.mark.usefixtures("leftovers")
def test_a_configuration_is_trained_resumed_exported_and_trained_on(made: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"{n} is {n * n % 97}, and so on. " for n in range(2500)))
    words = ["--data", "text.txt", "--seq", "16", "--batch", "4", "--no-tensorboard"]
    first = ["train", "olmoe", "--layout", "tp=2,zero=1", "--steps", "4", "--report", *words]
    done = shardwise(*first, "--out", "one", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    run = TrainResult.read(tmp_path / "one")
    assert compare(run.predicted, run.report).equal_ledger
    done = shardwise("compare", "one", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    resumed = ["--layout", "dp=2,ep=2,zero=3,precision=fp32", "--steps", "6", "--out", "two"]
    done = shardwise("train", "--resume", "one", *resumed, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert run.summary["validation_loss"] == pytest.approx(
        TrainResult.read(tmp_path / "two").summary["first_validation_loss"], rel=2e-3
    )
    for words_ in (["reshard", "two", "--layout", "dp=2,zero=1", "--out", "moved"], ["diff", "two", "moved"]):
        done = shardwise("checkpoint", *words_, folder=tmp_path)
        assert done.returncode == 0, done.stderr
    done = shardwise("checkpoint", "export", "moved", "--dtype", "float32", "--out", "hub", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert_equal_logits(made, tmp_path)


def assert_equal_logits(made: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    opened = AutoModelForCausalLM.from_pretrained(folder / "hub")
    model = ClassModel(json.loads((made / "config.json").read_text()), "olmoe")
    trained, checkpoint = model(), find(folder / "two")
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            parameter.copy_(torch.from_numpy(checkpoint.read(f"model/{name}")).view(parameter.shape))
        inputs = model.inputs(2, 16)
        assert torch.equal(opened.eval()(**inputs).logits, trained.eval()(**inputs).logits)
    done = shardwise(
        *("train", "--weights", "hub", "--layout", "pp=2,precision=fp32", "--steps", "1", "--data", "text.txt"),
        *("--seq", "16", "--batch", "4", "--no-tensorboard", "--report", "--out", "three"), folder=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # The shapes of messages are exchanged before a step is measured, even the first one.
    assert '"messages"' not in (folder / "three" / "reports" / "measured.json").read_text()
    before, after = (TrainResult.read(folder / name).summary for name in ("two", "three"))
    assert after["first_validation_loss"] == pytest.approx(before["validation_loss"], rel=1e-3)


def test_a_suggested_plan_is_the_ranks_own(tmp_path: Path) -> None:
    """OPT publishes none, and its heads, fixed in its code, would pass for other tokens."""
    config = ClassModel({"model_type": "opt"}, "opt").small(Layout.parse("tp=2")).config.to_dict()
    whole = {"vocab_size": 300, "dropout": 0.0, "attention_dropout": 0.0}
    (tmp_path / "opt").mkdir()
    (tmp_path / "opt" / "config.json").write_text(json.dumps(config | whole))
    (tmp_path / "text.txt").write_text("".join(f"{n} is {n * n % 97}, and so on. " for n in range(2500)))
    words = ["--data", "text.txt", "--seq", "16", "--batch", "4", "--steps", "2", "--no-tensorboard"]
    losses = []
    for layout in ("dp=1,precision=fp32", "tp=2,zero=1,precision=fp32"):
        done = shardwise("train", "opt", "--layout", layout, *words, "--out", layout, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        losses.append(TrainResult.read(tmp_path / layout).losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_verify_takes_a_configuration(made: Path, tmp_path: Path) -> None:
    done = shardwise("verify", "olmoe", "--layout", "dp=2,ep=2,zero=3", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["equal"]


@from_table
def test_what_a_class_cannot_do_is_one_line_and_code_2(
    words: str, config: dict[str, object], message: str, made: Path, tmp_path: Path
) -> None:
    data = json.loads((made / "config.json").read_text()) | config
    (made / "config.json").write_text(json.dumps(data))
    (tmp_path / "text.txt").write_text("one two three " * 400)
    more = ["--data", "text.txt", "--seq", "16", "--batch", "4", "--steps", "1"] if words.startswith("train") else []
    done = shardwise(*words.split(), *more, folder=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("runs/*/events.jsonl"))


@pytest.mark.parametrize("family", some_of(FAMILIES, 2, "adapters of classes"))
def test_adapters_of_a_class_train_as_on_one_device(family: str) -> None:
    """Beside all of its maps and its stacked experts."""
    result = check(family, lora=True)
    assert result.verification, str(result.verification)
    assert result.error < result.tolerance
    assert result.predicted is not False and result.peak <= 0.05


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed: pip install peft")
def test_adapters_are_trained_resumed_merged_and_read_by_peft(made: Path, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    (tmp_path / "text.txt").write_text("".join(f"{n} is {n * n % 97}, and so on. " for n in range(2500)))
    words = ["--data", "text.txt", "--seq", "16", "--batch", "4", "--no-tensorboard"]
    lora = "rank=4,targets=q_proj+o_proj+experts.down_proj+experts.gate_up_proj"
    exact = "precision=fp32"
    for command in (
        ["train", "olmoe", "--layout", "dp=1", "--steps", "1", "--out", "base", *words],
        ["checkpoint", "export", "base", "--dtype", "float32", "--out", "hub"],
        ["train", "--weights", "hub", "--lora", lora, "--layout", f"dp=2,ep=2,zero=3,{exact}", "--steps", "4",
         "--lr", "0.01", "--out", "one", *words],
        ["train", "--resume", "one", "--layout", f"tp=2,etp=2,zero=1,{exact}", "--steps", "6", "--out", "two"],
        ["checkpoint", "export", "two", "--out", "adapters"],
        ["checkpoint", "merge", "two", "--out", "merged"],
        ["train", "--weights", "hub", "--lora", "adapters", "--layout", f"pp=2,{exact}", "--steps", "1",
         "--out", "three", *words],
    ):  # fmt: skip
        done = shardwise(*command, folder=tmp_path)
        assert done.returncode == 0, done.stderr
    one, two, three = (TrainResult.read(tmp_path / name).summary for name in ("one", "two", "three"))
    assert two["first_validation_loss"] == pytest.approx(one["validation_loss"], rel=1e-5)
    assert three["first_validation_loss"] == pytest.approx(two["validation_loss"], rel=1e-5)
    inputs = ClassModel(json.loads((made / "config.json").read_text()), "olmoe").inputs(2, 16)
    logits = []
    for folder, adapters in (("hub", None), ("hub", "adapters"), ("merged", None)):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        model = model if adapters is None else peft.PeftModel.from_pretrained(model, tmp_path / adapters)
        with torch.no_grad():
            logits.append(model.eval()(**inputs).logits)
    assert (logits[1] - logits[0]).abs().max() > 1e-3, "training must have moved the adapters"
    assert (logits[2] - logits[1]).abs().max() < 1e-5


@pytest.mark.parametrize(("family", "axes"), some_of(GENERATING, 1, "generation of classes"))
def test_a_class_generates_transformers_own_tokens(family: str, axes: str, tmp_path: Path) -> None:
    """Greedily, two prompts at a time, both whole; windows, states and latents are those of its own cache."""
    torch.manual_seed(0)
    module: Any = ClassModel({"model_type": family}, family).small(Layout.parse("tp=2"))().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)  # small weights would have one answer to everything
    module.generation_config.eos_token_id = None
    module.save_pretrained(tmp_path / "hub")
    prompts, expected = [[5, 9, 17, 33, 2, 71, 8], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]], []
    for prompt in prompts:
        out = module.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0)
        expected.append(out[0, len(prompt) :].tolist())
    words = [word for prompt in prompts for word in ("--tokens", ",".join(map(str, prompt)))]
    done = shardwise(
        *("generate", "hub", "--layout", f"tp=2,{axes}", "--precision", "fp32", "--max-new-tokens", "8"),
        *("--chunk", "4", "--json", *words), folder=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [answer["tokens"] for answer in json.loads(done.stdout)["answers"]] == expected
