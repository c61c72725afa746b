"""Errors that the Python layer raises.

Every error a user can cause is a MosaicError: one line that says what was wrong, what was expected,
what was found and the way out, plus a short code that programs can test. Anything else that escapes
is a bug.
"""

from __future__ import annotations

import re


class MosaicError(Exception):
    """A failure with a one-line message and a code such as "EINVAL", "ENOENT" or "EFORMAT"."""

    def __init__(self, message: str, code: str = "EFAIL") -> None:
        # A message may quote a file, a template or a library; it must still print as one line, and as text: what a
        # terminal would obey, or UTF-8 cannot hold, is shown as its escape. Spaces stay: they may be of a file's name.
        line = re.sub(r"\s*[^\S ]\s*", " ", message).strip()
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line))
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
