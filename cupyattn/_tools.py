"""Help around the operators: plan, explain, warmup, show_config, cache_info, check_errors."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import _arrays, _device, _launch, _select
from ._jit import CacheInfo, cache_info
from ._program import Program

__all__ = ["CacheInfo", "Explanation", "Plan", "cache_info", "check_errors", "explain", "plan",
           "show_config", "warmup"]


def _operators() -> dict[str, Callable]:
    import cupyattn

    names = ("neighborhood_attention", "neighborhood_attention_backward",
             "fused_neighborhood_attention", "fused_neighborhood_attention_backward",
             "multi_token_attention", "multi_token_attention_backward", "rope", "rope_backward")
    return {name: getattr(cupyattn, name) for name in names}


def _function(op: str | Callable) -> Callable:
    operators = _operators()
    if op in operators.values():
        return op  # type: ignore[return-value]
    if isinstance(op, str) and op in operators:
        return operators[op]
    raise ValueError(f"op is {op!r}; accepted are {', '.join(operators)}, by name or as functions")


# ---------------------------------------------------------------------------------------- plan


class Plan:
    """One call on fixed arrays, captured; see `plan`.

    Attributes
    ----------
    outputs : array or tuple
        What the call returns; rewritten by each `__call__`.
    """

    def __init__(self, op: str | Callable, arrays: tuple, options: dict[str, Any]):
        function = _function(op)
        if options.get("out") is not None:
            raise ValueError("out is given; a plan allocates its own results, as `outputs`")
        options = {name: value for name, value in options.items() if name != "out"}
        self.outputs = function(*arrays, **options)
        flat = [x for x in _flat(arrays) if hasattr(x, "__dlpack__")]
        library = _arrays.library_of({f"arrays[{i}]": x for i, x in enumerate(flat)})
        if isinstance(library, _arrays.Foreign):
            raise TypeError("plan takes NumPy, CuPy and torch arrays; other DLPack arrays cannot "
                            "be written again in place")
        again = self.outputs

        def run() -> None:
            function(*arrays, **options, out=again)

        self._keep: list[Any] = [arrays, options]
        self._replay: Callable[[], None] = run
        if library.on_device:
            self._replay = _captured(library, library.device(flat[0]), run, self._keep)

    def __call__(self) -> Any:
        """Recompute from the arrays' present contents, on the current stream."""
        self._replay()
        return self.outputs


def _flat(values: Sequence) -> list:
    return [y for x in values for y in (_flat(x) if isinstance(x, (tuple, list)) else [x])]


def _captured(library: _arrays.Library, device: int, run: Callable[[], None],
              keep: list[Any]) -> Callable[[], None]:
    import cupy

    with cupy.cuda.Device(device):
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.runtime.deviceSynchronize()  # what `run` reads may be in flight elsewhere
        with _launch.keeping(keep), library.entered(stream, device):
            stream.begin_capture()
            try:
                run()
            finally:
                graph = stream.end_capture()
    keep += [stream, graph]

    def replay() -> None:
        with cupy.cuda.Device(device):
            graph.launch(library.stream_object(device))

    return replay


def plan(op, *arrays, **options) -> Plan:
    """Prepare a call on fixed arrays: check, allocate the results once, capture.

    Parameters
    ----------
    op : function or str
        A public operator, such as `cupyattn.rope` or its name.
    *arrays, **options
        Its arguments, without `out`.

    Returns
    -------
    Plan
        ``p()`` recomputes from the arrays' present contents into ``p.outputs``, at the cost of
        launching a CUDA graph (NumPy arrays: of the reference), and returns them.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, KernelError
        As the operator.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> q, (cos, sin) = np.ones((1, 2, 3, 8), np.float32), cupyattn.rope_table(3, 8)
    >>> p = cupyattn.plan("rope", q, None, cos, sin)
    >>> q[...] = 2
    >>> float(p()[0][0, 0, 0, 0])
    2.0
    """
    return Plan(op, arrays, options)


# ------------------------------------------------------------------------------------- explain


@dataclass
class Explanation:
    """Which row does a call, and why; `str()` prints it. See `explain`."""

    operator: str
    row: str
    refused: dict[str, str]
    kernels: list[str]
    scratch_bytes: int
    bytes: int
    flops: int
    floor_us: float | None
    device: str
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.operator} on {self.device}: row {self.row}"]
        lines += [f"  refused by {name}: {reason}" for name, reason in self.refused.items()]
        lines += [f"  kernel {text}" for text in self.kernels]
        lines.append(f"  inputs and results {self.bytes:,} bytes, scratch "
                     f"{self.scratch_bytes:,} bytes, {self.flops:,} floating-point operations")
        if self.floor_us is not None:
            lines.append(f"  floor {self.floor_us:.2f} us (the longer of moving the bytes and "
                         "doing the operations, at the device's nominal rates)")
        return "\n".join(lines + [f"  {note}" for note in self.notes])


