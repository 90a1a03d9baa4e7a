"""Reported faults B01 to B35: neighborhood attention and the fused module. See CASES.md."""

import math

import cupyattn
import numpy as np
import oracle
import pytest
from kinds import (
    DTYPES,
    backwards,
    broadcast,
    call,
    fortran,
    fused,
    fused_bwd,
    guarded,
    mk,
    mta,
    mta_bwd,
    na,
    na_bwd,
    place,
    rope,
    stepped,
)
from tolerance import agree, eps, identical

BOUNDARIES = ("shift", "clip")


def check_na(kind, arrays, case=True, backward=True, **options):
    """Forward (with lse) and backward against the oracle."""
    q, k, v, dy = arrays
    words = {"causal" if key == "is_causal" else key: value for key, value in options.items()}
    y, lse = na(kind, q, k, v, **options)
    exact_y, exact_lse = oracle.na(q, k, v, **words)
    agree(y, exact_y, case=case, what="y")
    agree(lse, exact_lse, case=case, what="lse")
    if backward:
        ours = na_bwd(kind, q, k, v, dy, **options)
        for name, a, b in zip(("dq", "dk", "dv"), ours, oracle.na_bwd(q, k, v, dy, **words)):
            agree(a, b, case=case, what=name)


def four(shape, dtype="f32", kv_heads=None):
    """q, k, v, dy of one shape."""
    kv = shape if kv_heads is None else (*shape[:-2], kv_heads, shape[-1])
    return mk(0, shape, dtype), mk(1, kv, dtype), mk(2, kv, dtype), mk(3, shape, dtype)


def ramp(space, dtype="f32"):
    """q = k = 0 and v = the token's number: the result is the mean position of the window."""
    shape = (1, *space, 1, 1)
    zero = np.zeros(shape, DTYPES[dtype])
    return zero, zero, np.arange(math.prod(space), dtype=DTYPES[dtype]).reshape(shape)


def mean_positions(kind, length, kernel_size, values=None, **options):
    q, k, v = ramp((length,))
    if values is not None:
        v = np.asarray(values, np.float32).reshape(v.shape)
    return na(kind, q, k, v, kernel_size, **options)[0].reshape(-1)


def valid_call(kind):
    """A call that must still be right after an error."""
    arrays = four((1, 16, 2, 8))
    check_na(kind, arrays, kernel_size=3)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("length", [2_097_152, 2_097_153])
def test_b01_backward_past_2_31_elements(cupy_kind, length):
    cp = cupy_kind.xp
    tail = [mk(i, (1, 64, 16, 64), "f16") for i in range(4)]
    arrays = []
    for x in tail:
        big = cp.zeros((1, length, 16, 64), np.float16)
        big[:, -64:] = cp.asarray(x)
        arrays.append(big)
    q, k, v, dy = arrays
    y, lse = cupyattn.neighborhood_attention(q, k, v, 3, return_lse=True)
    ours = (y, *cupyattn.neighborhood_attention_backward(dy, q, k, v, y, lse, 3))
    ends = [cp.asnumpy(x[:, -128:]) for x in (q, k, v, dy)]
    exact = (oracle.na(*ends[:3], 3)[0], *oracle.na_bwd(*ends, 3))
    for name, a, b in zip(("y", "dq", "dk", "dv"), ours, exact):
        agree(cp.asnumpy(a[:, -64:]), b[:, 64:], case=True, what=name)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_b03_partial_last_tile(kind, boundary, dtype):
    for length in (8, 63, 64, 65, 97, 127, 129, 200):
        arrays = four((1, length, 2, 64), dtype)
        q, k, v, dy = (place(kind, x, guarded) for x in arrays)
        options = dict(kernel_size=7, boundary=boundary)
        y, lse = cupyattn.neighborhood_attention(q, k, v, return_lse=True, **options)
        grads = cupyattn.neighborhood_attention_backward(dy, q, k, v, y, lse, **options)
        exact = (oracle.na(*arrays[:3], **options)[0], *oracle.na_bwd(*arrays, **options))
        for name, a, b in zip(("y", "dq", "dk", "dv"), (y, *grads), exact):
            agree(kind.get(a), b, case=True, what=f"{name} at length {length}")


