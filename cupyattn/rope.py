"""Rotary position embedding and its tables."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from . import _arrays, _checks
from ._launch import Operator, call
from ._program import Layout, dense_like
from .configs import rope as configs
from .configs.rope import Problem
from .reference import rope as reference

_LAYOUTS = ("bhsd", "bshd")


def rope(q, k, cos, sin, *, rotary_dim=None, interleaved=False, position_ids=None, offset=0,
         inverse=False, layout="bhsd", out=None):
    """Rotate pairs of features of queries and keys by an angle that depends on the position.

    With ``r = rotary_dim // 2``, half-split: ``y[:r] = x[:r] cos - x[r:2r] sin`` and
    ``y[r:2r] = x[r:2r] cos + x[:r] sin``; interleaved: the same for features (2i, 2i + 1).
    Features from `rotary_dim` on pass through. Arithmetic in float32 (float64 for float64), one
    rounding.

    Parameters
    ----------
    q : array, (batch, q_heads, seq, head_dim), or None
        float16, bfloat16, float32 or float64; NumPy, CuPy or torch (CUDA). Copied only if the
        last axis is strided.
    k : array, (batch, kv_heads, seq, head_dim), or None
        Both are (batch, seq, heads, head_dim) with ``layout="bshd"``.
    cos, sin : array, (table, width) or (batch or 1, table, width)
        Any float dtype. `width` is ``rotary_dim // 2``, or `rotary_dim` with each value twice:
        halves repeated (half-split), neighbours repeated (interleaved).
    rotary_dim : int, optional
        Even, at most head_dim. None: head_dim if ``width == head_dim``, else ``2 * width``.
    interleaved : bool
        Pairs are (0, 1), (2, 3), ... if true, else (i, i + rotary_dim // 2).
    position_ids : array, (seq,) or (batch, seq), int32 or int64, optional
        Position of each token, an array of the same library. The token's number when None.
    offset : int or sequence of int
        Added to the position; one value, or one for each batch item. The sum is the table row.
        A row outside the table is an error where the host knows it; from `position_ids` on a
        device the token comes out as NaN and `check_errors`, or a later call, raises.
    inverse : bool
        Negate the sine: the transpose, hence the gradient.
    layout : {"bhsd", "bshd"}
        Axis order of `q` and `k`.
    out : (array or None, array or None), optional
        Written in place of new results. May be exactly the inputs.

    Returns
    -------
    q_out, k_out : arrays or None
        Of the kind, shape and dtype of `q` and `k`, and with their order of axes in memory; None
        where the input is None.

    Raises
    ------
    TypeError
        For arrays of unlike kinds or dtypes, and options of the wrong type.
    ValueError
        For shapes that do not fit together, options outside their range, a position outside
        the table.

    References
    ----------
    Su et al., "RoFormer", 2021, section 3.2.

    Examples
    --------
    >>> import numpy as np, cupyattn
    >>> q, k = np.ones((1, 8, 5, 16), np.float32), np.ones((1, 2, 5, 16), np.float32)
    >>> cos, sin = cupyattn.rope_table(5, 16)
    >>> [x.shape for x in cupyattn.rope(q, k, cos, sin)]
    [(1, 8, 5, 16), (1, 2, 5, 16)]
    """
    if cos is None or sin is None:
        raise TypeError(f"{'cos' if cos is None else 'sin'} is None; accepted is an array")
    constants, offsets = None, None
    if type(offset) is not int:
        offset, offsets = _offsets(offset)
        if offsets is not None:
            constants = {"offsets": np.array(offsets, np.int64)}
    if out is not None:
        out = _outputs(out, q, k)
    options = (rotary_dim, interleaved, inverse, layout, offsets,
               type(rotary_dim), type(interleaved), type(inverse))
    results = call(ROPE, (q, k, cos, sin, position_ids), options, out, (offset,), constants)
    if k is None:
        return results[0], None
    return (None, results[0]) if q is None else tuple(results)


def _outputs(out, q, k) -> tuple | None:
    """Return the entries of `out` for the inputs that are there, or None."""
    out = _checks.outputs(out, 2)
    if out is None:
        return None
    for name, target, x in zip(("q", "k"), out, (q, k)):
        if target is not None and x is None:
            raise ValueError(f"out has an array for {name}, which is None; accepted there is None")
    return tuple(target for target, x in zip(out, (q, k)) if x is not None)


def rope_backward(dq, dk, cos, sin, *, rotary_dim=None, interleaved=False, position_ids=None,
                  offset=0, layout="bhsd", out=None):
    """Gradients of `rope` with respect to `q` and `k`: the rotation by the opposite angle.

    Parameters
    ----------
    dq, dk : arrays or None
        Gradients of the results, in the shapes of `q` and `k`.
    cos, sin, rotary_dim, interleaved, position_ids, offset, layout, out
        As in `rope`.

    Returns
    -------
    dq_in, dk_in : arrays or None
        Gradients of `q` and `k`.

    Raises
    ------
    TypeError, ValueError
        As `rope`.
    """
    try:
        return rope(dq, dk, cos, sin, rotary_dim=rotary_dim, interleaved=interleaved,
                    position_ids=position_ids, offset=offset, inverse=True, layout=layout, out=out)
    except (TypeError, ValueError) as error:  # checked as q and k of `rope`: say which they are
        raise type(error)(re.sub(r"\b[qk](?=\b|_out\b)", r"d\g<0>", str(error))) from error


def rope_table(seq, rotary_dim, *, base=10000.0, scaling=None, positions=None, dtype="float32",
               like=None):
    """Cosine and sine of the angle of each position and pair, in the half form.

    Angles are formed in float64 and rounded once, so they are right to float32 rounding at any
    position. Tables on a device are made there; the host waits for it only where the rule depends
    on the largest of `positions`.

    Parameters
    ----------
    seq : int
        Positions 0 to seq - 1; the current length for the rules "dynamic" and "longrope".
    rotary_dim : int
        Even number of features that are rotated.
    base : float
        Base of the geometric series of frequencies.
    scaling : dict, optional
        A frequency rule in the Hugging Face form: "rope_type" one of "default", "linear",
        "dynamic", "yarn", "longrope", "llama3", "proportional", with its fields. The rule's
        attention factor is multiplied in.
    positions : array of int, optional
        Positions instead of 0 to seq - 1, any shape.
    dtype : dtype
        float16, bfloat16, float32 or float64.
    like : array, optional
        An array of the wanted kind (CuPy, torch) on the wanted device; NumPy when None. Positions
        of the same kind on the same device stay there; others come by way of the host.

    Returns
    -------
    cos, sin : arrays, (seq, rotary_dim // 2) or (*positions.shape, rotary_dim // 2)

    Raises
    ------
    TypeError, ValueError
        For options of the wrong type or outside their range; an unknown rule, or a missing
        field of one, is named.

    Examples
    --------
    >>> import cupyattn
    >>> cos, sin = cupyattn.rope_table(4, 8)
    >>> cos.shape, float(cos[0, 0]), float(sin[0, 0])
    ((4, 4), 1.0, 0.0)
    """
    if seq is None and positions is None:
        raise TypeError("seq is None; accepted is an integer, or None beside positions")
    if seq is not None:
        seq = _checks.integer("seq", seq)
        if seq < 0:
            raise ValueError(f"seq is {seq}; accepted is an integer of at least 0")
    rotary_dim = _checks.integer("rotary_dim", rotary_dim)
    if rotary_dim < 0 or rotary_dim % 2:
        raise ValueError(f"rotary_dim is {rotary_dim}; accepted is an even number of at least 0")
    base = _checks.real("base", base)
    if base <= 0:
        raise ValueError(f"base is {base}; accepted is a positive number")
    if scaling is not None and not isinstance(scaling, Mapping):
        raise TypeError(f"scaling is a {type(scaling).__name__}; accepted is a dict or None")
    tag = _arrays.float_dtype(dtype)
    library = None if like is None else _arrays.library_of({"like": like})
    if library is not None and library.on_device:
        return _device_table(library, like, tag, positions, seq, rotary_dim, base, scaling)
    if positions is not None:
        positions = _integers(_arrays.to_host("positions", positions))
    values = reference.table(seq, rotary_dim, base, scaling, positions)
    return tuple(_arrays.from_host(x, tag, like) for x in values)


def _integers(positions):
    if positions.dtype.kind not in "iu":
        raise TypeError(f"positions has dtype {positions.dtype}; accepted are integers")
    return positions


def _device_table(library: _arrays.Library, like, tag: str, positions, seq: int | None,
                  rotary_dim: int, base: float, scaling: Mapping | None) -> tuple:
    """Make the tables on the device of `like`, on its library's stream.

    Only the frequencies, a few hundred numbers, come from the host.
    """
    import cupy

    foreign = isinstance(library, _arrays.Foreign)
    device = library.device(library.adopt("like", like) if foreign else like)  # type: ignore
    with cupy.cuda.Device(device), library.stream_object(device):
        if positions is None:
            positions = cupy.arange(seq)
        elif type(positions) is type(like) and positions.__dlpack_device__() == (2, device):
            positions = _integers(cupy.from_dlpack(positions))
        else:  # elsewhere, or in the order of another stream
            positions = cupy.asarray(_integers(_arrays.to_host("positions", positions)))
        if seq is None and scaling is not None and positions.size:
            if (scaling.get("rope_type") or scaling.get("type")) in _RULES_OF_LENGTH:
                seq = int(positions.max()) + 1  # waits
        frequencies, factor = reference.frequencies(rotary_dim, base, scaling, seq)
        layout = Layout((*positions.shape, rotary_dim // 2), tag)
        tables = [library.empty(layout, device) for _ in ("cos", "sin")]
        if layout.size:
            dtype, kernel = _table_kernel(tag)
            kernel(positions[..., None], cupy.asarray(frequencies), factor, *(
                cupy.ndarray(layout.shape, dtype, cupy.cuda.MemoryPointer(
                    cupy.cuda.UnownedMemory(library.pointer(x), layout.nbytes, x, device), 0))
                for x in tables))
    return tuple(library.give_back(x, like) if foreign else x for x in tables)  # type: ignore


_RULES_OF_LENGTH = ("dynamic", "longrope")


@functools.cache
def _table_kernel(tag: str) -> tuple[type, Any]:
    """Return the dtype that holds the bits of `tag`, and the kernel that writes them.

    Angles in float64, as in the reference: at position 10**6 they are off by 1e-10 at most. Then
    one rounding, as NumPy and ml_dtypes do it (bfloat16 by way of float32).
    """
    import cupy

    dtype, ctype, rounding = {
        "f64": (np.float64, "double", "y = x;"),
        "f32": (np.float32, "float", "y = float(x);"),
        "f16": (np.uint16, "unsigned short", 'asm("cvt.rn.f16.f64 %0, %1;" : "=h"(y) : "d"(x));'),
        "bf16": (np.uint16, "unsigned short",
                 'asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(float(x)));'),
    }[tag]
    return dtype, cupy.ElementwiseKernel(
        "T position, float64 frequency, float64 factor", f"{np.dtype(dtype).name} c, "
        f"{np.dtype(dtype).name} s",
        """
        double cosine, sine;
        sincos(double(position) * frequency, &sine, &cosine);
        c = rounded(cosine * factor);
        s = rounded(sine * factor);
        """, f"cupyattn_rope_table_{tag}",
        preamble=f"__device__ {ctype} rounded(double x) {{ {ctype} y; {rounding} return y; }}")


def _offsets(offset) -> tuple[int, tuple[int, ...] | None]:
    """Return (offset, None) for one value, (0, offsets) for one value per batch item."""
    if isinstance(offset, (tuple, list)) or getattr(offset, "ndim", 0) == 1:
        if not isinstance(offset, (tuple, list, np.ndarray)):
            raise TypeError(f"offset is a {type(offset).__name__}; accepted are an int, or one "
                            "int per batch item in a tuple, list or NumPy array")
        return 0, tuple(_checks.integer(f"offset[{b}]", x) for b, x in enumerate(offset))
    return _checks.integer("offset", offset), None


def _normalise(arrays, options: tuple) -> tuple[Any, ...]:
    rotary_dim, interleaved, inverse, layout, offsets = options[:5]
    return (None if rotary_dim is None else _checks.integer("rotary_dim", rotary_dim),
            _checks.boolean("interleaved", interleaved), _checks.boolean("inverse", inverse),
            _checks.choice("layout", layout, _LAYOUTS), offsets)


def _bounds(problem: Problem) -> tuple[int, int] | None:
    """Return the offsets that keep every row inside the table, where the host knows the rows."""
    batch, seq = problem.some.shape[:2]
    if problem.position_ids is not None or not batch or not seq:
        return None
    low, high = problem.offsets or (0, 0)  # beside them the call's own offset is 0
    return -low, problem.cos.shape[1] - seq - high


def _out_of_bounds(problem: Problem, offset: int) -> None:
    low, high = problem.offsets or (0, 0)
    _checks.rope_rows(low + offset, high + offset + problem.some.shape[1] - 1,
                      problem.cos.shape[1])


def _results(problem: Problem) -> dict[str, Layout]:
    """The results in the caller's axis order, in memory as the inputs lie."""
    return {f"{name}_out": dense_like(layout) for name, layout in problem.given.items()}


def _reference(arrays: Mapping[str, Any], problem: Problem, scalars: Mapping[str, Any]):
    batch_offsets = scalars.get("offsets")
    rows = (np.arange(problem.some.shape[1])[None] if arrays["position_ids"] is None
            else np.atleast_2d(arrays["position_ids"]).astype(np.int64))
    rows = rows + (scalars["offset"] if batch_offsets is None else batch_offsets[:, None])
    tables = [x if x.ndim == 3 else x[None] for x in (arrays["cos"], arrays["sin"])]
    if rows.size:
        _checks.rope_rows(int(rows.min()), int(rows.max()), tables[0].shape[1])
    results = []
    for name in problem.given:
        x = arrays[name]
        y = reference.rotate(x if problem.seq_first else x.swapaxes(1, 2), tables[0], tables[1],
                             problem.rotary_dim, problem.interleaved, rows, problem.inverse)
        results.append(y if problem.seq_first else y.swapaxes(1, 2))
    return results


ROPE = Operator(
    name="rope", arrays=("q", "k", "cos", "sin", "position_ids"), table=configs.TABLE,
    normalise=_normalise, problem=_checks.rope, results=_results, reference=_reference,
    flops=lambda p: sum(3 * x.size * p.rotary_dim // x.shape[-1] for x in p.given.values()),
    any_strides=frozenset({"cos", "sin", "position_ids"}), strided_results=("q_out", "k_out"),
    scalars=("offset",), bounds=_bounds, out_of_bounds=_out_of_bounds, typed=True)
