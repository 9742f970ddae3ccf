"""One clear line for what a user can put right, and exit code 2; a traceback for what only we can.

Every ``main`` of this project (``mapd``, ``python -m retrieval_server``, ``python -m protocol_cache``)
runs inside :func:`one_line_errors`.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")

#: Exit codes: bad input, and Ctrl-C as shells report it (128 + SIGINT).
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130

# What the operating system says, in words that name the remedy.
_OS_ERRORS = {
    errno.ENOENT: "no such file",
    errno.EACCES: "permission denied",
    errno.EISDIR: "is a directory, not a file",
    errno.ENOTDIR: "is not a directory",
    errno.ENOSPC: "disk full",
    errno.EDQUOT: "disk quota used up",
    errno.EADDRINUSE: "port already taken",
    errno.EROFS: "file system is read-only",
}


class UserError(Exception):
    """Something the user can put right; its text is one line that names the thing."""


def describe(error: BaseException) -> str | None:
    """The line to print for ``error``, or None when it is no user error but a fault of the program."""
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in _OS_ERRORS:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{_OS_ERRORS[error.errno]}"
    return None


def one_line_errors(program: str) -> Callable[[Callable[P, int | None]], Callable[P, int]]:
    """Decorator of a ``main``: bad input becomes ``PROGRAM: error: ...`` on stderr and exit code 2.

    Any other exception keeps its traceback. ``MAPD_TRACEBACK=1`` keeps it for user errors too.
    """

    def decorate(main: Callable[P, int | None]) -> Callable[P, int]:
        @functools.wraps(main)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> int:
            try:
                return main(*args, **kwargs) or 0
            except KeyboardInterrupt:
                print(f"{program}: interrupted", file=sys.stderr)
                return EXIT_INTERRUPTED
            except BrokenPipeError:
                # The reader of our output (`| head`) has gone; point stdout away so that exit stays silent.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return 0
            except Exception as error:
                line = describe(error)
                if line is None or os.environ.get("MAPD_TRACEBACK") == "1":
                    raise
                print(f"{program}: error: {line}", file=sys.stderr)
                return EXIT_USER_ERROR

        return wrapped

    return decorate


def exit_with(main: Callable[[], int]) -> None:
    """Run a decorated ``main`` as a script."""
    sys.exit(main())
