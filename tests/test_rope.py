"""Rotary position embedding against the oracle: results, in place, tables, layouts, rows."""

import cupyattn
import numpy as np
import oracle
import pytest
from kinds import DTYPES, LAYOUTS, Guard, call, guarded, lift, mk, padded, place, rope
from problems import (
    ROPE,
    ROPE_FEW,
    Rope,
    check,
    check_capture,
    check_layouts,
    check_out,
    check_repeat,
    check_row,
    row_names,
    with_table,
)
from tolerance import agree, eps, identical

from cupyattn import _launch
from cupyattn._program import Device, Layout
from cupyattn.configs.rope import Problem, VectorRow, _shares


def by_name(problem):
    return problem.name


@pytest.mark.parametrize("problem", ROPE, ids=by_name)
def test_results(kind, problem):
    check(problem, kind, "f32")


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f64"])
@pytest.mark.parametrize("problem", ROPE_FEW, ids=by_name)
def test_dtypes(kind, problem, dtype):
    check(problem, kind, dtype)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_one_rounding(kind, dtype):
    """Within half a unit of the last place of the exact result, but for float32 arithmetic."""
    problem = with_table(ROPE[0], "f32")
    for ours, exact in zip(problem.run(kind, dtype), problem.exact(dtype)):
        slack = np.abs(exact) * eps(DTYPES[dtype]) / 2 + 4 * 2.0 ** -23 * np.abs(exact).max()
        slack += float(np.finfo(np.float32).tiny if dtype != "f16" else 2.0 ** -25)
        assert (np.abs(ours.astype(np.float64) - exact) <= slack).all()


def test_rest_of_the_head_passes_through(kind):
    problem = next(p for p in ROPE if p.name == "partial_named")
    q_out, k_out = problem.run(kind, "bf16")[:2]
    for ours, x in zip((q_out, k_out), problem.inputs("bf16")):
        identical(ours[..., problem.rotary_dim:], x[..., problem.rotary_dim:])


@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3)])
def test_results_lie_in_memory_as_the_inputs(kind, axes):
    """A heads-first view gives a heads-first view of heads-last memory, and the same numbers."""
    tables, x = [mk(n, (4, 4)) for n in (1, 2)], mk(0, (2, 3, 4, 8))
    memory = lift(kind, np.ascontiguousarray(x.transpose(axes)))
    view = getattr(memory, "permute", memory.transpose)(*np.argsort(axes).tolist())
    y = cupyattn.rope(view, None, *lift(kind, tuple(tables)))[0]
    assert getattr(y, "strides", None) == getattr(view, "strides", None)  # NumPy, CuPy
    assert not hasattr(y, "permute") or y.stride() == view.stride()
    identical(kind.get(y), call(kind, cupyattn.rope, x, None, *tables)[0])


def test_either_array_alone(kind):
    problem = ROPE[0]
    (q, k), tables = problem.inputs("f16"), problem.tables("f16")
    both = call(kind, cupyattn.rope, q, k, *tables)
    q_out, none = call(kind, cupyattn.rope, q, None, *tables)
    assert none is None
    identical(q_out, both[0])
    none, k_out = call(kind, cupyattn.rope, None, k, *tables)
    assert none is None
    identical(k_out, both[1])
    none, dk = call(kind, cupyattn.rope_backward, None, k, *tables)
    assert none is None
    identical(dk, call(kind, cupyattn.rope, None, k, *tables, inverse=True)[1])


def test_offset_may_change_from_call_to_call(kind):
    """A growing cache: the same arrays, another offset, each right; the last is outside."""
    x, table = mk(0, (2, 3, 2, 8)), mk(1, (9, 4))
    arrays = lift(kind, (x, table, table))
    for offset in (0, 5, 1, 6, 0, (2, 4), (6, 0), 3):
        rows = np.arange(3) + np.broadcast_to(offset, (2,))[:, None]
        y, _ = cupyattn.rope(arrays[0], None, *arrays[1:], offset=offset, layout="bshd")
        agree(kind.get(y), oracle.rotate(x, table[rows], table[rows]), case=True, what=str(offset))
    for offset in (7, -1, (0, 7), (-1, 0)):
        with pytest.raises(ValueError, match="9 rows"):
            cupyattn.rope(arrays[0], None, *arrays[1:], offset=offset, layout="bshd")


