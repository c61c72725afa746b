"""Errors that the Python layer raises.

Every error a user can cause is a MosaicError: one line that says what was wrong, what was expected,
what was found and the way out, plus a short code that programs can test. Anything else that escapes
is a bug.
"""

from __future__ import annotations


class MosaicError(Exception):
    """A failure with a one-line message and a code such as "EINVAL", "ENOENT" or "EFORMAT"."""

    def __init__(self, message: str, code: str = "EFAIL") -> None:
        # A message may quote a file or a template; it must still print as one line.
        super().__init__(" ".join(message.split()))
        self.code = code

    @property
    def message(self) -> str:
        """The one-line text; the same as str(error)."""
        return str(self)

    def __reduce__(self) -> tuple[type[MosaicError], tuple[str, str]]:
        return type(self), (str(self), self.code)


class UsageError(MosaicError):
    """A bad argument: calling differently helps (exit status 2 on the command line)."""

    def __init__(self, message: str, code: str = "EINVAL") -> None:
        super().__init__(message, code)
