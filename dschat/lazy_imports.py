"""Modules that are imported when they are first used, so that flags and --help need neither torch nor DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


class LazyFunctions:
    """The functions of a module, which is imported when one of them is first called."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: getattr(import_module(self._module), name)(*args, **kwargs)


def lazy_exports(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose public names are imported when they are first read (PEP 562).

    Args:
        package: its `__name__`.
        modules: public name → the module that defines it, relative to the package.
    """

    def getattribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return getattribute, lambda: sorted(modules)
