"""Files that people publish (`data/published.toml`): each has the layout that its engine's words give."""

import tomllib
from pathlib import Path

import pytest

from shardwise.errors import UserError
from shardwise.interop import read

DATA = Path(__file__).parent / "data"
ROWS, INPUTS = (
    tomllib.loads((DATA / f"{name}.toml").read_text(encoding="utf-8"))[table]
    for name, table in (("published", "published"), ("inputs", "input"))
)


@pytest.mark.parametrize(
    "row", ROWS + INPUTS, ids=lambda row: f"{row['engine']} {row.get('url', '').rpartition('/')[2]}"
)
def test_the_layout_of_a_published_file(tmp_path, row):
    name = row.get("name", "")
    for other, text in {name or "unnamed": row["text"], **row.get("files", {})}.items():
        if other.endswith((".yaml", ".yml")):
            pytest.importorskip("yaml")
        (tmp_path / other).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / other).write_text(text, encoding="utf-8")
    config = [str(tmp_path / name) if name else row["text"]]
    if "refused" in row:
        with pytest.raises(UserError, match=row["refused"]):
            read(config, row.get("ranks"))
        return
    found = read(config, row.get("ranks"))
    assert (found.engine, str(found.layout)) == (row["engine"], row["layout"])
    told = {key: getattr(found, key) for key in ("seq", "batch", "model") if key in row}
    assert told == {key: row[key] for key in told}
    assert any(row["doubt"] in one for one in found.unsettled) if "doubt" in row else not found.unsettled
    assert not (row.get("known") and found.unknown)
    assert "memory" not in row or (found.served and found.served.memory == row["memory"])
    assert "fact" not in row or any(row["fact"] in one for one in found.facts)


def test_every_engine_has_several_files():
    engines = [row["engine"].partition(" with ")[0] for row in ROWS]
    assert len(ROWS) >= 103 and len(set(engines)) >= 12
    assert all(row["url"].startswith("https://") for row in ROWS)
