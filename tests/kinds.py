"""Arrays of each kind (NumPy, CuPy, torch) in every layout, and calls on them.

A test holds NumPy arrays; `call` puts them where the kind lives, calls a public function and
brings the results back. bfloat16 travels as its bits, so that nothing depends on how well an
array library knows that type.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cupyattn

DTYPES = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16),
          "f32": np.dtype(np.float32), "f64": np.dtype(np.float64)}


def mk(seed, shape, dtype="f32"):
    """Standard normal numbers of a dtype, rounded from float32."""
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return x.astype(DTYPES[dtype])


def wide(dtype):
    """Return the type in which `exact` is computed for a dtype."""
    return np.longdouble if np.dtype(DTYPES.get(dtype, dtype)) == np.float64 else np.float64


class Numpy:
    """NumPy arrays: the reference runs."""

    name, on_gpu, xp = "numpy", False, np

    def put(self, x):
        return np.array(x, order="C")

    def get(self, a):
        return a

    def sync(self):
        pass

    def pointer(self, a):
        return a.__array_interface__["data"][0]


class Cupy:
    """CuPy arrays."""

    name, on_gpu = "cupy", True

    @property
    def xp(self):
        import cupy

        return cupy

    def put(self, x):
        x = np.ascontiguousarray(x) if x.ndim else x
        if x.dtype == DTYPES["bf16"]:
            return self.xp.asarray(x.view(np.uint16)).view(x.dtype)
        return self.xp.asarray(x)

    def get(self, a):
        if a.dtype == DTYPES["bf16"]:
            return self.xp.asnumpy(a.view(np.uint16)).view(a.dtype)
        return self.xp.asnumpy(a)

    def sync(self):
        self.xp.cuda.Device().synchronize()

    def pointer(self, a):
        return a.data.ptr


class Torch:
    """torch tensors on the current CUDA device."""

    name, on_gpu = "torch", True

    @property
    def xp(self):
        import torch

        return torch

    def put(self, x):
        torch = self.xp
        x = np.ascontiguousarray(x)
        if x.dtype == DTYPES["bf16"]:
            return torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16)
        return torch.from_numpy(x.copy()).cuda()

    def get(self, a):
        torch = self.xp
        a = a.detach().cpu().contiguous()
        if a.dtype == torch.bfloat16:
            return a.view(torch.int16).numpy().view(DTYPES["bf16"])
        return a.numpy()

    def sync(self):
        self.xp.cuda.synchronize()

    def pointer(self, a):
        return a.data_ptr()


KINDS = {kind.name: kind for kind in (Numpy(), Cupy(), Torch())}
GPU_MARKS = {"numpy": (), "cupy": (pytest.mark.gpu,), "torch": (pytest.mark.gpu, pytest.mark.torch)}


def params(*names):
    """Return the kinds of these names as pytest parameters with their marks."""
    return [pytest.param(KINDS[name], id=name, marks=GPU_MARKS[name]) for name in names]


def lift(kind, x):
    """Put NumPy arrays, also those inside tuples, where the kind lives."""
    if isinstance(x, np.ndarray):
        return kind.put(x)
    return tuple(lift(kind, y) for y in x) if isinstance(x, tuple) else x


def lower(kind, x):
    """Bring results back as NumPy arrays."""
    if isinstance(x, tuple):
        return tuple(lower(kind, y) for y in x)
    return None if x is None else kind.get(x)


def call(kind, operation, *arrays, **options):
    """Call a public function of NumPy arrays on arrays of a kind."""
    options = {name: lift(kind, value) for name, value in options.items()}
    return lower(kind, operation(*(lift(kind, a) for a in arrays), **options))


# --- the entry points under the names that tests/CASES.md uses -------------------------------


def na(kind, q, k, v, kernel_size, **options):
    """Neighborhood attention: y and lse."""
    return call(kind, cupyattn.neighborhood_attention, q, k, v, kernel_size, return_lse=True,
                **options)


def na_bwd(kind, q, k, v, dy, kernel_size, dlse=None, **options):
    """Forward, then the gradients of q, k and v."""
    q, k, v, dy = (lift(kind, x) for x in (q, k, v, dy))
    y, lse = cupyattn.neighborhood_attention(q, k, v, kernel_size, return_lse=True, **options)
    if dlse is not None:
        options["dlse"] = lift(kind, dlse)
    return lower(kind, cupyattn.neighborhood_attention_backward(dy, q, k, v, y, lse, kernel_size,
                                                                **options))


def mta(kind, scores, weight, bias=None, **options):
    """Multi-token attention."""
    return call(kind, cupyattn.multi_token_attention, scores, weight, bias, **options)


def mta_bwd(kind, scores, weight, bias, dy, **options):
    """Gradients of scores, weight and bias."""
    return call(kind, cupyattn.multi_token_attention_backward, dy, scores, weight, bias, **options)


def rope(kind, x, cos, sin, **options):
    """Rotate one array [batch, seq, heads, head_dim]."""
    options.setdefault("layout", "bshd")
    return call(kind, cupyattn.rope, x, None, cos, sin, **options)[0]


def fused(kind, x, weights, biases, **options):
    """The module; `weights` and `biases` are four each."""
    return call(kind, cupyattn.fused_neighborhood_attention, x, *weights, *biases, **options)


def fused_bwd(kind, x, weights, biases, dy, **options):
    """Forward with residuals, then the nine gradients."""
    x, dy, weights, biases = (lift(kind, a) for a in (x, dy, tuple(weights), tuple(biases)))
    options = {name: lift(kind, value) for name, value in options.items()}
    _, residuals = cupyattn.fused_neighborhood_attention(x, *weights, *biases,
                                                         return_residuals=True, **options)
    return lower(kind, cupyattn.fused_neighborhood_attention_backward(
        dy, x, *weights, *biases, residuals, **options))


# --- layouts ---------------------------------------------------------------------------------
#
# A layout turns a NumPy array into (base, view): `base` is contiguous, NaN outside the array,
# and `view(base)` is the array. The same view is taken of the base wherever it lives.


def _filled(shape, dtype):
    nan = dtype.kind not in "iub"
    return np.full(shape, np.nan if nan else np.iinfo(dtype).max, dtype)


def guarded(x, before=257, after=259):
    """Contiguous, not aligned to more than one element, between NaNs."""
    base = _filled(before + x.size + after, x.dtype)

    def view(b):
        return b[before:before + x.size].reshape(x.shape)

    view(base)[...] = x
    return base, view


def padded(x):
    """Every axis inside a longer one of NaNs: strides without a pattern, rows not aligned."""
    base = _filled(tuple(n + 2 + axis for axis, n in enumerate(x.shape)), x.dtype)
    inner = tuple(slice(1, 1 + n) for n in x.shape)

    def view(b):
        return b[inner]

    view(base)[...] = x
    return base, view


def stepped(x):
    """Every other element of a longer last axis."""
    base = _filled(x.shape[:-1] + (2 * x.shape[-1],), x.dtype)

    def view(b):
        return b[..., ::2]

    view(base)[...] = x
    return base, view


def swapped(x):
    """Heads first in memory: the axes 1 and -2 (heads and the first of space) exchanged."""
    base = np.ascontiguousarray(np.moveaxis(x, -2, 1))

    def view(b):
        return b.swapaxes(1, 2) if b.ndim == 4 else _moved(b)

    def _moved(b):
        order = (0,) + tuple(range(2, b.ndim - 1)) + (1, b.ndim - 1)
        return b.permute(order) if hasattr(b, "permute") else b.transpose(order)

    return base, view


def backwards(x):
    """A negative stride on axis 1 (not for torch, which has none)."""
    base = np.ascontiguousarray(x[:, ::-1])

    def view(b):
        return b[:, ::-1]

    return base, view


def fortran(x):
    """First axis fastest."""
    base = np.ascontiguousarray(x.T)

    def view(b):
        return b.T if not hasattr(b, "permute") else b.permute(tuple(range(b.ndim))[::-1])

    return base, view


def broadcast(x):
    """A stride of 0 on the first axis; `x` must not vary along it."""
    base = np.ascontiguousarray(x[:1])

    def view(b):
        if hasattr(b, "expand"):
            return b.expand(x.shape)
        xp = np if isinstance(b, np.ndarray) else KINDS["cupy"].xp
        return xp.broadcast_to(b, x.shape)

    return base, view


LAYOUTS = {f.__name__: f for f in (guarded, padded, stepped, swapped, backwards, fortran)}


def place(kind, x, layout):
    """Return the array of a kind in a layout."""
    base, view = layout(x)
    return view(kind.put(base))


class Guard:
    """An output buffer in a layout, filled with NaN, whose surroundings must stay as they are."""

    def __init__(self, kind, shape, dtype, layout=guarded):
        self.kind = kind
        base, self._view = layout(_filled(shape, np.dtype(dtype)))
        self._base = kind.put(base)
        self.before = base.copy()
        self.array = self._view(self._base)

    def check(self, what="out"):
        """Return the result; fail if anything around it changed."""
        after = np.array(self.kind.get(self._base))
        result = self._view(after).copy()
        self._view(after)[...] = self._view(self.before)
        if after.tobytes() != self.before.tobytes():
            raise AssertionError(f"memory around {what} was written")
        return result


def raw(a):
    """The elements' bits as unsigned integers, in the same memory (NumPy and CuPy)."""
    return a.view(f"u{a.dtype.itemsize}")


# --- streams ---------------------------------------------------------------------------------

SPIN = r"""
extern "C" __global__ void spin(long long nanoseconds) {
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < nanoseconds);
}
"""


def spin(milliseconds, stream=None):
    """Keep a stream (CuPy's current one if None) busy, so that unordered work would be early."""
    import cupy

    kernel = cupy.RawKernel(SPIN, "spin")
    with stream if stream is not None else cupy.cuda.get_current_stream():
        kernel((1,), (1,), (np.int64(milliseconds * 1_000_000),))


def capture(function):
    """Warm up, capture one call of `function`, and return (stream, graph)."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        function()
        stream.synchronize()
        stream.begin_capture()
        try:
            function()
        finally:
            graph = stream.end_capture()
    return stream, graph
