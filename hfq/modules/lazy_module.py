"""Modules that make torch's tables of hooks when these are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from typing import Self

__all__ = ["LazyModule"]

_BLANK = vars(nn.Module())
_EAGER = ("_parameters", "_buffers", "_modules")
"""Tables that torch looks up without an attribute access."""
_TABLES = {
    name: type(value)
    for name, value in _BLANK.items()
    if name not in _EAGER and isinstance(value, (dict, list, set))
}
_VALUES = {name: value for name, value in _BLANK.items() if name not in _TABLES and name not in _EAGER}


class LazyModule(nn.Module):
    """A module without torch's tables of hooks until they are first used.

    A mixture of experts has many thousand modules, with more than ten empty tables each.
    """

    def __init__(self) -> None:
        own = vars(self)
        for name, value in _VALUES.items():
            own[name] = value
        for name in _EAGER:
            own[name] = {}

    def train(self, mode: bool = True) -> Self:
        """Sets the mode as torch does, without its slow assignment."""
        vars(self)["training"] = mode
        for module in self._modules.values():
            if module is not None:
                module.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        if name in _TABLES:
            return vars(self).setdefault(name, _TABLES[name]())  # the first of two threads makes it
        return super().__getattr__(name)
