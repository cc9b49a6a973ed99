"""The disk tier: tensors in files, in a folder that is deleted with its process.

`store.tiers` writes a unit here when the tiers above are full, and reads it back in the backward. Each store has a
folder (mode 0700) with a lock file; the operating system releases the lock when the process ends, also after a crash.
The next `SpillFolder` in the same parent folder deletes folders whose lock is free.

Files are written with `write` and not through a memory map: on a full disk `write` raises, and a map kills the process.
A checksum per file detects damage. Reads and writes block the host.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from lowtide.errors import StoreError
from lowtide.store import codecs
from lowtide.store.transfer import Parts
from lowtide.units import format_bytes


def free_disk_bytes(folder: str | os.PathLike[str] | None) -> int:
    """Free bytes on the disk that holds `folder`, or the system's temporary folder."""
    path = Path(tempfile.gettempdir() if folder is None else folder)
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


_PREFIX = "lowtide-spill-"
_UNLOCKED_PREFIX = ".lowtide-new-"
_LOCK_NAME = "lock"


@dataclass(frozen=True)
class SpilledFile:
    """The parts of a value, written to one file."""

    path: Path
    shapes: tuple[tuple[torch.Size, torch.dtype], ...]
    nbytes: int
    checksum: int


class SpillFolder:
    """A folder of spilled values. Deleted by `close`, at exit, and after a crash by the next `SpillFolder`."""

    def __init__(self, parent: str | os.PathLike[str] | None = None) -> None:
        base = Path(tempfile.gettempdir() if parent is None else parent)
        try:
            base.mkdir(parents=True, exist_ok=True)
            _remove_orphans(base)
            unlocked = Path(tempfile.mkdtemp(prefix=_UNLOCKED_PREFIX, dir=base))  # mode 0700
            self._lock = open(unlocked / _LOCK_NAME, "w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Renamed once it is locked: another process deletes unlocked folders of the final name.
            self.path = unlocked.rename(base / unlocked.name.replace(_UNLOCKED_PREFIX, _PREFIX))
        except OSError as error:
            raise StoreError(f"cannot make a spill folder in {base}: {error}. Give another with folder=.") from error
        self._count = 0
        self._owner_pid = os.getpid()
        self._finalizer = weakref.finalize(self, _remove, self.path, self._lock, os.getpid())

    def write(self, parts: Parts) -> SpilledFile:
        """Write CPU tensors to a new file. A failed write deletes it and raises `StoreError`."""
        self._count += 1
        path = self.path / f"{self._count}.bin"
        checksum, nbytes = 0, 0
        try:
            with open(path, "xb") as file:
                for part in parts:
                    view = _buffer(part.contiguous())
                    checksum = zlib.crc32(view, checksum)
                    nbytes += file.write(view)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            size = format_bytes(sum(part.nbytes for part in parts))
            raise StoreError(f"could not spill {size} to {path}: {error}. Free space there or lower disk=.") from error
        return SpilledFile(path, tuple((part.shape, part.dtype) for part in parts), nbytes, checksum)

    def read(self, spilled: SpilledFile) -> Parts:
        """The parts as CPU tensors; a missing or damaged file raises `StoreError`."""
        parts, checksum = [], 0
        try:
            with open(spilled.path, "rb") as file:
                for shape, dtype in spilled.shapes:
                    part = torch.empty(shape, dtype=dtype)
                    view = _buffer(part)
                    if file.readinto(view) != len(view):
                        raise EOFError("the file is shorter than what was written")
                    checksum = zlib.crc32(view, checksum)
                    parts.append(part)
        except (OSError, EOFError) as error:
            raise StoreError(
                f"cannot read back {format_bytes(spilled.nbytes)} from {spilled.path}: {error}. Was the spill folder "
                "removed while in use? The step has to be run again."
            ) from error
        if checksum != spilled.checksum:
            raise StoreError(
                f"{spilled.path} is damaged: its checksum is {checksum:#010x} and was {spilled.checksum:#010x}. "
                "The step has to be run again; check the disk."
            )
        return tuple(parts)

    def remove(self, spilled: SpilledFile) -> None:
        if os.getpid() == self._owner_pid:  # a forked child has copied this object, but not the files
            with contextlib.suppress(FileNotFoundError):
                spilled.path.unlink()

    def close(self) -> None:
        self._finalizer()


def _buffer(part: torch.Tensor) -> memoryview:
    return memoryview(codecs.as_bytes(part.view(-1)).numpy())  # type: ignore[arg-type]


def _remove(path: Path, lock: IO[str], owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # a forked child must not delete its parent's files when it exits
        shutil.rmtree(path, ignore_errors=True)
    lock.close()


def _remove_orphans(base: Path) -> None:
    for folder in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid() or folder.is_symlink():
                continue
            with open(folder / _LOCK_NAME) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its process lives
                shutil.rmtree(folder, ignore_errors=True)
