"""Certificates: clean layouts without a finding, what a command says of a user's adapter, and torch's own mistakes."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness import forked
from harness.cases import from_table, table
from harness.pool import run_ranks
from harness.today import seed
from shardwise.certify import job
from shardwise.certify.adapter import Adapter
from shardwise.certify.compare import Case
from shardwise.certify.result import COLUMNS, PROPERTIES, Cell, Certificate, LayoutRow
from shardwise.cli.main import main
from shardwise.errors import UserError
from shardwise.runtime.job.launch import Ending, RunFailed

pytestmark = pytest.mark.usefixtures("leftovers")
SOURCE = str(Path(__file__).parents[2] / "src")
ADAPTER = table(__file__, "ADAPTER")

OWN_LOSS = ADAPTER.replace(
    'loss = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / tokens',
    "value = loss(logits[None], labels.view(1, -1)) / tokens",
).replace("loss * run", "value * run").replace("return loss", "return value") + '''

def loss(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=0.1)
'''  # fmt: skip


def shardwise(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": SOURCE, "COLUMNS": "200"}
    return forked.shardwise(*words, environment=environment, timeout=170)


def known(engine: str, layout: str, variant: str) -> bool:
    """torch's own mistakes, of which there is a test below."""
    parts = ("tensor_parallel", "tied"), ("pipelining", "frozen")
    return (engine, variant) in parts or (engine == "tensor_parallel" and variant == "frozen" and "sp" in layout)


def test_generated_layouts_of_sound_engines_have_no_finding() -> None:
    generator, cases = random.Random(seed()), []
    for engine in ("ddp", "fsdp2", "tensor_parallel", "pipelining", "shardwise"):
        adapter = Adapter.load_from(engine)
        texts = [text for text in adapter.layouts(1000, seed()) if adapter.ranks(adapter.parse(text)) == 2]
        layout, other = (generator.choice(texts) for _ in range(2))
        variants = [v for v in adapter.variants if not (known(engine, layout, v) or known(engine, other, v))]
        variant = generator.choice(variants)
        # Another layout may have other masks.
        cases.append((engine, Case(layout, "tiny", variant, layout if variant == "dropout" else other)))
    for case, cells in zip(cases, run_ranks("harness.certified:compare_clean", 2, cases)[0], strict=True):
        assert {cell.state for cell in cells.values()} <= {"proven", "not run"}, (case, cells)
        assert cells["gradients"].state == cells["resume"].state == "proven", (case, cells)


TORCH = {
    "sequence parallelism trains a frozen norm": (
        "tensor_parallel", Case("tp=2,sp=1", "tiny", "frozen", "tp=2,sp=1"), "frozen parameter has a gradient",
    ),
    "parallelize_module unties": ("tensor_parallel", Case("tp=2", "tiny", "tied", "tp=2"), "tied weight: from"),
    "zero-bubble schedules drop what follows a frozen stage": (
        "pipelining", Case("pp=2,schedule=ZBVZeroBubble", "tiny", "frozen", "pp=2"), "dropped: no rank has a gradient",
    ),
}  # fmt: skip
"""Mistakes of torch 2.13 without a word."""


def test_mistakes_of_torch_are_found() -> None:
    cases = [(engine, case) for engine, case, _ in TORCH.values()]
    for (name, (_, _, kind)), cells in zip(
        TORCH.items(), run_ranks("harness.certified:compare_clean", 2, cases)[0], strict=True
    ):
        assert cells["gradients"].state == "wrong" and kind in cells["gradients"].kind, (name, cells)


@pytest.mark.parametrize("source", [ADAPTER, OWN_LOSS], ids=["the usual loss", "its own"])
def test_a_wrong_adapter_is_found_at_its_smallest_layout_with_a_script(tmp_path: Path, source: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source.replace("FACTOR", "2"))
    done = shardwise("certify", str(file), "dp=4", "--json", "--out", str(tmp_path / "out"))
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    (finding,) = result["findings"]
    assert finding["layout"] == "dp=2" and finding["cell"]["kind"] == "factor 2 = dp"
    assert finding["cells"] == ["dp=4 (gradients)", "dp=4 (uneven)"]
    assert "WRONG" in (tmp_path / "out" / "certificate.md").read_text()
    script = tmp_path / "out" / "wrong-1.py"
    text = script.read_text()
    assert text.count("\n") < 60 and "shardwise" not in text
    assert_script(script, fails=True)
    script.write_text(text.replace("run.data[1] * 2", "run.data[1]"))
    assert_script(script, fails=False)


def assert_script(script: Path, *, fails: bool, words: str = "gradients table.weight differs by") -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert f"rank 0: {words}" in done.stdout and bool(done.returncode) is fails, done.stderr


