"""The providers: for each, how to call it on given arrays, or why that cannot be done.

A provider's function receives a workload and a direction and returns `bind`; `bind(arrays)`
returns the call to be timed. It imports its library itself, so that none is needed but those asked
for. Those that run on torch are in `torch_peers`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

from .workloads import NAIVE_SPACE, OPERATORS, Windowed, Workload


class Refusal(Exception):
    """The provider cannot run this workload; the text says why."""


@dataclasses.dataclass
class Bound:
    """A call on one set of arrays; `capture`, if given, is the call to put into a graph."""

    call: Callable[[], Any]
    capture: Callable[[], Any] | None = None
    finish: Callable[[Any], Any] = lambda outputs: outputs  # brings outputs to the results' shapes
    row: str = ""


Bind = Callable[[dict[str, Any]], Bound]


@dataclasses.dataclass(frozen=True)
class Provider:
    name: str
    bind: Callable[[Workload, str], Bind]
    operators: tuple[str, ...]
    packages: tuple[str, ...]  # by the name they are imported by
    framework: str = "torch"
    compared: bool = True  # whether its result is the workload's own
    compiles: bool = False  # whether it compiles each shape anew, into a cache on disk

    def missing(self) -> str | None:
        """Return which package is not installed, or None."""
        for package in ("cupy", *(("torch",) if self.framework == "torch" else ()), *self.packages):
            if importlib.util.find_spec(package) is None:
                return f"{package} is not installed"
        return None


PROVIDERS: dict[str, Provider] = {}


def provider(name: str, operators: tuple[str, ...], *packages: str, **options: Any) -> Any:
    def register(bind: Callable[[Workload, str], Bind]) -> Callable[[Workload, str], Bind]:
        PROVIDERS[name] = Provider(name, bind, operators, packages, **options)
        return bind

    return register


# --- this library ---------------------------------------------------------------------------

OURS = {
    "rope": "rope",
    "multi_token": "multi_token_attention",
    "fused_neighborhood": "fused_neighborhood_attention",
    "neighborhood": "neighborhood_attention",
}


def our_call(w: Workload, direction: str, x: dict[str, Any]) -> tuple[str, list[Any], dict]:
    """Return the public function's name, its arrays and its options; runs forward for residuals."""
    import cupyattn

    name, options = OURS[w.operator], w.options
    arrays = [value for key, value in x.items() if key != "dy"]
    if w.operator == "neighborhood":
        kernel_size = options.pop("kernel_size")
        arrays.append(kernel_size)
    if direction == "forward":
        return name, arrays, options
    if w.operator == "neighborhood":
        y, lse = cupyattn.neighborhood_attention(*arrays, return_lse=True, **options)
        arrays = [*arrays[:-1], y, lse, kernel_size]
    if w.operator == "fused_neighborhood":
        forward = cupyattn.fused_neighborhood_attention
        arrays.append(forward(*arrays, return_residuals=True, **options)[1])
    if "dy" in x:
        arrays.insert(0, x["dy"])
    return name + "_backward", arrays, options


def _row(name: str, arrays: list[Any], options: dict[str, Any]) -> str:
    import cupyattn

    try:
        return str(cupyattn.explain(name, *arrays, **options).row)
    except Exception:  # noqa: BLE001 (the time stands without a row's name)
        return ""


def bind_ours(w: Workload, direction: str) -> Bind:
    import cupyattn
    from cupyattn import _launch

    def bind(x: dict[str, Any]) -> Bound:
        name, arrays, options = our_call(w, direction, x)
        function = getattr(cupyattn, name)
        call = functools.partial(function, *arrays, **options)
        results: list[Any] = []
        temporaries: list[Any] = []  # of captured calls: they go when this call goes

        def capture() -> Any:
            if not results:  # the first call, outside any capture, gives the arrays to write to
                results.append(call())
            else:
                with _launch.keeping(temporaries):
                    function(*arrays, out=results[0], **options)
            return results[0]

        return Bound(call, capture, row=_row(name, arrays, options))

    return bind


@provider("cupyattn", OPERATORS, framework="cupy")
def cupyattn(w: Workload, direction: str) -> Bind:
    return bind_ours(w, direction)


@provider("naive", OPERATORS, framework="cupy")
def naive(w: Workload, direction: str) -> Bind:
    from cupyattn import _select

    # For the life of the process: a worker serves one provider.
    contextlib.ExitStack().enter_context(_select.force("plain"))
    return bind_ours(w, direction)


def stand_in(name: str, w: Workload) -> Workload:
    """Return the smaller workload on which the naive provider is timed, or `w` itself."""
    if name == "naive" and isinstance(w, Windowed) and w.space in NAIVE_SPACE:
        return dataclasses.replace(w, space=NAIVE_SPACE[w.space])
    return w


@provider("copy", OPERATORS, framework="cupy", compared=False)
def copy(w: Workload, direction: str) -> Bind:
    import cupy

    half = max(w.nbytes(direction) // 2, 4)

    def bind(x: dict[str, Any]) -> Bound:
        source, target = cupy.empty(half, np.int8), cupy.empty(half, np.int8)
        stream = cupy.cuda.get_current_stream()
        return Bound(lambda: target.data.copy_from_device_async(source.data, half, stream))

    return bind


# Registers the providers in it, which need the names above.
from . import torch_peers  # noqa: E402, F401
