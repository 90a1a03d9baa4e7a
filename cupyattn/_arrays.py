"""The only module that knows array libraries: NumPy, CuPy, torch, anything with DLPack.

A `Library` answers what the rest of the package needs of its arrays: layout, address, device,
stream, allocation. No library is imported here unless an array of it is already at hand.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from ._program import FLOATS, ITEMSIZE, Layout, contiguous_strides

_NUMPY_TAG = {np.dtype(t): tag for t, tag in (
    (np.float16, "f16"), (bfloat16, "bf16"), (np.float32, "f32"), (np.float64, "f64"),
    (np.int32, "i32"), (np.int64, "i64"))}
NUMPY_DTYPE = {tag: dtype for dtype, tag in _NUMPY_TAG.items()}
FLOAT_NAMES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64",
               "i32": "int32", "i64": "int64"}


def _unknown_dtype(name: str, dtype: Any) -> TypeError:
    return TypeError(f"{name} has dtype {dtype}; accepted are {', '.join(FLOAT_NAMES.values())}")


def _element_strides(name: str, x: Any) -> tuple[int, ...]:
    if any(s % x.itemsize for s in x.strides):
        raise ValueError(f"{name} has strides {x.strides} in bytes, which are not multiples of its "
                         f"item size {x.itemsize}; pass a copy")
    return tuple(s // x.itemsize for s in x.strides)


def _alignment(address: int) -> int:
    return 16 if address % 16 == 0 else address & -address


class _Handle:
    """A stream of another library, as the CUDA stream protocol wants it."""

    def __init__(self, handle: int):
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def external_stream(handle: int) -> Any:
    """Return the CuPy stream of a handle that another library owns."""
    import cupy

    return cupy.cuda.Stream.from_external(_Handle(handle))


class Library:
    """What the package asks of an array library; see the subclasses."""

    name = ""
    on_device = True

    def read(self, arrays: Sequence[Any]) -> tuple[tuple, list[int]]:
        """Return a hashable value that determines layouts and devices, and the addresses.

        May raise `AttributeError` or `TypeError` where an array is not of this library. Strides
        need not be told of an array that is C-contiguous: its shape says where its elements are.
        """
        return (tuple([None if x is None else (self.layout("", x), self.device(x))
                       for x in arrays]),
                [0 if x is None else self.pointer(x) for x in arrays])

    def allocator(self, layouts: Sequence[Layout], device: int
                  ) -> Callable[[list[int]], list[Any]]:
        """Return a function that makes such arrays and appends their addresses to a list."""
        makers = [self.maker(layout, device) for layout in layouts]

        def allocate(addresses):
            results = [make() for make in makers]
            addresses += [self.pointer(x) for x in results]
            return results

        return allocate

    def usable(self, name: str, x: Any) -> None:
        """Raise if an array cannot be used as it is."""

    def layout(self, name: str, x: Any) -> Layout:
        raise NotImplementedError

    def pointer(self, x: Any) -> int:
        raise NotImplementedError

    def device(self, x: Any) -> int:
        raise NotImplementedError

    def stream(self, device: int) -> int:
        """Return the handle of the library's current stream on the device."""
        raise NotImplementedError

    def stream_object(self, device: int) -> Any:
        """Return the library's current stream as an object that CuPy takes."""
        raise NotImplementedError

    def entered(self, stream: Any, device: int) -> contextlib.AbstractContextManager:
        """Make a CuPy stream the library's current one within a block."""
        raise NotImplementedError

    def empty(self, layout: Layout, device: int) -> Any:
        return self.maker(layout, device)()

    def maker(self, layout: Layout, device: int) -> Callable[[], Any]:
        """Return a function that allocates such an array on the device, when it is current."""
        raise NotImplementedError

    def zeros(self, layout: Layout, device: int) -> Any:
        raise NotImplementedError

    def contiguous(self, x: Any) -> Any:
        """Return a C-ordered copy."""
        raise NotImplementedError

    def assign(self, target: Any, source: Any) -> None:
        """Copy the values of `source` into `target`."""
        raise NotImplementedError


class NumPy(Library):
    name = "NumPy"
    on_device = False

    def layout(self, name, x):
        tag = _NUMPY_TAG.get(x.dtype)
        if tag is None:
            raise _unknown_dtype(name, x.dtype)
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError(f"{name} is a masked array; pass a plain array such as {name}.data")
        return Layout(x.shape, tag, _element_strides(name, x))

    def pointer(self, x):
        return x.__array_interface__["data"][0]

    def device(self, x):
        return -1

    def maker(self, layout, device):
        # NumPy takes no strides without memory: make it in memory order, then exchange the axes.
        order = sorted(range(len(layout.shape)), key=lambda axis: -layout.strides[axis])
        shape = [layout.shape[axis] for axis in order]
        back = [order.index(axis) for axis in range(len(order))]
        return lambda: np.empty(shape, NUMPY_DTYPE[layout.dtype]).transpose(back)

    def zeros(self, layout, device):
        return np.zeros(layout.shape, NUMPY_DTYPE[layout.dtype])

    def contiguous(self, x):
        return np.array(x, order="C")

    def assign(self, target, source):
        target[...] = source


