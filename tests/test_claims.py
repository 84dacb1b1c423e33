"""Every figure of the table of claims is what a public function gives, and the page of the docs shows it."""

import re
import runpy
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from math import ceil, log2
from pathlib import Path
from typing import Any

import pytest

from quoted import Samples, Shown, computed_by, missing, show, topics
from shardwise.cli.main import main
from shardwise.cluster import Cluster
from shardwise.layout import Workload
from shardwise.model.catalog import get
from shardwise.planner.serving import plan_serving
from shardwise.predict.time.serving import ServingLayout, weight_bytes
from shardwise.validation.claims import claims

DOCS = Path(__file__).parents[1] / "docs"

NOT_SHOWN: list[str] = []
"""Claims that nothing can compute yet."""

PARTS = {
    "act-12x": [r"per layer (s\*b\*h\*\(.*?\)) bytes", r"; (34\S+) with it"],
    "flops-mlp-layer": [r"^(.*?) \(", r"\(\+ (.*) attention\)"],
    "sp-activation": [r"per layer (.*)$"],
    "broadcast-volume": [r"^(M)$"],
}
"""Where in the text of a claim its formulas stand."""

IN_WORDS = {"1f1b-drawing", "int-weights", "inference-83-training-5", "ms-52-mfu"}
"""Claims whose figures stand in a sentence: each has a test below."""


@cache
def shown(name: str) -> Shown:
    return show(name)


def evaluate(formula: str, letters: dict[str, float]) -> float:
    """A formula as people write it: 2M(N-1)/N, 4P + 12P/N, ceil(log2 N)(alpha + S/B)."""
    formula = re.sub(r"log2 (\w+)", r"log2(\1)", formula).replace("^", "**")
    words = re.findall(r"\d+(?:\.\d+)?|log2|ceil|alpha|[A-Za-z]|\*\*|[-+*/()]", formula)
    assert "".join(words) == formula.replace(" ", ""), formula
    out: list[str] = []
    for word in words:
        before = out[-1] if out else "("
        if (before[-1].isalnum() or before == ")") and before not in ("log2", "ceil"):
            out += ["*"] if word[0].isalnum() or word == "(" else []
        out.append(word)
    return eval("".join(out), {"__builtins__": {}, "ceil": ceil, "log2": log2}, letters)


def formulas(name: str, key: str) -> dict[str, str]:
    """The formulas that a claim expects under a name, by where they belong."""
    claim, expected = claims()[name], claims()[name].expect[key]
    if isinstance(expected, dict):
        return expected
    text = expected if isinstance(expected, str) else claim.says
    if name not in PARTS:
        return {"": text}
    return {str(i): re.search(pattern, text)[1] for i, pattern in enumerate(PARTS[name])}


def samples(found: Any) -> dict[str, Samples]:
    """Computed values of formulas, by the same names as `formulas` has."""
    if isinstance(found, dict):
        return found
    several = isinstance(found[0], list)
    return {str(i): one for i, one in enumerate(found)} if several else {"": found, "0": found}


def figures(name: str) -> Iterator[tuple[str, float, float]]:
    """(what, computed, expected) of all numbers of a claim."""
    computed = shown(name).values
    for key, expected in claims()[name].expect.items():
        assert key in computed, f"{name} computes no {key}"
        if isinstance(expected, str | dict) or (expected is True and key == "formula"):
            for part, formula in formulas(name, key).items():
                for letters, value in samples(computed[key])[part]:
                    yield f"{formula} at {letters}", value, evaluate(formula, letters)
        elif isinstance(expected, list):
            yield from ((key, a, b) for a, b in zip(computed[key], expected, strict=True))
        else:
            yield key, computed[key], expected


def test_the_list_of_what_is_not_shown_does_not_grow():
    assert missing() == NOT_SHOWN
    assert sorted(name for names in topics().values() for name in names) == sorted(claims().keys() - set(NOT_SHOWN))


@pytest.mark.parametrize("name", [name for name in claims() if name not in {*NOT_SHOWN, *IN_WORDS}])
def test_a_claim_comes_out(name):
    compared = list(figures(name))
    assert compared
    for what, computed, expected in compared:
        assert computed == pytest.approx(expected, rel=claims()[name].rel_tol or 1e-9), what


def test_formulas_are_read_as_they_are_meant():
    letters = {"M": 8.0, "N": 4, "P": 3.0, "a": 2, "s": 5, "h": 10, "b": 1, "alpha": 1.0, "S": 6.0, "B": 2.0}
    assert evaluate("2M(N-1)/N", letters) == 12
    assert evaluate("4P + 12P/N", letters) == 21
    assert evaluate("s*b*h*(34 + 5*a*s/h)", letters) == 50 * 39
    assert evaluate("ceil(log2 N)(alpha + S/B)", letters) == 8
    assert evaluate("2(N-1)(alpha + S/(N B))", letters) == 6 * 1.75
    assert evaluate("24 P h^2", letters) == 7200
    with pytest.raises(AssertionError):
        evaluate("2M bytes; or so", letters)


def test_a_wrong_figure_would_be_seen(monkeypatch):
    from quoted import states

    monkeypatch.setattr(states, "zero_table", lambda params, ranks: {1: dict.fromkeys(ranks, params), 2: {8: 1.0}})
    wrong = show("zero1-formula").values["formula"]
    assert all(value != pytest.approx(evaluate("4P + 12P/N", letters)) for letters, value in wrong)


