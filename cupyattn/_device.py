"""What the package knows about each GPU, asked once."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence

from ._errors import KernelError
from ._program import Device, TensorMap


@functools.cache
def device(index: int) -> Device:
    """Return the properties of a CUDA device."""
    from cupy.cuda import runtime

    p = runtime.getDeviceProperties(index)
    return Device(index=index, name=p["name"].decode(), capability=(p["major"], p["minor"]),
                  multiprocessors=p["multiProcessorCount"],
                  shared_memory=p["sharedMemPerBlockOptin"], l2=p["l2CacheSize"])


class LaunchAttribute(ctypes.Structure):
    """`CUlaunchAttribute` of the driver's header."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class LaunchConfig(ctypes.Structure):
    """`CUlaunchConfig` of the driver's header."""

    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
                ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
                ("attributes", ctypes.POINTER(LaunchAttribute)), ("count", ctypes.c_uint)]

    @classmethod
    def dependent(cls, grid: Sequence[int], threads: int, shared: int) -> LaunchConfig:
        """Return the configuration of a programmatic dependent launch."""
        attribute = LaunchAttribute(6)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value[0] = 1
        return cls(tuple(grid), (threads, 1, 1), shared, None, ctypes.pointer(attribute), 1)


@functools.cache
def launch_kernel_ex(index: int) -> Callable[..., int] | None:
    """Return the driver's `cuLaunchKernelEx` where dependent launches work, else None.

    They do from sm_90 on, with a driver (CUDA 12.3) whose graphs keep them. The function
    releases the interpreter's lock, since a launch may have to wait for the device.
    """
    from cupy.cuda import runtime

    if device(index).capability < (9, 0) or runtime.driverGetVersion() < 12030:
        return None
    try:
        function = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p,) * 4  # config, function, arguments, none
    return function


_TENSOR_BYTES = {"f16": 2, "f32": 4, "bf16": 2, "tf32": 4}
_TENSOR_TYPES = {"f16": 6, "f32": 7, "bf16": 9, "tf32": 11}  # CU_TENSOR_MAP_DATA_TYPE_...


@functools.cache
def encode(tensor_map: TensorMap) -> tuple[int, ...]:
    """Return the sixteen words of a tensor map, as the driver encodes it, for some address.

    The first word is the address, and nothing else depends on it.

    Raises
    ------
    KernelError
        If the driver refuses it.
    """
    words = (ctypes.c_ulonglong * 24)()
    at = ctypes.addressof(words)
    at += -at % 64
    rank = len(tensor_map.extents)
    arrays = [(ctypes.c_ulonglong * rank)(*tensor_map.extents),
              (ctypes.c_ulonglong * rank)(*tensor_map.strides),
              (ctypes.c_uint * rank)(*tensor_map.box),
              (ctypes.c_uint * rank)(*(tensor_map.steps or (1,) * rank))]
    swizzle = {128: 3, 64: 2}[tensor_map.box[0] * _TENSOR_BYTES[tensor_map.dtype]]  # of a row
    promotion = 2  # 128 bytes
    driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    error = driver.cuTensorMapEncodeTiled(
        ctypes.c_void_p(at), _TENSOR_TYPES[tensor_map.dtype], rank, ctypes.c_void_p(1 << 20),
        *arrays, 0, swizzle, promotion, 0)
    if error:
        raise KernelError(f"cuTensorMapEncodeTiled refuses {tensor_map}: error {error}")
    return tuple((ctypes.c_ulonglong * 16).from_address(at))


def count() -> int:
    """Return how many CUDA devices CuPy sees; 0 without CuPy or a driver."""
    try:
        from cupy.cuda import runtime

        return runtime.getDeviceCount()
    except Exception:  # no CuPy, no driver, or a driver too old: all mean "no device"
        return 0


# Nominal rates by device name: (bytes a second, float operations a second on the matrix units in
# 16-bit). They only serve `explain`; the bench measures its own.
_NOMINAL = {"H200": (4.8e12, 989e12), "H100": (3.35e12, 989e12), "A100": (2.0e12, 312e12)}


def floor_us(index: int, moved: int, flops: int) -> float | None:
    """Return the time in us below which no kernel can do the work, or None if not known."""
    for name, (bandwidth, rate) in _NOMINAL.items():
        if name in device(index).name:
            return max(moved / bandwidth, flops / rate) * 1e6
    return None
