"""Replace a file in one step: a reader, or a crash at any moment, finds the old file or the new one, never a half."""

import contextlib
import os
import secrets
from pathlib import Path


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace the file by these bytes; its permissions stay as they were, and a symbolic link keeps pointing there.

    A device or a pipe (``/dev/stdout``) is written to, not replaced.

    Raises:
        OSError: the folder is missing or read-only, or the disk is full; the old file is then untouched.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_file() and not target.is_dir():
        target.write_bytes(data)
        return
    # in the same folder, since a rename is atomic only inside one file system
    temporary = target.with_name(f".{target.name[:64]}.{secrets.token_hex(6)}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            temporary.chmod(target.stat().st_mode & 0o7777)
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    r"""Replace the file by this text in UTF-8, with ``\n`` line ends on every system."""
    write_bytes(path, text.encode("utf-8"))
