"""Save under one layout, go on under another: all ordered pairs of twelve layouts, and every third one with pipelines
or context parallelism; a sample of them in `make test-day`, beside half of the pairs of cp=4, tp=4 and dp=4,zero=3.

Every layout trains undisturbed once and saves on the way; under every other one its checkpoint is loaded, saved again,
and trained on. One model has what layouts stumble over: a tied embedding, key/value heads that tp=4 replicates, a
prime vocabulary, hidden size and MLP width, and dropout.
"""

import random
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path

import pytest

from harness.expert_jobs import plain_routing
from harness.pool import run_ranks
from harness.reference import Case
from harness.resume_jobs import STEPS, Trained
from harness.space import EXPERT_MODELS
from harness.today import EVERYTHING, RESUMED, of_some, seed, some_of
from shardwise.checkpoint import Checkpoint, diff
from shardwise.layout import Layout, Workload
from shardwise.model import ModelConfig

MODEL = ModelConfig(
    "resumed", vocab=59, hidden=29, layers=4, heads=4, kv_heads=2, head_dim=6, ffn=41, max_positions=16, tied=True,
    qk_norm=True, dropout=0.1,
)  # fmt: skip
CASE = Case(MODEL, Workload(seq=12, batch=12))
LAYOUTS = (
    "dp=1", "dp=2,micro=2", "dp=3,zero=1", "dp=4,zero=2", "dp=3,zero=3", "dp=4,zero=3,shard=2", "dp=6,zero=2,shard=3",
    "tp=2", "tp=4,sp", "dp=2,tp=2,zero=3,sp", "dp=2,tp=4,zero=1", "dp=3,tp=2,zero=3,order=pp-tp-cp-dp,recompute=full",
)  # fmt: skip
PIPELINES = (
    "pp=2", "dp=2,pp=2,zero=1,schedule=zb-h1", "dp=2,pp=2,zero=3,virtual=2,schedule=interleaved", "tp=2,pp=3,sp",
    "pp=2,virtual=2,schedule=zb-v", "dp=2,tp=2,pp=2,zero=1,sp",
)  # fmt: skip
MOVED = ("cp=4,micro=3", "tp=4,micro=3", "dp=4,zero=3,micro=3")
CONTEXTS = (
    "dp=2,cp=2,zero=2,cpkind=allgather", "tp=2,cp=2,sp,cpkind=ulysses", "dp=2,cp=3,zero=3,shard=3,micro=3",
    "pp=2,cp=2,zero=3,virtual=2,schedule=zb-v",
)  # fmt: skip
EVERY = LAYOUTS + PIPELINES + MOVED + CONTEXTS
SAVED = 3
PAIRS = 3
SECONDS_A_PAIR = 30.0


def layout(text: str) -> Layout:
    return Layout.parse(f"{text},precision=fp64")


def chosen() -> dict[str, list[str]]:
    """Layout to load under -> layouts to load from: a seeded sample with two equal pairs, or all pairs."""
    if EVERYTHING:
        others = [pair for pair in product(EVERY, EVERY) if not set(pair) <= set(LAYOUTS)]
        pairs = [*product(LAYOUTS, LAYOUTS), *others[::3]]
    else:
        generator = random.Random(seed())
        # Few layouts in many pairs: each one that is saved from is trained once for it.
        some = generator.sample(LAYOUTS, 3) + generator.sample(CONTEXTS, 1) + generator.sample(PIPELINES, 1)
        pairs = [(text, text) for text in (some[0], some[-1])]
        pairs += generator.sample([pair for pair in product(some, some) if pair[0] != pair[1]], PAIRS - 2)
    pairs += some_of(permutations(MOVED, 2), 2, "moved")
    return {to: sorted({a for a, b in pairs if b == to}) for to in EVERY if any(b == to for _, b in pairs)}


