"""Profiles of engines are parsed one by one, and are those of the whole file."""

import tomllib
from pathlib import Path

from shardwise.predict.time import ENGINES, profiles


def test_each_profile_is_its_table_of_the_file():
    tables = tomllib.loads(Path(profiles.__file__).with_name("engines.toml").read_text(encoding="utf-8"))
    assert list(ENGINES) == list(tables) and len(ENGINES) == len(tables)
    for name, table in tables.items():
        profile = ENGINES[name]
        assert profile.name == name
        rows = {key: row for key, row in table.items() if key not in ("base", "unlisted", "features")}
        assert {key: profile.facts[key] for key in rows} == {key: source for key, (_, source) in rows.items()}
        for key, (value, _) in rows.items():
            assert getattr(profile, key) == (tuple(value) if isinstance(value, list) else value)
        for key, (value, source) in table.get("features", {}).items():
            assert getattr(profile.features, key) == (tuple(value) if isinstance(value, list) else value)
            assert profile.features.sources[key] == source
        if "base" in table:
            base, own = ENGINES[table["base"]], {"name", "features", "facts", *rows}
            assert all(getattr(profile, key) == getattr(base, key) for key in vars(base).keys() - own)


def test_only_what_is_used_is_parsed():
    fresh = profiles._Profiles()
    assert fresh["shardwise"] == ENGINES["shardwise"]
    assert len(fresh._parsed) < len(fresh) // 4