def test_b04_even_kernel(kind):
    arrays = four((1, 32, 1, 8))
    with pytest.raises(ValueError, match="kernel_size"):
        na(kind, *arrays[:3], 8, boundary="clip")
    expected = [1.5, 1.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 7.5]
    agree(mean_positions(kind, 10, 4), np.array(expected), case=True)


@pytest.mark.parametrize("error, name, options", [
    (ValueError, "dilation", dict(dilation=0)), (ValueError, "dilation", dict(dilation=-1)),
    (ValueError, "stride", dict(stride=0)), (ValueError, "stride", dict(stride=-1)),
    (ValueError, "kernel_size", dict(kernel_size=0)),
    (ValueError, "kernel_size", dict(kernel_size=-1)),
    (TypeError, "kernel_size", dict(kernel_size=3.0)),
    (TypeError, "kernel_size", dict(kernel_size=True)),
    (TypeError, "kernel_size", dict(kernel_size="3")),
    (ValueError, "stride", dict(stride=4)), (ValueError, "scale", dict(scale=math.nan))])
def test_b05_degenerate_window(kind, error, name, options):
    arrays = four((1, 16, 1, 8))
    with pytest.raises(error, match=name):
        na(kind, *arrays[:3], **{"kernel_size": 3, **options})
    valid_call(kind)


@pytest.mark.parametrize("kernel_size", [(3,), (3, 3, 3)])
def test_b05_wrong_number_of_axes(kind, kernel_size):
    arrays = four((1, 4, 4, 1, 8))
    with pytest.raises(ValueError, match="kernel_size"):
        na(kind, *arrays[:3], kernel_size)
    valid_call(kind)


def test_b06_window_beyond_the_input(kind):
    with pytest.raises(ValueError, match=r"(?s)kernel_size.*\b9\b.*\b6\b"):
        mean_positions(kind, 6, 3, dilation=3)
    agree(mean_positions(kind, 9, 3, dilation=3), np.array([3, 4, 5, 3, 4, 5, 3, 4, 5.0]),
          case=True)
    clipped = mean_positions(kind, 6, 3, dilation=3, boundary="clip")
    agree(clipped, np.array([1.5, 2.5, 3.5, 1.5, 2.5, 3.5]), case=True)
    agree(mean_positions(kind, 4, 9, boundary="clip"), np.full(4, 1.5), case=True)
    with pytest.raises(ValueError, match=r"(?s)kernel_size\[1\].*\b3\b.*\b2\b"):
        na(kind, *ramp((12, 2)), 3)


def test_b08_queries_and_keys_of_different_length(kind):
    q, k = mk(0, (2, 64, 4, 32)), mk(1, (2, 64, 4, 32))
    long, short, thin = mk(2, (2, 100, 4, 32)), mk(3, (2, 63, 4, 32)), mk(4, (2, 64, 4, 16))
    for arrays, shape in (((q, long, long), long.shape), ((q, k, short), short.shape),
                          ((q, thin, k), thin.shape)):
        with pytest.raises(ValueError) as caught:
            na(kind, *arrays, 3)
        assert str(shape) in str(caught.value) and str(q.shape) in str(caught.value)
    valid_call(kind)


@pytest.mark.parametrize("kernel_size", [2, 3, 4, 5, 6, 7, 8, 9, 13, 15, 33, 63, 64, 65, 127, 255])
def test_b12_any_kernel_size(kind, kernel_size):
    check_na(kind, four((1, 300, 1, 16)), kernel_size=kernel_size)


@pytest.mark.parametrize("space, kernel_size", [
    ((40, 66), (13, 13)), ((40, 66), (15, 15)), ((40, 66), (33, 33)), ((40, 66), (3, 65)),
    ((8, 9, 10), (7, 9, 3))], ids=str)
def test_b12_any_kernel_size_on_more_axes(kind, space, kernel_size):
    if not kind.on_gpu and space == (40, 66):
        space = (33, 33) if max(kernel_size) <= 33 else (4, 66)  # the reference is slower
    check_na(kind, four((1, *space, 1, 16)), kernel_size=kernel_size)


