#!/usr/bin/env python3
"""Ask a server for its health at a steady pace, from a process of its own.

    python scripts/server_probe.py PORT [--per-second 20]

It goes on until stdin ends. Then it writes a JSON object: `ms`, the milliseconds that each response took, and `wrong`, the
number of those that were not status 200.
"""

from __future__ import annotations

import argparse
import http.client
import json
import select
import sys
import time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int, metavar="PORT")
    parser.add_argument("--per-second", type=float, default=20.0, metavar="N", help="default: %(default)g")
    arguments = parser.parse_args()
    times: list[float] = []
    wrong = 0
    due = time.perf_counter()
    while not select.select([sys.stdin], [], [], max(0.0, due - time.perf_counter()))[0]:
        begin = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", arguments.port, timeout=60)
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            response.read()
            wrong += response.status != 200
        except (OSError, http.client.HTTPException):
            wrong += 1
        finally:
            connection.close()
        times.append(1000 * (time.perf_counter() - begin))
        # After a response that was late, the next one is not at once.
        due = max(due + 1 / arguments.per_second, time.perf_counter())
    print(json.dumps({"ms": times, "wrong": wrong}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
