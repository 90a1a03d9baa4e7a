"""Reported faults B36 to B49: multi-token attention. See CASES.md."""

import cupyattn
import numpy as np
import oracle
import pytest
from kinds import DTYPES, mk, mta, mta_bwd
from tolerance import agree, identical

ACTIVATIONS = ("softmax", "sparsemax")


def check_mta(kind, scores, weight, bias, dy, backward=True, **options):
    """Forward and backward against the oracle."""
    agree(mta(kind, scores, weight, bias, **options), oracle.mta(scores, weight, bias, **options),
          case=True, what="y")
    if backward:
        ours = mta_bwd(kind, scores, weight, bias, dy, **options)
        exact = oracle.mta_bwd(scores, weight, bias, dy, **options)
        for name, a, b in zip(("d_scores", "d_weight", "d_bias"), ours, exact):
            if b is None:
                assert a is None, name
            else:
                agree(a, b, case=True, what=name)


def test_b36_bias_gradient(kind):
    scores, weight = np.zeros((2, 1, 3, 3), np.float32), np.ones((1, 1, 3, 3), np.float32)
    bias, dy = np.zeros(1, np.float32), np.ones((2, 1, 3, 3), np.float32)
    _, d_weight, d_bias = mta_bwd(kind, scores, weight, bias, dy)
    agree(d_bias, np.array([12.0]), case=True)
    agree(d_weight, np.array([[[[4, 4, 1], [7 / 3, 6, 7 / 3], [2 / 3, 7 / 3, 7 / 3]]]]), case=True)


