"""Inputs that are the same in every process, and the steps between array libraries."""

from __future__ import annotations

import functools
import math
import zlib
from typing import Any

import numpy as np

from .workloads import Workload

# A counter-based generator: element i of an array depends on i and the seed only, so that each
# process draws the same bits whatever library its provider uses.
_NORMAL = """
    unsigned long long z = ((unsigned long long)i + 1) * 0x9E3779B97F4A7C15ULL + seed;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    z ^= z >> 31;
    float u = ((float)(unsigned)(z >> 40) + 0.5f) * 5.9604644775390625e-8f;
    float v = (float)(unsigned)(z & 0xffffff) * 5.9604644775390625e-8f;
    float value = scale * sqrtf(-2.0f * logf(u)) * cospif(2.0f * v);
"""
_STORE = "x = value;"
_STORE_BF16 = "unsigned b = __float_as_uint(value); x = (b + 0x7fff + ((b >> 16) & 1)) >> 16;"


@functools.cache
def _generator(bf16: bool) -> Any:
    import cupy

    kind, store = ("uint16", _STORE_BF16) if bf16 else ("T", _STORE)
    name = "bench_normal_bf16" if bf16 else "bench_normal"
    return cupy.ElementwiseKernel("uint64 seed, float32 scale", f"{kind} x", _NORMAL + store, name)


def numpy_dtype(name: str) -> np.dtype:
    if name == "bf16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype({"f16": "float16", "f32": "float32", "f64": "float64"}[name])


def normal(xp: Any, shape: tuple[int, ...], dtype: str, seed: int, scale: float) -> Any:
    """Return normal draws times `scale`, rounded to `dtype`."""
    if xp is np:
        draws = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
        return (draws * np.float32(scale)).astype(numpy_dtype(dtype))
    out = xp.empty(shape, np.uint16 if dtype == "bf16" else numpy_dtype(dtype))
    if out.size:
        _generator(dtype == "bf16")(np.uint64(seed), np.float32(scale), out)
    return out.view(numpy_dtype(dtype))


@functools.lru_cache(maxsize=4)
def _angles(seq: int, width: int) -> tuple[Any, Any]:
    """Return the cosines and sines of a table on the host, float32."""
    frequency = 10000.0 ** (-2.0 * np.arange(width // 2) / width)
    angle = np.arange(seq)[:, None] * frequency
    half = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    cos, sin = (np.concatenate([table, table], axis=1)[None] for table in half)
    return cos, sin


def _table(xp: Any, name: str, shape: tuple[int, ...], dtype: str) -> Any:
    table = _angles(*shape[1:])[name == "sin"]
    if dtype == "bf16" and xp is not np:
        bits = table.view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return xp.asarray(rounded).view(numpy_dtype(dtype))
    return xp.array(table.astype(numpy_dtype(dtype)))  # a new one: providers may write to it


def _scale(workload: Workload, name: str, shape: tuple[int, ...]) -> float:
    if name.endswith("weight"):
        return 1.0 / math.sqrt(math.prod(shape[1:]))
    return 0.1 if name.endswith("bias") else 1.0


def make(workload: Workload, direction: str, xp: Any) -> dict[str, Any]:
    """Return the workload's arrays; each call allocates new ones with the same contents."""
    arrays = {}
    for name, shape in workload.arrays(direction).items():
        if name in ("cos", "sin"):
            arrays[name] = _table(xp, name, shape, workload.dtype)
        else:
            seed = zlib.crc32(f"{workload.name} {name}".encode()) << 16
            scale = _scale(workload, name, shape)
            arrays[name] = normal(xp, shape, workload.dtype, seed, scale)
            if workload.operator == "rope":
                arrays[name] = arrays[name].transpose(0, 2, 1, 3)
    return arrays


def widen(array: Any, xp: Any, dtype: Any) -> Any:
    """Return `array` in float32 or float64, also where it is bfloat16 on the device."""
    if xp is not np and array.dtype.name == "bfloat16":
        array = (array.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(dtype, copy=False)


def rounder(dtype: str, xp: Any) -> Any:
    """Return a function that rounds float32 values to `dtype` and keeps them float32."""
    if dtype == "bf16":

        def to_bf16(x: Any) -> Any:
            bits = xp.ascontiguousarray(x).view(np.uint32)
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            return ((bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)).view(np.float32)

        return to_bf16
    if dtype == "f16":
        return lambda x: x.astype(np.float16).astype(np.float32)
    return lambda x: x


def to_torch(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the same memory as torch tensors; bfloat16 crosses as 16-bit integers."""
    import torch

    tensors = {}
    for name, array in arrays.items():
        if array.dtype.name == "bfloat16":
            tensors[name] = torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
        else:
            tensors[name] = torch.from_dlpack(array)
    return tensors


def to_cupy(outputs: Any) -> list[Any]:
    """Return a provider's outputs as CuPy arrays, 16-bit torch tensors as float32."""
    import cupy

    arrays = []
    for out in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
        if not isinstance(out, cupy.ndarray):
            out = out.detach()
            out = cupy.from_dlpack((out.float() if out.itemsize == 2 else out).contiguous())
        arrays.append(out)
    return arrays
