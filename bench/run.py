"""One invocation on a GPU: its worker processes, its roofs and its rows."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

from . import ledger, workloads
from .peers import PROVIDERS
from .worker import Died, TimedOut, Worker, provider_worker
from .workloads import DIRECTIONS, Workload

DEFAULT_PROVIDERS = ["cupyattn", "naive"]
# These take the longest a case: they come after all others, where `--total` cuts first.
LAST = ("torch_compile", "flex")
FIRST_CASE_SECONDS = 20.0  # on top of the limit: a new process compiles what the checks need
COMPILE_SHARE = 0.35  # of `--total`, after which no further compilation starts
NOT_COMPILED = ", to compile"  # the end of the note of what did not compile in time
LARGE_COPY = 1 << 28


def directions(options: argparse.Namespace) -> list[str]:
    return list(DIRECTIONS) if options.direction == "both" else [options.direction]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def asks_as_much(large: Workload, small: Workload) -> bool:
    """Return whether one workload differs from another by larger sizes and its dtype only."""
    if type(large) is not type(small):
        return False
    for field in dataclasses.fields(large):
        a, b = getattr(large, field.name), getattr(small, field.name)
        if field.name in ("name", "dtype") or a == b:
            continue
        a, b = (x if isinstance(x, tuple) else (x,) for x in (a, b))
        sizes = len(a) == len(b) and all(type(x) is int for x in (*a, *b))
        if not sizes or any(x < y for x, y in zip(a, b, strict=True)):
            return False
    return True


@dataclasses.dataclass(frozen=True)
class NotCompiled:
    """A case that its provider did not compile within a limit, in this run or an earlier one."""

    workload: Workload
    direction: str
    provider: str
    limit: float
    run: str

    def covers(self, w: Workload, direction: str, provider: str) -> bool:
        """Return whether a case would take this provider as long, or longer."""
        return (
            provider == self.provider
            and self.direction in ("forward", direction)  # no backward without a forward
            and asks_as_much(w, self.workload)
        )


def not_compiled(rows: Iterable[dict[str, Any]], gpu: str) -> list[NotCompiled]:
    """Return what the ledger's rows say that the present versions of peers did not compile."""
    found = []
    for row in rows:
        late = re.search(rf"time limit of ([\d.]+) s{NOT_COMPILED}$", row["note"] or "")
        w = workloads.WORKLOADS.get(row["workload"])
        same = row["gpu"] == gpu and row["peer_version"] == ledger.peer_version(row["provider"])
        if late and w and same:
            limit = float(late[1])
            found.append(NotCompiled(w, row["direction"], row["provider"], limit, row["run"]))
    return found


