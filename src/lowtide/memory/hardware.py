"""How much memory and disk there is."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path


def host_bytes() -> int:
    """The memory this process may use: the machine's, or its control group's if that is less."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


def free_disk_bytes(folder: str | os.PathLike[str] | None) -> int:
    """What is free where the disk tier would write."""
    path = Path(tempfile.gettempdir() if folder is None else folder)
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free