def test_b13_window_width(kind):
    powers = [1, 2, 4, 8, 16, 32]
    agree(mean_positions(kind, 6, 3, powers, is_causal=True),
          np.array([1, 1.5, 7 / 3, 14 / 3, 28 / 3, 56 / 3]), case=True)
    agree(mean_positions(kind, 8, 4, stride=3, is_causal=True),
          np.array([0, 0.5, 1, 2.5, 3, 3.5, 5, 5.5]), case=True)
    agree(mean_positions(kind, 9, 4, stride=4),
          np.array([1.5, 1.5, 1.5, 1.5, 5.5, 5.5, 5.5, 5.5, 6.5]), case=True)
    agree(mean_positions(kind, 11, 3, dilation=2),
          np.array([2, 3, 2, 3, 4, 5, 6, 7, 8, 7, 8.0]), case=True)


@pytest.mark.parametrize("length", [1023, 1024, 1025, 1151])
def test_b16_large_scores_in_the_last_tile(kind, length):
    if not kind.on_gpu and length != 1025:
        pytest.skip("one length is enough for the reference")
    shape = (1, length, 1, 64)
    q, k = (8 * mk(i, shape) for i in (0, 1))
    arrays = [x.astype(DTYPES["bf16"]) for x in (q, k, mk(2, shape), mk(3, shape))]
    options = dict(kernel_size=129, is_causal=True)
    words = dict(kernel_size=129, causal=True)
    ours = (na(kind, *arrays[:3], **options)[0], *na_bwd(kind, *arrays, **options))
    exact = (oracle.na(*arrays[:3], **words)[0], *oracle.na_bwd(*arrays, **words))
    for name, a, b in zip(("y", "dq", "dk", "dv"), ours, exact):
        worst = np.abs(a.astype(np.float64) - b).max()
        assert worst <= 3e-2 * np.abs(b).max(), f"{name}: {worst} of {np.abs(b).max()}"


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("boundary, causal", [("shift", False), ("clip", False), ("shift", True),
                                              ("clip", True)])
@pytest.mark.parametrize("where, value", [("v", math.nan), ("v", math.inf), ("k", math.nan)])
def test_b17_nan_outside_the_window(kind, where, value, boundary, causal, dtype):
    options = dict(kernel_size=5, boundary=boundary, is_causal=causal)
    clean = dict(zip(("q", "k", "v", "dy"), four((1, 200, 2, 64), dtype)))
    poisoned = {name: x.copy() for name, x in clean.items()}
    poisoned[where][:, 100, 0, :] = value

    def run(arrays):
        y, lse = na(kind, arrays["q"], arrays["k"], arrays["v"], **options)
        grads = na_bwd(kind, *(arrays[n] for n in ("q", "k", "v", "dy")), **options)
        return dict(zip(("y", "lse", "dq", "dk", "dv"), (y, lse, *grads)))

    good, bad = run(clean), run(poisoned)
    sees = oracle.axis_mask(200, 5, causal=causal, boundary=boundary)[:, 100]
    far = np.abs(np.arange(200) - 100) > 2 * 4
    for name in good:
        kept = far if name in ("dk", "dv") else ~sees
        ours, theirs = bad[name][:, kept], good[name][:, kept]
        if dtype == "f32" or not kind.on_gpu or name in ("y", "lse"):
            identical(ours, theirs, what=f"{name}, head 0")
        else:  # a tile beside the token is computed again, the plain way (spec, section 1)
            ours, theirs = ours.astype(np.float32), theirs.astype(np.float32)
            np.testing.assert_allclose(ours, theirs, rtol=0, err_msg=name,
                                       atol=4 * eps(np.float16) * np.abs(theirs).max())
        identical(bad[name][:, :, 1], good[name][:, :, 1], what=f"{name}, head 1")
    assert not np.isfinite(bad["y"][:, sees, 0].astype(np.float32)).any()
    first, last = np.flatnonzero(sees)[[0, -1]]
    assert (first, last) == (100 if causal else 98,
                             104 if causal and boundary == "shift" else 102)


@pytest.mark.parametrize("space, options", [
    ((512,), dict(kernel_size=3)), ((2048,), dict(kernel_size=3, dilation=512)),
    ((1024,), dict(kernel_size=9, dilation=113, is_causal=True)),
    ((64, 64), dict(kernel_size=3, dilation=21))], ids=str)
def test_b18_masked_tiles(kind, space, options):
    if not kind.on_gpu and space == (64, 64):
        space, options = (32, 32), dict(kernel_size=3, dilation=10)
    check_na(kind, four((1, *space, 1, 64), "f16"), backward=False, **options)


