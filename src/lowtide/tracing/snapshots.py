"""What lies in objects: attributes and containers, remembered as they are and put back as they were."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

# What a cache may be wrapped in; further away from a module lie things that are not its own.
_DEEPEST = 6
_LONGEST = 10_000  # what is longer is data
_LEFT_ALONE = (Tensor, nn.Module, type, types.ModuleType, types.FunctionType, str, bytes)


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
                    if len(container) <= _LONGEST:
                        following += containers(container.values() if isinstance(container, dict) else container)
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


def containers(items: Iterable[Any]) -> list[Any]:
    """Those items that hold other things, and the attributes of those that have any."""
    found = []
    for item in items:
        if isinstance(item, types.MethodType):
            item = item.__self__
        if isinstance(item, dict | list | set | deque | tuple):
            found.append(item)
        elif not isinstance(item, _LEFT_ALONE) and not getattr(type(item), "hidden_from_replay", False):
            attributes = getattr(item, "__dict__", None)
            if isinstance(attributes, dict):
                found.append(attributes)
    return found


def _same(a: Iterable[Any], b: Iterable[Any]) -> bool:
    """Whether both hold the same objects in the same order."""
    a, b = list(a), list(b)
    return len(a) == len(b) and all(one is other for one, other in zip(a, b, strict=True))
