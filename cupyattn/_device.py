"""What the package knows about each GPU, asked once."""

from __future__ import annotations

import functools

from ._program import Device


@functools.cache
def device(index: int) -> Device:
    """Return the properties of a CUDA device."""
    from cupy.cuda import runtime

    p = runtime.getDeviceProperties(index)
    return Device(index=index, name=p["name"].decode(), capability=(p["major"], p["minor"]),
                  multiprocessors=p["multiProcessorCount"],
                  shared_memory=p["sharedMemPerBlockOptin"], l2=p["l2CacheSize"])


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
