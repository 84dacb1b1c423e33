"""What tests of `split` in this process share."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def alone() -> Iterator[None]:
    """No process group is left by a module that was split here."""
    import torch.distributed as dist

    yield
    if dist.is_initialized():
        dist.destroy_process_group()
