"""Compile kernels through `cupy.RawModule`, keep them per device, launch them."""

from __future__ import annotations

import os
import threading
import warnings
from dataclasses import dataclass
from typing import Any

from . import _source
from ._errors import KernelError
from ._program import Device, Kernel

# C++17 for `if constexpr`; no fast math anywhere: results are as exact as the arithmetic.
OPTIONS = ("-std=c++17",)


@dataclass(frozen=True)
class Compiled:
    """A loaded kernel: the address of its CUfunction and what the compiler used for it."""

    kernel: Kernel
    function: int
    registers: int
    local_bytes: int
    keep: Any  # owns the module


@dataclass
class CacheInfo:
    """What the compilation cache of this process holds."""

    kernels: int  # held, over all devices
    compiled: int  # made ready by this process, from source or from the disk cache
    hits: int  # found again without that
    folder: str  # CuPy's disk cache


_lock = threading.Lock()
_loaded: dict[tuple[Kernel, int], Compiled] = {}
_counts = {"hits": 0, "compiled": 0}


def options(kernel: Kernel) -> tuple[str, ...]:
    """Return the compiler options of a kernel.

    CuPy adds the device's own ``-arch``; NVRTC lets an architecture-specific one beside it win.
    """
    return OPTIONS + ((f"-arch={kernel.target}",) if kernel.target else ())


def compile_cubin(kernel: Kernel, target: str) -> tuple[bytes, str]:
    """Compile a kernel with NVRTC alone, for any architecture, and return (cubin, log).

    Needs no GPU. `target` is such as ``"sm_90"``; the log holds registers and spills.
    """
    from cupy.cuda import nvrtc

    text = _source.assemble(kernel)
    program = nvrtc.createProgram(text, kernel.name + ".cu", (), ())
    try:
        flags = (*OPTIONS, f"-arch={kernel.target or target}", "-ftz=true",
                 "--device-as-default-execution-space", "-Xptxas", "-v")
        try:
            nvrtc.compileProgram(program, flags)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise KernelError(f"{kernel.name} did not compile for {target}\n{log}") from error
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def load(kernel: Kernel, device: Device) -> Compiled:
    """Return the kernel for the device, compiled on first use. The device must be current."""
    key = (kernel, device.index)
    compiled = _loaded.get(key)
    if compiled is not None:
        _counts["hits"] += 1
        return compiled
    with _lock:
        compiled = _loaded.get(key)
        if compiled is None:
            compiled = _load(kernel, device)
            _counts["compiled"] += 1
            _loaded[key] = compiled
    return compiled


def _load(kernel: Kernel, device: Device) -> Compiled:
    import cupy

    try:
        try:
            module = cupy.RawModule(code=_source.assemble(kernel), options=options(kernel))
            raw = module.get_function(kernel.name)
            raw.compile()
            function = raw.kernel
            keep: Any = raw
            attributes = raw.attributes
        except OSError as error:  # the disk cache cannot be used: compile in memory
            warnings.warn(f"CuPy's kernel cache cannot be used ({error}); "
                          "kernels are compiled anew in every process", RuntimeWarning,
                          stacklevel=2)
            cubin, _ = compile_cubin(kernel, device.target)
            keep = cupy.cuda.function.Module()
            keep.load(cubin)
            function = keep.get_function(kernel.name)
            attributes = {"num_regs": 0, "local_size_bytes": 0}
        from cupy_backends.cuda.api import driver

        if device.shared_memory > 49152:  # beyond 48 KiB a kernel must opt in, once
            static = driver.funcGetAttribute(
                driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function.ptr)
            driver.funcSetAttribute(
                function.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                device.shared_memory - static)
    except KernelError:
        raise
    except Exception as error:
        raise KernelError(f"{kernel.name} did not compile for {device.name}\n{error}") from error
    return Compiled(kernel, function.ptr, attributes["num_regs"],
                    attributes["local_size_bytes"], keep)


def cache_info() -> CacheInfo:
    """Say what the compilation cache of this process holds.

    Returns
    -------
    CacheInfo
        With `kernels`, `compiled`, `hits` and the `folder` of CuPy's disk cache.
    """
    folder = os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")
    return CacheInfo(len(_loaded), _counts["compiled"], _counts["hits"], folder)
