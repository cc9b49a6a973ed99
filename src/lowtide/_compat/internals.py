"""Look-up of torch's private functions and classes by dotted path, with placeholders for those a torch version lacks.

The other files of `_compat` bind what they need of torch's private API through `required` and `optional`. A name that
torch has removed must not break `import lowtide`, nor the features that do without it: `required` then returns a
placeholder that raises `LowtideError` when it is called, subclassed and instantiated, or asked for an attribute. The
message names the missing path and what cannot work without it. Where torch has the name, its own object is returned,
so that calls cost nothing extra.

The canary tests in tests/_compat read `INTERNALS` and report every missing path in one line.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any, NoReturn

import torch

from lowtide.errors import LowtideError

# Every path that was looked up by `required` so far, with what cannot work without it.
INTERNALS: dict[str, str] = {}


def required(path: str, consequence: str, also: tuple[str, ...] = ()) -> Any:
    """Return torch's object at `path`, or a placeholder that raises `LowtideError` with `consequence` when it is used.

    `also` lists further paths without which the object is of no use: if one is missing, the placeholder is returned.
    """
    INTERNALS.update(dict.fromkeys((path, *also), consequence))
    missing = [each for each in (*also, path) if optional(each, _ABSENT) is _ABSENT]
    if not missing:
        return resolve_name(path)
    message = f"torch {torch.__version__} has no {missing[0]}: {consequence}. Use another version of torch"
    return _Missing("Missing", (), {"message": message, "__slots__": ()})


_ABSENT = object()


def optional(path: str, fallback: Any) -> Any:
    """Return torch's object at `path`, or `fallback` if this torch has none."""
    try:
        return resolve_name(path)
    except (AttributeError, ImportError):
        return fallback


class _Missing(type):
    """The metaclass of placeholders: a call or an attribute look-up on one raises `LowtideError`."""

    message: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise LowtideError(cls.message)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # looked up by Python itself, `inspect` and `functools`
            raise AttributeError(name)
        raise LowtideError(cls.message)
