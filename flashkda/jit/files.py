# SPDX-License-Identifier: Apache-2.0
"""Files that appear whole or not at all, and the lock that their writers hold."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def write_whole(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Put a file in place. Call under the lock of its writers: what a killed one left is taken away first.

    Raises OSError; `path` is then as it was.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    try:
        with open(os.open(temporary, _CREATE, mode), "wb") as file:
            os.fchmod(file.fileno(), mode)  # whatever the umask leaves
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


@contextlib.contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """Holds a lock between processes, which ends with its process. Raises TimeoutError where another keeps it, OSError
    or NotImplementedError where there can be none."""
    from filelock import FileLock, Timeout

    lock = FileLock(path, mode=0o600)
    try:
        lock.acquire(timeout=seconds)
    except Timeout as error:
        raise TimeoutError(f"another process holds {path}") from error
    try:
        yield
    finally:
        lock.release()
