"""Errors of the sidecar: what stops a start (one line, exit code 2) and what answers a request."""

from __future__ import annotations

import logging
from typing import Any

_log = logging.getLogger("retrieval_server")


class StartupError(Exception):
    """The server can't start or finish loading; the message is one line that names the cause."""


class CorpusError(StartupError):
    """The corpus can't be used; the message names the file and, where there is one, the line."""


class ApiError(Exception):
    """A request that gets an error answer.

    ``status`` is the HTTP status, ``code`` a stable word for programs, ``message`` a sentence for
    people, ``details`` a JSON list with one object for each fault, ``retry_after`` whole seconds.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        details: list[dict[str, Any]] | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.details = details or []
        self.retry_after = retry_after


def log_fault(error: Exception) -> None:
    """A fault of ours with its traceback. Never what the client sent."""
    _log.error("a request failed: %s", type(error).__name__, exc_info=error)
