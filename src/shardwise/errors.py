"""The one exception that a user's mistake raises: the command line prints its message as one line and exits with 2."""


class UserError(ValueError):
    """Input that cannot be used. The message is one line: what is wrong, and what to do instead."""


class LayoutError(UserError):
    """A layout that is illegal, or that cannot run here. The message names the reason and the nearest legal values."""
