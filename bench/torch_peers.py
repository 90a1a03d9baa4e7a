"""The providers that run on torch tensors.

Each runs as its own documentation and scripts run it, with its library's defaults, forward under
`no_grad` (the worker sees to that) and backward as `torch.autograd.grad` on a kept graph.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from .peers import Bind, Bound, Refusal, provider
from .workloads import Workload, per_axis


def torch_bind(
    direction: str,
    build: Callable[[dict[str, Any]], Callable[[], Any]],
    names: list[str],
    gradients: list[str],
    finish: Callable[[Any], Any] = lambda outputs: outputs,
) -> Bind:
    """Return `bind` for a forward function that torch differentiates.

    `build(arrays)` returns the forward call; `names` are the arrays whose gradients are results,
    `gradients` the arrays that hold those of the outputs.
    """
    import torch

    backward = direction == "backward"

    def bind(x: dict[str, Any]) -> Bound:
        leaves = dict(x)
        for name in names:
            leaves[name] = torch.nn.Parameter(x[name], requires_grad=backward)
        if not backward:
            return Bound(build(leaves), finish=finish)
        with torch.enable_grad():
            outputs = build(leaves)()
        wanted, given = [leaves[n] for n in names], [x[n] for n in gradients]
        return Bound(lambda: torch.autograd.grad(outputs, wanted, given, retain_graph=True))

    return bind


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    import torch
    import torch._inductor.config

    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # the backward call is repeated
    # Peers compile side by side: what is fastest there says nothing, and is measured anew.
    torch._inductor.config.autotune_local_cache = False
    return torch.compile(function, dynamic=False)


def _allow_tf32(w: Workload) -> None:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = getattr(w, "precision", "") == "tf32"


# Rotary embedding


def _rope_bind(direction: str, function: Callable[..., Any]) -> Bind:
    names = ["q", "k"]

    def build(x: dict[str, Any]) -> Callable[[], Any]:
        return functools.partial(function, x["q"], x["k"], x["cos"], x["sin"])

    if direction == "forward":
        return torch_bind(direction, build, names, [])
    inner = torch_bind(direction, build, names, ["dq", "dk"])

    def bind(x: dict[str, Any]) -> Bound:
        import torch

        # Which q and k were rotated does not matter to the gradient; they must only exist.
        return inner({**x, "q": torch.zeros_like(x["dq"]), "k": torch.zeros_like(x["dk"])})

    return bind


@provider("huggingface", ("rope",), "transformers")
def huggingface(w: Workload, direction: str) -> Bind:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    return _rope_bind(direction, apply_rotary_pos_emb)


# Multi-token attention


def _sparsemax(z: Any, axis: int) -> Any:
    """Project onto the simplex by sorting, as the definition says: torch has none of its own."""
    import torch

    ordered = z.sort(axis, descending=True).values
    total = ordered.cumsum(axis)
    count = torch.arange(1, z.shape[axis] + 1, dtype=z.dtype, device=z.device)
    size = (1 + count * ordered > total).sum(axis, keepdim=True)
    return (z - (total.gather(axis, size - 1) - 1) / size).clamp(min=0)


def torch_multi_token(w: Any) -> Callable[..., Any]:
    import torch
    import torch.nn.functional as F

    activation = _sparsemax if w.activation == "sparsemax" else torch.softmax
    future = torch.ones(w.seq, w.seq, dtype=torch.bool, device="cuda").triu(1)

    def forward(scores: Any, weight: Any, bias: Any) -> Any:
        p = activation(scores.masked_fill(future, float("-inf")), -1)
        y = F.conv2d(p, weight, bias, padding=w.kernel // 2, groups=w.groups)
        return y.masked_fill(future, 0.0)

    return forward


def _multi_token_bind(direction: str, function: Callable[..., Any]) -> Bind:
    names = ["scores", "weight", "bias"]

    def build(x: dict[str, Any]) -> Callable[[], Any]:
        return functools.partial(function, *(x[name] for name in names))

    return torch_bind(direction, build, names, ["dy"])


# Windows for torch: a dense mask, or a mask function for flex_attention


def dense_mask(w: Any) -> Any:
    import torch

    from .check import masks

    if w.tokens > 16384:
        raise Refusal(f"a dense mask of {w.tokens} x {w.tokens} is too large")
    return torch.from_numpy(masks(w, np)(slice(0, w.tokens))).cuda()


def block_mask(w: Any) -> Any:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    from cupyattn.reference.neighborhood import window

    if w.tokens > 65536:
        raise Refusal(f"the block mask is made from a {w.tokens} x {w.tokens} mask: too large")
    ends = [[torch.from_numpy(a).int().cuda() for a in window(*axis)] for axis in w.axes()]
    axes = list(zip(w.space, per_axis(w.dilation, len(w.space)), ends, strict=True))

    def inside(batch: Any, head: Any, query: Any, key: Any) -> Any:
        result = None
        for length, d, (start, end) in reversed(axes):
            i, j = query % length, key % length
            query, key = query // length, key // length
            one = (i % d == j % d) & (j // d >= start[i]) & (j // d < end[i])
            result = one if result is None else result & one
        return result

    # Compiled, it needs no memory for the whole mask; otherwise it is there at once.
    compiled = w.tokens > 4096
    return create_block_mask(inside, None, None, w.tokens, w.tokens, "cuda", _compile=compiled)


# Fused module

PARAMETERS = [f"{part}_{kind}" for kind in ("weight", "bias") for part in ("q", "k", "v", "out")]


def _module_bind(w: Any, direction: str, attention: Callable[..., Any]) -> Bind:
    """Bind linear, then `attention` on [batch, heads, tokens, head_dim], then linear."""
    import torch.nn.functional as F

    _allow_tf32(w)
    names = ["hidden_states", *PARAMETERS]

    def module(x: Any, wq: Any, wk: Any, wv: Any, wo: Any, bq: Any, bk: Any, bv: Any, bo: Any):
        split = (w.batch, w.tokens, w.heads, -1)
        q, k, v = (
            F.linear(x, weight, bias).view(split).transpose(1, 2)
            for weight, bias in ((wq, bq), (wk, bk), (wv, bv))
        )
        return F.linear(attention(q, k, v).transpose(1, 2).reshape(x.shape), wo, bo)

    def build(x: dict[str, Any]) -> Callable[[], Any]:
        return functools.partial(module, *(x[name] for name in names))

    return torch_bind(direction, build, names, ["dy"])


@provider("cublas", ("fused_neighborhood",), compared=False)
def cublas(w: Workload, direction: str) -> Bind:
    """The four projections alone, all on the same input."""
    import torch.nn.functional as F

    _allow_tf32(w)

    def build(x: dict[str, Any]) -> Callable[[], Any]:
        weights = [(x[f"{part}_weight"], x[f"{part}_bias"]) for part in ("q", "k", "v", "out")]
        return lambda: tuple(F.linear(x["hidden_states"], *pair) for pair in weights)

    return torch_bind(direction, build, ["hidden_states", *PARAMETERS], ["dy"] * 4)


# Neighborhood attention


def _heads_first_bind(w: Any, direction: str, attention: Callable[..., Any]) -> Bind:
    names = ["q", "k", "v"]

    def flat(x: Any) -> Any:
        return x.reshape(w.batch, w.tokens, w.heads, w.head_dim).transpose(1, 2)

    def build(x: dict[str, Any]) -> Callable[[], Any]:
        return functools.partial(attention, *(flat(x[name]) for name in names))

    def restore(y: Any) -> Any:
        return y.transpose(1, 2).reshape(w.results("forward")["y"])

    inner = torch_bind(direction, build, names, ["dy"], restore)
    if direction == "forward":
        return inner
    return lambda x: inner({**x, "dy": flat(x["dy"])})


def _scaled_dot_product(mask: Any) -> Callable[..., Any]:
    import torch.nn.functional as F

    return functools.partial(F.scaled_dot_product_attention, attn_mask=mask)


def _attention_bind(w: Workload, direction: str, attention: Callable[..., Any]) -> Bind:
    one = _module_bind if w.operator == "fused_neighborhood" else _heads_first_bind
    return one(w, direction, attention)


@provider("torch", ("multi_token", "fused_neighborhood", "neighborhood"))
def torch_eager(w: Workload, direction: str) -> Bind:
    if w.operator == "multi_token":
        return _multi_token_bind(direction, torch_multi_token(w))
    return _attention_bind(w, direction, _scaled_dot_product(dense_mask(w)))


@provider("torch_compile", ("rope", "multi_token"), compiles=True)
def torch_compile(w: Workload, direction: str) -> Bind:
    if w.operator == "multi_token":
        return _multi_token_bind(direction, _compiled(torch_multi_token(w)))

    def rotate(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        import torch

        cos, sin = cos[:, None], sin[:, None]
        halves = [x.chunk(2, -1) for x in (q, k)]
        turned = [torch.cat([-second, first], -1) for first, second in halves]
        return q * cos + turned[0] * sin, k * cos + turned[1] * sin

    return _rope_bind(direction, _compiled(rotate))


@provider("flex", ("fused_neighborhood", "neighborhood"), compiles=True)
def flex(w: Workload, direction: str) -> Bind:
    from torch.nn.attention.flex_attention import flex_attention

    if w.operator == "fused_neighborhood" and w.dtype == "f32" and w.tokens > 1024:
        raise Refusal("float32 beyond 1024 tokens takes flex_attention tens of milliseconds")
    mask = block_mask(w)
    compiled = _compiled(flex_attention)
    return _attention_bind(w, direction, functools.partial(compiled, block_mask=mask))


@provider("cudnn", ("neighborhood",), compared=False)
def cudnn(w: Workload, direction: str) -> Bind:
    """Dense attention over all tokens, which windows make unnecessary."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    contextlib.ExitStack().enter_context(sdpa_kernel(SDPBackend.CUDNN_ATTENTION))
    return _attention_bind(w, direction, _scaled_dot_product(None))


