"""The page of published runs: measured and predicted step time, and the best layout for the same engine.

python docs/published_runs.py   writes docs/published_runs.md: about two minutes on one core
"""

from __future__ import annotations

from pathlib import Path

from shardwise.errors import UserError
from shardwise.layout import Workload
from shardwise.planner.plan import plan
from shardwise.validation import scoreboard
from shardwise.validation.scoreboard import Prediction

PAGE = Path(__file__).with_name("published_runs.md")

HEAD = """\
# Published runs

Published step times of large runs beside the prediction. No constant is fitted on these rows. `shardwise validate
--runs` scores them, `python docs/published_runs.py` makes this page.

Mean error over {count} runs: {mean:.1f}%. Within 20%: {within} of {count}.

*Step*: measured, predicted, error. *Best*: the fastest layout that `plan --engine` finds for the same model, devices
and batch, with its time. *Ratio*: predicted time of the published layout over that of the best, and of the best with
the published recompute mode. For DeepSeek-V3 the search keeps the published ep=64.

"""

HEADINGS = "run", "GPUs", "published layout", "step", "best", "ratio"

REASONS = """
## Ratios above 1.25
Narayanan et al. 2021 and Smith et al. 2022 recompute every block. By the prediction their activations would fit without
it, which saves a quarter of the arithmetic; how much memory fragmentation took is not known. For GPT 39.1B other
degrees win more: the published run has one stage per rank and micro-batches of 4. DeepSeek-V3's ratio is below 1
because its run computes in FP8, and the best layout is priced in bf16.

## Misses
MT-NLG is predicted 11 to 15% too fast, with gradients added up in fp32 (in 16 bits 20 to 23%); the same software's
BLOOM rows, which constants were fitted on, 9%.

MegaScale's baseline is predicted 6 to 17% too fast. Of its steps about 2.4 s do not shrink with the number of devices
(the four runs of one batch on 256 to 1,024), of the predicted ones 1.1 s, mostly gradients between nodes. With a
quarter of the bandwidth these rows are within 10%.

Llama 3 is predicted 12 to 16% too fast, Nemotron-4 11 to 12%.

## Sources and assumptions
In brackets is the profile (`--engine`).

"""


def main() -> None:
    runs, _ = scoreboard.cases(scoreboard.read(scoreboard.RUNS))
    predictions, refused = scoreboard.predict(runs)
    assert not refused, refused
    errors = [abs(one.error) for one in predictions]
    text = HEAD.format(
        count=len(errors), mean=100 * sum(errors) / len(errors), within=sum(error <= 0.2 for error in errors)
    )
    text += f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}\n"
    text += "".join(_row(one) for one in predictions) + REASONS
    engines: dict[tuple[str, str], list[str]] = {}
    for one in predictions:
        engines.setdefault((str(one.case.row["source"]), _notes(one)), []).append(one.case.engine)
    for (source, notes), named in engines.items():
        text += f"- {source} ({', '.join(dict.fromkeys(named))}){f': {notes}' if notes else ''}.\n"
    PAGE.write_text(text, encoding="utf-8")


def _notes(one: Prediction) -> str:
    stated = str(one.case.row.get("tflops_convention", ""))
    words = [f"TFLOP/s count {stated}" if stated else "", str(one.case.row.get("notes", ""))]
    return "; ".join(word for word in words if word)


def _row(one: Prediction) -> str:
    case, row = one.case, one.case.row
    fixed = {"ep": row["ep"]} if "ep" in row else {}  # 2,048 devices have too many degrees of experts for one page
    best, ratio = _best(one, fixed)
    _, same = _best(one, fixed | {"recompute": row["recompute"]})
    layout = case.describe().split(", ")[-1].split(",seq=")[0]
    cells = (
        f"{row['source_id']}, {row['model']}", f"{row['gpus']:,}", f"`{layout},recompute={row['recompute']}`",
        f"{one.measured:.2f}, {one.seconds:.2f} s, {100 * one.error:+.1f}%", best, f"{ratio}, {same}",
    )  # fmt: skip
    print(*cells, flush=True)
    return f"| {' | '.join(cells)} |\n"


def _best(one: Prediction, fixed: dict[str, object]) -> tuple[str, str]:
    """(the best layout, the published one's predicted time over its time)."""
    row = one.case.row
    workload = Workload(batch=row["gbs"], seq=row["seq"])
    try:
        found = plan(
            one.case.model, one.case.cluster, workload, engine=one.case.engine, fix=fixed, top=1, explain=False
        )
    except UserError as error:
        return str(error), "-"
    best = found.ranked[0]
    return f"`{best.layout}`, {best.seconds:.2f} s", f"{one.seconds / best.seconds:.2f}"


if __name__ == "__main__":
    main()