def test_b19_scores_beyond_float16(kind):
    shape = (1, 64, 1, 64)
    v, dy = mk(2, shape, "f16"), mk(3, shape, "f16")
    mask = oracle.axis_mask(64, 5)
    q = np.full(shape, 40, np.float16)
    values = v[0, :, 0].astype(np.float64)
    agree(na(kind, q, q, v, 5)[0][0, :, 0], mask @ values / 5, case=True)
    sign = np.where(np.arange(64) % 2, -1, 1)
    q = np.full(shape, 100, np.float16)
    k = q * sign[:, None, None].astype(np.float16)
    positive = mask & (sign > 0)
    agree(na(kind, q, k, v, 5)[0][0, :, 0],
          positive @ values / positive.sum(1, keepdims=True), case=True)
    for keys in (q, k):
        for grad in na_bwd(kind, q, keys, v, dy, 5):
            assert np.isfinite(grad).all()


def empty_calls(kind):
    """Every operation on every empty problem: (label, results, expected shapes)."""
    for shape in ((0, 16, 2, 32), (2, 0, 2, 32), (2, 16, 0, 32)):
        arrays = four(shape, "f16")
        y, lse = na(kind, *arrays[:3], 3)
        grads = na_bwd(kind, *arrays, 3)
        yield f"na {shape}", (y, lse, *grads), (shape, shape[:-1], shape, shape, shape)
    weight, bias = mk(1, (2, 2, 3, 3), "f16"), mk(2, (2,), "f16")
    for shape in ((0, 2, 4, 4), (2, 2, 0, 0)):
        scores = mk(0, shape, "f16")
        results = (mta(kind, scores, weight, bias), *mta_bwd(kind, scores, weight, bias, scores))
        yield f"mta {shape}", results, (shape, shape, weight.shape, bias.shape)
        assert not any(np.asarray(g, np.float32).any() for g in results[2:])
    cos = mk(0, (8, 4))
    for shape in ((0, 5, 2, 8), (2, 0, 2, 8), (2, 5, 0, 8)):
        x = mk(0, shape, "f16")
        back = call(kind, cupyattn.rope_backward, x, None, cos, cos, layout="bshd")[0]
        yield f"rope {shape}", (rope(kind, x, cos, cos), back), (shape, shape)
    weights, biases = [mk(i, (64, 64), "f16") for i in range(4)], [mk(4, (64,), "f16")] * 4
    for shape in ((0, 16, 64), (2, 0, 64)):
        x = mk(0, shape, "f16")
        options = dict(num_heads=2, kernel_size=3)
        grads = fused_bwd(kind, x, weights, biases, x, **options)
        results = (fused(kind, x, weights, biases, **options), *grads)
        yield f"fused {shape}", results, (shape, shape, *[(64, 64)] * 4, *[(64,)] * 4)
        assert not any(np.asarray(g, np.float32).any() for g in grads[1:])


def test_b20_empty_arrays(kind):
    for label, results, shapes in empty_calls(kind):
        assert [r.shape for r in results] == list(shapes), label
        lse = [1] if label.startswith("na") else []
        for n, result in enumerate(results):
            assert result.dtype == (np.float32 if n in lse else np.float16), label
    valid_call(kind)


@pytest.mark.parametrize("shape", [(70000, 4, 1, 8), (1, 4, 70000, 8)], ids=str)
def test_b21_more_blocks_than_a_grid_axis_neighborhood(kind, shape):
    if not kind.on_gpu:
        shape = tuple(min(n, 700) for n in shape)
    arrays = four(shape, "f16")
    q, k, v, dy = (kind.put(x) for x in arrays)
    y = kind.put(np.full(shape, 7, np.float16))
    _, lse = cupyattn.neighborhood_attention(q, k, v, 3, return_lse=True, out=(y, None))
    grads = tuple(kind.put(np.full(shape, 7, np.float16)) for _ in range(3))
    cupyattn.neighborhood_attention_backward(dy, q, k, v, y, lse, 3, out=grads)
    exact = (oracle.na(*arrays[:3], 3)[0], *oracle.na_bwd(*arrays, 3))
    for name, a, b in zip(("y", "dq", "dk", "dv"), (y, *grads), exact):
        agree(kind.get(a), b, case=True, what=name)


