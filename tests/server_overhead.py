"""What the server costs a token: python tests/server_overhead.py [MODEL] [--rounds N] [--tokens N] [--ram SIZE]

One process has the model. In turns it runs the loop of `generate`, the scheduler alone, and a request by HTTP whose
client, a process of its own, notes when each token comes. Time a token is that between the first and the last. Printed
are medians, and the median of each round's ratio to `generate` in the same round; beside them the CPU time of the
process, all threads, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

CLIENT = """
import json, socket, sys, time
port, body = int(sys.argv[1]), sys.argv[2].encode()
for line in sys.stdin:
    sock = socket.create_connection(("127.0.0.1", port))
    head = "POST /v1/completions HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\nContent-Length: %d\\r\\n\\r\\n"
    sock.sendall((head % len(body)).encode() + body)
    times, rest = [], b""
    while True:
        part = sock.recv(65536)
        if not part:
            break
        now = time.perf_counter()
        rest += part
        *events, rest = rest.split(b"\\n\\n")
        times += [now for e in events if b'"finish_reason":null' in e]
    print(times[-1] - times[0], len(times), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--ram", default="400M")
    args = parser.parse_args()

    from helpers_server import running

    import mosaic_c
    from mosaic_c import sampling
    from mosaic_c.errors import MosaicError
    from mosaic_c.generation import Piece
    from mosaic_c.scheduler import Scheduler
    from mosaic_c.server.prompts import Prompter
    from mosaic_c.states import States
    from mosaic_c.ticket import Request

    def none() -> object:
        raise MosaicError("no grammars here", "EGRAMMAR")

    with mosaic_c.open(args.model, ram=args.ram, sessions=2) as model:
        ids = model.tokenizer.encode("Once upon a time")
        body = {
            "prompt": ids,
            "max_tokens": args.tokens,
            "stream": True,
            "ignore_eos": True,
            "temperature": 0,
        }
        prompts = Prompter(
            model.tokenizer, room=model.ctx, vocab=model.vocab, config=model.config,
            generation_config=model.generation_config, grammars=none,
        )  # fmt: skip
        scheduler = Scheduler(model, States(model, 8 << 20))

        def loop() -> float:
            out = model.generate(ids, max_new_tokens=args.tokens, temperature=0, ignore_eos=True)
            times = [time.perf_counter() for _ in out]
            out.session.close()
            return (times[-1] - times[0]) / (len(times) - 1)

        def scheduled() -> float:
            settings = sampling.resolve({}, temperature=0)
            ticket = scheduler.submit(Request(ids, settings, args.tokens, ignore_eos=True))
            times = [time.perf_counter() for e in ticket.events() if isinstance(e, Piece)]
            return (times[-1] - times[0]) / (len(times) - 1)

        with (
            running(scheduler, prompts) as server,
            subprocess.Popen(
                [sys.executable, "-c", CLIENT, str(server.port), json.dumps(body)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            ) as client,
        ):

            def served() -> float:
                client.stdin.write("\n")
                client.stdin.flush()
                seconds, count = client.stdout.readline().split()
                return float(seconds) / (int(count) - 1)

            ways = {"generate": loop, "scheduler": scheduled, "server": served}
            rows: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
            for n in range(args.rounds + 1):
                for name, run in ways.items():
                    cpu = time.process_time()
                    took = run()
                    cpu = (time.process_time() - cpu) / args.tokens
                    if n:  # the first round warms up
                        rows[name].append((took, cpu))
            client.stdin.close()
        for name, row in rows.items():
            shown = []
            for what, at in (("", 0), (" of CPU", 1)):
                ratio = statistics.median(
                    r[at] / g[at] for r, g in zip(row, rows["generate"], strict=True)
                )
                shown.append(
                    f"{1e3 * statistics.median(r[at] for r in row):.3f} ms a token{what} {ratio - 1:+.1%}"
                )
            print(f"{name:10}", "  ".join(shown), [f"{1e3 * r[0]:.2f}" for r in row])


if __name__ == "__main__":
    main()
