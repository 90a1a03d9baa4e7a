"""Times of one call: eager, within a CUDA graph, and on the host; and the roofs of the device.

`call` is the time between two events round one eager call, L2 flushed before it. Below some tens
of microseconds that is the host's time, so `graph` gives the device's: many calls, on inputs that
rotate past L2, captured into one graph. `host` is the time until the Python call returns.
"""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np
from cupyx.profiler import benchmark

MOST_SETS = 200
COMPUTE_TYPE_TF32 = 7  # as CuPy numbers it
GRAPH_US = 2000.0  # a graph is at least about this long, where 200 calls suffice


def quantiles(microseconds: Sequence[float]) -> list[float]:
    """Return [p20, median, p80]."""
    return [round(float(x), 3) for x in np.percentile(np.asarray(microseconds), [20, 50, 80])]


class Clock:
    """Takes times on the current stream; `budget` is in seconds for each kind of time."""

    def __init__(self, budget: float) -> None:
        self.budget = budget
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        self.l2_bytes = int(properties["l2CacheSize"]) or 1 << 25
        self._flush_bytes = 4 * self.l2_bytes
        self._flush = cupy.cuda.alloc(self._flush_bytes)

    def flush(self) -> None:
        self._flush.memset_async(0, self._flush_bytes)

    def events(self, function: Callable[[], Any], repeats: int) -> list[float]:
        """Return microseconds of each call; the host runs ahead while L2 is flushed."""
        pairs = []
        for _ in range(repeats):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            self.flush()
            start.record()
            function()
            end.record()
            pairs.append((start, end))
        cupy.cuda.get_current_stream().synchronize()
        return [1000 * cupy.cuda.get_elapsed_time(*pair) for pair in pairs]

    def repeats(self, seconds: float, most: int) -> int:
        """Return how many calls of `seconds` fit the budget; the flush counts as well."""
        return int(np.clip(self.budget / (seconds + 1e-4), 3, most))

    def estimate(self, function: Callable[[], Any]) -> float:
        """Warm up and return about how many seconds one call takes, host and device."""
        cupy.cuda.get_current_stream().synchronize()
        times: list[float] = []
        while len(times) < 10 and sum(times) < self.budget / 4:
            start = time.perf_counter()
            function()
            cupy.cuda.get_current_stream().synchronize()
            times.append(time.perf_counter() - start)
        return min(times)

    def call(self, function: Callable[[], Any], seconds: float) -> list[float]:
        return quantiles(self.events(function, self.repeats(seconds, 100)))

    def host(self, function: Callable[[], Any], seconds: float) -> list[float]:
        result = benchmark(
            function, n_repeat=self.repeats(seconds, 200), n_warmup=2, max_duration=self.budget,
            name="bench",
        )  # fmt: skip
        return quantiles(1e6 * result.cpu_times)

    def sets(self, set_bytes: int, extra_bytes: int) -> int:
        """Return how many input sets it takes to rotate past L2, within half the free memory."""
        wanted = -(-3 * self.l2_bytes // max(set_bytes, 1))
        free = cupy.cuda.runtime.memGetInfo()[0]
        fitting = max(1, int(0.5 * free / max(set_bytes + extra_bytes, 1)))
        return max(1, min(wanted, MOST_SETS, fitting))

    def graph(
        self, functions: Sequence[Callable[[], Any]], capture: Any, call_us: float
    ) -> tuple[list[float], Callable[[], Any]]:
        """Return the device time of one call, and the graph's launch.

        The graph goes round `functions`, which are bound to as many sets of inputs.
        """
        for function in functions:
            function()
        calls = int(np.clip(GRAPH_US / max(call_us, 0.1), len(functions), MOST_SETS))
        calls = -(-calls // len(functions)) * len(functions)
        launch = capture([functions[i % len(functions)] for i in range(calls)])
        launch()
        seconds = self.estimate(launch)
        times = self.events(launch, self.repeats(seconds, 30))
        return quantiles([t / calls for t in times]), launch


def capture_cupy(functions: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    stream = cupy.cuda.get_current_stream()
    stream.begin_capture()
    try:
        for function in functions:
            function()
    finally:
        graph = stream.end_capture()
    graph.upload(stream)
    return lambda: graph.launch(stream)


def capture_torch(functions: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """Capture on torch's current stream; outputs stay alive for a whole round of the inputs."""
    import torch

    graph = torch.cuda.CUDAGraph()
    kept: Any = collections.deque(maxlen=len(set(map(id, functions))))
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for function in functions:
            kept.append(function())

    def launch(kept: Any = kept) -> None:
        graph.replay()

    return launch


class Peak(cupy.cuda.MemoryHook):
    """Follows the live bytes of CuPy's allocations; `peak` is their highest sum."""

    name = "BenchPeak"

    def __init__(self) -> None:
        self.live = self.peak = 0

    def malloc_postprocess(self, **event: Any) -> None:
        self.live += event["mem_size"]
        self.peak = max(self.peak, self.live)

    def free_preprocess(self, **event: Any) -> None:
        self.live -= event["mem_size"]


def peak_cupy(function: Callable[[], Any]) -> tuple[Any, int]:
    """Return the function's result and the most bytes that it held at a time."""
    hook = Peak()
    with hook:
        result = function()
    return result, hook.peak


def peak_torch(function: Callable[[], Any]) -> tuple[Any, int]:
    import torch

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    return result, torch.cuda.max_memory_allocated() - before


def copy_functions(nbytes: int, clock: Clock) -> list[Callable[[], Any]]:
    """Return device copies that read and write `nbytes` in all, on sets rotated past L2."""
    half = max(nbytes // 2, 4)
    sets = clock.sets(2 * half, 0)
    pairs = [(cupy.empty(half, np.int8), cupy.empty(half, np.int8)) for _ in range(sets)]

    def copy(source: Any, target: Any) -> Callable[[], Any]:
        stream = cupy.cuda.get_current_stream()
        return lambda: target.data.copy_from_device_async(source.data, half, stream)

    return [copy(*pair) for pair in pairs]


def copy_us(nbytes: int, clock: Clock) -> float:
    """Return the median device time of a copy that moves `nbytes`.

    The less of the time in a graph and of the time alone: copies of 1 GB have taken half as long
    again in a graph.
    """
    functions = copy_functions(nbytes, clock)
    seconds = clock.estimate(functions[0])
    graph = clock.graph(functions, capture_cupy, 1e6 * seconds)[0]
    return min(graph[1], clock.call(functions[0], seconds)[1])


def product_rates(clock: Clock, size: int = 8192) -> dict[str, float]:
    """Return FLOP/s of square matrix products: bf16, TF32, float64, and a third of TF32."""
    rates = {}
    for name in ("bf16", "tf32", "f64"):
        n = size // 2 if name == "f64" else size
        try:
            rates[name] = _product_rate(name, n, clock)
        except Exception:  # noqa: BLE001 (not every CuPy multiplies bfloat16)
            if name != "bf16":
                raise
            rates[name] = _product_rate("f16", n, clock)  # the units run it at the same rate
    rates["f32"] = rates["tf32"] / 3  # three TF32 products make one near-float32 product
    return rates


def _product_rate(name: str, n: int, clock: Clock) -> float:
    from .inputs import normal

    # Varied values: a product of constants draws less power and would run at a higher clock.
    a = normal(cupy, (n, n), "f32" if name == "tf32" else name, 1, 1.0)
    out = cupy.empty_like(a)
    default = cupy._core.get_compute_type(np.float32)
    if name == "tf32":
        cupy._core.set_compute_type(np.float32, COMPUTE_TYPE_TF32)
    try:
        multiply = functools.partial(cupy.matmul, a, a, out=out)
        seconds = clock.estimate(multiply)
        times = clock.events(multiply, clock.repeats(seconds, 20))
    finally:
        cupy._core.set_compute_type(np.float32, default)
    return 2.0 * n**3 / (1e-6 * float(np.median(times)))