@pytest.mark.parametrize("interleaved", [False, True])
def test_inverse_undoes(kind, interleaved):
    x, tables = mk(0, (2, 9, 3, 16)), cupyattn.rope_table(9, 16)
    turned = rope(kind, x, *tables, interleaved=interleaved)
    agree(rope(kind, turned, *tables, interleaved=interleaved, inverse=True),
          x.astype(np.float64), case=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [guarded, padded], ids=lambda f: f.__name__)
@pytest.mark.parametrize("problem", ROPE_FEW, ids=by_name)
def test_in_place(kind, problem, layout, dtype):
    """`out` may be exactly an input; the bits are those of a new array, and nothing around."""
    forward, backward = problem.calls(kind, dtype)
    for request in (forward, backward):
        expected = request()
        guards = []
        for x in request.arrays[:2]:
            guard = Guard(kind, tuple(x.shape), DTYPES[dtype], layout)
            guard.array[...] = x
            guards.append(guard)
        q, k = (g.array for g in guards)
        results = request.function(q, k, *request.arrays[2:], **request.options, out=(q, k))
        assert results[0] is q and results[1] is k
        for guard, right in zip(guards, expected):
            identical(guard.check(), kind.get(right), what=problem.name)


def test_in_place_one_of_two(kind):
    """`out` may be an input for q and a new array for k."""
    problem = ROPE[0]
    forward, _ = problem.calls(kind, "f32")
    expected = forward()
    q = forward.arrays[0].copy()
    results = cupyattn.rope(q, *forward.arrays[1:], **forward.options, out=(q, None))
    for a, b in zip(results, expected):
        identical(kind.get(a), kind.get(b))


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("problem", ROPE_FEW, ids=by_name)
def test_layouts(kind, problem, layout, dtype):
    def every(x):
        flat_layout = layout.__name__ in ("swapped", "backwards") and x.ndim < 4
        return LAYOUTS["guarded"](x) if flat_layout else layout(x)

    check_layouts(problem, kind, dtype, every)


@pytest.mark.parametrize("layout", [LAYOUTS[n] for n in ("guarded", "padded", "stepped")],
                         ids=lambda f: f.__name__)
@pytest.mark.parametrize("problem", ROPE_FEW[:3], ids=by_name)
def test_out(kind, problem, layout):
    check_out(problem, kind, "bf16", layout)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("problem", ROPE_FEW, ids=by_name)
