"""Definitions of the operations as explicit Python loops, for tiny inputs in tests."""

import itertools
import math

import numpy as np


def window_keys(i, length, kernel_size, dilation, stride, is_causal, boundary):
    """List the positions that position `i` of one axis attends to, in order."""
    group = i % dilation
    p = i // dilation
    n = math.ceil((length - group) / dilation)
    if boundary == "clip":
        start = max(p - kernel_size // 2, 0)
        end = p + 1 if is_causal else min(p + kernel_size // 2 + 1, n)
    elif is_causal:
        leader = min((p // stride) * stride + stride - 1, n - 1)
        start = max(leader - kernel_size + 1, 0)
        end = p + 1
    else:
        leader = min((p // stride) * stride + stride // 2, n - 1)
        start = min(max(leader - kernel_size // 2, 0), n - kernel_size)
        end = start + kernel_size
    return [group + m * dilation for m in range(start, end)]


def window_tokens(token, space, kernel_size, dilation, stride, is_causal, boundary):
    """List the tokens, as index tuples, that `token` attends to."""
    axes = [
        window_keys(
            token[a], space[a], kernel_size[a], dilation[a], stride[a], is_causal[a], boundary
        )
        for a in range(len(space))
    ]
    return list(itertools.product(*axes))


def softmax(row):
    """Softmax and log of the sum of exponentials of a list of numbers."""
    top = max(row)
    powers = [math.exp(value - top) for value in row]
    return [power / sum(powers) for power in powers], top + math.log(sum(powers))


def sparsemax(row):
    """Projection onto the simplex: drop what falls below the threshold until nothing does."""
    support = list(row)
    while True:
        threshold = (sum(support) - 1) / len(support)
        kept = [value for value in support if value > threshold]
        if len(kept) == len(support):
            return [max(value - threshold, 0.0) for value in row]
        support = kept


def neighborhood(q, k, v, kernel_size, dilation, stride, is_causal, scale, boundary):
    """Neighborhood attention: output and lse."""
    batch, *space, heads, _ = q.shape
    share = heads // k.shape[-2]
    y, lse = np.zeros((*q.shape[:-1], v.shape[-1])), np.zeros(q.shape[:-1])
    for b, h in itertools.product(range(batch), range(heads)):
        for token in itertools.product(*map(range, space)):
            near = window_tokens(token, space, kernel_size, dilation, stride, is_causal, boundary)
            query = q[(b, *token, h)]
            scores = [
                scale * sum(float(x) * float(y) for x, y in zip(query, k[(b, *key, h // share)]))
                for key in near
            ]
            weights, lse[(b, *token, h)] = softmax(scores)
            for c in range(v.shape[-1]):
                y[(b, *token, h, c)] = sum(
                    weight * float(v[(b, *key, h // share, c)])
                    for weight, key in zip(weights, near)
                )
    return y, lse


def multi_token(scores, weight, bias, groups, dilation, padding, activation):
    """Multi-token attention, entry by entry."""
    batch, heads_in, seq, _ = scores.shape
    heads_out, per_group, kh, kw = weight.shape
    p = np.zeros(scores.shape)
    for b, c, i in itertools.product(range(batch), range(heads_in), range(seq)):
        row = [float(value) for value in scores[b, c, i, : i + 1]]
        p[b, c, i, : i + 1] = softmax(row)[0] if activation == "softmax" else sparsemax(row)
    y = np.zeros((batch, heads_out, seq, seq))
    for b, o, i, j in itertools.product(*map(range, y.shape)):
        if j > i:
            continue
        group = o // (heads_out // groups)
        total = 0.0 if bias is None else float(bias[o])
        for c, u, w in itertools.product(range(per_group), range(kh), range(kw)):
            if padding == "same":
                row = i + (u - kh // 2) * dilation[0]
            else:
                row = i + (u - kh + 1) * dilation[0]
            column = j + (w - kw // 2) * dilation[1]
            if 0 <= row < seq and 0 <= column < seq:
                weight_here = float(weight[o, c, u, w])
                total += weight_here * p[b, group * per_group + c, row, column]
        y[b, o, i, j] = total
    return y


def rotate(x, angles, rotary_dim, interleaved):
    """Turn pairs as complex numbers; `angles` is (batch, seq, rotary_dim // 2)."""
    y = np.array(x, np.float64)
    half = rotary_dim // 2
    for b, t, h in itertools.product(*map(range, x.shape[:3])):
        for i in range(half):
            first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            pair = complex(x[b, t, h, first], x[b, t, h, second])
            angle = float(angles[b, t, i])
            turned = pair * complex(math.cos(angle), math.sin(angle))
            y[b, t, h, first], y[b, t, h, second] = turned.real, turned.imag
    return y


def central_difference(function, x, step=1e-5):
    """Gradient of a scalar function of one float64 array, entry by entry."""
    gradient = np.zeros(x.shape)
    for index in np.ndindex(*x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (function(up) - function(down)) / (2 * step)
    return gradient
