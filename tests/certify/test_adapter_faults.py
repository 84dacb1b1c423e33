"""Mistakes put into engines are found where they are, and named."""

import pytest

from harness.certified import FAULTS
from harness.pool import run_ranks

WORLDS = {name: 4 if "4" in fault.layout or "replicate" in fault.layout else 2 for name, fault in FAULTS.items()}
PARTS = [(world, part) for world in sorted(set(WORLDS.values())) for part in range(3 if world == 2 else 1)]


@pytest.mark.parametrize(("world", "part"), PARTS)
def test_faults_are_found_and_named(world: int, part: int) -> None:
    names = [name for name in FAULTS if WORLDS[name] == world][part :: 3 if world == 2 else 1]
    wrong = []
    for name, cells in run_ranks("harness.certified:compare_faults", world, names)[0].items():
        fault, first = FAULTS[name], next((cell for cell in cells.values() if cell.state == "wrong"), None)
        found = cells[fault.property]
        if found.state != "wrong" or fault.kind not in found.kind or fault.parameter not in ("", found.parameter):
            wrong.append((name, fault.property, fault.kind, first, found))
    assert not wrong, "\n".join(map(str, wrong))


def test_ten_faults_are_of_merged_fixes() -> None:
    assert len(FAULTS) >= 30 and len({fault.fix for fault in FAULTS.values() if fault.fix}) >= 10