def test_bits_are_the_same_every_time(cupy_kind, problem, dtype):
    check_repeat(problem, cupy_kind, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("problem", ROPE_FEW, ids=by_name)
def test_capture(cupy_kind, problem, dtype):
    check_capture(problem, cupy_kind, dtype)


# --- tables ----------------------------------------------------------------------------------


def test_table_is_right_to_rounding_far_out():
    """float32 tables at position 1,000,000 are the float64 ones, rounded."""
    positions = np.array([0, 1, 4095, 131071, 999_999, 1_000_000])
    ours = cupyattn.rope_table(None, 64, positions=positions)
    angle = positions[:, None] * oracle.inv_freq(64)
    for table, exact in zip(ours, (np.cos(angle), np.sin(angle))):
        assert table.dtype == np.float32 and table.shape == (6, 32)
        assert np.abs(table - exact).max() <= 2.0 ** -24


def test_table_of_positions_of_any_shape():
    positions = np.array([[5, 2, 0], [1, 1, 7]], np.int32)
    whole = cupyattn.rope_table(8, 16)
    for table, rows in zip(cupyattn.rope_table(None, 16, positions=positions), whole):
        identical(table, rows[positions])


def test_table_of_no_rows():
    for table in cupyattn.rope_table(0, 16):
        assert table.shape == (0, 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_table_dtype_and_kind(kind, dtype):
    """Of the kind of `like`, with the bits of the host's table; float64 within 3 last places.

    The device's float64 cosine and sine are documented to 2 units in the last place.
    """
    like = kind.put(np.zeros(1, np.float32))
    positions = np.concatenate((np.arange(40), [131_071, 1_000_000]))
    for given in (dict(seq=42), dict(seq=None, positions=positions), dict(seq=0)):
        for table, host in zip(cupyattn.rope_table(**given, rotary_dim=16, dtype=DTYPES[dtype],
                                                   like=like),
                               cupyattn.rope_table(**given, rotary_dim=16, dtype=DTYPES[dtype])):
            assert type(table) is type(like)
            assert host.dtype == DTYPES[dtype]
            ours = kind.get(table)
            if dtype == "f64":
                assert ours.dtype == np.float64 and ours.shape == host.shape
                assert (np.abs(ours - host) <= 3 * 2.0 ** -53).all()
            else:
                identical(ours, host)


@pytest.mark.gpu
@pytest.mark.parametrize("index", [np.int32, np.int64, np.uint8])
def test_table_of_positions_on_the_device(cupy_kind, index):
    positions = np.array([[5, 2], [0, 200]], index)
    rules = (None, dict(rope_type="dynamic", factor=2.0, max_position_embeddings=64))
    for scaling in rules:  # the second depends on the largest position
        expected = cupyattn.rope_table(None, 16, positions=positions, scaling=scaling)
        for given in (cupy_kind.put(positions), positions):
            ours = cupyattn.rope_table(None, 16, positions=given, scaling=scaling,
                                       like=cupy_kind.put(np.zeros(1)))
            for table, host in zip(ours, expected):
                identical(cupy_kind.get(table), host)
    with pytest.raises(TypeError, match="positions has dtype float64"):
        cupyattn.rope_table(None, 16, positions=cupy_kind.put(np.zeros(3)),
                            like=cupy_kind.put(np.zeros(1)))


@pytest.mark.gpu
@pytest.mark.torch
def test_table_of_torch_positions(torch_kind):
    """On torch's stream, where the positions are made."""
    torch = pytest.importorskip("torch")
    with torch.cuda.stream(torch.cuda.Stream()):
        positions = torch.arange(50_000, device="cuda").flip(0).reshape(5, -1)
        tables = cupyattn.rope_table(None, 8, positions=positions, like=positions, dtype="bfloat16")
        ours = [x.float().cpu().numpy() for x in tables]
    host = cupyattn.rope_table(50_000, 8, dtype="bfloat16")
    for table, x, exact in zip(tables, ours, host):
        assert table.dtype is torch.bfloat16 and table.is_cuda
        identical(x, exact.astype(np.float32)[::-1].reshape(5, -1, 4))


# --- rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots, most", [(8, 1), (8, 2), (16, 3), (8, 5)])
@pytest.mark.parametrize("heads", [(32, 8), (1, 1), (12, 3), (64, 8), (0, 7), (50, 0), (8, 64)])
def test_every_head_has_a_thread(heads, slots, most):
    """The groups of a launch cover all heads, and none of them only heads that are not there."""
    slots = min(slots, max(heads))
    groups, shares = _shares(heads, slots, most)
    for n, share in zip(heads, shares):
        assert n <= groups * slots * share and (share > 0) == (n > 0)
    assert max(n - (groups - 1) * slots * share for n, share in zip(heads, shares)) > 0
    assert sum(shares) <= most or max(shares) == 1


@pytest.mark.parametrize("hidden, seq, lanes, slots, shares", [
    (512, 2048, 1, 16, (2, 1)), (2048, 2048, 4, 16, (2, 1)), (4096, 1, 8, 16, (2, 1)),
    (2048, 4096, 4, 8, (1, 1)), (8192, 1024, 16, 8, (1, 1)), (8192, 16384, 16, 8, (1, 1))])
def test_block_shapes(hidden, seq, lanes, slots, shares):
    """Three heads a thread while one wave holds all blocks, then two; 256 threads."""
    device = Device(0, "NVIDIA H200", (9, 0), 132, 232448, 60 << 20)
    q, k = (Layout((1, seq, n, hidden // 32), "bf16") for n in (32, 8))
    table = Layout((1, seq, hidden // 32), "bf16")
    problem = Problem(q, k, q, k, table, table, None, None, hidden // 32, False, False)
    (step,) = VectorRow("bf16", "bf16").program(problem, device).steps
    groups = step.kernel.config[2].removesuffix(";").rpartition(" ")[2]
    assert step.kernel.config[2:4] == (
        f"static constexpr int kLanes = {lanes}, kSlots = {slots}, kGroups = {groups};",
        f"static constexpr int kQueries = {shares[0]}, kKeys = {shares[1]};")
    assert step.kernel.threads == 256
    assert int(groups) * slots * shares[0] == 32
    assert step.grid == (-(-seq * lanes * slots // 256) * int(groups), 1, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("problem", ROPE_FEW, ids=by_name)
def test_blocks_of_large_problems(cupy_kind, problem, dtype, monkeypatch):
    """The other shape of block, at sizes that a test can afford."""
    monkeypatch.setattr(_launch, "_memo", {})
    monkeypatch.setattr(VectorRow, "RESIDENT_THREADS", 0)
    check(problem, cupy_kind, dtype)


def candidates():
    for dtype in DTYPES:
        for table in DTYPES:
            for problem in (ROPE_FEW[0], ROPE_FEW[2], ROPE_FEW[4]):
                yield with_table(problem, table), dtype


@pytest.mark.gpu
@pytest.mark.parametrize("row", row_names("rope"))
def test_every_row(cupy_kind, row):
    check_row(cupy_kind, "rope", row, candidates())


# --- a short run for the sanitizer -----------------------------------------------------------

SMOKE = Rope("smoke", "ragged, positions per item", 5, head_dim=10, half=4, rotary_dim=8,
             ids="batch", offset=(1, 2), heads=(3, 1))
# Aligned rows of whole vectors, and a rest: the vector rows, but for float64.
SMOKE_VECTOR = Rope("smoke_vector", "heads and tokens that do not fill a block", 5, head_dim=24,
                    half=8, rotary_dim=16, ids="batch", offset=(1, 2), heads=(11, 3), layout="bshd")


@pytest.mark.gpu
@pytest.mark.smoke
@pytest.mark.parametrize("dtype", DTYPES)
def test_smoke(cupy_kind, dtype):
    check(SMOKE, cupy_kind, dtype, lambda x: place(cupy_kind, x, LAYOUTS["guarded"]))


@pytest.mark.gpu
@pytest.mark.smoke
@pytest.mark.parametrize("dtype", DTYPES)
def test_smoke_vectors(cupy_kind, dtype):
    forward, _ = SMOKE_VECTOR.calls(cupy_kind, dtype)
    row = cupyattn.explain("rope", *forward.arrays, **forward.options).row
    assert row.startswith("plain" if dtype == "f64" else "vector")
    check(SMOKE_VECTOR, cupy_kind, dtype)


@pytest.mark.gpu
@pytest.mark.smoke
@pytest.mark.parametrize("head_dim", [8, 10])  # by vectors, by elements
def test_smoke_positions_outside_the_table(cupy_kind, head_dim):
    """A wrong position reads nothing outside the table."""
    x, table = mk(0, (1, 4, 1, head_dim)), mk(1, (6, head_dim // 2))
    q, cos, ids = lift(cupy_kind, (x, table, np.array([0, 6, -1, 2 ** 40])))
    y = cupyattn.rope(q, None, cos, cos, position_ids=ids, layout="bshd")[0]
    with pytest.raises(ValueError, match="position_ids"):
        cupyattn.check_errors()
    assert np.isnan(cupy_kind.get(y)[0, 1:]).all()
