"""Counters of the server in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import Any

_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    def __init__(self) -> None:
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(_SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str, text: str) -> list[str]:
        out = [f"# HELP {name} {text}", f"# TYPE {name} histogram"]
        total = 0
        for bound, count in zip((*_SECONDS, None), self._counts, strict=True):
            total += count
            out.append(f'{name}_bucket{{le="{"+Inf" if bound is None else bound}"}} {total}')
        return [*out, f"{name}_sum {self._sum:.6f}", f"{name}_count {total}"]


class Metrics:
    """Counted on the event loop alone, so without a lock."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.first_token = Histogram()
        self.whole = Histogram()
        self.disconnected = 0

    def text(self, stats: Any) -> str:
        """stats: scheduler.SchedulerStats."""
        out: list[str] = []

        def one(name: str, kind: str, text: str, value: float) -> None:
            name = f"mosaic_c_{name}"
            out.extend([f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name} {value}"])

        out += ["# HELP mosaic_c_http_requests_total Answers by path and status.",
                "# TYPE mosaic_c_http_requests_total counter"]  # fmt: skip
        for (path, status), count in sorted(self.requests.items()):
            out.append(f'mosaic_c_http_requests_total{{path="{path}",status="{status}"}} {count}')
        one("disconnects_total", "counter", "Clients that left before the end.", self.disconnected)
        one("requests_running", "gauge", "Requests in the batch.", stats.running)
        one("requests_queued", "gauge", "Requests that wait.", stats.queued)
        for name in ("done", "cancelled", "failed"):
            one(f"requests_{name}_total", "counter", f"Requests {name}.", getattr(stats, name))
        one("prompt_tokens_total", "counter", "Tokens of prompts, evaluated.", stats.tokens_in)
        one(
            "reused_tokens_total",
            "counter",
            "Tokens of prompts, taken from kept states.",
            stats.reused_tokens,
        )
        one("generated_tokens_total", "counter", "Tokens chosen.", stats.tokens_out)
        one("steps_total", "counter", "Steps of the whole batch.", stats.steps)
        one("states_kept", "gauge", "Kept states in memory.", stats.states.kept)
        one("states_bytes", "gauge", "What they take.", stats.states.bytes)
        one("states_on_disk", "gauge", "Kept states in files.", stats.states.on_disk)
        model = stats.model
        one("expert_hits_total", "counter", "Calls of experts that were in memory.", model.hits)
        one("expert_misses_total", "counter", "Calls of experts that were read.", model.misses)
        one("expert_bytes_read_total", "counter", "Bytes of experts read.", model.bytes_read)
        out += self.first_token.lines(
            "mosaic_c_first_token_seconds", "From the body to the first token."
        )
        out += self.whole.lines(
            "mosaic_c_request_seconds", "From the body to the end of the answer."
        )
        return "\n".join(out) + "\n"
