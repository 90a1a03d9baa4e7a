"""One invocation on a GPU: its worker processes, its roofs and its rows."""

from __future__ import annotations

import argparse
import os
import queue
import sys
import threading
import time
from typing import Any

from . import ledger, workloads
from .peers import PROVIDERS
from .worker import Died, TimedOut, Worker, provider_worker
from .workloads import DIRECTIONS, Workload

DEFAULT_PROVIDERS = ["cupyattn", "naive"]
FIRST_CASE_SECONDS = 20.0  # on top of the limit: a new process compiles what the checks need
LARGE_COPY = 1 << 28


def directions(options: argparse.Namespace) -> list[str]:
    return list(DIRECTIONS) if options.direction == "both" else [options.direction]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Run:
    """One invocation on a GPU: its workers, its floors and its rows."""

    def __init__(self, options: argparse.Namespace, cases: list[Workload]) -> None:
        self.options = options
        self.budget = min(0.2, options.limit / 50)
        self.workers = {}
        names = options.provider or DEFAULT_PROVIDERS
        for name in PROVIDERS if "all" in names else names:
            missing = PROVIDERS[name].missing()
            if missing:
                say(f"{name}: left out: {missing}")
            elif any(w.operator in PROVIDERS[name].operators for w in cases):
                self.workers[name] = provider_worker(name)
        self.dead: dict[str, str] = {}  # providers whose worker does not start
        self.uncompiled: dict[tuple[str, str, str], str] = {}  # case: the reason
        self.cases = [
            (w, direction, name)
            for w in cases
            for direction in directions(options)
            for name in self.workers
            if w.operator in PROVIDERS[name].operators
        ]
        self.rows: list[dict[str, Any]] = []
        self.run = ""
        self.rates: dict[str, float] = {}
        self.copies: dict[int, float] = {}

    def start(self) -> None:
        """Learn what the device is and measure its roofs, in a worker of their own."""
        roofs = provider_worker("copy")
        try:
            self.facts = roofs.start()
            self.file = ledger.path(self.facts["gpu"])
            self.known = ledger.read(self.file)
            self.run = ledger.join_run(self.options.run, self.known, self.facts["gpu"])
            self.done = {
                (row["workload"], row["direction"], row["provider"])
                for row in self.known
                if row["run"] == self.run
            }
            self.commit, self.dirty = ledger.commit()
            say(f"{environment(self.facts)}; run {self.run}; {len(self.cases)} cases")
            self._measure_roofs(roofs)
        except (Died, TimedOut, KeyError) as failure:
            if not self.run:
                raise
            say(f"no floors: {failure}")
        finally:
            roofs.stop()

    def _measure_roofs(self, roofs: Worker) -> None:
        answer = roofs.ask(self._floors([LARGE_COPY], True), 120.0)
        self.rates, copy = answer["rates"], answer["copies"][0]
        bandwidth = LARGE_COPY / copy  # bytes per microsecond
        sizes = set()
        for w, direction, _ in self.cases:
            # A copy can only be the floor where it takes about as long as the work.
            nbytes = w.nbytes(direction)
            if w.memory_bound or self._work(w, direction) < 2 * nbytes / bandwidth + 5:
                sizes.add(nbytes)
        ordered = sorted(sizes)
        answer = roofs.ask(self._floors(ordered, False), 60.0 + len(ordered))
        self.copies = dict(zip(ordered, answer["copies"], strict=True))
        print(
            f"roofs: copy {bandwidth / 1e6:.2f} TB/s; products bf16 {self.rates['bf16'] / 1e12:.0f}"
            f", TF32 {self.rates['tf32'] / 1e12:.0f}, float64 {self.rates['f64'] / 1e12:.0f}"
            " TFLOP/s",
            flush=True,
        )

    def _floors(self, sizes: list[int], rates: bool) -> dict[str, Any]:
        return {"ask": "floors", "sizes": sizes, "budget": 0.05, "rates": rates}

    def _work(self, w: Workload, direction: str) -> float:
        """Return the microseconds of the useful work at the product rate."""
        return 0.0 if w.memory_bound else 1e6 * w.flops(direction) / self.rates[w.rate]

    def floor(self, w: Workload, direction: str) -> float | None:
        if not self.rates:
            return None
        copy = self.copies.get(w.nbytes(direction), 0.0)
        return round(max(copy, self._work(w, direction)), 3) or None

    def compile(self) -> None:
        """Let peers compile side by side, before anything is timed.

        What they compile stays in their caches on disk; a workload that one of them does not
        compile within the limit is not tried again.
        """
        items: dict[tuple[str, str], Workload] = {
            (w.name, name): w
            for w, direction, name in self.cases
            if PROVIDERS[name].compiles and (w.name, direction, name) not in self.done
        }
        jobs = min(8, (os.cpu_count() or 1) // 2, len(items))
        if len(items) < 4 or jobs < 2:
            return  # the time limit of the cases has room for it
        # Those that take the longest first.
        todo: queue.SimpleQueue[tuple[str, Workload]] = queue.SimpleQueue()
        ordered = sorted(
            items.items(),
            key=lambda item: (item[1].operator != "multi_token", -item[1].nbytes("forward")),
        )
        for (_, name), w in ordered:
            todo.put((name, w))
        begin = time.perf_counter()
        threads = [threading.Thread(target=self._compile, args=(todo,)) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        say(f"{len(items)} workloads compiled in {time.perf_counter() - begin:.0f} s")

    def _compile(self, todo: queue.SimpleQueue[tuple[str, Workload]]) -> None:
        own: dict[str, Worker] = {}
        try:
            while True:
                try:
                    name, w = todo.get_nowait()
                except queue.Empty:
                    return
                worker = own.setdefault(name, provider_worker(name))
                left = directions(self.options)
                try:
                    worker.start()
                    while left:
                        direction = left[0]
                        request = self._request("compile", w, direction)
                        if not worker.ask(request, self.options.compile_limit)["healthy"]:
                            worker.stop()
                            worker.start()
                        del left[0]
                except TimedOut as failure:
                    for direction in left:
                        self.uncompiled[w.name, direction, name] = f"{failure}, to compile"
                except Died:
                    continue  # its case will say why
        finally:
            for worker in own.values():
                worker.stop()

    def _request(self, ask: str, w: Workload, direction: str) -> dict[str, Any]:
        return {
            "ask": ask,
            "workload": workloads.to_json(w),
            "direction": direction,
            "budget": self.budget,
        }

    def measure(self, w: Workload, direction: str, name: str) -> dict[str, Any]:
        """Return what the provider's worker says, or a row whose note says why it says nothing."""
        if name in self.dead:
            return {"note": self.dead[name]}
        if (w.name, direction, name) in self.uncompiled:
            return {"note": self.uncompiled[w.name, direction, name]}
        for row in self.rows:
            same = row["workload"] == w.name and row["provider"] == name
            if same and "time limit" in row["note"] and direction == "backward":
                return {"note": "not tried: the forward call outlasted the time limit"}
        worker = self.workers[name]
        try:
            worker.start()
        except (Died, TimedOut) as failure:
            self.dead[name] = f"worker does not start: {failure}"
            return {"note": self.dead[name]}
        try:
            limit = self.options.limit + (FIRST_CASE_SECONDS if worker.fresh else 0)
            result = worker.ask(self._request("case", w, direction), limit)
        except (Died, TimedOut) as failure:
            return {"note": str(failure)}
        if not result.pop("healthy"):
            worker.stop()
        if trace := result.pop("trace", None):
            say(trace)
        return result

    def execute(self) -> list[dict[str, Any]]:
        begin = time.perf_counter()
        self.compile()
        try:
            for count, (w, direction, name) in enumerate(self.cases, 1):
                if (w.name, direction, name) in self.done:
                    continue
                elapsed = time.perf_counter() - begin
                if self.options.total and elapsed > self.options.total:
                    say(f"{len(self.cases) - count + 1} cases left after {elapsed:.0f} s: stopped")
                    break
                row = {
                    "run": self.run, "operator": w.operator, "workload": w.name,
                    "direction": direction, "provider": name, **dict.fromkeys(ledger.MEASURED),
                    **self.measure(w, direction, name), "floor_us": self.floor(w, direction),
                    "peer_version": ledger.peer_version(name),
                    **{key: self.facts[key] for key in ("gpu", "driver", "cuda", "cupy", "torch")},
                    "commit": self.commit, "dirty": self.dirty,
                }  # fmt: skip
                self.rows.append(row)
                if self.options.save:
                    ledger.append(self.file, row)
                took = time.perf_counter() - begin - elapsed
                graph, note = ledger.median(row, "graph_us"), row["note"] or ""
                say(
                    f"[{count}/{len(self.cases)}] {elapsed + took:.0f} s: {w.name} {direction} "
                    f"{name}: {took:.1f} s, graph {graph} us, call {ledger.median(row, 'call_us')}"
                    f" us {note}"
                )
        finally:
            for worker in self.workers.values():
                worker.stop()
        return self.rows


def environment(facts: dict[str, Any]) -> str:
    import platform

    return (
        f"{facts['gpu']}, driver {facts['driver']}, CUDA {facts['cuda']}, CuPy {facts['cupy']}, "
        f"torch {facts['torch']}, Python {platform.python_version()}"
    )
