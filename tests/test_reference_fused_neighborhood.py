"""The fused module's reference: its parts in order, and the gradients of all nine arrays."""

import json
import pathlib

import loops
import ml_dtypes
import numpy as np
import pytest

from cupyattn.reference import fused_neighborhood, rope

FIXTURES = np.load(pathlib.Path(__file__).parent / "fixtures" / "fused_neighborhood.npz")
CASES = sorted({name.split("/")[0] for name in FIXTURES.files if "/" in name})
NAMES = (
    "hidden_states",
    "q_weight",
    "k_weight",
    "v_weight",
    "out_weight",
    "q_bias",
    "k_bias",
    "v_bias",
    "out_bias",
)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def module_arrays(space, hidden, heads, kv_heads, head_dim, batch=2, bias=True):
    """Hidden states, four weights, four biases."""
    rows, kv_rows = heads * head_dim, kv_heads * head_dim
    shapes = [
        (batch, *space, hidden),
        (rows, hidden),
        (kv_rows, hidden),
        (kv_rows, hidden),
        (hidden, rows),
        (rows,),
        (kv_rows,),
        (kv_rows,),
        (hidden,),
    ]
    arrays = [normal(seed, *shape) for seed, shape in enumerate(shapes)]
    return arrays if bias else [*arrays[:5], None, None, None, None]


def window(axes, kernel_size, dilation=1, stride=1, is_causal=False):
    return [(x,) * axes for x in (kernel_size, dilation, stride, is_causal)]


def by_parts(arrays, heads, kv_heads, rule, scale, boundary, tables=None, interleaved=False):
    """The module out of NumPy products and explicit loops."""
    x, q_weight, k_weight, v_weight, out_weight, q_bias, k_bias, v_bias, out_bias = arrays

    def project(weight, bias, count):
        y = x @ weight.T + (0 if bias is None else bias)
        return y.reshape(*x.shape[:-1], count, -1)

    q, k, v = (
        project(q_weight, q_bias, heads),
        project(k_weight, k_bias, kv_heads),
        project(v_weight, v_bias, kv_heads),
    )
    if tables is not None:
        angles = np.arctan2(tables[1], tables[0])
        tokens = len(angles)
        angles = np.broadcast_to(angles, (len(x), *angles.shape))
        q, k = (
            loops.rotate(
                a.reshape(len(x), tokens, *a.shape[-2:]), angles, 2 * angles.shape[-1], interleaved
            ).reshape(a.shape)
            for a in (q, k)
        )
    y, _ = loops.neighborhood(q, k, v, *rule, scale, boundary)
    return y.reshape(*x.shape[:-1], -1) @ out_weight.T + (0 if out_bias is None else out_bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("boundary", ["shift", "clip"])
@pytest.mark.parametrize("space", [(9,), (3, 4), (3, 2, 3)])
def test_forward_equals_its_parts(space, boundary, bias):
    arrays = module_arrays(space, 6, 4, 2, 4, bias=bias)
    rule = window(len(space), 3 if boundary == "clip" else 2)
    y, _ = fused_neighborhood.forward(*arrays, 4, 2, *rule, 0.3, boundary, None)
    expected = by_parts(arrays, 4, 2, rule, 0.3, boundary)
    np.testing.assert_allclose(y, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 4])
def test_rope_rotates_tokens_in_row_major_order(rotary_dim, interleaved):
    arrays, rule = module_arrays((3, 4), 6, 2, 1, 4), window(2, 3)
    tables = rope.table(12, rotary_dim, 10.0, None, None)
    y, _ = fused_neighborhood.forward(*arrays, 2, 1, *rule, 0.3, "clip", (*tables, interleaved))
    expected = by_parts(arrays, 2, 1, rule, 0.3, "clip", tables, interleaved)
    np.testing.assert_allclose(y, expected, rtol=1e-11, atol=1e-12)
    if not interleaved:
        pair, _ = fused_neighborhood.forward(*arrays, 2, 1, *rule, 0.3, "clip", tables)
        np.testing.assert_array_equal(pair, y)


def test_rope_tables_with_a_batch_axis():
    arrays, rule = module_arrays((5,), 6, 2, 1, 4), window(1, 3)
    tables = rope.table(5, 4, 10.0, None, None)
    batched = [np.stack([a, a]) for a in tables]
    y, _ = fused_neighborhood.forward(*arrays, 2, 1, *rule, 0.3, "clip", batched)
    expected, _ = fused_neighborhood.forward(*arrays, 2, 1, *rule, 0.3, "clip", tables)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("case", CASES)
