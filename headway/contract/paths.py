"""Whether something is at a path: an error of the disk is not an absence."""

from __future__ import annotations

import os


def is_absent(path: str | os.PathLike[str]) -> bool:
    """Return whether certainly nothing, not even a broken link, is at `path`.

    Only ENOENT and ENOTDIR mean that. After any other error something may be there, and reading it
    raises the error.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no path of a file
        return True
    except OSError:
        return False
    return False
