"""One process that has imported torch, for all programs that are audited."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.audits import AuditServer


@pytest.fixture(scope="module")
def audits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AuditServer]:
    server = AuditServer(Path(tmp_path_factory.mktemp("audits")))
    yield server
    server.close()