def test_equals_torch(case):
    options = json.loads(str(FIXTURES[f"{case}/options"]))

    def stored(*names):
        names = [f"{case}/{name}" for name in names]
        return [FIXTURES.get(name, None) for name in names]

    style = options["rope"]
    if style is not None:
        options["rope"] = (*stored("cos", "sin"), style == "interleaved")
    arrays = stored(*NAMES)
    y, dy, *gradients = stored("y", "dy", *(f"d_{name}" for name in NAMES))
    ours, residuals = fused_neighborhood.forward(*arrays, **options)
    np.testing.assert_allclose(ours, y, rtol=1e-11, atol=1e-12)
    ours = fused_neighborhood.backward(dy, *arrays, residuals, **options)
    assert len(ours) == 9
    for name, our, gradient in zip(NAMES, ours, gradients):
        if gradient is None:
            assert our is None, name
        else:
            np.testing.assert_allclose(our, gradient, rtol=1e-10, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("interleaved", [False, True])
def test_all_nine_gradients_equal_central_differences(interleaved):
    arrays = module_arrays((2, 3), 4, 2, 1, 4, batch=1)
    cos, sin = rope.table(6, 4, 10.0, None, None)
    options = (2, 1, (2, 3), (1, 1), (2, 1), (False, True), 0.3, "shift", (cos, sin, interleaved))
    y, residuals = fused_neighborhood.forward(*arrays, *options)
    dy = normal(20, *y.shape)
    gradients = fused_neighborhood.backward(dy, *arrays, residuals, *options)
    for place, (name, gradient) in enumerate(zip(NAMES, gradients)):
        expected = loops.central_difference(
            lambda x, place=place: (
                dy
                * fused_neighborhood.forward(*arrays[:place], x, *arrays[place + 1 :], *options)[0]
            ).sum(),
            arrays[place],
        )
        np.testing.assert_allclose(gradient, expected, rtol=1e-7, atol=1e-7, err_msg=name)


def test_each_bias_may_be_none_alone():
    arrays, rule = module_arrays((7,), 6, 2, 2, 3), window(1, 3)
    full = fused_neighborhood.backward(
        np.ones((2, 7, 6)), *arrays, None, 2, 2, *rule, 0.3, "clip", None
    )
    assert all(x is not None for x in full)
    for missing in range(5, 9):
        some = [None if place == missing else x for place, x in enumerate(arrays)]
        zero = [0 * x if place == missing else x for place, x in enumerate(arrays)]
        y, _ = fused_neighborhood.forward(*some, 2, 2, *rule, 0.3, "clip", None)
        expected, _ = fused_neighborhood.forward(*zero, 2, 2, *rule, 0.3, "clip", None)
        np.testing.assert_array_equal(y, expected)
        gradients = fused_neighborhood.backward(
            np.ones(y.shape), *some, None, 2, 2, *rule, 0.3, "clip", None
        )
        assert [place for place, x in enumerate(gradients) if x is None] == [missing]


def test_rows_of_a_packed_weight():
    x = normal(0, 2, 24, 64)
    weight, bias = normal(1, 128, 64) / 8, normal(2, 128)
    out_weight, out_bias = normal(3, 64, 64) / 8, normal(4, 64)
    parts = slice(0, 64), slice(64, 96), slice(96, 128)
    arrays = [
        x,
        *(weight[part] for part in parts),
        out_weight,
        *(bias[part] for part in parts),
        out_bias,
    ]
    rule = window(1, 5)
    y, _ = fused_neighborhood.forward(*arrays, 4, 2, *rule, 0.25, "clip", None)
    expected = by_parts(arrays, 4, 2, rule, 0.25, "clip")
    np.testing.assert_allclose(y, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 1), (4, 2)])
