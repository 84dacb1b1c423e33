"""What tests of whole runs, and of `split` in this process, share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.training_process import write_text


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text for training."""
    folder = tmp_path_factory.mktemp("runs")
    write_text(folder)
    return folder


@pytest.fixture
def alone() -> Iterator[None]:
    """No process group is left by a module that was split here."""
    import torch.distributed as dist

    yield
    if dist.is_initialized():
        dist.destroy_process_group()
