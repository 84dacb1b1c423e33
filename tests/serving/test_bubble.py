import json
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.emulate.serving import TimedStage
from shardwise.layout import Layout
from shardwise.model import ModelConfig
from shardwise.report.step_report import Bytes, TransportRow
from shardwise.schedule.pipeline import build
from shardwise.schedule.pipeline.simulate import simulate
from shardwise.schedule.pipeline.times import Times
from shardwise.serving.job import ServingJob
from shardwise.serving.recording import Filled, StepRecord, measured, median, notes_file, simulated

MODEL = ModelConfig("m", vocab=53, hidden=24, layers=6, heads=4, kv_heads=2, ffn=42, max_positions=64)


def note(turn: int, began: float, ended: float, waited: float, tokens: int, rows: int) -> str:
    waiting = TransportRow(0, "shared", None, None, waited, waited)
    phase = "prefill" if tokens else "decode"
    made = StepRecord(turn, phase, tokens, rows, ended - began, began, 0, Bytes(), (), (waiting,))  # type: ignore[arg-type]
    return json.dumps(made.to_json()) + "\n"


def write(folder: Path, stages: int, chunks: int, seconds: float, hop: float, prompts: int) -> None:
    """The notes of ranks that do what is simulated, one prompt after the other, with a turn of nothing in between."""
    found = simulate(build("prefill", stages, chunks), Times.equal(stages, seconds, 0, 0).with_hop(hop))
    for rank, spans in enumerate(found.computing):
        lines, turn = "", 0
        for prompt in range(prompts):
            free = start = 10.0 + 2 * prompt * found.makespan
            for index, (begin, end) in enumerate(spans):
                turn += 1
                wanted = int(index == chunks - 1)
                lines += note(turn, free, start + end, start + begin - free, 4, wanted)
                free = start + end
            turn += 1
            lines += note(turn, free, free + 0.5, 0.5, 0, 0)
        notes_file(folder, rank).write_text(lines)


@given(st.integers(2, 4), st.integers(1, 9), st.floats(1e-3, 1), st.floats(0, 0.1), st.integers(1, 3))
def test_what_is_simulated_is_measured(stages: int, chunks: int, seconds: float, share: float, prompts: int) -> None:
    job = ServingJob(MODEL, Layout.parse(f"pp={stages}"), "nowhere")
    expected = simulated(stages, chunks, seconds, share * seconds)
    assert expected.bubble >= (stages - 1) / chunks * (1 - 1e-9)
    with TemporaryDirectory() as name:
        write(Path(name), stages, chunks, seconds, share * seconds, prompts)
        found = measured(job, Path(name))
    assert len(found) == prompts
    for one in found:
        assert one.chunks == chunks and one.makespan == pytest.approx(expected.makespan)
        assert one.bubble == pytest.approx(expected.bubble)


def test_the_median_is_one_of_them() -> None:
    filled = [Filled(1, makespan, (1.0, 1.0)) for makespan in (5.0, 2.0, 3.0, 4.0)]
    assert median(filled).makespan == 3.0


def test_a_pretended_stage_knows_another_turns_message() -> None:
    stage: Any = object.__new__(TimedStage)
    stage.job, stage.comms = SimpleNamespace(emulate=0.0), SimpleNamespace(timings={})
    stage.plan = SimpleNamespace(of_kind=lambda kind: [], model=MODEL)
    stage.dtype, stage.device = torch.bfloat16, torch.device("cpu")
    turn: Any = SimpleNamespace(tokens=3)
    sent = [stage.forward(turn, None) for _ in range(300)]
    assert sent[0].shape == (1, 3, MODEL.hidden)
    stage._number = 0
    for x in sent:
        stage.forward(turn, None, x)
    with pytest.raises(RuntimeError, match="that of turn 1 came"):
        stage.forward(turn, None, sent[0])