def _cupy_dtype(tag: str) -> Any:
    """Return a dtype in the form that CuPy resolves soonest: its own by their characters."""
    dtype = NUMPY_DTYPE[tag]
    return dtype if tag == "bf16" else dtype.char


def _byte_strides(layout: Layout) -> tuple[int, ...] | None:
    """Return the strides in bytes, or None where they are those of C order."""
    if layout.strides == contiguous_strides(layout.shape):
        return None
    return tuple(n * ITEMSIZE[layout.dtype] for n in layout.strides)


class CuPy(Library):
    name = "CuPy"

    def __init__(self):
        import cupy

        self._cupy = cupy
        self._get_stream = cupy.cuda.get_current_stream
        self._new = cupy.ndarray
        if not hasattr(cupy.ndarray, "_c_contiguous"):  # not public; `flags` takes too long
            self.read = super().read

    def read(self, arrays):
        signature, addresses = [], []
        for x in arrays:
            if x is None:
                signature.append(None)
                addresses.append(0)
            else:
                memory = x.data
                address = memory.ptr
                signature.append((x.shape, x._c_contiguous or x.strides, x.dtype, address & 15,
                                  memory.device_id))
                addresses.append(address)
        return tuple(signature), addresses

    def allocator(self, layouts, device):
        # An array of CuPy is complete when made; its `__init__` does nothing, but takes time.
        cls, new, memory = self._new, self._new.__new__, self._cupy.cuda.alloc
        wanted = [(x.shape, _cupy_dtype(x.dtype), x.nbytes, _byte_strides(x)) for x in layouts]

        def allocate(addresses):
            results = []
            for shape, dtype, nbytes, strides in wanted:
                x = (new(cls, shape, dtype) if strides is None
                     else new(cls, shape, dtype, memory(nbytes), strides))
                results.append(x)
                addresses.append(x.data.ptr)
            return results

        return allocate

    def layout(self, name, x):
        tag = _NUMPY_TAG.get(x.dtype)
        if tag is None:
            raise _unknown_dtype(name, x.dtype)
        return Layout(x.shape, tag, _element_strides(name, x), _alignment(x.data.ptr))

    def pointer(self, x):
        return x.data.ptr

    def device(self, x):
        return x.device.id

    def stream(self, device):
        return self._get_stream(device).ptr

    def stream_object(self, device):
        return self._get_stream(device)

    def entered(self, stream, device):
        return stream

    def maker(self, layout, device):
        strides = _byte_strides(layout)
        if strides is None:
            return functools.partial(self._new, layout.shape, _cupy_dtype(layout.dtype))
        return lambda: self._new(layout.shape, _cupy_dtype(layout.dtype),
                                 self._cupy.cuda.alloc(layout.nbytes), strides)

    def zeros(self, layout, device):
        return self._cupy.zeros(layout.shape, NUMPY_DTYPE[layout.dtype])

    def contiguous(self, x):
        return self._cupy.array(x, order="C")

    def assign(self, target, source):
        self._cupy.copyto(target, source)


