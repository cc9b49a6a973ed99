"""Libraries that take another path when they see fake tensors, asked to take the one of a plain step."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def plain_paths() -> Iterator[None]:
    """A block in which transformers does not notice that its tensors are fake.

    It would build attention masks and repeat keys that a plain step does without, so that the step traced would be
    larger than the one that runs. Where it then asks for numbers there are none, and the trace is made the other way.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    original = getattr(module, "is_fake_tensor", None)
    if module is None or original is None:
        yield
        return
    module.is_fake_tensor = lambda tensor: False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.is_fake_tensor = original  # type: ignore[attr-defined]
