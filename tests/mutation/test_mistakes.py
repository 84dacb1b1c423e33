"""The known mistakes fit the source of today: `make mutation` puts each of them back."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # as where `run.py` itself runs

from run import MISTAKES, ROOT, misplaced


def test_every_mistake_has_one_place() -> None:
    assert misplaced(ROOT / "src", MISTAKES) == []