class Torch(Library):
    name = "torch"

    def __init__(self):
        torch = sys.modules["torch"]
        self._torch = torch
        self._tag = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32",
                     torch.float64: "f64", torch.int32: "i32", torch.int64: "i64"}
        self._dtype = {tag: dtype for dtype, tag in self._tag.items()}
        self._devices = {}  # index to torch.device
        # The public current_stream() builds an object; the raw handle is all that is needed.
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self.stream = raw or (lambda device: torch.cuda.current_stream(device).cuda_stream)

    def read(self, arrays):
        signature, addresses = [], []
        for x in arrays:
            if x is None:
                signature.append(None)
                addresses.append(0)
            else:
                address = x.data_ptr()
                signature.append((x.shape, x.is_contiguous() or x.stride(), x.dtype, address & 15,
                                  x.get_device(), x.requires_grad, x.is_neg()))
                addresses.append(address)
        return tuple(signature), addresses

    def allocator(self, layouts, device):
        makers = [self.maker(layout, device) for layout in layouts]

        def allocate(addresses):
            results = []
            for make in makers:
                x = make()
                results.append(x)
                addresses.append(x.data_ptr())
            return results

        return allocate

    def usable(self, name, x):
        if not x.is_cuda:
            raise TypeError(f"{name} is a torch tensor on {x.device}; move it with .cuda(), or "
                            f"pass {name}.numpy() for the NumPy reference")
        if x.requires_grad:
            raise ValueError(f"{name} is a torch tensor that requires grad; pass "
                             f"{name}.detach() and use the _backward function for gradients")
        if x.layout is not self._torch.strided:
            raise TypeError(f"{name} is a torch tensor of layout {x.layout}; accepted is a dense "
                            f"tensor, such as {name}.to_dense()")
        if x.is_neg():
            raise ValueError(f"{name} is a lazily negated torch view; pass {name}.resolve_neg()")

    def layout(self, name, x):
        tag = self._tag.get(x.dtype)
        if tag is None:
            raise _unknown_dtype(name, x.dtype)
        return Layout(tuple(x.shape), tag, tuple(x.stride()), _alignment(x.data_ptr()))

    def pointer(self, x):
        return x.data_ptr()

    def device(self, x):
        return x.get_device()

    def entered(self, stream, device):
        torch = self._torch
        return torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr, self._on(device)))

    def stream_object(self, device):
        return external_stream(self.stream(device))

    def _on(self, device: int) -> Any:
        if device not in self._devices:
            self._devices[device] = self._torch.device("cuda", device)
        return self._devices[device]

    def maker(self, layout, device):
        # Of torch's allocating functions the one that costs the host least.
        return functools.partial(
            self._torch.empty_strided, layout.shape, layout.strides,
            dtype=self._dtype[layout.dtype], device=self._on(device))

    def zeros(self, layout, device):
        return self._torch.zeros(layout.shape, dtype=self._dtype[layout.dtype],
                                 device=self._on(device))

    def contiguous(self, x):
        return x.clone(memory_format=self._torch.contiguous_format)

    def assign(self, target, source):
        target.copy_(source)


class Foreign(CuPy):
    """Arrays of another library, seen as CuPy arrays through DLPack and given back the same way.

    DLPack orders the caller's pending work before the kernels, and the kernels before the
    caller's later work.
    """

    name = "DLPack"

    def adopt(self, name: str, x: Any) -> Any:
        kind, _ = x.__dlpack_device__()
        if kind not in (2, 13):  # CUDA, CUDA managed
            raise TypeError(f"{name} is a {_kind(x)} that is not on a CUDA device; move it there, "
                            "or pass a NumPy array for the NumPy reference")
        try:
            return self._cupy.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError, NotImplementedError) as error:
            raise TypeError(f"{name}: the {_kind(x)} cannot be read through DLPack: {error}"
                            ) from error

    def give_back(self, result: Any, like: Any) -> Any:
        package = sys.modules[type(like).__module__.partition(".")[0]]
        for module in (package, getattr(package, "dlpack", None)):
            if module is not None and hasattr(module, "from_dlpack"):
                return module.from_dlpack(result)
        # A library that cannot import DLPack gets the CuPy array, which exports it.
        return result


def _kind(x: Any) -> str:
    cls = type(x)
    return f"{cls.__module__.partition('.')[0]} {cls.__qualname__}"


@functools.cache
def cupy_library() -> CuPy:
    """Return the CuPy adapter (imports CuPy)."""
    return CuPy()


@functools.cache
def _torch_library() -> Torch:
    return Torch()


@functools.cache
def _foreign_library() -> Foreign:
    try:
        return Foreign()
    except ImportError as error:
        raise TypeError("arrays on a CUDA device need CuPy; install the extra cuda12 or cuda13"
                        ) from error


_numpy = NumPy()
_by_type: dict[type, Library] = {np.ndarray: _numpy}
# Those of CuPy and torch, whose arrays need no more checks than their signature.
on_device: dict[type, Library] = {}


def _library_of(name: str, x: Any) -> Library:
    library = _by_type.get(type(x))
    if library is not None:
        return library
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    if isinstance(x, np.ndarray):
        library = _numpy
    elif cupy is not None and isinstance(x, cupy.ndarray):
        library = cupy_library()
    elif torch is not None and isinstance(x, torch.Tensor):
        _torch_library().usable(name, x)  # said before CuPy is asked for: the remedy is another
        _require_cupy()
        library = _torch_library()
    elif hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        library = _foreign_library()
    else:
        raise TypeError(f"{name} is a {type(x).__name__}; accepted are NumPy arrays, CuPy "
                        "arrays, and torch tensors or other DLPack arrays on a CUDA device")
    _by_type[type(x)] = library
    if type(library) in (CuPy, Torch):
        on_device[type(x)] = library
    return library


