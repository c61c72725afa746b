"""What is answered in place of a result: OpenAI's error object, with its status."""

from __future__ import annotations

from typing import Any

from mosaic_c.errors import MosaicError, UsageError


class Problem(Exception):
    """An error for the client. param: the field of the body that is at fault, as `messages[0].role`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        kind: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}
        self.kind = kind or _KINDS.get(
            status, "invalid_request_error" if status < 500 else "server_error"
        )

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def refuse(param: str, message: str, code: str | None = None) -> Problem:
    """400 for a field: the message begins with its name."""
    return Problem(400, f"{param}: {message}", param=param, code=code)


def problem_of(error: BaseException, field: str = "messages") -> Problem:
    """What an error of the engine or of templates means to the client."""
    if isinstance(error, Problem):
        return error
    wait = getattr(error, "retry_after", None)
    if wait is not None:  # the scheduler's queue is full
        return Problem(
            429, str(error), code="queue_full", headers={"Retry-After": str(max(1, round(wait)))}
        )
    if not isinstance(error, MosaicError):
        # The text of what nobody foresaw may quote memory or paths: the log has it, the client does not.
        return Problem(500, "internal error; the server's log says more", code="internal_error")
    if error.code == "ECONTEXT":
        return Problem(400, error.message, param=field, code="context_length_exceeded")
    if error.code in ("ECLOSED", "ECANCEL"):
        return Problem(503, error.message, code="shutting_down")
    if error.code in ("EFULL", "EBUDGET"):  # memory, which other requests hold
        return Problem(503, error.message, code="no_memory", headers={"Retry-After": "5"})
    if isinstance(error, UsageError) or error.code in _CLIENTS:
        return Problem(400, error.message)
    # Names of files and the like are for the log: whoever runs the server reads it.
    return Problem(500, "the engine failed; the server's log says more", code=error.code)


# codes of errors that another request would not meet
_CLIENTS = ("EILSEQ", "ETEMPLATE", "EGRAMMAR")