@pytest.mark.parametrize("dtype, tolerance", [("f32", 2e-5), ("bf16", 1e-2)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_b36_gradients_of_groups(kind, activation, dtype, tolerance):
    scores = mk(0, (3, 4, 37, 37), dtype)
    if activation == "sparsemax":
        scores = oracle.untied(scores)
    weight, bias, dy = mk(1, (6, 2, 5, 5), dtype), mk(2, (6,), dtype), mk(3, (3, 6, 37, 37), dtype)
    options = dict(groups=2, activation=activation)
    ours = mta_bwd(kind, scores, weight, bias, dy, **options)
    exact = oracle.mta_bwd(scores, weight, bias, dy, **options)
    for name, a, b in zip(("d_scores", "d_weight", "d_bias"), ours, exact):
        worst = np.abs(a.astype(np.float64) - b).max()
        assert worst <= tolerance * np.abs(b).max(), name
    poisoned = np.where(np.tri(37, dtype=bool), dy, np.nan).astype(dy.dtype)
    for a, b in zip(ours, mta_bwd(kind, scores, weight, bias, poisoned, **options)):
        identical(a, b)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_b38_mask_in_half_precision(kind, activation, dtype):
    scores = np.zeros((2, 2, 5, 5), DTYPES[dtype])
    check_mta(kind, scores, mk(1, (2, 2, 3, 3), dtype), mk(2, (2,), dtype),
              mk(3, (2, 2, 5, 5), dtype), activation=activation)
    one = np.ones((1, 1, 1, 1), DTYPES[dtype])
    rows = mta(kind, scores[:1, :1], one)[0, 0]
    agree(rows, np.tri(5) / np.arange(1, 6)[:, None], case=True)


def every_operation(kind, dtype="f32"):
    """(label, arrays, function of the arrays) for every operation, forward and backward."""
    put = kind.put

    def numbered(*shapes):
        return [put(mk(i, s, dtype)) for i, s in enumerate(shapes)]

    token = (2, 12, 4, 8)
    q, k, v, dy = numbered(token, (2, 12, 2, 8), (2, 12, 2, 8), token)
    y, lse = cupyattn.neighborhood_attention(q, k, v, 5, return_lse=True)
    yield "na", [q, k, v], lambda q, k, v: cupyattn.neighborhood_attention(q, k, v, 5)
    yield ("na_bwd", [dy, q, k, v, y, lse],
           lambda *arrays: cupyattn.neighborhood_attention_backward(*arrays, 5))
    for activation in ACTIVATIONS:
        scores, weight, bias, d_out = numbered((2, 4, 9, 9), (4, 2, 3, 3), (4,), (2, 4, 9, 9))
        options = dict(groups=2, activation=activation)
        yield (f"mta_{activation}", [scores, weight, bias],
               lambda *a, o=options: cupyattn.multi_token_attention(*a, **o))
        yield (f"mta_bwd_{activation}", [d_out, scores, weight, bias],
               lambda *a, o=options: cupyattn.multi_token_attention_backward(*a, **o))
    cos, sin = (put(mk(i, (20, 4))) for i in (5, 6))
    ids = put(np.arange(12)[::-1])
    yield ("rope", [q, k, cos, sin, ids], lambda q, k, cos, sin, ids: cupyattn.rope(
        q, k, cos, sin, position_ids=ids, layout="bshd"))
    yield ("rope_bwd", [q, k, cos, sin, ids], lambda q, k, cos, sin, ids: cupyattn.rope_backward(
        q, k, cos, sin, position_ids=ids, layout="bshd"))
    arrays = numbered((2, 12, 32), *[(32, 32)] * 4, *[(32,)] * 4, (2, 12, 32))
    options = dict(num_heads=4, kernel_size=5)
    _, residuals = cupyattn.fused_neighborhood_attention(*arrays[:9], return_residuals=True,
                                                         **options)
    yield ("fused", arrays[:9],
           lambda *a: cupyattn.fused_neighborhood_attention(*a, **options))
    yield ("fused_bwd", [arrays[9], *arrays[:9], *residuals],
           lambda *a: cupyattn.fused_neighborhood_attention_backward(
               *a[:10], tuple(a[10:]), **options))


def test_b40_nothing_is_overwritten(kind):
    for label, arrays, function in every_operation(kind):
        before = [np.array(kind.get(x)) for x in arrays]
        first, second = function(*arrays), function(*arrays)
        first, second = (r if isinstance(r, tuple) else (r,) for r in (first, second))
        for x, old in zip(arrays, before):
            identical(kind.get(x), old, what=f"{label}: input")
        for a, b in zip(first, second):
            identical(kind.get(a), kind.get(b), what=label)
            assert not any(kind.xp.shares_memory(a, x) for x in arrays), label


def test_b41_stride_of_the_convolution(kind):
    scores, weight, dy = mk(0, (1, 2, 8, 8)), mk(1, (2, 2, 3, 3)), mk(2, (1, 2, 8, 8))
    with pytest.raises(TypeError, match="stride"):
        mta(kind, scores, weight, stride=2)
    for length in (8, 7):
        maps = scores[..., :length, :length], weight, None, dy[..., :length, :length]
        check_mta(kind, *maps, dilation=2)
        # y is linear in the weight: <y, dy> = <weight, d_weight>.
        y = mta(kind, *maps[:2], dilation=2)
        d_scores, d_weight, _ = mta_bwd(kind, *maps, dilation=2)
        assert d_scores.shape == maps[0].shape
        left, right = (y * maps[3]).sum(dtype=float), (weight * d_weight).sum(dtype=float)
        assert abs(left - right) <= 1e-5 * max(1, abs(left))


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize("outs", [6, 12])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_b42_groups(kind, groups, outs, size):
    scores, dy = mk(0, (2, 6, 11, 11)), mk(2, (2, outs, 11, 11))
    check_mta(kind, scores, mk(1, (outs, 6 // groups, size, size)), None, dy, groups=groups)


def test_b42_one_element_a_group(kind):
    scores = np.zeros((1, 4, 2, 2), np.float32)
    scores[0, :, 1, 1] = range(4)
    weight = np.zeros((4, 2, 1, 1), np.float32)
    weight[(0, 1, 2, 3), (0, 1, 0, 1), 0, 0] = (1, 2, 3, 4)
    expected = [[0.5, 0.5], [0.53788, 1.46212], [0.35761, 2.64239], [0.18970, 3.81030]]
    assert np.abs(mta(kind, scores, weight, groups=2)[0, :, 1] - expected).max() <= 2e-5


@pytest.mark.parametrize("groups, outs", [(4, 4), (2, 3), (0, 4), (-1, 4)])
def test_b42_groups_that_do_not_divide(kind, groups, outs):
    with pytest.raises(ValueError, match="groups"):
        mta(kind, mk(0, (1, 6, 5, 5)), mk(1, (outs, 3, 1, 1)), groups=groups)


def test_b43_kernel_above_the_map(kind):
    for seq, weight, expected in (
            (2, np.ones((1, 1, 5, 5), np.float32), [[2, 0], [2, 2]]),
            (1, np.arange(9, dtype=np.float32).reshape(1, 1, 3, 3), [[4]]),
            (3, np.ones((1, 1, 2, 2), np.float32), None)):
        scores = np.zeros((1, 1, seq, seq), np.float32)
        check_mta(kind, scores, weight, None, mk(0, scores.shape))
        if expected is not None:
            agree(mta(kind, scores, weight)[0, 0], np.array(expected, float), case=True)


ROWS = [([0, 0.5, 1], [0, 0.25, 0.75]), ([0.1, 0.2, 0.3, 0.4, 0.5], [0, 0.1, 0.2, 0.3, 0.4]),
        ([0.175, 0, -2], [0.5875, 0.4125, 0]), ([1, 1, 1, 0], [1 / 3, 1 / 3, 1 / 3, 0])]


@pytest.mark.parametrize("row, expected", ROWS, ids=str)
def test_b44_sparsemax_rows(kind, row, expected):
    scores = np.zeros((1, 1, len(row), len(row)), np.float32)
    scores[..., -1, :] = row
    one = np.ones((1, 1, 1, 1), np.float32)
    ours = mta(kind, scores, one, activation="sparsemax")[0, 0, -1]
    agree(ours, np.array(expected, float), case=True)


@pytest.mark.parametrize("spread", [0.05, 1, 20])
def test_b44_sparsemax_random(kind, spread):
    scores = (mk(0, (1, 1, 64, 64)) * spread).astype(np.float32)
    one = np.ones((1, 1, 1, 1), np.float32)
    ours = mta(kind, scores, one, activation="sparsemax")
    agree(ours, oracle.probabilities(scores, "sparsemax"), case=True)
    assert np.abs(ours.sum(-1, dtype=float) - 1).max() <= 1e-5


def test_b44_sparsemax_gradient(kind):
    scores, dy = np.zeros((1, 1, 3, 3), np.float32), np.zeros((1, 1, 3, 3), np.float32)
    scores[..., -1, :], dy[..., -1, :] = [0, 0.5, 1], [1, 2, 3]
    one = np.ones((1, 1, 1, 1), np.float32)
    d_scores = mta_bwd(kind, scores, one, None, dy, activation="sparsemax")[0]
    agree(d_scores[0, 0, -1], np.array([0, -0.5, 0.5]), case=True)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_b47_dtype_of_every_result(kind, dtype):
    for label, arrays, function in every_operation(kind, dtype):
        results = function(*arrays)
        for result in results if isinstance(results, tuple) else (results,):
            assert kind.get(result).dtype == DTYPES[dtype], label


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("groups", [1, 2])
def test_b47_dtype_without_bias(kind, activation, groups, dtype):
    scores, weight = mk(0, (1, 2, 5, 5), dtype), mk(1, (2, 2 // groups, 3, 3), dtype)
    options = dict(groups=groups, activation=activation)
    assert mta(kind, scores, weight, **options).dtype == scores.dtype
    *grads, d_bias = mta_bwd(kind, scores, weight, None, scores, **options)
    assert d_bias is None and all(g.dtype == scores.dtype for g in grads)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_b47_no_large_temporaries(cupy_kind, dtype):
    cp = cupy_kind.xp
    scores, dy = (cupy_kind.put(mk(i, (1, 2, 1024, 1024), dtype)) for i in (0, 1))
    weight = cupy_kind.put(mk(2, (2, 2, 3, 3), dtype))
    pool = cp.get_default_memory_pool()
    for function in (lambda: cupyattn.multi_token_attention(scores, weight),
                     lambda: cupyattn.multi_token_attention_backward(dy, scores, weight)):
        function()
        pool.free_all_blocks()
        before = pool.total_bytes()
        function()
        assert pool.total_bytes() - before <= 4 * scores.nbytes


@pytest.mark.parametrize("dtype, tolerance", [("f32", 1e-5), ("f16", 1e-2)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("length", [31, 32, 33, 1023, 1024, 1025, 2049, 4097, 8193])
def test_b48_long_rows(kind, length, activation, dtype, tolerance):
    if not kind.on_gpu and length > 1025:
        pytest.skip("the reference has no branch for long rows")
    xp = kind.xp
    i = xp.arange(length)
    scores = xp.zeros((1, 1, length, length), DTYPES[dtype])
    scores[0, 0, i, i] = (xp.log(xp.maximum(i, 1)) if activation == "softmax"
                          else xp.full(length, 0.5)).astype(scores.dtype)
    one = xp.ones((1, 1, 1, 1), DTYPES[dtype])
    y = cupyattn.multi_token_attention(scores, one, activation=activation)[0, 0]
    y = y.astype(np.float32)
    others = (0.5 / xp.maximum(i, 1) if activation == "softmax" else 0.5 / (i + 1))
    expected = xp.tril(xp.broadcast_to(others.astype(np.float32)[:, None], y.shape), -1)
    expected[i, i] = 0.5 if activation == "softmax" else 0.5 + 0.5 / (i + 1)
    expected[0, 0] = 1
    worst = (xp.abs(y - expected) / xp.where(expected > 0, expected, 1)).max()
    assert float(worst) <= tolerance
    assert float(xp.abs(y.sum(-1) - 1).max()) <= max(tolerance, 1e-4)


@pytest.mark.gpu
@pytest.mark.large
def test_b49_score_map_past_2_31_entries(cupy_kind):
    cp, seq = cupy_kind.xp, 46342
    scores = cp.zeros((1, 1, seq, seq), np.float16)
    scores[0, 0, -1, -1] = 10.742
    centre = cp.zeros((1, 1, 3, 3), np.float16)
    centre[0, 0, 1, 1] = 1
    for weight in (cp.ones((1, 1, 1, 1), np.float16), centre):
        y = cupyattn.multi_token_attention(scores, weight)[0, 0]
        assert abs(float(y[-1, -1]) - 0.4996) <= 0.01
        assert abs(float(y[-2, 0]) - 2.158e-5) <= 1e-6
        assert float(y[0, 0]) == 1 and float(y[0, 1]) == 0
        del y
