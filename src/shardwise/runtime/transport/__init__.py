"""How messages get from rank to rank: a schedule's transfers by torch.distributed sends, or through shared memory."""

from torch.distributed import ProcessGroup

from shardwise.runtime.transport.mail import Mail
from shardwise.runtime.transport.sends import SendTransport
from shardwise.runtime.transport.shared import SharedTransport

__all__ = ["Mail", "SendTransport", "SharedTransport", "shared_transport"]


def shared_transport(group: ProcessGroup, timeout: float) -> SharedTransport:
    return SharedTransport(group, timeout)