def all_samples(ranks: list[Trained], parsed: Layout) -> list[list[int]]:
    copies = parsed.tp * parsed.cp * parsed.pp
    return [sorted(i for rank in ranks for i in rank.samples[step])[::copies] for step in range(len(ranks[0].samples))]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Trained]]]:
    """Layout -> (its checkpoint after `SAVED` steps, its whole run), made when first asked for."""
    folder = tmp_path_factory.mktemp("saved")

    class Runs(dict[str, tuple[Path, list[Trained]]]):
        def __missing__(self, text: str) -> tuple[Path, list[Trained]]:
            parsed, own = layout(text), folder / str(EVERY.index(text))
            ranks = run_ranks("harness.resume_jobs:straight", parsed.ranks, (CASE, parsed, str(own), SAVED, STEPS))
            self[text] = own / f"step-{SAVED}", ranks
            return self[text]

    return Runs()


@pytest.mark.parametrize("to", chosen())
def test_a_run_goes_on_under_any_layout(to: str, undisturbed: dict, tmp_path: Path) -> None:
    sources = chosen()[to]
    parsed, found = layout(to), [undisturbed[text] for text in sources]
    targets = [(str(path), str(tmp_path / str(i))) for i, (path, _) in enumerate(found)]
    limit = 60 + SECONDS_A_PAIR * len(sources)
    resumed = run_ranks("harness.resume_jobs:go_on", parsed.ranks, (CASE, parsed, targets, STEPS), limit)
    for index, (text, (path, before)) in enumerate(zip(sources, found, strict=True)):
        again = Checkpoint.open(tmp_path / str(index) / f"step-{SAVED}")
        assert diff(Checkpoint.open(path), again) == [], (text, to)
        ranks = [rank[index] for rank in resumed]
        expected = before[0].losses[SAVED:]
        assert len(expected) == STEPS - SAVED == 5
        for rank in ranks:
            if text == to:
                assert rank.losses == expected
            assert rank.losses == pytest.approx(expected, rel=1e-9, abs=0), (text, to)
        assert all_samples(ranks, parsed) == all_samples(before, layout(text))[SAVED:]


@pytest.mark.parametrize("text", sorted({text for sources in chosen().values() for text in sources}))
def test_what_is_saved_in_the_background_is_the_state_as_it_was(text: str, undisturbed: dict) -> None:
    """Later steps have changed every weight by the time that the copy is written."""
    path, _ = undisturbed[text]
    later = Checkpoint.open(path.parent.with_name(f"{path.parent.name}-later") / path.name)
    later.verify()
    assert diff(Checkpoint.open(path), later) == []


def test_the_layouts_have_what_they_are_to_be_tried_with() -> None:
    parsed = [layout(text) for text in LAYOUTS]
    assert all(layout(text).pp > 1 for text in PIPELINES)
    assert {layout(text).cpkind for text in CONTEXTS} == {"ring", "allgather", "ulysses"}
    assert CASE.workload.seq % (2 * layout(MOVED[0]).cp), "padding at the end"
    assert len(set(map(str, parsed))) == 12
    assert any(p.tp > MODEL.kv_heads for p in parsed) and MODEL.tied
    assert {p.stage for p in parsed} == {0, 1, 2, 3} and any(p.replicate_ranks > 1 and p.stage for p in parsed)
    assert all(MODEL.vocab % n and MODEL.hidden % n and MODEL.ffn % n for n in range(2, 9))


# -- Loss sequences that do not depend on ep, straight and resumed from a checkpoint of any layout with experts


MODEL_ROUTED = EXPERT_MODELS["deepseek"]
LAYOUTS_ROUTED = (
    "dp=1", "dp=4,ep=4", "dp=4,ep=2,zero=3", "dp=2,tp=2,ep=2,etp=2,zero=1", "tp=4,ep=4,sp",
    "dp=2,cp=2,ep=2,zero=2,shard=2", "dp=2,pp=2,ep=2,zero=1,schedule=zb-h1",
)  # fmt: skip
SAVED_ROUTED, LAST = 3, 6
PAIRS_ROUTED = 2
LONG_SAVED, LONG_LAST = 10, 20
LIMIT = 240.0


