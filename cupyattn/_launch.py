"""One call, from arrays to queued launches. Every public function ends here.

What depends only on shapes, strides, dtypes, devices and options is worked out once and kept: the
checks, the row, compiled kernels, filled parameter blocks. That is `Prepared`, found again by a
key made of what was passed, as it was passed. A later call of the same kind makes the key,
allocates its results, writes addresses into the blocks and launches; nothing else.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _arrays, _device, _jit, _select
from ._arrays import on_device as _on_device
from ._select import _forced
from ._arrays import FLOAT_NAMES, Library
from ._errors import KernelError, PerformanceWarning
from ._params import STRUCTS, offset_of
from ._program import Device, Layout, Program, Row, Step, cdiv

Named = Mapping[str, Any]


@dataclass(frozen=True)
class Operator:
    """What the call path must know about one direction of an operator.

    Parameters
    ----------
    name : str
        The pass, as `_select.tables` names it.
    arrays : tuple of str
        The inputs, in the order in which `call` gets them.
    table : sequence of Row
    normalise : function of (arrays, options)
        Checks the options as passed, without looking at layouts; returns them normalised.
    problem : function of (layouts, normalised options)
        Checks everything else and freezes the call.
    results : function of (problem)
        The results by name, in order.
    reference : function of (arrays, problem, scalars)
        The results by NumPy, in float64.
    any_strides : set of str
        Arrays whose kernels need no unit last axis.
    as_matrix : set of str
        Arrays whose leading axes must be one axis in memory, and whose lines should begin at
        16-byte boundaries: they are copied if that helps.
    strided_results : tuple of str
        Results that kernels write with any strides but the last (their layouts are part of the
        problem), and that may be exactly the input of that name. A strided `out` of another
        result is copied into.
    dense : set of str
        Inputs and results that kernels take without gaps and at 16-byte boundaries only. Others are
        copied.
    over : str
        The array that everything is summed over: where it is empty all results are zero.
    scalars : tuple of str
        Integers that may change from call to call without a new problem; one at most.
    bounds : function of (problem), optional
        Least and greatest value of that scalar, or None where any will do.
    out_of_bounds : function of (problem, scalar), optional
        Raises for a scalar outside them.
    mixed : bool
        Whether options may be tuples, whose items' types count too.
    typed : bool
        Whether the options end with the types of those before, where these matter.
    flops : function of (problem)
        The useful operations.
    """

    name: str
    arrays: tuple[str, ...]
    table: Sequence[Row]
    normalise: Callable[[Sequence[Any], tuple], tuple]
    problem: Callable[[Mapping[str, Layout | None], tuple], Any]
    results: Callable[[Any], dict[str, Layout]]
    reference: Callable[[Named, Any, Named], Sequence[np.ndarray | None]]
    flops: Callable[[Any], int]
    any_strides: frozenset[str] = frozenset()
    as_matrix: frozenset[str] = frozenset()
    strided_results: tuple[str, ...] = ()
    dense: frozenset[str] = frozenset()
    over: str = ""
    scalars: tuple[str, ...] = ()
    bounds: Callable[[Any], tuple[int, int] | None] = lambda problem: None
    out_of_bounds: Callable[[Any, int], None] | None = None
    mixed: bool = False
    typed: bool = False

    def check_scalars(self, problem: Any, scalars: Sequence[int]) -> None:
        bounds = self.bounds(problem)
        if bounds is not None and not bounds[0] <= scalars[0] <= bounds[1]:
            assert self.out_of_bounds is not None
            self.out_of_bounds(problem, scalars[0])


# ---------------------------------------------------------------------------------------- calls

# Whether calls end where they would check layouts and launch; see `request_of`.
_stopping: contextvars.ContextVar[bool] = contextvars.ContextVar("cupyattn_stop", default=False)

_MEMO_SIZE = 4096
_memo: dict[tuple, Prepared] = {}  # in order of insertion, the oldest leaves first
_memo_lock = threading.Lock()


def call(operator: Operator, arrays: Sequence[Any], options: tuple, out: Sequence[Any] | None,
         scalars: Sequence[int] = (), constants: Mapping[str, np.ndarray] | None = None
         ) -> list[Any]:
    """Check, choose, launch; return the results in the order of `operator.results`.

    `arrays` are the inputs (None where absent), `options` the options as the caller passed them,
    `out` one entry a result or None, `constants` small host arrays that the kernels need on the
    device, part of the problem.
    """
    first = arrays[0] if arrays[0] is not None else arrays[1]
    library = _on_device.get(type(first))
    if library is None:  # the first array of its type, or none that kernels take
        _arrays.library_of(dict(zip(operator.arrays, arrays)))
        library = _on_device.get(type(first))
    if library is None or _stopping.get():
        return _first_call(operator, arrays, options, out, scalars, constants)
    try:
        signature, addresses = library.read(arrays)
        key: tuple = (operator.name, options, None if operator.typed else _types(options)
                      if operator.mixed else tuple(map(type, options)), signature, _forced.get())
        if out is not None:
            out_signature, out_addresses = library.read(out)
            key += (out_signature,)
        if constants:
            key += tuple((name, x.tobytes()) for name, x in constants.items())
        prepared = _memo.get(key)
    except (AttributeError, TypeError):  # unlike kinds, or options that cannot be a key
        return _first_call(operator, arrays, options, out, scalars, constants)
    if prepared is None:
        return _first_call(operator, arrays, options, out, scalars, constants, key)
    if out is not None:
        prepared.out_check.check(addresses, out_addresses)
    if prepared.device == prepared.current_device():
        if prepared.simple is None:
            return prepared.run(arrays, addresses, out, scalars)
        if out is not None:
            addresses += out_addresses
        return prepared.simple(addresses, out, scalars)
    with prepared.guard():
        return prepared.run(arrays, addresses, out, scalars)


def _types(options: tuple) -> tuple:
    """Tell apart options that compare equal but are not the same: 1, 1.0 and True."""
    return tuple([type(x) if type(x) is not tuple else tuple(map(type, x)) for x in options])


def _first_call(operator: Operator, arrays: Sequence[Any], options: tuple,
                out: Sequence[Any] | None, scalars: Sequence[int],
                constants: Mapping[str, np.ndarray] | None, key: tuple | None = None) -> list[Any]:
    """Make a call of a kind not seen before, with every check in its order."""
    named = dict(zip(operator.arrays, arrays))
    library = _arrays.library_of(named)
    if isinstance(library, _arrays.Foreign):
        return _call_foreign(operator, library, arrays, options, out, scalars, constants)
    request = Request(operator, library, named, operator.normalise(arrays, options), out,
                      tuple(scalars), constants or {})
    if _stopping.get():
        raise _Stopped(request)
    for name, x in named.items():
        if x is not None:
            library.usable(name, x)
    if out is not None:
        _check_out_kinds(request)
    if not library.on_device:
        return _call_reference(request)
    device = _arrays.common_device(library, named)
    import cupy

    with cupy.cuda.Device(device):
        prepared = Prepared(request, device)
        _, addresses = library.read(arrays)
        if out is not None:
            _check_out(request, operator.results(prepared.problem), device)
            prepared.out_check.check(addresses, library.read(out)[1])
        if key is not None:
            with _memo_lock:
                _memo[key] = prepared
                if len(_memo) > _MEMO_SIZE:
                    del _memo[next(iter(_memo))]
        return prepared.run(arrays, addresses, out, scalars)


def _call_foreign(operator: Operator, library: _arrays.Foreign, arrays: Sequence[Any],
                  options: tuple, out: Sequence[Any] | None, scalars: Sequence[int],
                  constants: Mapping[str, np.ndarray] | None) -> list[Any]:
    like = next(x for x in arrays if x is not None)
    if out is not None:
        raise TypeError("out is accepted for NumPy, CuPy and torch arrays only; "
                        f"the inputs are {type(like).__module__} arrays")
    adopted = [None if x is None else library.adopt(name, x)
               for name, x in zip(operator.arrays, arrays)]
    results = call(operator, adopted, options, None, scalars, constants)
    return [library.give_back(x, like) for x in results]


# ------------------------------------------------------------------------------------- requests


@dataclass(frozen=True)
class Request:
    """What a public function asks for, before anything is done."""

    operator: Operator
    library: Library
    arrays: dict[str, Any]
    options: tuple  # normalised
    out: Sequence[Any] | None
    scalars: tuple[int, ...]
    constants: Mapping[str, np.ndarray]

    def layouts(self) -> dict[str, Layout | None]:
        """Return the layouts that the operator's checks want, by name."""
        layouts = {name: None if x is None else self.library.layout(name, x)
                   for name, x in self.arrays.items()}
        given = iter(self.out or ())
        for name in self.operator.strided_results:
            there = self.arrays[name.removesuffix("_out")] is not None
            x = next(given, None) if there else None
            layout = None if x is None else self.library.layout("out", x)
            layouts[name] = layout if layout is not None and layout.unit_last else None
        return layouts

    def operands(self, given: Mapping[str, Layout | None]
                 ) -> tuple[dict[str, Layout | None], list[str]]:
        """Return the layouts that kernels get, and the inputs that are copied to have them."""
        layouts = dict(given)
        copied = [name for name in self.operator.arrays
                  if _must_copy(self.operator, name, layouts[name])]
        for name in copied:
            layouts[name] = Layout(layouts[name].shape, layouts[name].dtype)  # type: ignore
        return layouts, copied

    def nothing_to_do(self, layouts: Mapping[str, Layout | None], results: Mapping[str, Layout]
                      ) -> bool:
        over = layouts.get(self.operator.over)
        return ((over is not None and over.size == 0)
                or all(layout.size == 0 for layout in results.values()))


