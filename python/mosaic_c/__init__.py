"""mosaic_c: runs Mixture-of-Experts language models far larger than memory.

with mosaic_c.open("Qwen3.6-35B-A3B-FP8", ram="8G") as model:
    for piece in model.generate("Once upon a time", max_new_tokens=64):
        print(piece.text, end="", flush=True)
"""

from __future__ import annotations

from mosaic_c.errors import MosaicError, UsageError

TYPE_CHECKING = False  # of typing, whose import takes longer than all else here
if TYPE_CHECKING:
    from typing import Any

    from mosaic_c.model import Model, Session
    from mosaic_c.opening import open_model as open

__version__ = "0.1.0"
__all__ = ["Model", "MosaicError", "Session", "UsageError", "__version__", "open"]


def __getattr__(name: str) -> Any:
    """Loads the engine when it is first used, so that importing the package costs nothing."""
    if name in ("open", "Model", "Session"):
        from mosaic_c import model, opening

        return {"open": opening.open_model, "Model": model.Model, "Session": model.Session}[name]
    raise AttributeError(f"module 'mosaic_c' has no attribute {name!r}")