def test_published_scripts_are_short_and_show_a_dropped_gradient(tmp_path: Path) -> None:
    pages = sorted((Path(__file__).parents[2] / "docs/certificates").glob("*.md"))
    scripts = {page.stem: re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) for page in pages}
    assert all(text.count("\n") < 60 and "shardwise" not in text for texts in scripts.values() for text in texts)
    (script := tmp_path / "wrong.py").write_text(scripts["pipelining"][0])
    assert_script(script, fails=True, words="gradients blocks.1.norm1.weight differs by 1.0e+00")


def test_a_right_adapter_is_proven(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(ADAPTER.replace("FACTOR", "1"))
    done = shardwise("certify", str(file), "dp=2")
    assert done.returncode == 0 and "7 proven" in done.stdout, done.stdout + done.stderr


def test_errors_of_an_engine_are_refused_or_failed(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    text = ADAPTER.replace("FACTOR", "1").replace('("plain", "uneven")', '("plain",)')
    file.write_text(text.replace("return Dist", 'raise ValueError("not on Sundays")\n    return Dist'))
    done = shardwise("certify", str(file), "dp=2")
    assert done.returncode == 1 and "refused: loss at dp=2 and 5 more: ValueError: not on Sundays" in done.stdout
    file.write_text(text.replace("    logits = ", '    assert run.data[0], "rank 0 gave up"\n    logits = '))
    done = shardwise("certify", str(file), "dp=2", "--json")
    cells = json.loads(done.stdout)["rows"][0]["cells"]
    assert done.returncode == 1 and cells["loss"]["state"] == "failed" and "rank 0 gave up" in cells["loss"]["note"]
    for function, words in (
        ("clip(run, most): pass", "clip returned None, and must return a number"),
        ("gradients(run): return [1]", "gradients returned [1], and must return a dict of name -> whole tensor"),
        ("gradients(run): return dict(run.engine.named_parameters())", "gradients has names that the model has not"),
    ):
        file.write_text(f"{text}\n\ndef {function}\n")
        done = shardwise("certify", str(file), "dp=2")
        assert done.returncode == 1 and f"failed: loss at dp=2 and 5 more: in a step: {words}" in done.stdout


@from_table
def test_mistakes_are_one_line(words: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mine = 'name, axes, data, space = "mine", ["dp"], ["dp"], {"dp": [1, 2]}\nparallelize = print\n'
    files = {
        "file": 'name = "mine"', "broken": "nothing", "needy": "import no_such_package",
        "axis": mine + 'data = ["pd"]', "text": mine + 'axes = data = "dp"', "space": mine + 'space = ["dp"]',
        "one": mine + 'space = {"dp": [1]}', "variant": mine + 'variants = ["plain", "untied"]',
        "plain": mine + 'variants = ["uneven"]', "within": mine + 'within = {"views": "dp"}',
        "number": mine + "clip = 3", "near": mine + "def backwards(*words):\n    pass",
        "version": mine + 'needs = ["nosuch"]',
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    words = words.format(**{name: tmp_path / f"{name}.py" for name in files})
    code = main(["certify", *words.split()])
    out, err = capfd.readouterr()
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1, err


def test_a_signal_from_outside_is_no_failure_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = Ending(143, "stopped by SIGTERM: all 2 ranks have ended")
    monkeypatch.setattr(job, "supervise", lambda *words, **options: stopped)
    with pytest.raises(RunFailed, match="stopped by SIGTERM"):
        job.certify("ddp", layouts=["dp=2"])


def test_layouts_are_of_the_space() -> None:
    adapter = Adapter.load_from("shardwise")
    texts = adapter.layouts(1000)
    assert len(set(texts)) == len(texts) and all(2 <= adapter.ranks(adapter.parse(text)) <= 8 for text in texts)
    assert not any("schedule" in text and "pp" not in text for text in texts)
    assert adapter.smaller(adapter.parse("pp=2,tp=2")) == ["tp=2", "pp=2"]
    with pytest.raises(UserError, match="did you mean zero"):
        adapter.parse("zer=1")


def test_what_nothing_proves_is_no_success() -> None:
    def certificate(**cells: Cell) -> Certificate:
        row = dict.fromkeys(COLUMNS, Cell("not run")) | cells
        return Certificate("mine", "float64", {}, (LayoutRow("dp=2", "tiny", 2, row),))

    proven = Cell("proven", 1e-12, 1e-9)
    assert certificate().exit_code == 1 and certificate(loss=proven).exit_code == 0
    assert certificate(loss=proven, norm=Cell("refused")).exit_code == 0
    assert certificate(loss=proven, norm=Cell("wrong", 1.0, note="norm")).exit_code == 1
    assert certificate(loss=proven, norm=Cell("failed")).exit_code == 1
    assert certificate(loss=proven).columns == ["loss"] and set(PROPERTIES) < set(COLUMNS)
    assert Certificate.from_json(json.loads(json.dumps(certificate(loss=proven).to_json()))) == certificate(loss=proven)
