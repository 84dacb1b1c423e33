"""The command `audit`; until it starts programs, it reads files alone."""

from shardwise.cli.audit_files import AuditOptions, __doc__, run

__all__ = ["AuditOptions", "__doc__", "run"]