def test_b21_more_blocks_than_a_grid_axis_multi_token(kind):
    batch = 70000 if kind.on_gpu else 700
    scores, dy = mk(0, (batch, 1, 4, 4), "f16"), mk(3, (batch, 1, 4, 4), "f16")
    weight, bias = mk(1, (1, 1, 3, 3), "f16"), mk(2, (1,), "f16")
    y = kind.put(np.full(scores.shape, 7, np.float16))
    cupyattn.multi_token_attention(kind.put(scores), kind.put(weight), kind.put(bias), out=y)
    agree(kind.get(y), oracle.mta(scores, weight, bias), case=True, what="y")
    ours = mta_bwd(kind, scores, weight, bias, dy)
    exact = oracle.mta_bwd(scores, weight, bias, dy)
    for name, a, b in zip(("d_scores", "d_weight", "d_bias"), ours, exact):
        agree(a, b, case=True, what=name)


@pytest.mark.parametrize("shape", [(70000, 1, 1, 8), (1, 70000, 1, 8), (1, 1, 70000, 8)], ids=str)
def test_b21_more_blocks_than_a_grid_axis_rope(kind, shape):
    x, cos, sin = mk(0, shape, "f16"), mk(1, (shape[1], 4)), mk(2, (shape[1], 4))
    out = kind.put(np.full(shape, 7, np.float16))
    cupyattn.rope(kind.put(x), None, kind.put(cos), kind.put(sin), layout="bshd", out=(out, None))
    agree(kind.get(out), oracle.rotate(x, cos, sin), case=True)


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_b22_gradients_of_shared_heads(kind, boundary):
    check_na(kind, four((1, 20, 6, 16), kv_heads=2), kernel_size=5, boundary=boundary)


def test_b22_count_of_windows(kind):
    q, k = np.zeros((1, 9, 6, 8), np.float32), np.zeros((1, 9, 2, 8), np.float32)
    _, _, dv = na_bwd(kind, q, k, k, np.ones_like(q), 3)
    counts = np.array([2, 3, 4, 3, 3, 3, 4, 3, 2.0])
    agree(dv, np.broadcast_to(counts[None, :, None, None], dv.shape), case=True)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_b24_any_head_dim(kind, dtype):
    for head_dim in (1, 2, 4, 8, 16, 24, 33, 36, 40, 64, 72, 80, 96, 100, 112, 128, 160, 192, 256):
        check_na(kind, four((1, 40, 2, head_dim), dtype), kernel_size=7)


@pytest.mark.parametrize("head_dim", [128, 192])
def test_b24_all_channels_count(kind, head_dim):
    q, k, v, dy = four((1, 40, 2, head_dim))
    q[..., :64] = k[..., :64] = 0
    check_na(kind, (q, k, v, dy), kernel_size=7)
    means = oracle.na(np.zeros_like(q), k, v, 7)[0]
    assert np.abs(na(kind, q, k, v, 7)[0] - means).max() > 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("operation", ["neighborhood", "softmax", "sparsemax", "rope"])
def test_b26_bits_do_not_change(cupy_kind, operation):
    """20 runs while another stream keeps the device busy."""
    cp = cupy_kind.xp
    put = cupy_kind.put
    if operation == "neighborhood":
        q, k, v, dy = map(put, four((2, 2048, 8, 64), "bf16", kv_heads=2))
        y, lse = cupyattn.neighborhood_attention(q, k, v, 129, return_lse=True)

        def run():
            return cupyattn.neighborhood_attention_backward(dy, q, k, v, y, lse, 129)
    elif operation == "rope":
        x, cos = put(mk(0, (2, 256, 8, 64), "bf16")), put(mk(1, (256, 32)))

        def run():
            return cupyattn.rope_backward(x, x, cos, cos, layout="bshd")
    else:
        scores, dy = (put(mk(i, (4, 8, 128, 128))) for i in (0, 1))
        weight, bias = put(mk(2, (8, 8, 5, 5))), put(mk(3, (8,)))

        def run():
            return cupyattn.multi_token_attention_backward(dy, scores, weight, bias,
                                                           activation=operation)

    first = [cp.asnumpy(r.view(np.uint8)) for r in run()]
    noise, other = cp.ones((2048, 2048), np.float32), cp.cuda.Stream(non_blocking=True)
    for _ in range(20):
        with other:
            noise @ noise
        again = run()
        for a, b in zip(first, again):
            assert np.array_equal(a, cp.asnumpy(b.view(np.uint8)))


