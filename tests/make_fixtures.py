"""Make the files in `tests/fixtures` with PyTorch and Hugging Face transformers.

    python tests/make_fixtures.py

Everything is computed in float64 by their own operations and differentiated by their autograd;
the frequencies of scaled rotary tables are float32, as transformers computes them. Each file holds
arrays named `case/array`, a JSON text `case/options` for each case, and the versions used.
"""

import itertools
import json
import math
import pathlib

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as rotate_interleaved
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_half_split

FOLDER = pathlib.Path(__file__).parent / "fixtures"


def random(seed, *shape):
    """Normal numbers that are exact in float32."""
    numbers = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return torch.tensor(numbers, dtype=torch.float64)


def save(name, cases):
    """Write one file; inputs are exact in float32 and stored so."""
    arrays = {
        "versions": np.array(f"torch {torch.__version__}, transformers {transformers.__version__}")
    }
    for case, (options, tensors) in cases.items():
        arrays[f"{case}/options"] = np.array(json.dumps(options))
        for key, tensor in tensors.items():
            if tensor is None:
                continue
            array = tensor.detach().numpy()
            exact = np.array_equal(array.astype(np.float32), array)
            arrays[f"{case}/{key}"] = array.astype(np.float32) if exact else array
    np.savez_compressed(FOLDER / f"{name}.npz", **arrays)


