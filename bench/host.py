"""Time until a call of each operation returns, against the smallest call of torch."""

from __future__ import annotations

from typing import Any

from cupyattn._arrays import external_stream

from . import inputs, workloads
from .peers import our_call
from .workloads import Workload

CASES = [
    "rope/s2048-h512-bf16",
    "mta/b2-c4-k3-l64-bf16",
    "fused_na/b2-s64-h512-n8-k7-d1-f32",
    "na/3d-small-causal",
]


def main(cases: list[Workload] | None = None, seconds: float = 0.3) -> int:
    """Print the host's microseconds per call, with and without ``out=``, and as a plan.

    Each row has the time of torch's ``z.add_(1)``, taken before and after it.
    """
    import cupy

    cupy.cuda.Stream(non_blocking=True).use()
    torch = torch_on_our_stream()
    z = None if torch is None else torch.zeros(1, device="cuda")
    print(f"{'workload':<36}{'direction':<11}{'arrays':<8}{'call us':>9}{'out= us':>9}"
          f"{'plan us':>9}{'add_ us':>9}{'call / add_':>13}{'out= / add_':>13}")  # fmt: skip
    for w in cases or [workloads.WORKLOADS[name] for name in CASES]:
        for direction in workloads.DIRECTIONS:
            arrays = inputs.make(w, direction, cupy)
            kinds = [("CuPy", arrays)]
            if torch is not None:
                kinds.append(("torch", inputs.to_torch(arrays)))
            for kind, x in kinds:
                line = f"{w.name:<36}{direction:<11}{kind:<8}"
                try:
                    # A host's clock wanders: torch is timed beside every row, not once.
                    around = [_add(z, seconds)]
                    times = _times(w, direction, x, seconds)
                    around.append(_add(z, seconds))
                    add = sum(around) / 2 if z is not None else None
                    line += "".join(f"{t:9.2f}" if t else f"{'-':>9}" for t in (*times, add))
                    line += "".join(f"{t / add:13.2f}" for t in times[:2] if add)
                except Exception as failure:  # noqa: BLE001 (must not hide the others)
                    line += f"  {type(failure).__name__}: {str(failure).splitlines()[0:1]}"
                print(line, flush=True)
    return 0


def _times(w: Any, direction: str, x: dict[str, Any], seconds: float) -> list[float | None]:
    import cupyattn

    name, arrays, options = our_call(w, direction, x)
    function = getattr(cupyattn, name)
    out = function(*arrays, **options)
    plan = None
    try:
        recompute = cupyattn.plan(name, *arrays, **options)
        plan = _host(recompute, seconds)
    except Exception as failure:  # noqa: BLE001
        print(f"no plan for {name}: {type(failure).__name__}: {failure}")
    return [
        _host(lambda: function(*arrays, **options), seconds),
        _host(lambda: function(*arrays, out=out, **options), seconds),
        plan,
    ]


def _add(z: Any, seconds: float) -> float:
    """Time the smallest call of torch (0 without torch)."""
    return 0.0 if z is None else _host(lambda: z.add_(1), seconds)


def _host(function: Any, seconds: float) -> float:
    import numpy as np
    from cupyx.profiler import benchmark

    result = benchmark(function, n_repeat=2000, n_warmup=20, max_duration=seconds, name="host")
    return float(np.median(1e6 * result.cpu_times))


def torch_on_our_stream() -> Any:
    """Return torch, on a stream that is CuPy's current one too, or None where it is missing."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_grad_enabled(False)
    stream = torch.cuda.Stream()
    torch.cuda.set_stream(stream)
    external_stream(stream.cuda_stream).use()
    return torch
