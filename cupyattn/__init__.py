"""Neighborhood attention, multi-token attention and rotary embedding for arrays.

NumPy arrays run the float64 reference; CuPy arrays and torch CUDA tensors (any CUDA array with
DLPack) run CUDA kernels compiled on first use, on the caller's stream. The same functions, the
same kind of array back.

Layouts: q, k, v of neighborhood attention (batch, *space, heads, head_dim); scores of multi-token
attention (batch, heads, seq, seq); q, k of rope (batch, heads, seq, head_dim) or, with
``layout="bshd"``, (batch, seq, heads, head_dim).

>>> import numpy as np, cupyattn
>>> x = np.random.default_rng(0).standard_normal((1, 7, 9, 2, 16)).astype(np.float32)
>>> cupyattn.neighborhood_attention(x, x, x, kernel_size=(3, 5)).shape
(1, 7, 9, 2, 16)
"""

from ._errors import KernelError, PerformanceWarning
from ._tools import cache_info, check_errors, explain, plan, show_config, warmup
from .fused_neighborhood import (fused_neighborhood_attention,
                                 fused_neighborhood_attention_backward)
from .multi_token import multi_token_attention, multi_token_attention_backward
from .neighborhood import neighborhood_attention, neighborhood_attention_backward
from .rope import rope, rope_backward, rope_table

from ._version import __version__

__all__ = [
    "KernelError", "PerformanceWarning", "__version__", "cache_info", "check_errors", "explain",
    "fused_neighborhood_attention", "fused_neighborhood_attention_backward",
    "multi_token_attention", "multi_token_attention_backward", "neighborhood_attention",
    "neighborhood_attention_backward", "plan", "rope", "rope_backward", "rope_table",
    "show_config", "warmup",
]
