"""One call, from arrays to queued launches. Every public function ends here.

What depends only on shapes, strides, dtypes and options is worked out once and kept: checks, the
row, compiled kernels, filled parameter blocks. A later call of the same kind looks that up,
allocates its results, writes the addresses into the blocks and launches.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import os
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _arrays, _device, _jit, _select
from ._arrays import FLOAT_NAMES, Library
from ._errors import KernelError, PerformanceWarning
from ._params import STRUCTS, offset_of
from ._program import Device, Layout, Program, Row, Step, cdiv

Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class Operator:
    """What the call path must know about one direction of an operator.

    `problem(layouts, options)` checks and freezes a call; `results(problem)` lists the results
    by name; `reference(arrays, problem, scalars)` computes them with NumPy, in float64.
    `any_strides` are arrays whose kernels need no unit last axis; `as_matrix` are arrays whose
    leading axes must be one axis in memory. `strided_results` are those that kernels write with
    any strides (their layouts are part of the problem); a strided `out` of another gets a copy.
    `over` is the array that everything is summed over: where it is empty all results are zero.
    `flops(problem)` counts the useful operations.
    """

    name: str
    table: Sequence[Row]
    problem: Callable[[Mapping[str, Layout | None], tuple], Any]
    results: Callable[[Any], dict[str, Layout]]
    reference: Callable[[Arrays, Any, Mapping[str, Any]], Sequence[np.ndarray | None]]
    any_strides: frozenset[str] = frozenset()
    as_matrix: frozenset[str] = frozenset()
    strided_results: tuple[str, ...] = ()
    over: str = ""
    flops: Callable[[Any], int] = lambda problem: 0


# --------------------------------------------------------------------------------- one problem


class Prepared:
    """A checked problem on one device: row, kernels, parameter blocks; addresses come later."""

    def __init__(self, operator: Operator, problem: Any, row: Row, device: Device,
                 constants: Mapping[str, Any]):
        self.operator, self.problem, self.row, self.device = operator, problem, row, device
        self.results = operator.results(problem)
        self.program: Program = row.program(problem, device)
        self.constants = constants  # arrays that live as long as this object (by buffer name)
        self._lock = threading.Lock()
        self._launches = [_Launch(step, device) for step in self.program.steps]
        self._scratch_at: dict[str, int] = {}
        self.scratch_bytes = 0
        for name, layout in self.program.scratch.items():
            self._scratch_at[name] = self.scratch_bytes
            self.scratch_bytes += cdiv(layout.nbytes, 256) * 256

    def launch(self, addresses: dict[str, int], scalars: Mapping[str, Any], scratch: int,
               stream: int) -> None:
        """Queue the kernels. `addresses` holds inputs and results by buffer name."""
        for name, offset in self._scratch_at.items():
            addresses.setdefault(name, scratch + offset)
        with self._lock:  # the blocks are shared; the driver copies them during the call
            for launch in self._launches:
                launch(addresses, scalars, stream)


class _Launch:
    """One kernel with its parameter block, ready for `cuLaunchKernel`."""

    def __init__(self, step: Step, device: Device):
        from cupy_backends.cuda.api import driver

        kernel = step.kernel
        block = np.zeros(1, STRUCTS[kernel.params])
        for path, value in step.values.items():
            _store(block, path, value)
        self.compiled = _jit.load(kernel, device)
        self.step = step
        self._words = block.view(np.int64)
        self._block = block
        self._arguments = (ctypes.c_void_p * 1)(block.ctypes.data)
        self._address = ctypes.addressof(self._arguments)
        self._buffers = [(offset_of(kernel.params, path) // 8, name)
                         for path, name in step.buffers.items()]
        self._scalars = list(step.scalars.items())
        self._driver_launch = driver.launchKernel
        self._shape = (*step.grid, kernel.threads, 1, 1, step.shared)

    def __call__(self, addresses: Mapping[str, int], scalars: Mapping[str, Any],
                 stream: int) -> None:
        words = self._words
        for index, name in self._buffers:
            words[index] = addresses[name]
        for path, name in self._scalars:
            _store(self._block, path, scalars[name])
        try:
            self._driver_launch(self.compiled.function, *self._shape, stream, self._address, 0)
        except Exception as error:
            raise KernelError(f"{self.step.kernel.name} did not launch with grid "
                              f"{self.step.grid}: {error}") from error


def _store(block: np.ndarray, path: str, value: Any) -> None:
    target: Any = block[0]
    *outer, last = path.split(".")
    for part in outer:
        target = target[int(part) if part.isdigit() else part]
    target[int(last) if last.isdigit() else last] = value


_MEMO_SIZE = 4096
_memo: OrderedDict[tuple, tuple[Prepared | None, Any, tuple[str, ...]]] = OrderedDict()
_memo_lock = threading.Lock()

# -------------------------------------------------------------------- temporaries under capture

# A graph replays into the temporaries of its capture, so they must outlive the call. `plan` keeps
# its own; those of a capture made by the caller are kept for good (documented in the README).
_kept_for_good: list[Any] = []
_keeper: contextvars.ContextVar[list[Any]] = contextvars.ContextVar(
    "cupyattn_keeper", default=_kept_for_good)


# ------------------------------------------------------------------------ calls that stop early


@dataclass(frozen=True)
class Request:
    """What a public function asks for, before it is done; for `explain` and `warmup`."""

    operator: Operator
    library: Library
    device: int
    arrays: Arrays
    options: tuple
    out: Sequence[Any] | None
    constants: Mapping[str, np.ndarray]

    def layouts(self) -> dict[str, Layout | None]:
        return _layouts(self.operator, self.library, self.arrays, self.out)

    def prepare(self) -> Prepared | None:
        """Check, choose and compile, without a launch; None where nothing is to be done."""
        import cupy

        with cupy.cuda.Device(self.device):
            return _prepare(self.operator, self.library, self.device, self.arrays, self.options,
                            self.out, self.constants)[0]


class _Stopped(BaseException):
    """Carries a request out of the public function; no error, so nothing may swallow it."""

    def __init__(self, request: Request):
        self.request = request


_stopping: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "cupyattn_stopping", default=False)


def request_of(function: Callable, arrays: Sequence[Any], options: Mapping[str, Any]) -> Request:
    """Run a public function up to the point where it would check and launch."""
    with _set(_stopping, True):
        try:
            function(*arrays, **options)
        except _Stopped as stopped:
            return stopped.request
    raise RuntimeError(f"{function!r} made no call")


@contextlib.contextmanager
def _set(variable: contextvars.ContextVar, value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def keeping(owner: list[Any]) -> contextlib.AbstractContextManager[None]:
    """Within the block, temporaries of captured calls are given to `owner`."""
    return _set(_keeper, owner)


# ------------------------------------------------------------------------------ position faults

_faults: dict[int, tuple[Any, np.ndarray]] = {}


def fault_address(device: int) -> int:
    """Return the address of a device's flag in host memory; kernels set it, nobody waits."""
    if device not in _faults:
        import cupy

        memory = cupy.cuda.alloc_pinned_memory(8)
        flag = np.frombuffer(memory, np.int32, 1)
        flag[0] = 0
        _faults[device] = (memory, flag)
    return _faults[device][0].ptr


