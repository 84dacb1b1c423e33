"""The page of what other engines express is what its script makes, and its columns are the engines."""

import runpy
from pathlib import Path

from shardwise.interop import WRITERS

SCRIPT = Path(__file__).parents[2] / "docs" / "emit.py"


def test_the_page_is_what_its_script_makes():
    made = runpy.run_path(str(SCRIPT))
    text = made["PAGE"].read_text(encoding="utf-8")
    assert text == made["page"](), "make figures"
    for writer in WRITERS.values():
        assert writer.name == "torchrun" or f" | {writer.title} |" in text
    assert "| `zero` | `data_parallel_sharding_strategy`: 0, 1, 2, 3 |" in text
