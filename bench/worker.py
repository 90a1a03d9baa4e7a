"""The process that one provider runs in, and the parent's side of it.

The parent writes one JSON object a line and reads one a line back. A case that outlasts its time
limit costs its worker, which the parent kills with all that it has started, and nothing more.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from . import ledger, workloads
from .workloads import Workload

ROOT = Path(__file__).resolve().parent.parent
STARTUP_SECONDS = 180.0
# An error beyond this is a wrong result, not a less accurate one: it gets no times. Peers may
# multiply float32 in TF32.
WRONG = {"f16": 0.05, "bf16": 0.05, "f32": 5e-3, "f64": 1e-9}


class TimedOut(Exception):
    """No answer came in time; the worker is gone."""


class Died(Exception):
    """The worker ended by itself; the text is the end of what it said."""


class Worker:
    """A child process that answers JSON lines; started on the first request."""

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        self._process: subprocess.Popen[str] | None = None
        self.hello: dict[str, Any] = {}
        self.fresh = True  # whether it has yet to answer a request

    def start(self) -> dict[str, Any]:
        """Start the process unless it runs, and return what it first says."""
        if self._process is None:
            self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
            self._lines: queue.Queue[str | None] = queue.Queue()
            self._process = subprocess.Popen(
                self._arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
                text=True, cwd=ROOT, start_new_session=True,
                # torch would start a compiler process per processor, beside what is being timed.
                env={"TORCHINDUCTOR_COMPILE_THREADS": "1", **os.environ},
            )  # fmt: skip
            self._reader = threading.Thread(
                target=_read, args=(self._process.stdout, self._lines), daemon=True
            )
            self._reader.start()
            self.hello = self.receive(STARTUP_SECONDS)
            self.fresh = True
        return self.hello

    def send(self, request: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended: receive says so

    def receive(self, seconds: float) -> dict[str, Any]:
        """Return the next answer, or end the process and raise."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            self.stop()
            raise TimedOut(f"no result within the time limit of {seconds:.3g} s") from None
        if line is None:
            self._log.seek(0)
            said = self._log.read().strip().splitlines()[-3:]
            self.stop()
            raise Died("worker ended: " + " | ".join(said)[-500:])
        return json.loads(line)

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        self.start()
        self.send(request)
        answer = self.receive(seconds)
        self.fresh = False
        return answer

    def stop(self) -> None:
        """End the process and whatever it has started, compilers included."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._reader.join(10)  # it ends with the pipe
            for stream in (self._process.stdin, self._process.stdout, self._log):
                with contextlib.suppress(OSError):
                    stream.close()  # type: ignore[union-attr]
            self._process = None


def _read(stream: Any, lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def provider_worker(name: str) -> Worker:
    return Worker([sys.executable, "-m", "bench.worker", name])


# --- the child ------------------------------------------------------------------------------


class Child:
    """Runs the cases of one provider on the GPU."""

    def __init__(self, name: str) -> None:
        import cupy

        from .peers import PROVIDERS

        self.provider = PROVIDERS[name]
        self.torch: Any = None
        if self.provider.framework == "torch":
            import torch

            from cupyattn._arrays import external_stream

            self.torch = torch
            torch.set_grad_enabled(False)
            # One stream for all: autograd replays a backward pass on its forward's stream, and a
            # graph can be captured on no other than a stream of one's own.
            self._stream: Any = torch.cuda.Stream()
            torch.cuda.set_stream(self._stream)
            external_stream(self._stream.cuda_stream).use()
        else:
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._stream.use()

    def clock(self, budget: float) -> Any:
        from .timing import Clock

        return Clock(budget)

    def release(self) -> None:
        """Give the memory of the last case back, to this process's libraries and others."""
        import cupy

        gc.collect()
        cupy.cuda.get_current_stream().synchronize()
        cupy.get_default_memory_pool().free_all_blocks()
        if self.torch is not None:
            self.torch.cuda.empty_cache()

    def arrays(self, w: Workload, direction: str) -> dict[str, Any]:
        import cupy

        from . import inputs

        made = inputs.make(w, direction, cupy)
        return inputs.to_torch(made) if self.torch is not None else made

    def address(self, array: Any) -> int:
        return array.data.ptr if self.torch is None else array.data_ptr()

    def compile(self, w: Workload, direction: str) -> dict[str, Any]:
        """Call once, so that what is compiled goes to the disk; `case` reports any failure."""
        with contextlib.suppress(Exception):
            self.provider.bind(w, direction)(self.arrays(w, direction)).call()
        return {"healthy": self._healthy()}

    def case(self, w: Workload, direction: str, budget: float) -> dict[str, Any]:
        """Check and time one case; every failure becomes a note."""
        from .peers import Refusal, stand_in

        row: dict[str, Any] = dict.fromkeys(ledger.MEASURED)
        notes: list[str] = []
        smaller = stand_in(self.provider.name, w)
        try:
            self._case(smaller, direction, budget, row, notes)
        except Refusal as refusal:
            notes.append(str(refusal))
        except Exception as failure:  # noqa: BLE001
            notes.append(_brief(failure))
            row["trace"] = traceback.format_exc()
        if smaller is not w and row["call_us"]:
            ratio = w.flops(direction) / smaller.flops(direction)
            for key in ("graph_us", "call_us", "host_us"):
                if row[key] and key != "host_us":
                    row[key] = [round(t * ratio, 3) for t in row[key]]
            notes.append(f"timed on a grid of {smaller.space} and scaled by the work, x{ratio:.3g}")
        row["note"] = "; ".join(notes)
        row["healthy"] = self._healthy()
        return row

    def _healthy(self) -> bool:
        try:
            self.release()
            return True
        except Exception:  # noqa: BLE001
            return False

    def _case(
        self, w: Workload, direction: str, budget: float, row: dict[str, Any], notes: list[str]
    ) -> None:
        import cupy

        from . import check, inputs, timing

        bind = self.provider.bind(w, direction)
        compared = self.provider.compared
        x = self.arrays(w, direction)
        exact = None
        if compared:  # before the first call, since some providers work in place
            original = inputs.make(w, direction, cupy)
            exact = check.answers(w, direction, original, cupy, exact=True)
            plain = check.answers(w, direction, original, cupy, exact=False)
            row["plain_error"] = check.error(w, direction, plain, exact, cupy)
            del original, plain
            self.release()

        def first() -> Any:
            bound = bind(x)
            return bound, bound.call()

        first_bytes = timing.peak_torch if self.torch is not None else timing.peak_cupy
        bound, outputs = first()
        row["row"] = bound.row
        if exact is not None:
            values = outputs
            values = [bound.finish(v) for v in _listed(values)]
            chosen = check.select(w, inputs.to_cupy(values))
            row["error"] = check.error(w, direction, chosen, exact, cupy)
            del chosen, values
            if not row["error"] <= max(WRONG[w.dtype], 4 * row["plain_error"]):
                notes.append(f"wrong result (error {row['error']:.3g}): not timed")
                row["error"] = row["error"] if math.isfinite(row["error"]) else None
                return
        # Each array once: some providers work in place.
        held = [t for t in [*x.values(), *_listed(outputs)] if t is not None]
        set_bytes = sum({self.address(t): t.nbytes for t in held}.values())
        del bound, outputs
        self.release()
        # Bound and called again now that everything is compiled: temporary and saved arrays.
        (bound, outputs), peak = first_bytes(first)
        own = {self.address(t) for t in x.values()}
        new = [t for t in _listed(outputs) if t is not None and self.address(t) not in own]
        row["peak_bytes"] = max(0, peak - sum(t.nbytes for t in new)) if compared else None
        del outputs, new

        clock = self.clock(budget)
        seconds = clock.estimate(bound.call)
        row["call_us"] = clock.call(bound.call, seconds)
        row["host_us"] = clock.host(bound.call, seconds)
        try:
            sets = clock.sets(set_bytes, peak)
            bounds = [bound, *(bind(self.arrays(w, direction)) for _ in range(sets - 1))]
            functions = [b.capture or b.call for b in bounds]
            capture = timing.capture_cupy if self.torch is None else timing.capture_torch
            times, launch = clock.graph(functions, capture, row["call_us"][0])
            if bound.capture is None or self._right_when_replayed(
                launch, bound, w, direction, exact
            ):
                row["graph_us"] = times
            else:
                notes.append("no graph: its results are wrong")
        except Exception as failure:  # noqa: BLE001
            notes.append("no graph: " + _brief(failure))
            row["trace"] = traceback.format_exc()

    def _right_when_replayed(
        self, launch: Any, bound: Any, w: Workload, direction: str, exact: Any
    ) -> bool:
        """Return whether a replay writes the results over rubbish put in their place."""
        import cupy

        from . import check

        written = _listed(bound.capture())
        for array in written:
            _bits(array).fill(0x5A5A)
        launch()
        return check.error(w, direction, check.select(w, written), exact, cupy) <= WRONG[w.dtype]

    def floors(self, sizes: list[int], budget: float, rates: bool) -> dict[str, Any]:
        """Return the time of copies that move so many bytes, and the product rates."""
        from . import timing

        clock = self.clock(budget)
        copies = []
        for size in sizes:
            copies.append(timing.copy_us(size, clock))
            self.release()
        measured = timing.product_rates(clock) if rates else {}
        self.release()
        return {"copies": copies, "rates": measured}


def _bits(array: Any) -> Any:
    return array.view({2: "uint16", 4: "uint32", 8: "uint64"}[array.itemsize])


def _listed(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


def _brief(failure: Exception) -> str:
    lines = str(failure).strip().splitlines() or [""]
    return f"{type(failure).__name__}: {lines[0]}"[:300]


def main(name: str) -> int:
    # Libraries print as they like: the protocol keeps the real standard output for itself.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    start = time.perf_counter()
    child = Child(name)
    say({**ledger.device_facts(), "startup_s": time.perf_counter() - start})
    for line in sys.stdin:
        request = json.loads(line)
        if request["ask"] == "floors":
            say(child.floors(request["sizes"], request["budget"], request["rates"]))
            continue
        workload, direction = workloads.from_json(request["workload"]), request["direction"]
        if request["ask"] == "compile":
            say(child.compile(workload, direction))
        else:
            say(child.case(workload, direction, request["budget"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