def na_views(kind, views):
    q, k, v, dy = views
    y, lse = cupyattn.neighborhood_attention(q, k, v, 5, return_lse=True)
    return y, lse, *cupyattn.neighborhood_attention_backward(dy, q, k, v, y, lse, 5)


def same_as_copies(kind, operation, views):
    """The results on views are those on contiguous copies, bit for bit; the inputs stay."""
    copies = [kind.put(np.array(kind.get(x), order="C")) for x in views]
    before = [np.array(kind.get(x)) for x in views]
    for a, b in zip(operation(kind, views), operation(kind, copies)):
        identical(kind.get(a), kind.get(b))
    for x, old in zip(views, before):
        identical(kind.get(x), old, what="input")


def test_b27_packed_and_transposed_views(kind):
    qkv = kind.put(mk(0, (2, 30, 3, 4, 32), "f16"))
    dy = kind.put(mk(1, (2, 30, 2, 4, 32), "f16"))[:, :, 1]
    same_as_copies(kind, na_views, [qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], dy])
    heads_first = [kind.put(mk(i, (2, 4, 30, 32), "f16")).transpose(0, 2, 1, 3) for i in range(4)]
    same_as_copies(kind, na_views, heads_first)


@pytest.mark.parametrize("layout", [stepped, backwards, fortran], ids=lambda f: f.__name__)
def test_b27_other_strides(kind, layout):
    same_as_copies(kind, na_views, [place(kind, mk(i, (2, 30, 4, 32), "f16"), layout)
                                    for i in range(4)])


def test_b27_rotary_part_of_a_head(kind):
    x = kind.put(mk(0, (2, 9, 4, 192), "f16"))[..., 64:128]
    cos, sin = (kind.put(mk(i, (9, 32))) for i in (1, 2))

    def operation(kind, views):
        return (*cupyattn.rope(views[0], None, cos, sin, layout="bshd")[:1],
                *cupyattn.rope_backward(views[0], None, cos, sin, layout="bshd")[:1])

    same_as_copies(kind, operation, [x])


def test_b27_part_of_a_score_map(kind):
    scores = kind.put(mk(0, (2, 3, 20, 20), "f16"))[:, :, 3:12, 3:12]
    weight = kind.put(mk(1, (3, 5, 3, 3), "f16")).transpose(1, 0, 3, 2)
    dy = kind.put(mk(2, (2, 5, 20, 20), "f16"))[:, :, 2:11, 5:14]

    def operation(kind, views):
        scores, weight, dy = views
        return (cupyattn.multi_token_attention(scores, weight),
                *cupyattn.multi_token_attention_backward(dy, scores, weight)[:2])

    same_as_copies(kind, operation, [scores, weight, dy])


def test_b27_broadcast_view(kind):
    q, k, v, dy = four((2, 30, 4, 32), "f16")
    k, v = (np.broadcast_to(x[:1], x.shape) for x in (k, v))
    views = [kind.put(q), place(kind, k, broadcast), place(kind, v, broadcast), kind.put(dy)]
    same_as_copies(kind, na_views, views)


def test_b29_sizes_that_only_broadcast(kind):
    q = mk(0, (2, 16, 4, 32))
    for k, v in (((1, 16, 4, 32), (1, 16, 4, 32)), ((2, 16, 4, 32), (2, 16, 1, 32)),
                 ((2, 16, 8, 32), (2, 16, 8, 32))):
        with pytest.raises(ValueError, match=r"\bk\b|\bv\b"):
            na(kind, q, mk(1, k), mk(2, v), 3)
    with pytest.raises(ValueError, match="weight"):
        mta(kind, mk(0, (2, 4, 8, 8)), mk(1, (4, 1, 3, 3)))
    with pytest.raises(ValueError, match="cos"):
        rope(kind, mk(0, (2, 5, 1, 8)), mk(1, (3, 5, 4)), mk(2, (3, 5, 4)))
    valid_call(kind)


# --- fused module ----------------------------------------------------------------------------


def packed(kind, weight, bias, rows):
    """Row slices of a packed projection: three weights and three biases, as views."""
    weight, bias = kind.put(weight), kind.put(bias)
    ends = np.cumsum((0, *rows))
    parts = [slice(a, b) for a, b in zip(ends, ends[1:])]
    return [weight[p] for p in parts], [bias[p] for p in parts]


