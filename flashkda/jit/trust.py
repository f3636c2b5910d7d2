# SPDX-License-Identifier: Apache-2.0
"""Whether a file on disk may become code of this process: read through folders that nobody else can write to.

See docs/security.md for what this protects from.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_COMMON = os.O_RDONLY | os.O_CLOEXEC
_OPEN_FOLDER = _COMMON | os.O_DIRECTORY
# Without O_NONBLOCK a FIFO of that name would hold the process up.
_OPEN_FILE = _COMMON | os.O_NOFOLLOW | os.O_NONBLOCK


class Untrusted(Exception):
    """A file is refused: `path` is what is wrong, the file or a folder above it; the text has the way out."""

    def __init__(self, path: Path, what: str, way_out: str) -> None:
        self.path = path
        super().__init__(f"{path} {what}: {way_out}")


@contextlib.contextmanager
def open_trusted(root: Path, name: str) -> Iterator[int]:
    """A descriptor, open for reading, of the regular file `name` ("sm_90a/file") in the folder `root`.

    Each folder is opened inside the one before it, and what was opened is what is checked, so no rename in between can
    put another file in its place. Links are followed on the way to `root`, never below it. Raises Untrusted, and
    OSError as open does.
    """
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in name:
        raise Untrusted(root, f"names the file {name!r}, which may lie outside of it", "build it again")
    path = root
    descriptor = os.open(root, _OPEN_FOLDER)
    try:
        _check(descriptor, path)
        for i, part in enumerate(parts, start=1):
            path = path / part
            flags = _OPEN_FILE if i == len(parts) else _OPEN_FOLDER | os.O_NOFOLLOW
            try:
                inner = os.open(part, flags, dir_fd=descriptor)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
                    raise Untrusted(path, "is a symbolic link", "put the file itself there") from error
                error.filename = str(path)
                raise
            os.close(descriptor)
            descriptor = inner
            _check(descriptor, path, file=i == len(parts))
        yield descriptor
    finally:
        os.close(descriptor)


def read_trusted(root: Path, name: str) -> bytes:
    """The content of a file that open_trusted opens. Raises Untrusted and OSError."""
    with open_trusted(root, name) as descriptor:
        return read_all(descriptor)


def read_all(descriptor: int) -> bytes:
    """All that is in an open file."""
    with open(descriptor, "rb", buffering=0, closefd=False) as file:
        return file.readall()


def _check(descriptor: int, path: Path, *, file: bool = False) -> None:
    status = os.fstat(descriptor)
    if file and not stat.S_ISREG(status.st_mode):
        raise Untrusted(path, "is not a regular file", "remove it")
    # Access control lists show in the bits of the group.
    if status.st_mode & 0o022:
        mode = stat.S_IMODE(status.st_mode)
        raise Untrusted(path, f"can be written to by others (mode {mode:04o})", f"chmod go-w '{path}'")
    if status.st_uid not in (0, os.geteuid()):
        text = f"belongs to user {status.st_uid}, not to user {os.geteuid()} or root"
        raise Untrusted(path, text, "use a copy of your own, or have its owner changed")
