"""Packages that import a name's module when the name is first used, so that a command loads what it needs alone."""

import re
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

_IMPORT = re.compile(r"^    from (\S+) import (?:\(([^)]*)\)|(.+))$", re.MULTILINE)
"""An import in a package's `if TYPE_CHECKING:`."""


class LazyPackage(ModuleType):
    """A package with names from its modules. A name that a module has as well stays the name from inside."""

    __homes__: Mapping[str, str]
    __wrap__: Callable[[Any], Any]

    def __getattr__(self, name: str) -> Any:
        if name not in self.__homes__:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(import_module(self.__homes__[name]), name)
        if isinstance(value, FunctionType):
            value = self.__wrap__(value)
        vars(self)[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing a module sets it as the package's attribute, in place of the function of that name.
        if not (isinstance(value, ModuleType) and name in self.__homes__):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *self.__homes__})


def lazily(package: str, wrap: Callable[[Any], Any] = lambda function: function) -> None:
    """Make a package lazy: what its source imports for type checkers alone. wrap: what its functions go through."""
    module = sys.modules[package]
    source = module.__spec__.loader.get_source(package)  # type: ignore[union-attr]
    homes = {
        name.strip(): home
        for home, many, few in _IMPORT.findall(source)
        for name in (many or few).split(",")
        if name.strip()
    }
    vars(module).update(__homes__=homes, __wrap__=wrap)
    module.__class__ = LazyPackage
