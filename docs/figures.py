"""The picture and the figures that the README shows, made by the project itself.

python docs/figures.py             writes docs/memory.svg
python docs/figures.py --numbers   prints the table that the README quotes
"""

from __future__ import annotations

import sys
from pathlib import Path

from shardwise import demo
from shardwise.report.figures import memory_bar, memory_svg
from shardwise.report.units import format_bytes

PICTURE = Path(__file__).with_name("memory.svg")


def picture() -> str:
    """The memory of a large model under ZeRO, as an SVG file."""
    cells = demo.zero_memory()
    gpus = sorted(cells[0])
    groups = [[memory_bar(f"ZeRO-{stage}", f"{n} GPUs", row[n]) for stage, row in cells.items()] for n in gpus]
    capacity = demo.capacity()
    limit = ("one H100", float(capacity)) if capacity else None
    return memory_svg(groups, f"{demo.LARGE} in training: what each GPU holds", limit) + "\n"


def numbers() -> str:
    """The same figures as a Markdown table; in bold what fits."""
    cells, capacity = demo.zero_memory(), demo.capacity() or 0
    gpus = sorted(cells[0])
    lines = ["| ZeRO stage |" + "".join(f" {n} GPUs |" for n in gpus), "|---|" + "---:|" * len(gpus)]
    for stage, row in cells.items():
        texts = [format_bytes(row[n].total) for n in gpus]
        marked = [f"**{text}**" if row[n].total <= capacity else text for n, text in zip(gpus, texts, strict=True)]
        lines.append(f"| {stage} |" + "".join(f" {text} |" for text in marked))
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:] == ["--numbers"]:
        print(numbers())
    elif not sys.argv[1:]:
        PICTURE.write_text(picture(), encoding="utf-8")
        print(f"wrote {PICTURE}")
    else:
        sys.exit(__doc__)
