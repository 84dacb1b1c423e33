"""Check for what `pip install shardwise` alone does not install. Imports no torch."""

from importlib.util import find_spec

from shardwise.errors import UserError


def require(purpose: str, *packages: str, extra: str = "train") -> None:
    """Raise `UserError` naming the extra where one of the packages is missing. purpose: what needs them."""
    for package in packages:
        if find_spec(package) is None:
            raise UserError(f"{purpose} needs {package}: pip install 'shardwise[{extra}]'")
