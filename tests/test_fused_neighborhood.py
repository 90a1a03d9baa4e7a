"""The fused module against the oracle: nine gradients, rotation, layouts, rows."""

import cupyattn
import numpy as np
import oracle
import pytest
from kinds import DTYPES, LAYOUTS, lift, lower, mk, place
from problems import (
    FUSED,
    FUSED_FEW,
    Fused,
    check,
    check_capture,
    check_layouts,
    check_out,
    check_repeat,
    check_row,
    flat,
    row_names,
)
from tolerance import agree, identical


def by_name(problem):
    return problem.name


@pytest.mark.parametrize("problem", FUSED, ids=by_name)
def test_results(kind, problem):
    check(problem, kind, "f32")


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f64"])
@pytest.mark.parametrize("problem", FUSED_FEW, ids=by_name)
def test_dtypes(kind, problem, dtype):
    check(problem, kind, dtype)


def fused_of_size(head_dim):
    return Fused(f"d{head_dim}", "this head_dim", (19,), 5, hidden=40, heads=2, kv_heads=1,
                 head_dim=head_dim, batch=1)


@pytest.mark.parametrize("head_dim", [1, 65, 130, 257, 512])
def test_head_dims(kind, head_dim):
    check(fused_of_size(head_dim), kind, "f32")


def test_residuals_are_of_the_size_of_the_tokens(kind):
    problem = FUSED[0]
    forward, _ = problem.calls(kind, "f32")
    y, residuals = forward()
    tokens = problem.batch * problem.space[0]
    width = 4 * problem.heads * problem.head_dim + problem.heads
    assert sum(np.asarray(kind.get(r)).size for r in residuals) <= tokens * width
    alone = cupyattn.fused_neighborhood_attention(
        *forward.arrays, **{**forward.options, "return_residuals": False})
    identical(kind.get(alone), kind.get(y))


def test_weights_as_rows_of_one_array(kind):
    """A packed projection is three views, forward and backward."""
    problem = next(p for p in FUSED if p.name == "grouped")
    x, weights, biases, dy = problem.inputs("f32")
    rows = np.cumsum([0, *(w.shape[0] for w in weights[:3])])
    packed = kind.put(np.concatenate(weights[:3]))
    packed_bias = kind.put(np.concatenate(biases[:3]))
    slices = [slice(a, b) for a, b in zip(rows, rows[1:])]
    arrays = (kind.put(x), *(packed[s] for s in slices), kind.put(weights[3]),
              *(packed_bias[s] for s in slices), kind.put(biases[3]))
    options = dict(problem.options, kernel_size=problem.kernel_size)
    y, residuals = cupyattn.fused_neighborhood_attention(*arrays, return_residuals=True, **options)
    # The gradients go to row slices of one array as well.
    d_packed = kind.put(np.full_like(np.concatenate(weights[:3]), np.nan))
    out = (None, *(d_packed[s] for s in slices), *[None] * 5)
    grads = cupyattn.fused_neighborhood_attention_backward(kind.put(dy), *arrays, residuals,
                                                           out=out, **options)
    for ours, separate in zip(lower(kind, (y, *grads)), problem.run(kind, "f32")):
        identical(np.array(ours), separate)
    identical(kind.get(d_packed), np.concatenate(lower(kind, grads[1:4])))