def test_the_order_of_1f1b():
    p, orders = 4, shown("1f1b-drawing").values["stage_s_order"]
    for stage, order in enumerate(orders):
        warm, words = p - 1 - stage, order.split()
        pairs = [word for k in range(8 - warm) for word in (f"F{warm + k}", f"B{k}")]
        drained = [f"B{k}" for k in range(8 - warm, 8)]
        assert words == [f"F{k}" for k in range(warm)] + pairs + drained
    values, why = shown("1f1b-drawing").values, claims()["1f1b-drawing"].why
    said = list(map(int, re.search(r"idles (\d+).* of (\d+) \((\d+)% against (\d+)%", why).groups()))
    assert [values["idle_drawn"], values["idle"]] == said[:2]
    assert [round(100 * values["share_drawn"]), round(100 * values["share"])] == said[2:]
    assert ",".join(map(str, values["peaks"])) in why and set(values["peaks_drawn"]) == {4}


def test_what_fits_how_many_devices():
    values = shown("tp-13b-40-gpu").values
    assert values["tp4_gb"] < 80 < values["whole"] and values["tp8pp2"] < 80 < values["405b_gb"] / 8


def test_quantised_weights():
    claim, table = claims()["int-weights"], shown("int-weights").values["table"]
    for dtype, word in (("float16", "fp16"), ("int8", "int8"), ("int4", "int4")):
        said = re.search(rf"(\d+)/(\d+)/(\d+)(?: GB)? {word}", claim.says).groups()
        assert table[dtype] == pytest.approx(list(map(float, said)), rel=claim.rel_tol)
    h200 = float(re.search(r"one (\d+) GB H200", claim.says)[1])
    assert table["int4"][2] > shown("int-weights").values["h200"] > h200
    # As stored, with scales and zeros: what `plan --serve` counts.
    assert shown("int-weights").values["stored"].split(" / ")[2] == "217"
    stored = weight_bytes(get("llama-3-405b"), ServingLayout("int4-g128z"))
    work = Workload(prompt=64, output=64, concurrency=1)
    plan = plan_serving(get("llama-3-405b"), Cluster.parse("2xH200"), work, by="cost")
    planned = min(one.devices * one.weight_bytes for one in plan.ranked if one.weights == "int4")
    assert planned == pytest.approx(stored, rel=0.01)


def test_the_share_of_gathering():
    why, values = claims()["inference-83-training-5"].why, shown("inference-83-training-5").values
    said = list(map(float, re.findall(r"([\d.]+)%", why)))
    assert [round(100 * values[name], 1) for name in ("said", "real", "training")] == said


def test_hardware_utilisation_is_said_as_model_utilisation():
    claim, values = claims()["ms-52-mfu"], shown("ms-52-mfu").values
    assert round(100 * values["hfu"]) == float(re.search(r"(\d+)% MFU", claim.says)[1])
    assert "three quarters" in claim.why and values["share"] == pytest.approx(0.75, rel=0.01)


def test_an_update_is_lost_in_torch_too():
    torch = pytest.importorskip("torch")
    from quoted.rounding import rounded, spacing, surely_lost_below

    weights = torch.arange(1.0, 2.0, 2.0**-7, dtype=torch.float64)
    low = weights.to(torch.bfloat16)
    assert torch.equal(low.double(), weights), "all weights between 1 and 2 that bf16 has"
    lost = surely_lost_below("bfloat16")
    assert torch.equal((weights * (1 + 0.999 * lost)).to(torch.bfloat16), low)
    assert ((weights * (1 + 1.001 * spacing("bfloat16")[1])).to(torch.bfloat16) > low).all()
    values = torch.randn(1000, dtype=torch.float64)
    assert [rounded(x, "bfloat16") for x in values.tolist()] == values.to(torch.bfloat16).double().tolist()


def test_ring_steps_and_halves():
    values = shown("ring-volume").values
    assert values["halves"] == pytest.approx([1.0] * len(values["halves"]))
    assert values["steps_of"] == {n: 2 * (n - 1) for n in (2, 3, 8, 64)}


def test_no_broadcast_spares_the_root():
    assert min(shown("broadcast-volume").values["sent"].values()) >= 1


def test_the_same_bytes_with_sequence_parallelism():
    assert shown("sp-activation").values["forward_ratio"] == pytest.approx(1)


def test_the_time_of_a_gathered_token():
    said = int(re.search(r"in TIME it is about (\d+)x", claims()["ratio-6400"].why)[1])
    assert shown("ratio-6400").values["time"] == pytest.approx(said, rel=0.15)


def test_measured_sums_are_in_the_range_that_the_reasons_name():
    why, text = claims()["tp-decode-nvlink"].why, shown("tp-decode-nvlink").values
    low, high = map(float, re.search(r"measured (\d+) to (\d+) us on NVLink", why).groups())
    assert low <= text["h100"] < text["a100"] <= high * 1.05


@pytest.mark.parametrize("name", [name for name in claims() if name not in NOT_SHOWN])
def test_what_a_figure_is_computed_by_exists(name):
    assert computed_by(name)
    for path in computed_by(name):
        if path.startswith("shardwise "):
            continue
        found, *rest = path.split(".")
        root = [] if found == "quoted" else ["shardwise"]
        thing = import_module(root[0] if root else found)
        for i, part in enumerate((found, *rest) if root else rest, start=0 if root else 1):
            module = ".".join([*root, found, *rest[:i]])
            thing = getattr(thing, part) if hasattr(thing, part) else import_module(module)
        assert thing.__doc__ or isinstance(thing, dict), path


COMMANDS = sorted({path for name in claims() if name not in NOT_SHOWN for path in computed_by(name) if " " in path})


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_run(command, capsys):
    assert main(command.split()[1:]) == 0
    assert capsys.readouterr().out


def test_the_page_is_what_its_script_makes():
    made = runpy.run_path(str(DOCS / "claims.py"))
    assert made["PAGE"].read_text(encoding="utf-8") == made["page"](), "make figures"
    assert max(map(len, made["page"]().splitlines())) <= 120