class Run:
    """One invocation on a GPU: its workers, its floors and its rows."""

    def __init__(self, options: argparse.Namespace, cases: list[Workload]) -> None:
        self.begin = time.perf_counter()
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
        self.late: list[NotCompiled] = []
        self.cases = [
            (w, direction, name)
            for last in (False, True)
            for w in cases
            for direction in directions(options)
            for name in self.workers
            if w.operator in PROVIDERS[name].operators and (name in LAST) is last
        ]
        self.rows: list[dict[str, Any]] = []
        self.run = ""
        self.rates: dict[str, float] = {}
        self.copies: dict[int, float] = {}

    def elapsed(self) -> float:
        return time.perf_counter() - self.begin

    def left(self, share: float = 1.0) -> float:
        """Return the seconds until this share of `--total` is spent."""
        return share * (self.options.total or math.inf) - self.elapsed()

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
            earlier = [*self.known, *ledger.read(ledger.path(self.facts["gpu"], committed=True))]
            self.late = not_compiled(earlier, self.facts["gpu"])
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

    def prepare(self) -> None:
        """Start the workers, and let peers compile side by side, before anything is timed.

        What they compile stays in their caches on disk. A workload that a provider does not
        compile within the limit is not tried again, nor is a larger one.
        """
        threads = [threading.Thread(target=self._start, args=(name,)) for name in self.workers]
        threads += self._compilers()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _start(self, name: str) -> bool:
        """Return whether the provider's worker runs, started if need be."""
        if name not in self.dead:
            try:
                self.workers[name].start()
            except (Died, TimedOut) as failure:
                self.dead[name] = f"worker does not start: {failure}"
        return name not in self.dead

    def _compilers(self) -> list[threading.Thread]:
        """Return a thread per compiling process; each provider has its share of them."""
        todo: dict[str, dict[str, Workload]] = {}
        for w, direction, name in self.cases:
            done = (w.name, direction, name) in self.done
            if PROVIDERS[name].compiles and not done and not self._too_late(w, direction, name):
                todo.setdefault(name, {})[w.name] = w
        total = sum(map(len, todo.values()))
        # Each takes one processor; a quarter of them is left to the workers' start.
        jobs = min(12, (os.cpu_count() or 1) * 3 // 4)
        if total < 4 or jobs < 2:
            return []  # the time limit of the cases has room for it
        threads = []
        for name, items in todo.items():
            # From small to large, so that what does not compile saves the trying of the rest.
            ordered = sorted(items.values(), key=lambda w: -w.nbytes("forward"))
            for _ in range(min(len(items), max(1, jobs * len(items) // total))):
                threads.append(threading.Thread(target=self._compile, args=(name, ordered)))
        return threads

    def _compile(self, name: str, todo: list[Workload]) -> None:
        """Compile what is left of a provider's workloads, the last of the list first."""
        worker = provider_worker(name)
        count, begin = 0, self.elapsed()
        try:
            while todo and self.left(COMPILE_SHARE) > 0:
                try:
                    w = todo.pop()
                except IndexError:
                    break  # another thread was quicker
                for direction in directions(self.options):
                    if self._too_late(w, direction, name):
                        continue
                    try:
                        worker.start()
                    except (Died, TimedOut):
                        return  # without this process: the cases have limits of their own
                    limit = min(self.options.compile_limit, max(1.0, self.left()))
                    try:
                        answer = worker.ask(self._request("compile", w, direction), limit)
                        count += 1
                        if not answer["healthy"]:
                            worker.stop()
                    except TimedOut as failure:
                        self.uncompiled[w.name, direction, name] = f"{failure}{NOT_COMPILED}"
                        self.late.append(NotCompiled(w, direction, name, limit, self.run))
                    except Died:
                        break  # its case will say why
        finally:
            worker.stop()
        say(f"{name}: {count} cases compiled by one process in {self.elapsed() - begin:.0f} s")

    def _too_late(self, w: Workload, direction: str, name: str) -> bool:
        """Note why a case is not to be tried where as large a one did not compile in time."""
        for late in self.late:
            if late.limit >= self.options.compile_limit and late.covers(w, direction, name):
                earlier = "" if late.run == self.run else f" (run {late.run})"
                self.uncompiled.setdefault(
                    (w.name, direction, name),
                    f"not tried: {late.workload.name} {late.direction} did not compile within "
                    f"{late.limit:.3g} s{earlier}",
                )
                return True
        return False

    def _request(self, ask: str, w: Workload, direction: str) -> dict[str, Any]:
        return {
            "ask": ask,
            "workload": workloads.to_json(w),
            "direction": direction,
            "budget": self.budget,
        }

    def measure(self, w: Workload, direction: str, name: str) -> dict[str, Any] | None:
        """Return what the provider's worker says, or a row whose note says why it says nothing.

        None if `--total` ran out meanwhile: that says nothing of the provider.
        """
        if name in self.dead:
            return {"note": self.dead[name]}
        self._too_late(w, direction, name)
        if (w.name, direction, name) in self.uncompiled:
            return {"note": self.uncompiled[w.name, direction, name]}
        for row in self.rows:
            same = row["workload"] == w.name and row["provider"] == name
            if same and "time limit" in row["note"] and direction == "backward":
                return {"note": "not tried: the forward call outlasted the time limit"}
        if not self._start(name):
            return {"note": self.dead[name]}
        worker = self.workers[name]
        limit = self.options.limit + (FIRST_CASE_SECONDS if worker.fresh else 0)
        try:
            request = self._request("case", w, direction)
            result = worker.ask(request, min(limit, max(1.0, self.left())))
        except (Died, TimedOut) as failure:
            cut = isinstance(failure, TimedOut) and self.left() <= 0
            return None if cut else {"note": str(failure)}
        if not result.pop("healthy"):
            worker.stop()
        if trace := result.pop("trace", None):
            say(trace)
        return result

    def execute(self) -> list[dict[str, Any]]:
        self.prepare()
        try:
            for count, (w, direction, name) in enumerate(self.cases, 1):
                if (w.name, direction, name) in self.done:
                    continue
                begin = self.elapsed()
                measured = self.measure(w, direction, name) if self.left() >= 1 else None
                if measured is None:
                    say(f"{len(self.cases) - count + 1} cases left after {begin:.0f} s: stopped")
                    break
                row = {
                    "run": self.run, "operator": w.operator, "workload": w.name,
                    "direction": direction, "provider": name, **dict.fromkeys(ledger.MEASURED),
                    **measured, "floor_us": self.floor(w, direction),
                    "peer_version": ledger.peer_version(name),
                    **{key: self.facts[key] for key in ("gpu", "driver", "cuda", "cupy", "torch")},
                    "commit": self.commit, "dirty": self.dirty,
                }  # fmt: skip
                self.rows.append(row)
                if self.options.save:
                    ledger.append(self.file, row)
                end = self.elapsed()
                graph, call = (ledger.median(row, key) for key in ("graph_us", "call_us"))
                say(
                    f"[{count}/{len(self.cases)}] {end:.0f} s: {w.name} {direction} "
                    f"{name}: {end - begin:.1f} s, graph {graph} us, call {call} us "
                    f"{row['note'] or ''}"
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
