"""The float32 products of the fused module alone, beside cuBLAS's in float32 and in TF32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupyattn import _device, _launch
from cupyattn.configs import linear

TOKENS = [128, 256, 512, 1024, 2048, 4096, 8192, 16384]
HIDDEN = [512, 768, 1024]


def main(seconds: float = 0.1) -> int:
    """Print the times of q, k and v's projections: [tokens, hidden] by three [hidden, hidden].

    In a CUDA graph, inputs rotated past L2; cuBLAS has the three weights in one array. Errors are
    the largest against float64 over the largest result, of the first 128 tokens.
    """
    import cupy

    from .host import torch_on_our_stream
    from .timing import Clock, capture_cupy, capture_torch

    cupy.cuda.Stream(non_blocking=True).use()
    torch = torch_on_our_stream()
    clock = Clock(seconds)
    kinds = [("ours", "fp32"), ("cuBLAS", "fp32"), ("ours", "tf32"), ("cuBLAS", "tf32")]
    if torch is None:  # CuPy does not let cuBLAS be captured
        print("torch is not installed, through which cuBLAS is called")
        kinds = [kind for kind in kinds if kind[0] == "ours"]
    print(f"{'hidden':>7}{'tokens':>8}" + "".join(
        f"{who + ' ' + precision:>13} us{'TFLOP/s':>8}{'error':>9}" for who, precision in kinds))
    for hidden in HIDDEN:
        for tokens in TOKENS:
            line = f"{hidden:>7}{tokens:>8}"
            for who, precision in kinds:
                bind = _ours if who == "ours" else _cublas
                sets = clock.sets(4 * hidden * (3 * hidden + 4 * tokens), 0)
                calls, check = zip(*(bind(hidden, tokens, precision, i) for i in range(sets)))
                capture = capture_cupy if torch is None else capture_torch
                (_, us, _), _ = clock.graph(calls, capture, 1e6 * clock.estimate(calls[0]))
                rate = 6e-6 * tokens * hidden**2 / us
                line += f"{us:16.2f}{rate:8.1f}{check[0]():9.1e}"
            print(line, flush=True)
    return 0


def _arrays(hidden: int, tokens: int, seed: int) -> tuple[Any, Any, Any]:
    """Return the input, the three weights in one array, and room for the results."""
    import cupy

    random = cupy.random.RandomState(seed)
    return (random.standard_normal((tokens, hidden), dtype=np.float32),
            random.standard_normal((3 * hidden, hidden), dtype=np.float32) * hidden**-0.5,
            cupy.empty((3, tokens, hidden), np.float32))


def _error(x: Any, w: Any, y: Any) -> float:
    exact = x[:128].astype(np.float64) @ w.T.astype(np.float64)
    return float(abs(y[:128] - exact).max() / abs(exact).max())


def _ours(hidden: int, tokens: int, precision: str, seed: int
          ) -> tuple[Callable[[], None], Callable[[], float]]:
    import cupy

    x, w, y = _arrays(hidden, tokens, seed)
    products = tuple(linear.Product(linear.Matrix("x", tokens, hidden, hidden, 1),
                                    linear.Matrix(f"w{i}", hidden, hidden, hidden, 1),
                                    linear.Matrix(f"y{i}", tokens, hidden, hidden, 1))
                     for i in range(3))
    device = _device.device(cupy.cuda.Device().id)
    program = linear.program(linear.Problem("f32", precision, products), device)
    buffers = {"x": x, **{f"w{i}": w[i * hidden:] for i in range(3)},
               **{f"y{i}": y[i] for i in range(3)},
               **{name: cupy.empty(max(layout.nbytes, 1), np.int8)
                  for name, layout in program.scratch.items()}}
    number = {name: i for i, name in enumerate(buffers)}
    launches = [_launch.Launch(step, device, number) for step in program.steps]
    addresses = [x.data.ptr for x in buffers.values()]

    def run() -> None:
        stream = cupy.cuda.get_current_stream().ptr
        for launch in launches:
            launch(addresses, stream)

    def check() -> float:
        run()
        return _error(x, w, cupy.concatenate([buffers[f"y{i}"] for i in range(3)], axis=1))

    return run, check


def _cublas(hidden: int, tokens: int, precision: str, seed: int
            ) -> tuple[Callable[[], None], Callable[[], float]]:
    import torch

    x, w, y = _arrays(hidden, tokens, seed)
    y = y.reshape(tokens, 3 * hidden)
    a, b, c = (torch.from_dlpack(array) for array in (x, w.T, y))

    def run() -> None:
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        torch.matmul(a, b, out=c)

    def check() -> float:
        run()
        return _error(x, w, y)

    return run, check