def test_tables_per_item(kind):
    """Rotary tables may differ by batch item."""
    problem = FUSED[0]
    x, weights, biases, _ = problem.inputs("f32")
    tables = tuple(mk(i, (problem.batch, problem.space[0], problem.head_dim // 2)) for i in (1, 2))
    options = dict(problem.options, kernel_size=problem.kernel_size)
    arrays = lift(kind, (x, *weights, *biases))
    y = cupyattn.fused_neighborhood_attention(*arrays, rope=lift(kind, tables), **options)
    exact = oracle.fused(x, weights, biases, problem.heads, problem.kv_heads, tables,
                         kernel_size=problem.kernel_size, boundary="clip")
    agree(kind.get(y), exact, case=True)


@pytest.mark.parametrize("table", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("interleaved, width", [(False, 3), (False, 8), (True, 3), (True, 8)])
def test_tables_of_part_of_a_head(kind, interleaved, width, table):
    """The module rotates 6 of 8 features (or all, by tables in the full form), forward and back."""
    problem = FUSED[0]
    x, weights, biases, dy = problem.inputs("f32")
    half = min(width, 4)
    tables = tuple(mk(i, (*x.shape[1:2], half), table) for i in (11, 12))
    given = tables if width == half else tuple(
        np.repeat(t, 2, -1) if interleaved else np.concatenate((t, t), -1) for t in tables)
    options = dict(problem.options, kernel_size=problem.kernel_size,
                   rope=lift(kind, given) + (interleaved,))
    arrays = lift(kind, (x, *weights, *biases))
    y, residuals = cupyattn.fused_neighborhood_attention(*arrays, return_residuals=True, **options)
    grads = cupyattn.fused_neighborhood_attention_backward(kind.put(dy), *arrays, residuals,
                                                           **options)
    words = dict(num_heads=problem.heads, num_kv_heads=problem.kv_heads, rope_tables=tables,
                 interleaved=interleaved, kernel_size=problem.kernel_size, boundary="clip")
    exact = (oracle.fused(x, weights, biases, **words),
             *oracle.fused_bwd(x, weights, biases, dy, **words))
    for name, ours, right in zip(problem.results, (y, *grads), exact):
        agree(kind.get(ours), right, case=True, what=name)


def test_input_of_any_strides(kind):
    """hidden_states with tokens that lie at no one stride."""
    problem = next(p for p in FUSED if p.name == "square")
    x, weights, biases, _ = problem.inputs("f32")
    options = dict(problem.options, kernel_size=problem.kernel_size)
    rest = lift(kind, (*weights, *biases))
    right = cupyattn.fused_neighborhood_attention(kind.put(x), *rest, **options)
    for layout in LAYOUTS.values():
        y = cupyattn.fused_neighborhood_attention(place(kind, x, layout), *rest, **options)
        identical(kind.get(y), kind.get(right), what=layout.__name__)


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("layout", [LAYOUTS[n] for n in ("guarded", "padded", "stepped",
                                                        "fortran")], ids=lambda f: f.__name__)
@pytest.mark.parametrize("problem", FUSED_FEW, ids=by_name)
def test_layouts(kind, problem, layout, dtype):
    check_layouts(problem, kind, dtype, layout)


@pytest.mark.parametrize("layout", [LAYOUTS[n] for n in ("guarded", "padded", "stepped")],
                         ids=lambda f: f.__name__)
@pytest.mark.parametrize("problem", FUSED_FEW[:2], ids=by_name)
def test_out(kind, problem, layout):
    check_out(problem, kind, "bf16", layout)


@pytest.mark.parametrize("given", [(True, False), (False, True), (True, True)], ids=str)
def test_out_of_the_module_in_part(kind, given):
    """Entries of `out` that are None are allocated, the residuals as a whole or one by one."""
    forward, _ = FUSED[0].calls(kind, "f32")
    y, residuals = forward()
    out = (kind.xp.zeros_like(y) if given[0] else None,
           (None, *map(kind.xp.zeros_like, residuals[1:])) if given[1] else None)
    ours = forward(out)
    assert out[0] is None or ours[0] is out[0]
    assert out[1] is None or all(a is b for a, b in zip(ours[1][1:], out[1][1:]))
    for a, b in zip(flat(*ours), flat(y, residuals)):
        identical(kind.get(a), kind.get(b))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("problem", FUSED_FEW, ids=by_name)
def test_bits_are_the_same_every_time(cupy_kind, problem, dtype):
    check_repeat(problem, cupy_kind, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("problem", FUSED_FEW, ids=by_name)
def test_capture(cupy_kind, problem, dtype):
    check_capture(problem, cupy_kind, dtype)


def test_tf32_is_close(kind):
    problem = FUSED[0]
    forward, _ = problem.calls(kind, "f32")
    y, _ = forward.function(*forward.arrays, **forward.options, precision="tf32")
    agree(kind.get(y), problem.exact("f32")[0], case=2e-3)


# --- rows ------------------------------------------------------------------------------------


def candidates():
    for dtype in DTYPES:
        for problem in (fused_of_size(100), fused_of_size(32), *FUSED_FEW):
            yield problem, dtype


@pytest.mark.gpu
@pytest.mark.parametrize("row", row_names("fused_neighborhood_fwd"))
def test_every_forward_row(cupy_kind, row):
    check_row(cupy_kind, "fused_neighborhood_fwd", row, candidates(), most=6)


@pytest.mark.gpu
@pytest.mark.parametrize("row", row_names("fused_neighborhood_bwd"))
def test_every_backward_row(cupy_kind, row):
    check_row(cupy_kind, "fused_neighborhood_bwd", row, candidates(), most=6)


# --- a short run for the sanitizer -----------------------------------------------------------

SMOKE = Fused("smoke", "ragged, shared heads, rotated", (7,), 3, hidden=13, heads=2, kv_heads=1,
              head_dim=6, rope="half")


@pytest.mark.gpu
@pytest.mark.smoke
@pytest.mark.parametrize("dtype", DTYPES)
def test_smoke(cupy_kind, dtype):
    check(SMOKE, cupy_kind, dtype, lambda x: place(cupy_kind, x, LAYOUTS["guarded"]))