@provider("natten", ("neighborhood",), "natten")
def natten(w: Any, direction: str) -> Bind:
    import natten

    rank = len(w.space)
    options = {name: per_axis(value, rank) for name, value in w.window_options.items()}
    function = functools.partial(getattr(natten, f"na{rank}d"), **options)
    names = ["q", "k", "v"]

    def build(x: dict[str, Any]) -> Callable[[], Any]:
        return functools.partial(function, *(x[name] for name in names))

    return torch_bind(direction, build, names, ["dy"])


@provider("liger", ("rope", "multi_token", "fused_neighborhood"), "liger_kernel", compiles=True)
def liger(w: Any, direction: str) -> Bind:
    import torch

    if w.operator == "rope":  # works in place, forward and backward
        from liger_kernel.transformers.rope import liger_rotary_pos_emb

        return _rope_bind(direction, liger_rotary_pos_emb)
    if w.operator == "multi_token":
        from liger_kernel.ops import LigerMultiTokenAttentionFunction

        def attend(scores: Any, weight: Any, bias: Any) -> Any:
            half, sparse = w.kernel // 2, w.activation == "sparsemax"
            return LigerMultiTokenAttentionFunction.apply(
                scores, weight, bias, 1, half, 1, w.groups, sparse
            )

        return _multi_token_bind(direction, attend)
    from liger_kernel.transformers.fused_neighborhood_attention import (
        LigerFusedNeighborhoodAttention,
    )

    if len(w.space) != 1 or w.stride != 1 or w.is_causal:
        raise Refusal("Liger-Kernel's module takes one axis, stride 1, not causal")
    _allow_tf32(w)

    def build(x: dict[str, Any]) -> Callable[[], Any]:
        with torch.device("meta"):  # the weights come from the workload
            module = LigerFusedNeighborhoodAttention(
                w.hidden, w.heads, kernel_size=w.kernel_size, dilation=w.dilation
            )
        for name in PARAMETERS:
            part, kind = name.split("_")
            setattr(getattr(module, part + "_proj"), kind, x[name])
        return functools.partial(module, x["hidden_states"])

    return torch_bind(direction, build, ["hidden_states", *PARAMETERS], ["dy"])