def test_query_heads_read_the_kv_head_of_their_group(heads, kv_heads):
    """Weights of zero: every value is its bias, and so is the output."""
    hidden, kv_rows = 4 * heads, 4 * kv_heads
    bias = np.arange(hidden + 2 * kv_rows, dtype=np.float64)
    arrays = [
        normal(0, 1, 6, hidden),
        np.zeros((hidden, hidden)),
        np.zeros((kv_rows, hidden)),
        np.zeros((kv_rows, hidden)),
        np.eye(hidden),
        bias[:hidden],
        bias[hidden : hidden + kv_rows],
        bias[hidden + kv_rows :],
        np.zeros(hidden),
    ]
    y, _ = fused_neighborhood.forward(*arrays, heads, kv_heads, *window(1, 3), 0.5, "clip", None)
    one_head = bias[hidden + kv_rows :].reshape(kv_heads, 4)
    expected = np.repeat(one_head, heads // kv_heads, axis=0).ravel()
    np.testing.assert_allclose(y, np.broadcast_to(expected, y.shape), rtol=1e-14)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_sixteen_bit_intermediates_are_rounded(dtype):
    arrays = [x.astype(dtype) for x in module_arrays((3, 5), 16, 4, 2, 8)]
    tables = rope.table(15, 8, 10000.0, None, None)
    rule = window(2, 3)
    wide = [x.astype(np.float64) for x in arrays]
    _, plain = fused_neighborhood.forward(*arrays, 4, 2, *rule, 0.3, "clip", None)
    _, turned = fused_neighborhood.forward(*arrays, 4, 2, *rule, 0.3, "clip", tables)
    _, exact = fused_neighborhood.forward(*wide, 4, 2, *rule, 0.3, "clip", None)
    for rounded, full in zip(plain[:3], exact[:3]):
        np.testing.assert_array_equal(rounded, full.astype(dtype).astype(np.float64))
        assert (rounded != full).any()
    rows = np.arange(15)[None]
    for place in range(2):
        again = rope.rotate(
            plain[place].reshape(2, 15, -1, 8), *(a[None] for a in tables), 8, False, rows, False
        ).reshape(plain[place].shape)
        np.testing.assert_array_equal(turned[place], again.astype(dtype).astype(np.float64))
    np.testing.assert_array_equal(turned[2], plain[2])


def test_float32_intermediates_are_not_rounded():
    arrays = [x.astype(np.float32) for x in module_arrays((7,), 16, 2, 2, 8)]
    wide = [x.astype(np.float64) for x in arrays]
    options = (2, 2, *window(1, 3), 0.3, "clip", None)
    y, _ = fused_neighborhood.forward(*arrays, *options)
    assert y.dtype == np.float64
    np.testing.assert_array_equal(y, fused_neighborhood.forward(*wide, *options)[0])


def test_backward_does_not_read_the_residuals():
    arrays = [x.astype(np.float16) for x in module_arrays((7,), 16, 2, 2, 8)]
    options = (2, 2, *window(1, 3), 0.3, "clip", rope.table(7, 8, 10.0, None, None))
    y, residuals = fused_neighborhood.forward(*arrays, *options)
    dy = normal(20, *y.shape)
    rounded = tuple(x.astype(np.float16) for x in residuals)
    for a, b in zip(
        fused_neighborhood.backward(dy, *arrays, residuals, *options),
        fused_neighborhood.backward(dy, *arrays, rounded, *options),
    ):
        np.testing.assert_array_equal(a, b)


def test_identity_weights_average_the_window():
    """Small steps on 1 survive: nothing is rounded below float32."""
    x = np.ones((1, 12, 1)) + np.arange(1, 17) * 2.0**-13
    zero, one = np.zeros((16, 16)), np.eye(16)
    y, _ = fused_neighborhood.forward(
        x, zero, zero, one, one, None, None, None, None, 1, 1, *window(1, 3), 0.25, "clip", None
    )
    np.testing.assert_allclose(y, x, rtol=1e-15)


@pytest.mark.parametrize("shape", [(0, 16), (2, 0)])
def test_empty_arrays(shape):
    arrays = module_arrays(shape[1:], 64, 4, 2, 16, batch=shape[0])
    options = (4, 2, *window(1, 5), 0.25, "clip", None)
    y, residuals = fused_neighborhood.forward(*arrays, *options)
    assert y.shape == (*shape, 64)
    gradients = fused_neighborhood.backward(y, *arrays, residuals, *options)
    assert [x.shape for x in gradients] == [x.shape for x in arrays]
    assert not any(x.any() for x in gradients)


def test_inputs_are_left_alone():
    arrays = module_arrays((5,), 8, 2, 2, 4)
    copies = [x.copy() for x in arrays]
    options = (2, 2, *window(1, 3), 0.3, "clip", rope.table(5, 4, 10.0, None, None))
    y, residuals = fused_neighborhood.forward(*arrays, *options)
    fused_neighborhood.backward(y, *arrays, residuals, *options)
    for array, copy in zip(arrays, copies):
        np.testing.assert_array_equal(array, copy)
