"""The neighborhood attention reference: its windows as exact sets, its values, its gradients."""

import itertools
import json
import pathlib

import loops
import ml_dtypes
import numpy as np
import pytest

from cupyattn.reference import neighborhood

FIXTURES = np.load(pathlib.Path(__file__).parent / "fixtures" / "neighborhood.npz")
CASES = sorted({name.split("/")[0] for name in FIXTURES.files if "/" in name})

# space, kernel_size, dilation, stride, is_causal, boundary
PROBLEMS = [
    ((11,), (5,), (1,), (1,), (False,), "shift"),
    ((11,), (4,), (2,), (3,), (False,), "shift"),
    ((11,), (4,), (1,), (4,), (True,), "shift"),
    ((9,), (3,), (3,), (2,), (True,), "shift"),
    ((5,), (5,), (1,), (1,), (False,), "shift"),
    ((11,), (5,), (2,), (1,), (False,), "clip"),
    ((7,), (19,), (1,), (1,), (False,), "clip"),
    ((7,), (5,), (9,), (1,), (True,), "clip"),
    ((4, 7), (3, 2), (1, 3), (2, 1), (True, False), "shift"),
    ((5, 3), (3, 5), (2, 1), (1, 1), (False, True), "clip"),
    ((2, 3, 4), (2, 3, 2), (1, 1, 2), (1, 2, 1), (False, True, False), "shift"),
    ((3, 1, 4), (1, 3, 3), (1, 1, 1), (1, 1, 1), (True, False, False), "clip"),
]


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def problem_arrays(space, heads=4, kv_heads=2, head_dim=3, value_dim=2, batch=2):
    return (
        normal(0, batch, *space, heads, head_dim),
        normal(1, batch, *space, kv_heads, head_dim),
        normal(2, batch, *space, kv_heads, value_dim),
    )


def positions_as_values(length):
    """Zero queries and keys, and the position as the value: outputs are means of positions."""
    zero = np.zeros((1, length, 1, 1))
    return zero, zero, np.arange(length, dtype=np.float64).reshape(1, length, 1, 1)


def axis_problems():
    for length, kernel_size, dilation in itertools.product(range(1, 14), range(1, 8), range(1, 5)):
        for is_causal in (False, True):
            if kernel_size % 2:
                yield length, kernel_size, dilation, 1, is_causal, "clip"
            if kernel_size * dilation <= length:
                for stride in range(1, kernel_size + 1):
                    yield length, kernel_size, dilation, stride, is_causal, "shift"


def test_window_and_inverse_exhaustively():
    checked = 0
    for length, *rule in axis_problems():
        keys = [loops.window_keys(i, length, *rule) for i in range(length)]
        dilation = rule[1]
        start, end = neighborhood.window(length, *rule)
        back_start, back_end = neighborhood.inverse_window(length, *rule)
        for i in range(length):
            group = i % dilation
            found = [group + p * dilation for p in range(start[i], end[i])]
            assert found == keys[i], (length, rule, i)
            seen_by = [query for query in range(length) if i in keys[query]]
            found = [group + p * dilation for p in range(back_start[i], back_end[i])]
            assert found == seen_by, (length, rule, i)
        checked += 1
    assert checked > 500