class _Stopped(BaseException):
    """Carries a request out of the public function; no error, so nothing may swallow it."""

    def __init__(self, request: Request):
        self.request = request


def request_of(function: Callable, arrays: Sequence[Any], options: Mapping[str, Any]) -> Request:
    """Run a public function up to the point where it would check layouts and launch."""
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


# ------------------------------------------------------------------------------ prepared problems


class Prepared:
    """A checked problem on one device, with all that a call of its kind needs but addresses.

    Buffers are numbered: inputs, results, scalars, constants, scratch. Each parameter block takes
    its 64-bit words from that list.
    """

    def __init__(self, request: Request, device: int):
        from cupy.cuda import runtime

        operator, library = request.operator, request.library
        given = request.layouts()
        inputs = [given[name] for name in operator.arrays]
        layouts, copied = request.operands(given)
        self.library, self.device, self.current_device = library, device, runtime.getDevice
        self.copied = [operator.arrays.index(name) for name in copied]
        self.problem = operator.problem(layouts, request.options)
        operator.check_scalars(self.problem, request.scalars)
        self._operator, self._bounds = operator, operator.bounds(self.problem)
        results = operator.results(self.problem)
        self.results = list(results.values())
        self.out_check = OutCheck(request, inputs, results)

        self.row: Row | None = None
        self.program = Program(())
        if not request.nothing_to_do(layouts, results):
            properties = _device.device(device)
            self.row = _select.choose(operator.name, operator.table, self.problem, properties)
            _warn_of_plain(operator, self.row, self.problem, properties)
            self.program = self.row.program(self.problem, properties)
        self._set_launches(operator, request, list(results))
        self._make = [library.maker(layout, device) for layout in self.results]
        self._allocate = library.allocator(self.results, device)
        # `run` where a call needs nothing but results, or has them all, and launches; else None.
        self.simple = (self._simple() if self.launches and not self.copied
                       and not self.scratch_bytes and self.out_check.all_or_none else None)

    def _set_launches(self, operator: Operator, request: Request, results: list[str]) -> None:
        """Number the buffers and make a launch of each step."""
        constants = {name: _arrays.resident(x) for name, x in request.constants.items()}
        fixed = {name: memory.ptr for name, memory in constants.items()}
        if any("fault" in step.buffers.values() for step in self.program.steps):
            fixed["fault"] = fault_address(self.device)
        self._keep = constants
        self._fixed = list(fixed.values())
        self.scratch_bytes, self._scratch_at, scratch = 0, [], []
        for name, layout in self.program.scratch.items():
            if name not in results:
                scratch.append(name)
                self._scratch_at.append(self.scratch_bytes)
                self.scratch_bytes += cdiv(layout.nbytes, 256) * 256
        self._scratch_layout = Layout((self.scratch_bytes // 8,), "i64")
        names = (*operator.arrays, *results, *operator.scalars, *fixed, *scratch)
        number = {name: i for i, name in reversed(list(enumerate(names)))}
        properties = _device.device(self.device)
        self.launches = [Launch(step, properties, number) for step in self.program.steps]
        self._queue = self._queuer()

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Make the arrays' device current within the block."""
        from cupy.cuda import runtime

        before = runtime.getDevice()
        runtime.setDevice(self.device)
        try:
            yield
        finally:
            runtime.setDevice(before)

    def _simple(self) -> Callable[[list[int], Sequence[Any] | None, Sequence[int]], list[Any]]:
        """Return `run` for inputs and given results by address, with all names at hand."""
        allocate, stream, device, queue = (self._allocate, self.library.stream, self.device,
                                           self._queue)
        bounds, faults = self._bounds, _faults

        def simple(addresses: list[int], out: Sequence[Any] | None, scalars: Sequence[int]
                   ) -> list[Any]:
            if faults:
                raise_faults()
            if bounds is not None and not bounds[0] <= scalars[0] <= bounds[1]:
                self._operator.check_scalars(self.problem, scalars)
            results = allocate(addresses) if out is None else list(out)
            queue(addresses, scalars, stream(device))
            return results

        return simple

    def run(self, arrays: Sequence[Any], addresses: list[int], out: Sequence[Any] | None,
            scalars: Sequence[int]) -> list[Any]:
        """Allocate what is missing and queue the kernels. The device must be current."""
        bounds = self._bounds
        if _faults:
            raise_faults()
        if bounds is not None and not bounds[0] <= scalars[0] <= bounds[1]:
            self._operator.check_scalars(self.problem, scalars)
        library, device = self.library, self.device
        temporaries: list[Any] = []
        for i in self.copied:
            copy = library.contiguous(arrays[i])
            addresses[i] = library.pointer(copy)
            temporaries.append(copy)
        if not self.launches:  # nothing to compute: results are empty, or sums over nothing
            return self._zeros(out)

        if out is None:
            results = written = self._allocate(addresses)
        else:
            results, written = [], []
            for given, make, direct in zip(out, self._make, self.out_check.direct):
                target = make() if given is None or not direct else given
                results.append(target if given is None else given)
                written.append(target)
                addresses.append(library.pointer(target))
                if not direct:
                    temporaries.append(target)
        base = 0
        if self.scratch_bytes:
            memory = library.empty(self._scratch_layout, device)
            base = library.pointer(memory)
            temporaries.append(memory)
        stream = library.stream(device)
        self._queue(addresses, scalars, stream, base)
        if written is not results:
            for x, target in zip(written, results):
                if x is not target:
                    library.assign(target, x)
        if temporaries and _capturing(stream):
            _keeper.get().extend(temporaries)
        return results

    def _queuer(self) -> Callable[..., None]:
        """Return a function that launches every kernel, with all names at hand."""
        fixed, scratch_at, lock = self._fixed, self._scratch_at, threading.Lock()
        more = bool(fixed or scratch_at)
        launches = [launch.__call__ for launch in self.launches]

        def queue(words: list[int], scalars: Sequence[int], stream: int, scratch: int = 0) -> None:
            """`words` holds the addresses of inputs and results."""
            words += scalars
            if more:
                words += fixed
                for offset in scratch_at:
                    words.append(scratch + offset)
            with lock:  # the blocks are shared; the driver copies them during the call
                for launch in launches:
                    launch(words, stream)
            if _VERBOSE:
                _report(self)

        return queue

    def _zeros(self, out: Sequence[Any] | None) -> list[Any]:
        library = self.library
        results = [library.zeros(layout, self.device) for layout in self.results]
        for i, given in enumerate(out or ()):
            if given is not None:
                library.assign(given, results[i])
                results[i] = given
        return results


class OutCheck:
    """What must hold for the `out` of a kind of call: memory that stays apart from the rest."""

    def __init__(self, request: Request, inputs: Sequence[Layout | None],
                 results: Mapping[str, Layout]):
        operator, out = request.operator, request.out or (None,) * len(results)
        outs = [None if x is None else request.library.layout("out", x) for x in out]
        self._labels = [*operator.arrays, *_labels(list(results))]
        self._layouts = [*inputs, *outs]
        self._first_out = len(inputs)
        # Number and bytes of each `out`, and of the arrays before it.
        spans = [(i, *span) for i, x in enumerate(self._layouts)
                 if x is not None and (span := _arrays.span(x)) is not None]
        self._against = [(span, spans[:at]) for at, span in enumerate(spans)
                         if span[0] >= self._first_out]
        # Whether kernels can write an `out` itself, and the input that it may be, or -1.
        self.direct = [given is None or (name in operator.strided_results and given.unit_last)
                       or (given.strides == results[name].strides
                           and (name not in operator.dense or given.align >= 16))
                       for name, given in zip(results, outs)]
        self.all_or_none = request.out is None or (None not in outs and all(self.direct))
        self._twin = [operator.arrays.index(name.removesuffix("_out"))
                      if name in operator.strided_results else -1 for name in results]

    def check(self, inputs: Sequence[int], outs: Sequence[int]) -> None:
        """Raise if an `out` shares memory with an input, or with another `out`."""
        addresses = [*inputs, *outs]
        for (i, low, high), others in self._against:
            at = addresses[i]
            low += at
            high += at
            for j, other_low, other_high in others:
                at = addresses[j]
                if low < at + other_high and at + other_low < high:
                    self._overlap(i, j, addresses)

    def _overlap(self, i: int, j: int, addresses: Sequence[int]) -> None:
        """Raise, unless `i` is exactly the input it replaces and that one is apart from `j`.

        Inputs that interleave, such as two slices of a packed array, may be replaced in place.
        """
        twin = self._twin[i - self._first_out]
        a, b = self._layouts[i], self._layouts[j]
        assert a is not None and b is not None
        replaced = self._layouts[twin] if twin >= 0 else None
        in_place = (replaced is not None and a.strides == replaced.strides
                    and addresses[i] == addresses[twin])
        if not in_place or (j != twin and _arrays.share_memory(a, addresses[i], b, addresses[j])):
            raise ValueError(
                f"{self._labels[i]} overlaps {self._labels[j]} in memory; accepted is an array of "
                "its own" + (", or exactly the input it replaces" if twin >= 0 else ""))


class Launch:
    """One kernel with its parameter block, ready for the driver.

    Where the device can, a launch carries the attribute of programmatic dependent launch: its
    blocks may be scheduled while the kernel before it in the stream drains, which hides about a
    microsecond. That is safe because every kernel of this package waits (`griddepcontrol.wait`,
    in `_source.assemble`) before its first load and its first store, until all that stands before
    it in the stream has completed and can be seen. So when a kernel of ours has completed, all
    earlier work has: completion is transitive, and events, copies and kernels launched without
    the attribute come after it as ever. The attribute counts only where a kernel directly follows
    a kernel; after anything else in the stream the launch is an ordinary one.

    A kernel lets its successor be scheduled (`launch_dependents`) after its own wait and not
    before: a successor of another library that loads constant data ahead of its wait then finds
    all work before this kernel done. Blocks that wait take no place from this kernel's, which all
    run or have run by then.
    """

    def __init__(self, step: Step, device: Device, number: Mapping[str, int]):
        from cupy_backends.cuda.api import driver

        kernel = step.kernel
        block = np.zeros(1, STRUCTS[kernel.params])
        for path, value in step.values.items():
            _store(block, path, value)
        for path, tensor_map in step.maps.items():
            _store(block, f"{path}.geometry", _device.encode(tensor_map)[1:])
        self.step, self.compiled = step, _jit.load(kernel, device)
        self._block = block
        self._words = (ctypes.c_ulonglong * (block.itemsize // 8)).from_address(block.ctypes.data)
        self._arguments = (ctypes.c_void_p * 1)(block.ctypes.data)
        self._from = [(offset_of(kernel.params, path) // 8, number[name])
                      for path, name in (*step.buffers.items(), *step.scalars.items())]
        self._launch = driver.launchKernel
        self._before = (self.compiled.function, *step.grid, kernel.threads, 1, 1, step.shared)
        self._address = ctypes.addressof(self._arguments)

        self._launch_dependent = _device.launch_kernel_ex(device.index) if _PDL else None
        self._config = _device.LaunchConfig.dependent(step.grid, kernel.threads, step.shared)
        self._stream = 0  # the one in `_config`
        self._dependent = (ctypes.addressof(self._config), self.compiled.function, self._address,
                           None)

    def __call__(self, values: Sequence[int], stream: int) -> None:
        words = self._words
        for index, buffer in self._from:
            words[index] = values[buffer]
        if self._launch_dependent is not None:
            if stream != self._stream:
                self._config.stream = self._stream = stream
            if self._launch_dependent(*self._dependent) == 0:
                return
        try:
            self._launch(*self._before, stream, self._address, 0)
        except Exception as error:
            raise KernelError(f"{self.step.kernel.name} did not launch with grid "
                              f"{self.step.grid}: {error}") from error
        self._launch_dependent = None  # refused although a plain launch is not: not asked again


def _store(block: np.ndarray, path: str, value: Any) -> None:
    target: Any = block[0]
    *outer, last = path.split(".")
    for part in outer:
        target = target[int(part) if part.isdigit() else part]
    target[int(last) if last.isdigit() else last] = value


def _must_copy(operator: Operator, name: str, layout: Layout | None) -> bool:
    if layout is None:
        return False
    if name in operator.dense:
        return layout != Layout(layout.shape, layout.dtype)
    if name in operator.as_matrix:
        from .configs.linear import needs_copy

        return needs_copy(layout)
    return name not in operator.any_strides and not layout.unit_last


def _warn_of_plain(operator: Operator, row: Row, problem: Any, device: Device) -> None:
    """Warn, once a problem, that a plain row runs although a faster one takes other sizes."""
    if not row.name.startswith("plain") or _select.forced():
        return
    kind = row.kind()
    reasons = [f"{other.name}: {reason}" for other, reason in _select.refusals(
        operator.table, problem, device) if not other.name.startswith("plain")
        and other.kind() == kind and (other.target or device.target).rstrip("a") == device.target]
    if reasons:
        warnings.warn(f"{operator.name} runs its plain kernel {row.name}; faster ones refuse: "
                      + "; ".join(reasons), PerformanceWarning, stacklevel=6)


# ---------------------------------------------------------------------------------------- out=


def _labels(results: Sequence[str]) -> list[str]:
    return ["out"] if len(results) == 1 else [f"out[{i}] ({n})" for i, n in enumerate(results)]


def _check_out_kinds(request: Request) -> None:
    """Check that every `out` is an array of the inputs' library."""
    for i, x in enumerate(request.out or ()):
        if x is not None:
            label = "out" if len(request.out or ()) == 1 else f"out[{i}]"
            if _arrays.library_of({label: x}) is not request.library:
                raise TypeError(f"{label} is a {type(x).__name__}; accepted is an array of the "
                                f"inputs' library, {request.library.name}")
            request.library.usable(label, x)


def _check_out(request: Request, results: Mapping[str, Layout], device: int) -> None:
    """Check device, dtype and shape of every `out`."""
    library = request.library
    for label, expected, x in zip(_labels(list(results)), results.values(), request.out or ()):
        if x is None:
            continue
        layout = library.layout(label, x)
        if library.on_device and library.device(x) != device:
            raise ValueError(f"{label} is on device {library.device(x)}; accepted is device "
                             f"{device}, that of the inputs")
        if layout.dtype != expected.dtype:
            raise TypeError(f"{label} has dtype {FLOAT_NAMES[layout.dtype]}; accepted is "
                            f"{FLOAT_NAMES[expected.dtype]}")
        if layout.shape != expected.shape:
            raise ValueError(f"{label} has shape {layout.shape}; accepted is {expected.shape}")
        if any(n > 1 and s == 0 for n, s in zip(layout.shape, layout.strides)):
            raise ValueError(f"{label} has strides {layout.strides}; accepted is an array whose "
                             "elements do not share memory")


# ------------------------------------------------------------------------------- the reference


def _call_reference(request: Request) -> list[Any]:
    operator, library, out = request.operator, request.library, request.out
    layouts = request.layouts()
    problem = operator.problem(layouts, request.options)
    operator.check_scalars(problem, request.scalars)
    results = operator.results(problem)
    if out is not None:
        _check_out(request, results, -1)
        OutCheck(request, [layouts[name] for name in operator.arrays], results).check(
            *([0 if x is None else library.pointer(x) for x in some]
              for some in (request.arrays.values(), out)))
    if request.nothing_to_do(layouts, results):
        values: Sequence[np.ndarray | None] = [library.zeros(r, -1) for r in results.values()]
    else:
        scalars = dict(zip(operator.scalars, request.scalars))
        values = operator.reference(request.arrays, problem, {**scalars, **request.constants})
    finished = []
    for i, (value, layout) in enumerate(zip(values, results.values())):
        target = out[i] if out is not None and out[i] is not None else library.empty(layout, -1)
        with np.errstate(over="ignore", invalid="ignore"):  # rounding to 16 bits may overflow
            target[...] = np.asarray(value).astype(target.dtype)
        finished.append(target)
    return finished


# -------------------------------------------------------------------- temporaries under capture

# A graph replays into the temporaries of its capture, so they must outlive the call. `plan` keeps
# its own; those of a capture made by the caller are kept for good (documented in the README).
_kept_for_good: list[Any] = []
_keeper: contextvars.ContextVar[list[Any]] = contextvars.ContextVar(
    "cupyattn_keeper", default=_kept_for_good)


def keeping(owner: list[Any]) -> contextlib.AbstractContextManager[None]:
    """Within the block, temporaries of captured calls are given to `owner`."""
    return _set(_keeper, owner)


def _capturing(stream: int) -> bool:
    from cupy.cuda import runtime

    return stream not in (0, 1) and runtime.streamIsCapturing(stream)


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


# ---------------------------------------------------------------------------------- diagnostics

_DEBUG = os.environ.get("CUPYATTN_DEBUG", "0") not in ("", "0")
_SYNC = os.environ.get("CUPYATTN_SYNC", "0") not in ("", "0")
_VERBOSE = _DEBUG or _SYNC
_PDL = os.environ.get("CUPYATTN_PDL", "1") not in ("", "0")  # programmatic dependent launch


def _report(prepared: Prepared) -> None:
    if _DEBUG:
        assert prepared.row is not None
        print(f"cupyattn: row {prepared.row.name}, scratch {prepared.scratch_bytes} bytes",
              file=sys.stderr)
        for launch in prepared.launches:
            step, compiled = launch.step, launch.compiled
            print(f"cupyattn:   {step.kernel.name} grid {step.grid} block {step.kernel.threads} "
                  f"shared {step.shared} registers {compiled.registers} local "
                  f"{compiled.local_bytes} bytes", file=sys.stderr)
    if _SYNC:
        from cupy.cuda import runtime

        runtime.deviceSynchronize()
