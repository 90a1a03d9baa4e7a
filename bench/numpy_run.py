"""Times of the NumPy reference, for machines without a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from . import check, inputs, ledger
from .peers import our_call
from .workloads import Workload


def measure(
    cases: list[Workload], directions: list[str], budget: float, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return a row per case and direction, checked against an independent computation."""
    rows = []
    for w in cases:
        for direction in directions:
            say(f"{w.name} {direction}")
            row = {"operator": w.operator, "workload": w.name, "direction": direction,
                   "provider": "cupyattn", "row": "NumPy reference",
                   **dict.fromkeys(k for k in ledger.MEASURED if k != "row")}  # fmt: skip
            rows.append(row)
            _measure(w, direction, budget, row)
    return rows


def _measure(w: Workload, direction: str, budget: float, row: dict[str, Any]) -> None:
    import cupyattn

    x = inputs.make(w, direction, np)
    name, arrays, options = our_call(w, direction, x)

    def call() -> Any:
        return getattr(cupyattn, name)(*arrays, **options)

    outputs = call()
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    exact = check.answers(w, direction, x, np, exact=True)
    plain = check.answers(w, direction, x, np, exact=False)
    row["plain_error"] = check.error(w, direction, plain, exact, np)
    row["error"] = check.error(w, direction, check.select(w, outputs), exact, np)
    if not row["error"] <= 1e-2:
        row["note"] = "wrong result: not timed"
        return
    times: list[float] = []
    while len(times) < 3 or sum(times) < 1e6 * budget and len(times) < 20:
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    low, middle, high = np.percentile(times, [20, 50, 80])
    row["call_us"] = [round(float(low), 3), round(float(middle), 3), round(float(high), 3)]