def _require_cupy() -> None:
    try:
        import cupy  # noqa: F401
    except ImportError as error:
        raise TypeError("tensors on a CUDA device need CuPy; install the extra cuda12 or cuda13"
                        ) from error


def library_of(arrays: Mapping[str, Any]) -> Library:
    """Return the library of all given arrays (None entries aside), or say which two differ."""
    found: Library | None = None
    first = ""
    for name, x in arrays.items():
        if x is None:
            continue
        library = _library_of(name, x)
        if found is None:
            found, first = library, name
        elif library is not found:
            raise TypeError(f"{first} is a {_kind(arrays[first])} and {name} a {_kind(x)}; pass "
                            "arrays of one library")
    if found is None:
        raise TypeError(f"no array given; pass at least one of {', '.join(arrays)}")
    return found


def common_device(library: Library, arrays: Mapping[str, Any]) -> int:
    """Return the device that all arrays are on, or say which two differ."""
    found, first = None, ""
    for name, x in arrays.items():
        if x is None:
            continue
        device = library.device(x)
        if found is None:
            found, first = device, name
        elif device != found:
            raise ValueError(f"{first} is on device {found} and {name} on device {device}; pass "
                             "arrays of one device")
    assert found is not None
    return found


def span(layout: Layout) -> tuple[int, int] | None:
    """Return the bytes [low, high) that an array touches, counted from its address, or None."""
    if layout.size == 0:
        return None
    size = ITEMSIZE[layout.dtype]
    steps = [(n - 1) * s * size for n, s in zip(layout.shape, layout.strides)]
    return sum(s for s in steps if s < 0), sum(s for s in steps if s > 0) + size


class _Addressed:
    """An address and a layout that NumPy can reason about; nothing is read there."""

    def __init__(self, layout: Layout, address: int):
        size = ITEMSIZE[layout.dtype]
        self.__array_interface__ = {
            "version": 3, "typestr": f"|V{size}", "data": (address, False),
            "shape": layout.shape, "strides": tuple(s * size for s in layout.strides)}


def share_memory(a: Layout, a_address: int, b: Layout, b_address: int) -> bool:
    """Return whether two strided arrays have a byte in common."""
    return np.shares_memory(np.asarray(_Addressed(a, a_address)),
                            np.asarray(_Addressed(b, b_address)))


def resident(x: np.ndarray) -> Any:
    """Copy a host array to the current device, and return its memory, ready for any stream."""
    import cupy

    memory = cupy.cuda.alloc(max(x.nbytes, 1))
    memory.copy_from_host(x.ctypes.data, x.nbytes)  # waits
    return memory


def float_dtype(dtype: Any) -> str:
    """Return the tag of a float dtype given by name, by NumPy or by torch."""
    name = str(dtype).removeprefix("torch.")
    for tag in FLOATS:
        if name == FLOAT_NAMES[tag]:
            return tag
    try:
        tag = _NUMPY_TAG.get(np.dtype(dtype), "")
    except TypeError:
        tag = ""
    if tag not in FLOATS:
        raise TypeError(f"dtype is {dtype!r}; accepted are float16, bfloat16, float32, float64")
    return tag


def to_host(name: str, x: Any) -> np.ndarray:
    """Return any array of integers, or a sequence of them, as a NumPy array (may wait)."""
    if hasattr(x, "get") and not isinstance(x, np.ndarray):  # CuPy
        return x.get()
    if hasattr(x, "cpu"):  # torch
        return x.detach().cpu().numpy()
    try:
        return np.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is a {type(x).__name__}; accepted is an array of integers"
                        ) from error


def from_host(x: np.ndarray, tag: str, like: Any) -> Any:
    """Round a NumPy array to a dtype and return it as the kind of array that `like` is."""
    with np.errstate(over="ignore"):
        x = x.astype(NUMPY_DTYPE[tag])
    library = _numpy if like is None else library_of({"like": like})
    if not library.on_device:
        return x
    import cupy

    with cupy.cuda.Device(library.device(_adopted(library, like))):
        if isinstance(library, Torch):
            bits = x.view(np.int16) if tag == "bf16" else x  # torch reads no NumPy bfloat16
            tensor = library._torch.from_numpy(bits).to(like.device)
            return tensor.view(library._torch.bfloat16) if tag == "bf16" else tensor
        result = cupy.asarray(x)
    return library.give_back(result, like) if isinstance(library, Foreign) else result


def _adopted(library: Library, x: Any) -> Any:
    return library.adopt("like", x) if isinstance(library, Foreign) else x