def model(capacity: float) -> ModelConfig:
    """Sequences are balanced, biases follow the loads, and with a capacity some tokens are dropped."""
    assert MODEL_ROUTED.experts is not None
    return MODEL_ROUTED.replace(experts=replace(MODEL_ROUTED.experts, capacity=capacity, balance_loss=0.05))


CASE_ROUTED = Case(model(0.7), Workload(seq=12, batch=8))


def straight(case: Case, text: str, folder: Path, saved: int, last: int) -> list[Trained]:
    payload = (case, layout(text), str(folder), saved, last)
    return run_ranks("harness.resume_jobs:straight", layout(text).ranks, payload, limit=LIMIT)


def resumed(case: Case, text: str, source: Path, folder: Path | None, last: int) -> list[Trained]:
    targets = [(str(source), None if folder is None else str(folder))]
    payload = (case, layout(text), targets, last)
    return [rank[0] for rank in run_ranks("harness.resume_jobs:go_on", layout(text).ranks, payload, limit=LIMIT)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[float]]]:
    """Layout -> (its checkpoint, its losses), made when first asked for."""
    folder = tmp_path_factory.mktemp("saved")

    class Runs(dict[str, tuple[Path, list[float]]]):
        def __missing__(self, text: str) -> tuple[Path, list[float]]:
            own = folder / str(LAYOUTS_ROUTED.index(text))
            ranks = straight(CASE_ROUTED, text, own, SAVED_ROUTED, LAST)
            self[text] = own / f"step-{SAVED_ROUTED}", ranks[0].losses
            return self[text]

    return Runs()


@of_some("experts", RESUMED, 2)
@pytest.mark.parametrize(
    ("source", "to"), some_of(product(LAYOUTS_ROUTED, LAYOUTS_ROUTED), PAIRS_ROUTED, "resumed experts")
)
def test_a_run_continues_under_any_layout(source: str, to: str, saved: dict, tmp_path: Path) -> None:
    path, losses = saved[source]
    ranks = resumed(CASE_ROUTED, to, path, tmp_path / "again", LAST)
    for rank in ranks:
        assert rank.losses == pytest.approx(losses[SAVED_ROUTED:], rel=1e-9, abs=0)
    assert diff(Checkpoint.open(path), Checkpoint.open(tmp_path / "again" / f"step-{SAVED_ROUTED}")) == []


@of_some("experts' losses", RESUMED, 2)
@pytest.mark.parametrize("capacity", some_of([0.0, 0.7], 1, "capacities"))
def test_twenty_steps_have_the_losses_of_any_ep_also_when_resumed(capacity: float, tmp_path: Path) -> None:
    """Two micro-batches a step on four data ranks; resumed by every ep from one ep's checkpoint."""
    case = Case(model(capacity), Workload(seq=12, batch=8))
    assert case.workload.micro_batches(layout("dp=4")) == 2
    dropped = sum(int((~routing.takes).sum()) for routing in plain_routing(case).values())
    assert bool(dropped) == bool(capacity)
    texts = ("dp=4", "dp=4,ep=2", "dp=4,ep=4")
    expected: list[float] = []
    for text in texts:
        for rank in straight(case, text, tmp_path / text, LONG_SAVED, LONG_LAST):
            expected = expected or rank.losses
            assert rank.losses == pytest.approx(expected, rel=1e-9, abs=0), text
    assert len(set(expected)) == LONG_LAST
    for source, to in zip(texts, (*texts[1:], texts[0]), strict=True):
        for rank in resumed(case, to, tmp_path / source / f"step-{LONG_SAVED}", None, LONG_LAST):
            assert rank.losses == pytest.approx(expected[LONG_SAVED:], rel=1e-9, abs=0), (source, to)