def explain(op, *arrays, **options) -> Explanation:
    """Say which row would do a call, why not the earlier ones, and what it costs.

    Nothing is launched and nothing allocated. Arrays that the call would copy first are named.

    Parameters
    ----------
    op : function or str
        A public operator, such as `cupyattn.rope` or its name.
    *arrays, **options
        Its arguments.

    Returns
    -------
    Explanation
        With `row`, `refused` (row name to reason), `kernels`, `scratch_bytes`, `bytes`,
        `flops`, `floor_us`; ``print`` it for people.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As the operator.
    """
    request = _launch.request_of(_function(op), arrays, options)
    operator, (layouts, copied) = request.operator, request.operands(request.layouts())
    problem = operator.problem(layouts, request.options)
    results = operator.results(problem)
    moved = sum(x.nbytes for x in (*(layouts[name] for name in request.arrays),
                                   *results.values()) if x is not None)
    flops = operator.flops(problem)
    if not request.library.on_device:
        return Explanation(operator.name, "reference", {}, [], 0, moved, flops, None, "NumPy",
                           ["NumPy arrays run the float64 reference; pass CuPy arrays or torch "
                            "CUDA tensors for the kernels"])
    device = _arrays.common_device(request.library, request.arrays)
    properties = _device.device(device)
    if request.nothing_to_do(layouts, results):
        return Explanation(operator.name, "none", {}, [], 0, moved, 0, 0.0, properties.name,
                           ["the results are empty or zero: nothing is launched"])
    refused: dict[str, str] = {}
    for row, reason in _select.refusals(operator.table, problem, properties):
        if reason is None:
            break
        refused[row.name] = reason
    row = _select.choose(operator.name, operator.table, problem, properties)
    program: Program = row.program(problem, properties)
    kernels = [f"{step.kernel.name}: grid {step.grid}, block {step.kernel.threads}, shared memory "
               f"{step.shared} bytes" for step in program.steps]
    notes = [f"{name} is copied first: kernels do not take its strides or its address"
             for name in copied] + row.notes(problem, properties)
    return Explanation(operator.name, row.name, refused, kernels, program.scratch_bytes, moved,
                       flops, _device.floor_us(device, moved, flops), properties.name, notes)


# -------------------------------------------------------------------------------------- others


def warmup(op, *arrays, **options) -> list[str]:
    """Compile and load what a call needs, without launching it.

    Parameters
    ----------
    op : function or str
        A public operator, such as `cupyattn.rope` or its name.
    *arrays, **options
        Its arguments. Their contents are not read.

    Returns
    -------
    list of str
        Names of the kernels, ready on the arrays' device; empty for NumPy arrays.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, KernelError
        As the operator.
    """
    request = _launch.request_of(_function(op), arrays, options)
    if not request.library.on_device:
        return []
    import cupy

    device = _arrays.common_device(request.library, request.arrays)
    with cupy.cuda.Device(device):
        return [launch.step.kernel.name for launch in _launch.Prepared(request, device).launches]


def show_config(file=None) -> None:
    """Print versions, devices and folders: what a bug report should hold.

    Parameters
    ----------
    file : text file, optional
        Standard output when None.
    """
    import ml_dtypes
    import numpy
    import scipy

    import cupyattn

    from ._source import kernels_folder

    lines = [f"cupyattn   {cupyattn.__version__}", f"python     {platform.python_version()}",
             f"numpy      {numpy.__version__}", f"scipy      {scipy.__version__}",
             f"ml_dtypes  {ml_dtypes.__version__}"]
    try:
        import cupy
        from cupy.cuda import nvrtc

        lines.append(f"cupy       {cupy.__version__}")
        lines.append("nvrtc      {}.{}".format(*nvrtc.getVersion()))
    except Exception as error:  # not installed, or its libraries cannot be loaded
        lines.append(f"cupy       not usable: {error}")
    if "torch" in sys.modules:
        lines.append(f"torch      {sys.modules['torch'].__version__}")
    if _device.count():
        from cupy.cuda import runtime

        version = runtime.driverGetVersion()
        lines.append(f"driver     CUDA {version // 1000}.{version % 1000 // 10}")
    for index in range(_device.count()):
        d = _device.device(index)
        lines.append(f"device {index}   {d.name}, {d.target}, {d.multiprocessors} "
                     f"multiprocessors, {d.shared_memory} bytes of shared memory a block, L2 "
                     f"{d.l2} bytes")
    if not _device.count():
        lines.append("device     none: NumPy arrays only")
    lines.append(f"kernels    {kernels_folder()}")
    info = cache_info()
    lines.append(f"cache      {info.kernels} kernels in this process, folder {info.folder}")
    print("\n".join(lines), file=file)


def check_errors() -> None:
    """Wait for the devices that this process has used with `rope`, and raise what they report.

    Raises
    ------
    ValueError
        If `position_ids` of an earlier `rope` call held a row outside the table.
    """
    _launch.synchronize_faults()
    _launch.raise_faults()