def synchronize_faults() -> None:
    """Wait for every device that may still report a position."""
    for device in _faults:
        import cupy

        with cupy.cuda.Device(device):
            cupy.cuda.runtime.deviceSynchronize()


def raise_faults() -> None:
    """Raise if a kernel has reported a position outside its table; then forget it."""
    for device, (_, flag) in _faults.items():
        if flag[0]:
            flag[0] = 0
            raise ValueError(f"position_ids of an earlier rope call on device {device} held a row "
                             "outside the table (plus offset); those tokens came out as NaN")


# ---------------------------------------------------------------------------------------- calls


def call(operator: Operator, arrays: Arrays, options: tuple, *, out: Sequence[Any] | None = None,
         scalars: Mapping[str, Any] | None = None,
         constants: Mapping[str, np.ndarray] | None = None) -> tuple[Any, ...]:
    """Check, choose, launch; return the results in the order of `operator.results`.

    `arrays` are the inputs by name (None where absent), `options` hashable and normalised,
    `scalars` values that may change from call to call, `constants` host arrays that the kernels
    need on the device (they are part of the memo's key).
    """
    library = _arrays.library_of(arrays)
    scalars = scalars or {}
    constants = constants or {}
    if not library.on_device:
        return _call_reference(operator, library, arrays, options, out, scalars, constants)
    if library.name == "DLPack":
        return _call_foreign(operator, arrays, options, out, scalars, constants)
    device = _arrays.common_device(library, arrays)
    from cupy.cuda import runtime

    current = runtime.getDevice()
    if current == device:
        return _call_device(operator, library, device, arrays, options, out, scalars, constants)
    runtime.setDevice(device)
    try:
        return _call_device(operator, library, device, arrays, options, out, scalars, constants)
    finally:
        runtime.setDevice(current)