def test_windows_of_an_empty_axis():
    for function in (neighborhood.window, neighborhood.inverse_window):
        start, end = function(0, 3, 2, 1, False, "shift")
        assert start.shape == end.shape == (0,)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_one_hot_probe_finds_the_exact_key_sets(problem):
    space, *rule, boundary = problem
    tokens = list(itertools.product(*map(range, space)))
    zero = np.zeros((1, *space, 1, 2))
    one_hot = np.eye(len(tokens)).reshape(1, *space, 1, len(tokens))
    y, lse = neighborhood.forward(zero, zero, one_hot, *rule, 1.0, boundary)
    # With uniform weights, dv holds at [key, query] what the forward holds at [query, key].
    dv = neighborhood.backward(one_hot, zero, zero, one_hot, y, lse, *rule, 1.0, boundary)[2]
    weights, transposed = y.reshape(len(tokens), -1), dv.reshape(len(tokens), -1)
    for number, token in enumerate(tokens):
        near = loops.window_tokens(token, space, *rule, boundary)
        expected = {tokens.index(key) for key in near}
        assert set(np.flatnonzero(weights[number])) == expected
        assert set(np.flatnonzero(transposed[:, number])) == expected
        np.testing.assert_allclose(weights[number, sorted(expected)], 1 / len(near), rtol=1e-14)
        np.testing.assert_allclose(lse[(0, *token, 0)], np.log(len(near)), rtol=1e-14)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_forward_equals_loops(problem):
    space, *rule, boundary = problem
    q, k, v = problem_arrays(space)
    y, lse = neighborhood.forward(q, k, v, *rule, 0.7, boundary)
    expected_y, expected_lse = loops.neighborhood(q, k, v, *rule, 0.7, boundary)
    np.testing.assert_allclose(y, expected_y, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_gradients_equal_central_differences(problem):
    space, *rule, boundary = problem
    arrays = problem_arrays(space, heads=2, kv_heads=1, batch=1)
    q, _, v = arrays
    dy, dlse = normal(3, *q.shape[:-1], v.shape[-1]), normal(4, *q.shape[:-1])

    def loss(*arrays):
        y, lse = neighborhood.forward(*arrays, *rule, 0.7, boundary)
        return (y * dy).sum() + (lse * dlse).sum()

    y, lse = neighborhood.forward(*arrays, *rule, 0.7, boundary)
    gradients = neighborhood.backward(dy, *arrays, y, lse, *rule, 0.7, boundary, dlse)
    for place, gradient in enumerate(gradients):
        expected = loops.central_difference(
            lambda x, place=place: loss(*arrays[:place], x, *arrays[place + 1 :]), arrays[place]
        )
        np.testing.assert_allclose(gradient, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("case", CASES)
def test_equals_torch(case):
    options = json.loads(str(FIXTURES[f"{case}/options"]))
    names = ("q", "k", "v", "dy", "dlse", "y", "lse", "dq", "dk", "dv")
    q, k, v, dy, dlse, y, lse, *gradients = (FIXTURES[f"{case}/{name}"] for name in names)
    our_y, our_lse = neighborhood.forward(q, k, v, **options)
    np.testing.assert_allclose(our_y, y, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(our_lse, lse, rtol=1e-12, atol=1e-13)
    ours = neighborhood.backward(dy, q, k, v, our_y, our_lse, **options, dlse=dlse)
    for our, gradient in zip(ours, gradients):
        np.testing.assert_allclose(our, gradient, rtol=1e-11, atol=1e-12)


def test_gradient_without_dlse_is_that_of_zero_dlse():
    problem, (q, k, v) = PROBLEMS[1], problem_arrays((11,))
    _, *rule, boundary = problem
    y, lse = neighborhood.forward(q, k, v, *rule, 0.7, boundary)
    arguments = (normal(3, *y.shape), q, k, v, y, lse, *rule, 0.7, boundary)
    for a, b in zip(
        neighborhood.backward(*arguments),
        neighborhood.backward(*arguments, np.zeros(lse.shape, np.float32)),
    ):
        np.testing.assert_array_equal(a, b)


def test_backward_does_not_depend_on_rounded_results():
    _, *rule, boundary = PROBLEMS[0]
    q, k, v = (x.astype(np.float16) for x in problem_arrays((11,)))
    y, lse = neighborhood.forward(q, k, v, *rule, 0.7, boundary)
    dy = normal(3, *y.shape).astype(np.float16)
    exact = neighborhood.backward(dy, q, k, v, y, lse, *rule, 0.7, boundary)
    rounded = neighborhood.backward(
        dy, q, k, v, y.astype(np.float16), lse.astype(np.float32), *rule, 0.7, boundary
    )
    for a, b in zip(exact, rounded):
        np.testing.assert_array_equal(a, b)


def test_uniform_means_over_shifted_windows():
    def means(length, kernel_size, dilation=1, stride=1, is_causal=False, boundary="shift"):
        arrays = positions_as_values(length)
        rule = (kernel_size,), (dilation,), (stride,), (is_causal,)
        return neighborhood.forward(*arrays, *rule, 1.0, boundary)[0].ravel()

    def same(actual, expected):
        np.testing.assert_allclose(actual, expected, rtol=1e-14, atol=1e-14)

    same(means(10, 4), [1.5, 1.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 7.5])
    same(means(9, 3, dilation=3), [3, 4, 5, 3, 4, 5, 3, 4, 5])
    same(means(11, 3, dilation=2), [2, 3, 2, 3, 4, 5, 6, 7, 8, 7, 8])
    same(means(9, 4, stride=4), [1.5, 1.5, 1.5, 1.5, 5.5, 5.5, 5.5, 5.5, 6.5])
    same(means(8, 4, stride=3, is_causal=True), [0, 0.5, 1, 2.5, 3, 3.5, 5, 5.5])
    same(means(6, 3, dilation=3, boundary="clip"), [1.5, 2.5, 3.5, 1.5, 2.5, 3.5])
    same(means(4, 9, boundary="clip"), [1.5, 1.5, 1.5, 1.5])


def test_causal_window_holds_exactly_kernel_size_keys():
    zero = np.zeros((1, 6, 1, 1))
    v = np.array([1.0, 2, 4, 8, 16, 32]).reshape(1, 6, 1, 1)
    y, _ = neighborhood.forward(zero, zero, v, (3,), (1,), (1,), (True,), 1.0, "shift")
    expected = [1, 1.5, 7 / 3, 14 / 3, 28 / 3, 56 / 3]
    np.testing.assert_allclose(y.ravel(), expected, rtol=1e-14)


def test_dv_counts_the_windows_that_hold_each_key():
    q = np.zeros((1, 9, 6, 8))
    k = v = np.zeros((1, 9, 2, 8))
    rule = (3,), (1,), (1,), (False,), 1.0, "shift"
    y, lse = neighborhood.forward(q, k, v, *rule)
    _, _, dv = neighborhood.backward(np.ones(q.shape), q, k, v, y, lse, *rule)
    counts = np.array([2, 3, 4, 3, 3, 3, 4, 3, 2.0])
    np.testing.assert_allclose(dv, np.broadcast_to(counts[:, None, None], dv.shape), rtol=1e-14)


def test_gradients_of_shared_heads_add_up():
    q, k, v = problem_arrays((20,), heads=6, kv_heads=2)
    dy = normal(3, 2, 20, 6, 2)
    for rule in (
        ((5,), (1,), (1,), (False,), 0.5, "shift"),
        ((5,), (1,), (1,), (False,), 0.5, "clip"),
    ):
        y, lse = neighborhood.forward(q, k, v, *rule)
        dq, dk, dv = neighborhood.backward(dy, q, k, v, y, lse, *rule)
        repeated = [np.repeat(x, 3, axis=2) for x in (k, v)]
        full = neighborhood.backward(dy, q, *repeated, y, lse, *rule)
        np.testing.assert_allclose(dq, full[0], rtol=1e-12, atol=1e-13)
        for ours, spread in zip((dk, dv), full[1:]):
            summed = spread.reshape(2, 20, 2, 3, -1).sum(3)
            np.testing.assert_allclose(ours, summed, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("space", "kernel_size", "dilation", "is_causal"),
    [
        ((512,), 3, 1, False),
        ((2048,), 3, 512, False),
        ((1024,), 9, 113, True),
        ((64, 64), 3, 21, False),
    ],
)
def test_far_and_near_keys(space, kernel_size, dilation, is_causal):
    axes = len(space)
    rule = [(x,) * axes for x in (kernel_size, dilation, 1, is_causal)]
    q, k, v = (normal(seed, 1, *space, 1, 64).astype(np.float16) for seed in range(3))
    y, lse = neighborhood.forward(q, k, v, *rule, 0.125, "shift")
    assert np.isfinite(y).all()
    assert np.isfinite(lse).all()
    if is_causal:
        first = 0.125 * (q[0, 0, 0].astype(np.float64) @ k[0, 0, 0].astype(np.float64))
        np.testing.assert_allclose(lse[0, 0, 0], first, rtol=1e-13)
    for number in range(0, int(np.prod(space)), 61):
        token = np.unravel_index(number, space)
        near = loops.window_tokens(token, space, *rule, "shift")
        near_k, near_v = (np.array([x[(0, *key, 0)] for key in near], np.float64) for x in (k, v))
        weights, expected = loops.softmax(0.125 * near_k @ q[(0, *token, 0)].astype(np.float64))
        np.testing.assert_allclose(y[(0, *token, 0)], weights @ near_v, rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(lse[(0, *token, 0)], expected, rtol=1e-12, atol=1e-12)


def test_large_float16_scores_stay_finite():
    q = np.full((1, 64, 1, 64), 40, np.float16)
    v = normal(2, 1, 64, 1, 64).astype(np.float16)
    rule = (5,), (1,), (1,), (False,), 0.125, "shift"
    y, lse = neighborhood.forward(q, q, v, *rule)
    start, end = neighborhood.window(64, 5, 1, 1, False, "shift")
    means = [v[0, a:b, 0].astype(np.float64).mean(0) for a, b in zip(start, end)]
    np.testing.assert_allclose(y[0, :, 0], means, rtol=1e-12, atol=1e-13)
    for gradient in neighborhood.backward(v, q, q, v, y, lse, *rule):
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("boundary", "is_causal", "sees_100"),
    [
        ("shift", False, range(98, 103)),
        ("clip", False, range(98, 103)),
        ("shift", True, range(100, 105)),
        ("clip", True, range(100, 103)),
    ],
)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("poisoned", ["k", "v"])
def test_non_finite_keys_and_values_stay_in_their_windows(
    boundary, is_causal, sees_100, poison, poisoned
):
    rule = (5,), (1,), (1,), (is_causal,), 0.125, boundary
    q, k, v = (normal(seed, 1, 200, 2, 8).astype(np.float32) for seed in range(3))
    dy = normal(3, 1, 200, 2, 8).astype(np.float32)
    y, lse = neighborhood.forward(q, k, v, *rule)
    clean = (y, lse, *neighborhood.backward(dy, q, k, v, y, lse, *rule))
    {"k": k, "v": v}[poisoned][:, 100, 0, :] = poison
    y, lse = neighborhood.forward(q, k, v, *rule)
    y, lse, dq, dk, dv = (y, lse, *neighborhood.backward(dy, q, k, v, y, lse, *rule))
    hit = np.isin(np.arange(200), sees_100)
    assert not np.isfinite(y[0, hit, 0]).any()
    near_hit = abs(np.arange(200) - 100) <= 8
    for after, before, touched in zip(
        (y, lse, dq, dk, dv), clean, (hit, hit, hit, near_hit, near_hit)
    ):
        np.testing.assert_array_equal(after[0, ~touched], before[0, ~touched])
        np.testing.assert_array_equal(after[0, :, 1], before[0, :, 1])


def test_infinite_value_in_a_cut_window_gives_infinity_not_nan():
    q, k, v = (np.zeros((1, 6, 1, 1)) for _ in range(3))
    v[0, 0] = np.inf
    y, _ = neighborhood.forward(q, k, v, (3,), (1,), (1,), (False,), 1.0, "clip")
    np.testing.assert_array_equal(y.ravel(), [np.inf, np.inf, 0, 0, 0, 0])


def test_scores_of_minus_infinity():
    """One such score has weight 0; a row of them has no softmax."""
    q = np.ones((1, 5, 1, 1))
    k, v = np.zeros((1, 5, 1, 1)), np.arange(5.0).reshape(1, 5, 1, 1)
    k[0, 0] = -np.inf
    y, _ = neighborhood.forward(q, k, v, (3,), (1,), (1,), (True,), 1.0, "shift")
    np.testing.assert_allclose(y.ravel(), [np.nan, 1, 1.5, 2, 3], rtol=1e-14)


def test_key_of_minus_infinity_gets_no_gradient():
    """Nor does it become NaN, in windows cut at the border."""
    q, k, v = np.ones((1, 5, 1, 1)), np.zeros((1, 5, 1, 1)), normal(0, 1, 5, 1, 1)
    k[0, 0] = -np.inf
    rule = (3,), (1,), (1,), (False,), 1.0, "clip"
    y, lse = neighborhood.forward(q, k, v, *rule)
    _, dk, dv = neighborhood.backward(np.ones(q.shape), q, k, v, y, lse, *rule)
    assert dk[0, 0] == dv[0, 0] == 0
    assert np.isfinite(dk).all()
    np.testing.assert_allclose(dv.ravel(), [0, 11 / 6, 7 / 6, 7 / 6, 5 / 6], rtol=1e-14)


def test_zero_scale_gives_plain_means():
    _, *rule, boundary = PROBLEMS[0]
    q, k, v = problem_arrays((11,))
    y, lse = neighborhood.forward(q, k, v, *rule, 0.0, boundary)
    means = neighborhood.forward(0 * q, k, v, *rule, 1.0, boundary)[0]
    np.testing.assert_allclose(y, means, rtol=1e-14)
    np.testing.assert_allclose(lse, np.log(5), rtol=1e-14)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_narrow_dtypes_are_read_exactly(dtype):
    _, *rule, boundary = PROBLEMS[8]
    q, k, v = (x.astype(dtype) for x in problem_arrays((4, 7)))
    y, lse = neighborhood.forward(q, k, v, *rule, 0.7, boundary)
    wide = [x.astype(np.float64) for x in (q, k, v)]
    assert y.dtype == lse.dtype == np.float64
    np.testing.assert_array_equal(y, neighborhood.forward(*wide, *rule, 0.7, boundary)[0])


def test_views_with_strides():
    _, *rule, boundary = PROBLEMS[0]
    packed = normal(0, 2, 4, 11, 3, 8)
    q, k, v = (packed[:, :, :, part, ::2].transpose(0, 2, 1, 3) for part in range(3))
    dy = normal(1, 2, 4, 11, 4).transpose(0, 2, 1, 3)
    copies = [np.ascontiguousarray(x) for x in (q, k, v)]
    y, lse = neighborhood.forward(q, k, v, *rule, 0.7, boundary)
    np.testing.assert_array_equal(y, neighborhood.forward(*copies, *rule, 0.7, boundary)[0])
    for a, b in zip(
        neighborhood.backward(dy, q, k, v, y, lse, *rule, 0.7, boundary),
        neighborhood.backward(dy.copy(), *copies, y, lse, *rule, 0.7, boundary),
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_chunks_do_not_change_results(problem, monkeypatch):
    space, *rule, boundary = problem
    q, k, v = problem_arrays(space)
    dy = normal(3, *q.shape[:-1], v.shape[-1])

    def everything():
        y, lse = neighborhood.forward(q, k, v, *rule, 0.7, boundary)
        return (y, lse, *neighborhood.backward(dy, q, k, v, y, lse, *rule, 0.7, boundary))

    whole = everything()
    monkeypatch.setattr(neighborhood, "CHUNK_BYTES", 2000)
    for a, b in zip(everything(), whole):
        np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(
    ("batch", "space", "heads", "kv_heads"),
    [(0, (16,), 2, 2), (2, (0,), 2, 1), (2, (16,), 0, 0), (1, (3, 0), 2, 2)],
)
def test_empty_arrays(batch, space, heads, kv_heads):
    rule = [(x,) * len(space) for x in (3, 1, 1, False)]
    q = np.zeros((batch, *space, heads, 8), np.float32)
    k = np.zeros((batch, *space, kv_heads, 8), np.float32)
    v = np.zeros((batch, *space, kv_heads, 4), np.float32)
    y, lse = neighborhood.forward(q, k, v, *rule, 1.0, "shift")
    assert y.shape == (batch, *space, heads, 4)
    assert lse.shape == (batch, *space, heads)
    gradients = neighborhood.backward(y, q, k, v, y, lse, *rule, 1.0, "shift")
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


def test_inputs_are_left_alone():
    _, *rule, boundary = PROBLEMS[0]
    arrays = [normal(3, 2, 11, 4, 2), *problem_arrays((11,))]
    copies = [x.copy() for x in arrays]
    y, lse = neighborhood.forward(*arrays[1:], *rule, 0.7, boundary)
    results = (y, lse, *neighborhood.backward(*arrays, y, lse, *rule, 0.7, boundary))
    for array, copy in zip(arrays, copies):
        np.testing.assert_array_equal(array, copy)
        assert not any(np.shares_memory(array, result) for result in results)
