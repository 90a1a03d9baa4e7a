"""Every workload by name, and those that a user describes."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable
from typing import Any

from .problems import (
    DIRECTIONS,
    ITEMSIZE,
    KINDS,
    OPERATORS,
    Fused,
    MultiToken,
    Neighborhood,
    Rope,
    Windowed,
    Workload,
    per_axis,
)

__all__ = ["DIRECTIONS", "OPERATORS", "Windowed", "Workload", "per_axis"]

# The sequence lengths and shapes of the published scripts.
ROPE = [(2048, 512), (2048, 2048), *[(s, 8192) for s in (1024, 2048, 4096, 8192, 16384)]]
MULTI_TOKEN = [*[(4, 2**e) for e in range(5, 13)], (16, 1024), (32, 2048)]
FUSED = [(2, 512, 8, 7, 1), (4, 768, 12, 7, 1), (2, 1024, 16, 9, 1), (2, 512, 8, 7, 2)]
FUSED_SEQ = [64, 128, 256, 512, 1024, 2048, 4096]
# name: batch, space, heads, head_dim, window, other options
NEIGHBORHOOD: dict[str, tuple[int, tuple[int, ...], int, int, Any, dict[str, Any]]] = {
    "1d-32k-w2048": (1, (32768,), 1, 128, 2048, {}),
    "1d-32k-w2048-s256": (1, (32768,), 1, 128, 2048, {"stride": 256}),
    "1d-32k-w2048-causal": (1, (32768,), 8, 128, 2048, {"is_causal": True}),
    "1d-16k-w256": (2, (16384,), 16, 64, 256, {}),
    "1d-16k-w63-dil4": (2, (16384,), 16, 64, 63, {"dilation": 4}),
    "2d-flux-w80": (1, (256, 256), 24, 128, (80, 80), {}),
    "2d-flux-w80-s16": (1, (256, 256), 24, 128, (80, 80), {"stride": 16}),
    "2d-nat56-w7": (64, (56, 56), 4, 32, (7, 7), {}),
    "2d-nat56-w7-dil8": (64, (56, 56), 4, 32, (7, 7), {"dilation": 8}),
    "2d-96-w24": (4, (96, 96), 16, 64, (24, 24), {}),
    "3d-hunyuan": (1, (30, 48, 80), 24, 128, (18, 24, 24), {}),
    "3d-hunyuan-s": (1, (30, 48, 80), 24, 128, (18, 24, 24), {"stride": (16, 8, 8)}),
    "3d-cosmos": (1, (16, 44, 80), 32, 128, (16, 32, 48), {}),
    "3d-small-causal": (2, (16, 32, 32), 8, 64, (8, 8, 8), {"is_causal": (True, False, False)}),
}
# Kernel time of NATTEN 0.21.7.dev1, forward and backward, us: measured on an NVIDIA H200 with its
# Hopper kernels, every configuration tried, the best kept, its permutation of tokens included.
# Cited beside runs of this benchmark on the same model.
NATTEN = {
    "1d-32k-w2048": (111, 468), "1d-32k-w2048-s256": (86, 458), "1d-32k-w2048-causal": (712, 3100),
    "1d-16k-w256": (333, 1230), "1d-16k-w63-dil4": (292, 1053), "2d-flux-w80": (17300, 61800),
    "2d-flux-w80-s16": (9100, 50000), "2d-nat56-w7": (662, 2200), "2d-nat56-w7-dil8": (501, 2200),
    "2d-96-w24": (1153, 3200), "3d-hunyuan": (75100, 253800), "3d-hunyuan-s": (25500, 137800),
    "3d-cosmos": (63600, 255300), "3d-small-causal": (554, 1406),
}  # fmt: skip
# Plain kernels would run for seconds on these: their stand-in has the same window on a quarter of
# the grid, or on the smallest grid that holds the window.
NAIVE_SPACE = {(256, 256): (128, 128), (30, 48, 80): (30, 24, 40), (16, 44, 80): (16, 32, 48)}


def _catalogue() -> Iterable[Workload]:
    for seq, hidden in ROPE:
        yield Rope(f"rope/s{seq}-h{hidden}-bf16", seq, hidden)
    kinds = [("bf16", "bf16", "softmax"), ("f32", "f32", "softmax")]
    kinds += [("sparsemax-f32", "f32", "sparsemax")]
    sizes = [(c, 3, 1, seq) for c, seq in MULTI_TOKEN]
    sizes += [(4, kernel, 1, seq) for kernel in (5, 7, 11) for seq in (256, 1024)]
    sizes += [(16, 3, groups, seq) for groups in (4, 16) for seq in (256, 1024)]
    for suffix, dtype, activation in kinds:
        for channels, kernel, groups, seq in sizes:
            group = f"-g{groups}" if groups > 1 else ""
            name = f"mta/b2-c{channels}-k{kernel}{group}-l{seq}-{suffix}"
            yield MultiToken(name, 2, channels, kernel, seq, groups, activation, dtype)
    for suffix, dtype, precision in (
        ("f32", "f32", "fp32"),
        ("tf32", "f32", "tf32"),
        ("bf16", "bf16", "fp32"),
    ):
        for batch, hidden, heads, kernel, dilation in FUSED:
            for seq in FUSED_SEQ:
                name = f"fused_na/b{batch}-s{seq}-h{hidden}-n{heads}-k{kernel}-d{dilation}-{suffix}"
                yield Fused(
                    name, batch, (seq,), hidden, heads, kernel, dilation,
                    precision=precision, dtype=dtype,
                )  # fmt: skip
    for name, (*sizes, options) in NEIGHBORHOOD.items():
        yield Neighborhood(f"na/{name}", *sizes, **options)


WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in _catalogue()}
# The workloads of the public record: 28 float32 modules, 6 maps of 4 channels, 7 rotations.
PUBLISHED = [
    name
    for name, w in WORKLOADS.items()
    if w.operator == "rope"
    or name.endswith("-f32") and name.startswith("fused_na/")
    or w.operator == "multi_token" and name in [f"mta/b2-c4-k3-l{2**e}-bf16" for e in range(5, 11)]
]  # fmt: skip
QUICK = [
    "rope/s2048-h2048-bf16",
    "mta/b2-c4-k3-l256-bf16",
    "fused_na/b2-s128-h512-n8-k7-d2-f32",
    "na/2d-96-w24",
]
# The two operators that are bound by memory: the published sizes and their continuation, then
# every other option at one or two lengths.
MEMORY = [
    *[name for name, w in WORKLOADS.items() if w.operator == "rope"],
    *[f"mta/b2-c{channels}-k3-l{seq}-bf16" for channels, seq in MULTI_TOKEN],
    *[f"mta/b2-c4-k3-l{seq}-f32" for seq in (256, 1024, 4096)],
    *[f"mta/b2-c4-k3-l{seq}-sparsemax-f32" for seq in (256, 1024)],
    *[f"mta/b2-c4-k{kernel}-l{seq}-bf16" for kernel in (5, 7, 11) for seq in (256, 1024)],
    *[f"mta/b2-c16-k3-g{groups}-l{seq}-bf16" for groups in (4, 16) for seq in (256, 1024)],
]
SETS = {"published": PUBLISHED, "memory": MEMORY, "quick": QUICK}
# For machines without a GPU: small enough for the NumPy reference.
SMALL: list[Workload] = [
    Rope("small/rope-s256-h512-f32", 256, 512, dtype="f32"),
    MultiToken("small/mta-c4-k3-l64-f32", 1, 4, 3, 64, dtype="f32"),
    Fused("small/fused_na-s256-h64-n4-k7-d2-f32", 1, (256,), 64, 4, 7, 2),
    Neighborhood("small/na-24x24-w7-f32", 1, (24, 24), 4, 32, (7, 7), dtype="f32"),
]


def select(operators: list[str] | None, patterns: list[str] | None) -> list[Workload]:
    """Return the workloads of these operators whose name matches a pattern.

    A pattern is a name, a glob, or ``published``, ``memory`` or ``quick`` for those sets.
    """
    names: list[str] = []
    for pattern in patterns or ["*"]:
        found = SETS.get(pattern) or fnmatch.filter(WORKLOADS, pattern)
        if not found:
            raise ValueError(f"no workload matches {pattern!r}; `python -m bench --list` names all")
        names += [name for name in found if name not in names]
    chosen = [WORKLOADS[name] for name in names]
    return [w for w in chosen if not operators or w.operator in operators]


def custom(operator: str, settings: list[str]) -> Workload:
    """Return the workload that ``key=value`` settings describe, as in ``space=128x128``."""
    kind = KINDS[operator]
    fields = {f.name: f for f in dataclasses.fields(kind) if f.name != "name"}
    values: dict[str, Any] = {}
    for setting in settings:
        key, _, text = setting.partition("=")
        if key not in fields or not text:
            raise ValueError(f"--shape {setting!r}: expected KEY=VALUE with KEY in {list(fields)}")
        values[key] = _parse(key, text)
    if values.get("dtype", "f32") not in ITEMSIZE:
        raise ValueError(f"--shape dtype={values['dtype']}: expected one of {list(ITEMSIZE)}")
    return kind(f"{operator}/custom:" + ",".join(settings), **values)


def _parse(key: str, text: str) -> Any:
    if key in ("dtype", "activation", "precision"):
        return text
    if key == "is_causal":
        flags = tuple(part.lower() in ("1", "true", "yes") for part in text.split("x"))
        return flags if len(flags) > 1 else flags[0]
    numbers = tuple(int(part) for part in text.split("x"))
    return numbers if len(numbers) > 1 or key == "space" else numbers[0]


def to_json(workload: Workload) -> dict[str, Any]:
    return {"operator": workload.operator, **dataclasses.asdict(workload)}


def from_json(fields: dict[str, Any]) -> Workload:
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return KINDS[values.pop("operator")](**values)
