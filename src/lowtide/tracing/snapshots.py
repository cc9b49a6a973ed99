"""What lies in objects: attributes and containers, remembered as they are and put back as they were."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

# What a cache may be wrapped in; further away from a module lie things that are not its own.
_DEEPEST = 6
_LEFT_ALONE = (Tensor, nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType, str, bytes)


class Snapshot:
    """The content of `roots` and of the lists, dicts, sets and attributes in them; not that of tensors and modules."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self._contents: list[tuple[Any, Any]] = []
        seen: set[int] = set()
        level = list(roots)
        for _ in range(_DEEPEST):
            following: list[Any] = []
            for container in level:
                if id(container) not in seen:
                    seen.add(id(container))
                    if not isinstance(container, tuple):
                        self._contents.append((container, container.copy()))
                    items = container.values() if isinstance(container, dict) else container
                    following += [inner for item in items if (inner := _container(item)) is not None]
            level = following

    def restore(self) -> None:
        """Put back what was changed."""
        for container, content in self._contents:
            if isinstance(container, dict):
                if not _same(container, content) or not _same(container.values(), content.values()):
                    container.clear()
                    container.update(content)
            elif not _same(container, content):
                container.clear()
                (container.update if isinstance(container, set) else container.extend)(content)


def _container(item: Any) -> Any:
    """`item` if it holds other things, its attributes if those do, else None."""
    if isinstance(item, dict | list | set | deque | tuple):
        return item
    attributes = None if isinstance(item, _LEFT_ALONE) else getattr(item, "__dict__", None)
    return attributes if isinstance(attributes, dict) else None


def _same(a: Iterable[Any], b: Iterable[Any]) -> bool:
    """Whether both hold the same objects in the same order."""
    a, b = list(a), list(b)
    return len(a) == len(b) and all(one is other for one, other in zip(a, b, strict=True))