def _call_device(operator: Operator, library: Library, device: int, arrays: Arrays,
                 options: tuple, out: Sequence[Any] | None, scalars: Mapping[str, Any],
                 constants: Mapping[str, np.ndarray]) -> tuple[Any, ...]:
    if _stopping.get():
        raise _Stopped(Request(operator, library, device, arrays, options, out, constants))
    if _faults:
        raise_faults()
    key = (operator.name, options, library.name, device, _select.forced(),
           tuple(x if x is None else library.signature(name, x) for name, x in arrays.items()),
           out and tuple(x if x is None else library.signature("out", x) for x in out),
           tuple((name, x.tobytes()) for name, x in constants.items()))
    entry = _memo.get(key)
    if entry is None:
        entry = _prepare(operator, library, device, arrays, options, out, constants)
        with _memo_lock:
            _memo[key] = entry
            if len(_memo) > _MEMO_SIZE:
                _memo.popitem(last=False)
    prepared, problem, copied = entry

    temporaries: list[Any] = []
    if copied:
        arrays = dict(arrays)
        for name in copied:
            arrays[name] = library.contiguous(arrays[name])
            temporaries.append(arrays[name])
    layouts = prepared.results if prepared else operator.results(problem)
    if out is not None:
        _check_out(operator, library, device, layouts, arrays, out)
    results = []
    written = []  # where the kernels write: `results`, or a temporary for a strided `out`
    for i, layout in enumerate(layouts.values()):
        given = out[i] if out is not None else None
        if given is None:
            given = (library.empty if prepared else library.zeros)(layout, device)
            written.append(given)
        elif operator.strided_results or library.layout("out", given).strides == layout.strides:
            written.append(given)
        else:
            written.append(library.empty(layout, device))
            temporaries.append(written[-1])
        results.append(given)
    if prepared is None:  # nothing to compute: results are empty, or sums over nothing
        for given in out or ():
            if given is not None:
                library.assign(given, library.zeros(library.layout("out", given), device))
        return tuple(results)

    stream = library.stream(device)
    addresses = {name: library.pointer(x) for name, x in arrays.items() if x is not None}
    for name, x in zip(layouts, written):
        addresses[name] = library.pointer(x)
    for name, x in prepared.constants.items():
        addresses[name] = x.data.ptr if hasattr(x, "data") else x
    scratch = 0
    if prepared.scratch_bytes:
        memory = library.empty(Layout((prepared.scratch_bytes // 8,), "i64"), device)
        scratch = library.pointer(memory)
        temporaries.append(memory)
    prepared.launch(addresses, scalars, scratch, stream)
    for x, target in zip(written, results):
        if x is not target:
            library.assign(target, x)
    if temporaries and _capturing(stream):
        _keeper.get().extend(temporaries)
    if _DEBUG:
        _report(prepared)
    if _SYNC:
        from cupy.cuda import runtime

        runtime.deviceSynchronize()
    return tuple(results)


def _capturing(stream: int) -> bool:
    from cupy.cuda import runtime

    return stream not in (0, 1) and runtime.streamIsCapturing(stream)


def _prepare(operator: Operator, library: Library, device: int, arrays: Arrays, options: tuple,
             out: Sequence[Any] | None, constants: Mapping[str, np.ndarray]
             ) -> tuple[Prepared | None, Any, tuple[str, ...]]:
    """Return (prepared, problem, names of arrays to copy); prepared None if all is empty."""
    layouts = _layouts(operator, library, arrays, out)
    copied = tuple(name for name in arrays if _must_copy(operator, name, layouts[name]))
    for name in copied:
        layout = layouts[name]
        assert layout is not None
        layouts[name] = Layout(layout.shape, layout.dtype)
    problem = operator.problem(layouts, options)
    if nothing_to_do(operator, layouts, operator.results(problem)):
        return None, problem, ()
    properties = _device.device(device)
    row = _select.choose(operator.name, operator.table, problem, properties)
    _warn_of_plain(operator, row, problem, properties)
    resident: dict[str, Any] = {}
    if constants:
        import cupy

        resident = {name: cupy.asarray(x) for name, x in constants.items()}
    if operator.name == "rope":
        resident["fault"] = fault_address(device)
    return Prepared(operator, problem, row, properties, resident), problem, copied


def nothing_to_do(operator: Operator, layouts: Mapping[str, Layout | None],
                   results: Mapping[str, Layout]) -> bool:
    over = layouts.get(operator.over)
    return ((over is not None and over.size == 0)
            or all(layout.size == 0 for layout in results.values()))


def _warn_of_plain(operator: Operator, row: Row, problem: Any, device: Device) -> None:
    """Warn, once a problem, that a plain row runs although the device has a faster one."""
    if not row.name.startswith("plain") or _select.forced():
        return
    reasons = [f"{other.name}: {reason}" for other, reason in _select.refusals(
        operator.table, problem, device) if not other.name.startswith("plain")
        and (other.target or device.target).rstrip("a") == device.target]
    if reasons:
        warnings.warn(f"{operator.name} runs its plain kernel {row.name}; the faster ones refuse: "
                      + "; ".join(reasons), PerformanceWarning, stacklevel=5)


def _layouts(operator: Operator, library: Library, arrays: Arrays, out: Sequence[Any] | None
             ) -> dict[str, Layout | None]:
    """Return the layouts that the operator's checks want, by name."""
    layouts = {name: None if x is None else library.layout(name, x) for name, x in arrays.items()}
    if operator.strided_results:
        given = iter(out or ())
        for name in operator.strided_results:
            there = arrays[name.removesuffix("_out")] is not None
            x = next(given, None) if there else None
            layouts[name] = None if x is None else library.layout("out", x)
    return layouts


def _must_copy(operator: Operator, name: str, layout: Layout | None) -> bool:
    if layout is None or name in operator.any_strides:
        return False
    if not layout.unit_last:
        return True
    if name in operator.as_matrix:
        from .configs.linear import collapsed

        try:
            collapsed(layout)
        except ValueError:
            return True
    return False


def _check_out(operator: Operator, library: Library, device: int, layouts: Mapping[str, Layout],
               arrays: Arrays, out: Sequence[Any]) -> None:
    """Check `out`: kind, device, shape, dtype, and that it overlaps nothing it must not."""
    spans = [(name, x, _arrays.span(library, library.layout(name, x), x))
             for name, x in arrays.items() if x is not None]
    for i, (name, expected) in enumerate(layouts.items()):
        given = out[i]
        if given is None:
            continue
        label = "out" if len(layouts) == 1 else f"out[{i}] ({name})"
        if _arrays.library_of({label: given}) is not library:
            raise TypeError(f"{label} is a {type(given).__name__}; accepted is an array of the "
                            f"inputs' library, {library.name}")
        layout = library.layout(label, given)
        if library.on_device and library.device(given) != device:
            raise ValueError(f"{label} is on device {library.device(given)}; accepted is device "
                             f"{device}, that of the inputs")
        if layout.dtype != expected.dtype:
            raise TypeError(f"{label} has dtype {FLOAT_NAMES[layout.dtype]}; accepted is "
                            f"{FLOAT_NAMES[expected.dtype]}")
        if layout.shape != expected.shape:
            raise ValueError(f"{label} has shape {layout.shape}; accepted is {expected.shape}")
        if any(n > 1 and s == 0 for n, s in zip(layout.shape, layout.strides)):
            raise ValueError(f"{label} has strides {layout.strides}; accepted is an array whose "
                             "elements do not share memory")
        low, high = _arrays.span(library, layout, given)
        for other, x, (a, b) in spans:
            if low < b and a < high and not (operator.strided_results and other == name[:-4]
                                             and low == a and high == b
                                             and library.layout(other, x) == layout):
                raise ValueError(f"{label} overlaps {other} in memory; accepted is an array of "
                                 "its own" + (", or exactly the input it replaces"
                                              if operator.strided_results else ""))
        spans.append((label, given, (low, high)))


def _call_reference(operator: Operator, library: Library, arrays: Arrays, options: tuple,
                    out: Sequence[Any] | None, scalars: Mapping[str, Any],
                    constants: Mapping[str, np.ndarray]) -> tuple[Any, ...]:
    if _stopping.get():
        raise _Stopped(Request(operator, library, -1, arrays, options, out, constants))
    layouts = _layouts(operator, library, arrays, out)
    problem = operator.problem(layouts, options)
    results = operator.results(problem)
    if out is not None:
        _check_out(operator, library, -1, results, arrays, out)
    if nothing_to_do(operator, layouts, results):
        values: Sequence[np.ndarray | None] = [library.zeros(r, -1) for r in results.values()]
    else:
        values = operator.reference(arrays, problem, {**scalars, **constants})
    finished = []
    for i, (value, layout) in enumerate(zip(values, results.values())):
        target = out[i] if out is not None and out[i] is not None else library.empty(layout, -1)
        with np.errstate(over="ignore", invalid="ignore"):  # rounding to 16 bits may overflow
            target[...] = np.asarray(value).astype(target.dtype)
        finished.append(target)
    return tuple(finished)


def _call_foreign(operator: Operator, arrays: Arrays, options: tuple, out: Sequence[Any] | None,
                  scalars: Mapping[str, Any], constants: Mapping[str, np.ndarray]
                  ) -> tuple[Any, ...]:
    foreign = _arrays._foreign_library()
    like = next(x for x in arrays.values() if x is not None)
    adopted = {name: None if x is None else foreign.adopt(name, x) for name, x in arrays.items()}
    if out is not None and any(x is not None for x in out):
        raise TypeError("out is accepted for NumPy, CuPy and torch arrays only; "
                        f"the inputs are {type(like).__module__} arrays")
    results = call(operator, adopted, options, scalars=scalars, constants=constants)
    return tuple(foreign.give_back(x, like) for x in results)


# ---------------------------------------------------------------------------------- diagnostics

_DEBUG = os.environ.get("CUPYATTN_DEBUG", "0") not in ("", "0")
_SYNC = os.environ.get("CUPYATTN_SYNC", "0") not in ("", "0")


def _report(prepared: Prepared) -> None:
    print(f"cupyattn: {prepared.operator.name} by row {prepared.row.name}, scratch "
          f"{prepared.scratch_bytes} bytes", file=sys.stderr)
    for launch in prepared._launches:
        step, compiled = launch.step, launch.compiled
        print(f"cupyattn:   {step.kernel.name} grid {step.grid} block {step.kernel.threads} "
              f"shared {step.shared} registers {compiled.registers} local "
              f"{compiled.local_bytes} bytes", file=sys.stderr)
