"""Cluster files that `calibrate` reads and writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import UserError

if TYPE_CHECKING:
    from shardwise.cluster import Cluster


def check_name(file: Path | None) -> None:
    """Raise `UserError` for a name that other commands would not read as a file's."""
    if file and file.suffix != ".toml":
        raise UserError(f"--out {file}: a cluster file's name ends in .toml")


def known_cluster(file: Path | None) -> Cluster | None:
    """The cluster in a file; None where there is none yet. Raises `UserError` where it could not be written later."""
    from shardwise.cluster import Cluster
    from shardwise.report.files import check_place

    check_name(file)
    if file is None:
        return None
    if not file.parent.is_dir():
        raise UserError(f"--out {file}: there is no directory {file.parent}")
    before = Cluster.parse(str(file)) if file.exists() else None
    check_place(file)
    return before


def write_cluster(
    file: Path, cluster: Cluster, header: Sequence[str], remarks: Mapping[str, str] | None = None
) -> None:
    """Write a cluster file, whole or not at all. remarks: key -> comment behind its value."""
    from shardwise.cluster.writing import to_toml
    from shardwise.report.files import write_whole

    write_whole(file, to_toml(cluster, header, remarks))