def sees(i, j, length, kernel_size, dilation, stride, is_causal, boundary):
    """Whether query position `i` of one axis sees key position `j`."""
    if (i - j) % dilation:
        return False
    query, key = i // dilation, j // dilation
    last = (length - 1 - i % dilation) // dilation
    if is_causal and key > query:
        return False
    if boundary == "clip":
        return abs(query - key) <= kernel_size // 2
    first_of_block = query - query % stride
    if is_causal:
        return key > min(first_of_block + stride - 1, last) - kernel_size
    start = min(first_of_block + stride // 2, last) - kernel_size // 2
    start = min(max(start, 0), last + 1 - kernel_size)
    return start <= key < start + kernel_size


def mask_of(space, kernel_size, dilation, stride, is_causal, boundary):
    """Boolean (tokens, tokens), row-major over the axes."""
    tokens = list(itertools.product(*map(range, space)))
    rules = list(zip(space, kernel_size, dilation, stride, is_causal))
    return torch.tensor(
        [
            [
                all(sees(a, b, *rule, boundary) for a, b, rule in zip(query, key, rules))
                for key in tokens
            ]
            for query in tokens
        ]
    )


def attention(q, k, v, mask, scale):
    """Masked attention of (batch, tokens, heads, dim) arrays: output and lse."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = (scale * q @ k.mT).masked_fill(~mask, -math.inf)
    return y.transpose(1, 2), torch.logsumexp(scores, -1).transpose(1, 2)


def neighborhood_case(space, kernel_size, dilation, stride, is_causal, boundary, heads, kv_heads):
    options = {
        "kernel_size": kernel_size,
        "dilation": dilation,
        "stride": stride,
        "is_causal": is_causal,
        "scale": 0.4,
        "boundary": boundary,
    }
    q, k, v, dy, dlse = (
        random(0, 2, *space, heads, 5),
        random(1, 2, *space, kv_heads, 5),
        random(2, 2, *space, kv_heads, 3),
        random(3, 2, *space, heads, 3),
        random(4, 2, *space, heads),
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    mask = mask_of(space, kernel_size, dilation, stride, is_causal, boundary)
    y, lse = attention(*(x.flatten(1, -3) for x in inputs), mask, 0.4)
    y, lse = y.reshape(dy.shape), lse.reshape(dlse.shape)
    dq, dk, dv = torch.autograd.grad([y, lse], inputs, [dy, dlse])
    return options, {
        "q": q,
        "k": k,
        "v": v,
        "dy": dy,
        "dlse": dlse,
        "y": y,
        "lse": lse,
        "dq": dq,
        "dk": dk,
        "dv": dv,
    }


def neighborhood():
    no, yes = False, True
    save(
        "neighborhood",
        {
            "shift": neighborhood_case((13,), (5,), (1,), (1,), (no,), "shift", 4, 2),
            "shift-even-dilated-stride": neighborhood_case(
                (19,), (4,), (3,), (3,), (no,), "shift", 3, 1
            ),
            "shift-causal-stride": neighborhood_case(
                (14,), (5,), (2,), (4,), (yes,), "shift", 2, 2
            ),
            "clip-dilated": neighborhood_case((17,), (7,), (2,), (1,), (no,), "clip", 2, 1),
            "clip-wider-than-axis": neighborhood_case((6,), (21,), (1,), (1,), (no,), "clip", 2, 1),
            "clip-causal": neighborhood_case((11,), (5,), (2,), (1,), (yes,), "clip", 2, 1),
            "shift-2d": neighborhood_case((5, 6), (3, 2), (1, 3), (2, 1), (yes, no), "shift", 2, 1),
            "clip-2d": neighborhood_case((4, 5), (3, 9), (2, 1), (1, 1), (no, yes), "clip", 2, 1),
            "shift-3d": neighborhood_case(
                (3, 4, 3), (2, 2, 3), (1, 2, 1), (1, 2, 1), (no, no, yes), "shift", 2, 1
            ),
        },
    )


def sparsemax(scores):
    """Sparsemax of rows, by sorting; autograd differentiates the threshold of the support."""
    falling = scores.sort(-1, descending=True).values
    finite = torch.isfinite(falling)
    total = falling.masked_fill(~finite, 0).cumsum(-1)
    rank = torch.arange(1, scores.shape[-1] + 1)
    count = (finite & (1 + rank * falling > total)).sum(-1, keepdim=True)
    threshold = (total.gather(-1, count - 1) - 1) / count
    return (scores - threshold).clamp_min(0)


def multi_token_case(shape, groups, dilation, padding, activation, bias=True):
    heads_in, heads_out, seq, kh, kw = shape
    options = {"groups": groups, "dilation": dilation, "padding": padding, "activation": activation}
    scores, weight = (
        random(0, 2, heads_in, seq, seq),
        random(1, heads_out, heads_in // groups, kh, kw),
    )
    inputs = [scores, weight] + ([random(2, heads_out)] if bias else [])
    dy = random(3, 2, heads_out, seq, seq)
    inputs = [x.requires_grad_() for x in inputs]
    above = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    masked = scores.masked_fill(above, -math.inf)
    p = masked.softmax(-1) if activation == "softmax" else sparsemax(masked)
    reach_rows, reach_columns = (kh - 1) * dilation[0], (kw - 1) * dilation[1]
    top = reach_rows if padding == "causal" else kh // 2 * dilation[0]
    left = kw // 2 * dilation[1]
    p = F.pad(p, (left, reach_columns - left, top, reach_rows - top))
    y = F.conv2d(p, weight, inputs[2] if bias else None, dilation=dilation, groups=groups)
    y = y.masked_fill(above, 0)
    gradients = torch.autograd.grad(y, inputs, dy)
    names = ("d_scores", "d_weight", "d_bias")
    return options, dict(
        scores=scores,
        weight=weight,
        bias=inputs[2] if bias else None,
        dy=dy,
        y=y,
        **dict(zip(names, gradients)),
    )


def multi_token():
    save(
        "multi_token",
        {
            "same": multi_token_case((3, 2, 7, 3, 3), 1, (1, 1), "same", "softmax"),
            "same-sparsemax": multi_token_case((2, 4, 8, 5, 3), 2, (1, 1), "same", "sparsemax"),
            "even": multi_token_case((2, 2, 7, 4, 2), 1, (1, 1), "same", "softmax", bias=False),
            "causal": multi_token_case((4, 4, 8, 3, 5), 4, (1, 1), "causal", "softmax"),
            "causal-even-sparsemax": multi_token_case(
                (2, 1, 9, 2, 4), 1, (1, 1), "causal", "sparsemax"
            ),
            "dilated": multi_token_case((2, 2, 9, 3, 3), 1, (2, 3), "same", "softmax"),
            "dilated-causal": multi_token_case((2, 2, 9, 4, 3), 2, (3, 1), "causal", "softmax"),
            "wider-than-map": multi_token_case((1, 1, 2, 5, 7), 1, (1, 1), "same", "sparsemax"),
        },
    )


def angles_of(tokens, width):
    """Angles (tokens, width) of a plain table, in float64."""
    inv_freq = 10000.0 ** (-torch.arange(width, dtype=torch.float64) / width)
    return torch.arange(tokens, dtype=torch.float64)[:, None] * inv_freq


def rotate_like_transformers(q, k, cos, sin, interleaved):
    """Rotate (batch, tokens, heads, dim) arrays with half-form tables (tokens, width)."""
    cos, sin = (torch.cat([x, x], -1)[None] for x in (cos, sin))
    function = rotate_interleaved if interleaved else rotate_half_split
    return function(q, k, cos, sin, unsqueeze_dim=2)


def fused_case(space, options, num_heads, num_kv_heads, bias=True, rope=None):
    head_dim, hidden = 4, 6
    tokens = math.prod(space)
    inputs = {
        "hidden_states": random(0, 2, *space, hidden),
        "q_weight": random(1, num_heads * head_dim, hidden),
        "k_weight": random(2, num_kv_heads * head_dim, hidden),
        "v_weight": random(3, num_kv_heads * head_dim, hidden),
        "out_weight": random(4, hidden, num_heads * head_dim),
    }
    if bias:
        inputs["q_bias"] = random(5, num_heads * head_dim)
        inputs["k_bias"] = random(6, num_kv_heads * head_dim)
        inputs["v_bias"] = random(7, num_kv_heads * head_dim)
        inputs["out_bias"] = random(8, hidden)
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    x = inputs["hidden_states"].flatten(1, -2)

    def heads(name):
        projected = F.linear(x, inputs[f"{name}_weight"], inputs.get(f"{name}_bias"))
        return projected.unflatten(-1, (-1, head_dim))

    q, k, v = heads("q"), heads("k"), heads("v")
    tables = {}
    if rope is not None:
        angle = angles_of(tokens, head_dim // 2)
        tables = {"cos": angle.cos(), "sin": angle.sin()}
        q, k = rotate_like_transformers(q, k, *tables.values(), rope == "interleaved")
    window = {
        name: options[name]
        for name in ("kernel_size", "dilation", "stride", "is_causal", "boundary")
    }
    y, _ = attention(q, k, v, mask_of(space, **window), options["scale"])
    y = F.linear(y.flatten(2), inputs["out_weight"], inputs.get("out_bias"))
    y = y.reshape(inputs["hidden_states"].shape)
    dy = random(9, *y.shape)
    gradients = torch.autograd.grad(y, list(inputs.values()), dy)
    options = dict(options, num_heads=num_heads, num_kv_heads=num_kv_heads, rope=rope)
    gradients = {f"d_{name}": x for name, x in zip(inputs, gradients)}
    return options, dict(inputs, **tables, y=y, dy=dy, **gradients)


def fused_neighborhood():
    def options(kernel_size, dilation, stride, is_causal, boundary):
        return {
            "kernel_size": kernel_size,
            "dilation": dilation,
            "stride": stride,
            "is_causal": is_causal,
            "scale": 0.3,
            "boundary": boundary,
        }

    clip = options((5,), (1,), (1,), (False,), "clip")
    dilated = options((3,), (2,), (1,), (True,), "clip")
    shift = options((3, 2), (1, 2), (2, 1), (False, True), "shift")
    deep = options((2, 3, 3), (1, 1, 1), (1, 1, 1), (False, False, False), "shift")
    save(
        "fused_neighborhood",
        {
            "clip": fused_case((9,), clip, 2, 2),
            "clip-no-bias": fused_case((9,), dilated, 2, 1, bias=False),
            "half-split": fused_case((9,), clip, 4, 2, rope="half-split"),
            "shift-2d-interleaved": fused_case((4, 5), shift, 2, 1, rope="interleaved"),
            "shift-3d": fused_case((2, 3, 4), deep, 3, 1, rope="half-split"),
        },
    )


SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "max_position_embeddings": 2048},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048},
    "yarn-exact-limits": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.25,
    },
    "yarn-step": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 4.0,
        "beta_slow": 4.0,
        "truncate": False,
    },
    "yarn-ratio": {
        "rope_type": "yarn",
        "factor": None,
        "original_max_position_embeddings": 512,
        "max_position_embeddings": 2048,
    },
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 1024,
        "factor": 16.0,
        "short_factor": [1 + i / 16 for i in range(16)],
        "long_factor": [1 + i * i / 4 for i in range(16)],
    },
    "longrope-ratio": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 1024,
        "max_position_embeddings": 8192,
        "short_factor": [1 + i / 16 for i in range(16)],
        "long_factor": [1 + i * i / 4 for i in range(16)],
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.3},
    "proportional-factor": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "factor": 4.0,
    },
}


def frequency_case(scaling, rotary_dim, base, seq):
    parameters = {key: x for key, x in scaling.items() if key != "max_position_embeddings"}
    config = LlamaConfig(
        head_dim=rotary_dim,
        hidden_size=2 * rotary_dim,
        num_attention_heads=2,
        max_position_embeddings=scaling.get("max_position_embeddings", 2048),
        rope_parameters=dict(parameters, rope_theta=base),
    )
    if scaling["rope_type"] == "default":
        inv_freq, attention_factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        function = ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
        inv_freq, attention_factor = function(config, "cpu", seq_len=seq)
    options = {
        "scaling": scaling,
        "rotary_dim": rotary_dim,
        "base": base,
        "seq": seq,
        "attention_factor": attention_factor,
    }
    positions = torch.arange(max(seq - 4, 0), seq)[None]
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), positions)
    half = rotary_dim // 2
    return options, {"inv_freq": inv_freq, "cos": cos[0, :, :half], "sin": sin[0, :, :half]}


def rope():
    cases = {}
    for name, scaling in SCALINGS.items():
        for seq in (64, 1024, 1025, 2048, 2049, 5000):
            if seq == 64 or scaling["rope_type"] in ("dynamic", "longrope"):
                cases[f"{name}-{seq}"] = frequency_case(scaling, 32, 10000.0, seq)
    cases["llama3-base"] = frequency_case(SCALINGS["llama3"], 128, 500000.0, 100)
    cases["yarn-base"] = frequency_case(SCALINGS["yarn"], 64, 150000.0, 100)
    save("rope_frequencies", cases)

    cases = {}
    for style, rotary_dim in (("half-split", 8), ("interleaved", 8), ("interleaved", 6)):
        q, k = random(0, 2, 5, 3, 8), random(1, 2, 5, 1, 8)
        dq, dk = random(2, *q.shape), random(3, *k.shape)
        angle = angles_of(5, rotary_dim // 2)
        inputs = [q.requires_grad_(), k.requires_grad_()]
        turned = rotate_like_transformers(q, k, angle.cos(), angle.sin(), style == "interleaved")
        grad_q, grad_k = torch.autograd.grad(turned, inputs, [dq, dk])
        cases[f"{style}-{rotary_dim}"] = (
            {"rotary_dim": rotary_dim, "interleaved": style == "interleaved"},
            {
                "q": q,
                "k": k,
                "cos": angle.cos(),
                "sin": angle.sin(),
                "q_out": turned[0],
                "k_out": turned[1],
                "dq": dq,
                "dk": dk,
                "grad_q": grad_q,
                "grad_k": grad_k,
            },
        )
    save("rope_rotation", cases)


if __name__ == "__main__":
    torch.manual_seed(0)
    FOLDER.mkdir(exist_ok=True)
    neighborhood()
    multi_token()
    fused_neighborhood()
    rope()