def test_b31_number_of_key_heads(kind):
    x, weight, bias = mk(0, (2, 24, 64)), mk(1, (128, 64)) / 8, mk(2, (128,))
    out_weight, out_bias = mk(3, (64, 64)) / 8, mk(4, (64,))
    weights, biases = packed(kind, weight, bias, (64, 32, 32))
    y = cupyattn.fused_neighborhood_attention(
        kind.put(x), *weights, kind.put(out_weight), *biases, kind.put(out_bias), num_heads=4,
        num_kv_heads=2, kernel_size=5)
    exact = oracle.fused(x, [weight[:64], weight[64:96], weight[96:], out_weight],
                         [bias[:64], bias[64:96], bias[96:], out_bias], 4, 2, kernel_size=5,
                         boundary="clip")
    agree(kind.get(y), exact, case=True)
    wrong = [mk(i, (64, 64)) for i in range(4)]
    with pytest.raises(ValueError, match=r"(?s)k_weight.*\b64\b.*\b32\b"):
        fused(kind, x, wrong, [None] * 4, num_heads=4, num_kv_heads=2, kernel_size=5)


@pytest.mark.parametrize("hidden, heads, kv_heads, expected", [
    (8, 2, 1, [12, 13, 14, 15] * 2),
    (16, 4, 2, [24, 25, 26, 27] * 2 + [28, 29, 30, 31] * 2)])
def test_b32_rows_of_a_packed_weight(kind, hidden, heads, kv_heads, expected):
    """Zero weights leave the biases: each query head shows which value head it read."""
    rows = (hidden, 4 * kv_heads, 4 * kv_heads)
    weights, biases = packed(kind, np.zeros((sum(rows), hidden), np.float32),
                             np.arange(sum(rows), dtype=np.float32), rows)
    y = cupyattn.fused_neighborhood_attention(
        kind.put(mk(0, (1, 6, hidden))), *weights, kind.put(np.eye(hidden, dtype=np.float32)),
        *biases, num_heads=heads, num_kv_heads=kv_heads, kernel_size=3)
    agree(kind.get(y), np.broadcast_to(np.array(expected, float), (1, 6, hidden)), case=True)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("shape, kernel_size", [((2, 3, 5, 64), 3), ((1, 2, 3, 4, 32), (2, 3, 3)),
                                                ((1, 20, 64), 3)], ids=str)
def test_b34_half_products_of_any_rank(kind, shape, kernel_size, dtype):
    hidden = shape[-1]
    rows = (hidden, hidden // 2, hidden // 2, hidden)
    weights = [(mk(i, (n, hidden)) / math.sqrt(hidden)).astype(DTYPES[dtype])
               for i, n in enumerate(rows)]
    biases = [mk(4 + i, (n,), dtype) for i, n in enumerate(rows)]
    x = mk(9, shape, dtype)
    options = dict(kernel_size=kernel_size, boundary="shift")
    y = fused(kind, x, weights, biases, num_heads=4, num_kv_heads=2, **options)
    assert y.dtype == x.dtype
    agree(y, oracle.fused(x, weights, biases, 4, 2, **options), case=True)


def test_b35_float32_products_are_float32(kind):
    zero, one = np.zeros((16, 16), np.float32), np.eye(16, dtype=np.float32)
    x = np.broadcast_to(1 + np.arange(1, 17, dtype=np.float32) * 2.0 ** -13, (1, 12, 16))
    x = np.ascontiguousarray(x, np.float32)
    y = fused(kind, x, [zero, zero, one, one], [None] * 4, num_heads=1, kernel_size=3)
    assert np.abs(y - x).max() <= 4e-7
    rough = fused(kind, x, [zero, zero, one, one], [None] * 4, num_heads=1, kernel_size=3,
                  precision="tf32")
    assert np.abs(rough - x).max() <= 2e-3


def test_b35_float32_products_are_float32_random(kind):
    x, weights = mk(0, (1, 20, 256)), [mk(1 + i, (256, 256)) / 16 for i in range(4)]
    options = dict(kernel_size=5, boundary="clip")
    y = fused(kind, x, weights, [None] * 4, num_heads=8, **options)
    exact = oracle.fused(x, weights, [None] * 4, 8, None, **options)
    assert np.abs(y - exact).max() <= 5e-6 * np.abs(exact).max()
