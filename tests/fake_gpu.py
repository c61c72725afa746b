"""A GPU for tests of the Python layer: every call of the engine that would touch one is replaced."""

from __future__ import annotations

from typing import Any

from mosaic_c import engine, engine_pure
from mosaic_c.errors import MosaicError

GIB, MIB = 1 << 30, 1 << 20
WHY = "this build has no GPU tier: built without nvcc"


class FakeGpu:
    """8 GiB, of which 7 are free. slot: VRAM of an expert; work, host: beside slots. tiers: what stores were given;
    counters: fields of mc_stats that every engine shows; events: calls in their order."""

    def __init__(self, monkeypatch: Any) -> None:
        self.info = {
            "name": "Test GPU", "total": 8 * GIB, "free": 7 * GIB, "devices": 1, "capability": 86,
            "driver": 13000, "runtime": 12040,
        }  # fmt: skip
        self.slot, self.work, self.host = 3 * MIB, 10 * MIB, 5 * MIB
        self.probe_error: MosaicError | None = None
        self.tier_error: MosaicError | None = None
        self.tiers: list[tuple[int, int, int, int]] = []
        self.events: list[str] = []
        self.counters: dict[str, Any] = {}
        stats, opened = engine.Engine.stats, engine.Store.open

        def counted(this: engine.Engine) -> Any:
            c = stats(this)
            for name, value in self.counters.items():
                setattr(c, name, value)
            return c

        def store_open(this: engine.Store, slots: int, ahead: int = 0) -> None:
            self.events.append("open")
            opened(this, slots, ahead)

        monkeypatch.setattr(engine, "gpu", lambda: None)
        monkeypatch.setattr(engine, "gpu_probe", self.probe)
        monkeypatch.setattr(engine_pure, "tier_slot", lambda experts: self.slot)
        monkeypatch.setattr(engine_pure, "tier_work", lambda *args: (self.work, self.host))
        monkeypatch.setattr(engine.Store, "tier", lambda this, *args: self.tier(*args))
        monkeypatch.setattr(engine.Store, "open", store_open)
        monkeypatch.setattr(engine.Engine, "stats", counted)

    def probe(self, device: int = 0) -> dict[str, Any]:
        self.events.append("probe")
        if self.probe_error is not None:
            raise self.probe_error
        if device >= self.info["devices"]:
            raise MosaicError(f"GPU {device}: there are {self.info['devices']}", "ERANGE")
        return dict(self.info)

    def tier(self, device: int, after: int, window: int, size: int) -> None:
        self.events.append("tier")
        if self.tier_error is not None:
            raise self.tier_error
        self.tiers.append((device, after, window, size))
