"""Rotary position embedding in NumPy, float64: the rotation, and tables for every scaling rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

__all__ = ["ROPE_TYPES", "frequencies", "rotate", "table"]


@np.errstate(invalid="ignore")
def rotate(
    x: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    rotary_dim: int,
    interleaved: bool,
    rows: np.ndarray,
    inverse: bool,
) -> np.ndarray:
    """Rotate pairs of the first `rotary_dim` features of each token.

    Parameters
    ----------
    x : ndarray, (batch, seq, heads, head_dim)
    cos, sin : ndarray, (1 or batch, table, width)
        `width` is `rotary_dim // 2`, or `rotary_dim` with each value standing twice.
    rotary_dim : int
        Even, at most `head_dim`.
    interleaved : bool
        Pairs are (0, 1), (2, 3), ... if true, else (i, i + rotary_dim // 2).
    rows : ndarray of int, (1 or batch, seq)
        Table row of each token.
    inverse : bool
        Rotate back: the transpose, hence also the gradient.

    Returns
    -------
    ndarray, (batch, seq, heads, head_dim), float64
    """
    half = rotary_dim // 2
    if interleaved:
        first, second = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    else:
        first, second = slice(0, half), slice(half, rotary_dim)
    if cos.shape[-1] != half:
        cos, sin = cos[..., first], sin[..., first]
    item = np.arange(len(cos))[:, None]
    c = cos[item, rows].astype(np.float64)[:, :, None]
    s = sin[item, rows].astype(np.float64)[:, :, None]
    if inverse:
        s = -s
    y = x.astype(np.float64)
    a, b = y[..., first].copy(), y[..., second].copy()
    y[..., first] = a * c - b * s
    y[..., second] = b * c + a * s
    return y


def table(
    seq: int | None,
    rotary_dim: int,
    base: float,
    scaling: Mapping[str, Any] | None,
    positions: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of every angle, times the attention factor of the scaling rule.

    Parameters
    ----------
    seq : int or None
        Current length, on which the rules `dynamic` and `longrope` depend. None stands for the
        largest position plus 1.
    rotary_dim : int
    base : float
    scaling : mapping or None
        See `frequencies`.
    positions : ndarray of int or None
        None stands for `0 ... seq - 1`.

    Returns
    -------
    cos, sin : ndarray, (*positions.shape, rotary_dim // 2), float64
    """
    if positions is None:
        positions = np.arange(seq or 0)
    positions = np.asarray(positions)
    if seq is None:
        seq = int(positions.max()) + 1 if positions.size else 0
    inv_freq, attention_factor = frequencies(rotary_dim, base, scaling, seq)
    angle = positions[..., None].astype(np.float64) * inv_freq
    return np.cos(angle) * attention_factor, np.sin(angle) * attention_factor


def frequencies(
    rotary_dim: int, base: float, scaling: Mapping[str, Any] | None, seq: int | None
) -> tuple[np.ndarray, float]:
    """Angle per position of each pair, and the factor of the table.

    Parameters
    ----------
    rotary_dim : int
    base : float
    scaling : mapping or None
        Rule and fields in the Hugging Face form. `rope_type` (or `type`) names the rule:

        ``default``
            None.
        ``linear``
            `factor`.
        ``dynamic``
            `factor` and `max_position_embeddings` (or `original_max_position_embeddings`), the
            length up to which nothing changes.
        ``yarn``
            `original_max_position_embeddings` (or `max_position_embeddings`), `factor` (else the
            ratio of the two lengths); optional `beta_fast` (32), `beta_slow` (1), `truncate`
            (True), and `attention_factor`, or `mscale` with `mscale_all_dim`.
        ``longrope``
            `short_factor` and `long_factor`, lists with one number per pair;
            `original_max_position_embeddings` (or `max_position_embeddings`), beyond which the
            long list stands; `attention_factor`, or `factor`, or both lengths.
        ``llama3``
            `factor`, `low_freq_factor`, `high_freq_factor`, `original_max_position_embeddings`
            (or `max_position_embeddings`).
        ``proportional``
            Optional `partial_rotary_factor` (1): the share of pairs that turn; and `factor` (1).

        `rope_theta`, where present, stands for `base`. Other fields are not read.
    seq : int or None
        Current length; None stands for a length within the trained one.

    Returns
    -------
    inv_freq : ndarray, (rotary_dim // 2,), float64
    attention_factor : float

    Raises
    ------
    TypeError
        If `scaling` is no mapping, or a field is not of its kind.
    ValueError
        If the rule is unknown, a field is missing or out of range, or `rope_theta` contradicts
        `base`.
    """
    if scaling is None:
        return _unscaled(rotary_dim, base), 1.0
    if not isinstance(scaling, Mapping):
        raise TypeError(f"scaling is {scaling!r}; a dict with 'rope_type' or None is accepted")
    name = scaling.get("rope_type") or scaling.get("type")
    if name is None:
        raise ValueError(f"scaling has no 'rope_type'; accepted: {', '.join(ROPE_TYPES)}")
    if name not in _RULES:
        raise ValueError(f"scaling['rope_type'] is {name!r}; accepted: {', '.join(ROPE_TYPES)}")
    fields = _Fields(name, scaling)
    theta = fields.number("rope_theta", default=base)
    if theta != base and base != 10000.0:
        raise ValueError(f"scaling['rope_theta'] is {theta!r} but base is {base!r}; give one")
    return _RULES[name](fields, rotary_dim, theta, seq)


class _Fields:
    """Checked access to the fields of one scaling rule."""

    def __init__(self, rope_type: str, scaling: Mapping[str, Any]) -> None:
        self.rope_type = rope_type
        self.scaling = scaling

    def number(self, *names: str, default: float | None = None) -> float:
        """Return the first field present, else the default; no default means it is needed."""
        value = self.optional(*names)
        if value is not None:
            return value
        if default is None:
            raise ValueError(
                f"scaling has no {names[0]!r}, which rope_type {self.rope_type!r} needs"
                + (f" (or {names[1]!r})" if names[1:] else "")
            )
        return default

    def optional(self, *names: str) -> float | None:
        for name in names:
            value = self.scaling.get(name)
            if value is not None:
                return _positive(value, f"scaling[{name!r}]")
        return None

    def per_pair(self, name: str, pairs: int) -> np.ndarray:
        values = self.scaling.get(name)
        if values is None:
            raise ValueError(f"scaling has no {name!r}, which rope_type {self.rope_type!r} needs")
        values = [_positive(value, f"an entry of scaling[{name!r}]") for value in values]
        if len(values) != pairs:
            raise ValueError(
                f"scaling[{name!r}] has {len(values)} entries; rotary_dim // 2 = {pairs} are needed"
            )
        return np.array(values)

    def trained_length(self) -> float:
        return self.number("original_max_position_embeddings", "max_position_embeddings")

    def length_ratio(self) -> float:
        """Return `factor`, or by how much the length has grown where that is not given."""
        factor = self.optional("factor")
        if factor is None:
            if self.optional("max_position_embeddings") is None:
                return self.number("factor", "max_position_embeddings")
            factor = self.number("max_position_embeddings") / self.trained_length()
        return factor


def _positive(value: Any, name: str) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(
        value, (int, float, np.integer, np.floating)
    ):
        raise TypeError(f"{name} is {value!r}; a number is accepted")
    if not (0 < value < math.inf):
        raise ValueError(f"{name} is {value!r}; a finite number above 0 is accepted")
    return float(value)


_Frequencies = tuple[np.ndarray, float]


def _unscaled(rotary_dim: int, base: float) -> np.ndarray:
    return float(base) ** (-np.arange(0, rotary_dim, 2) / rotary_dim)


def _default(fields: _Fields, rotary_dim: int, base: float, seq: int | None) -> _Frequencies:
    return _unscaled(rotary_dim, base), 1.0


def _linear(fields: _Fields, rotary_dim: int, base: float, seq: int | None) -> _Frequencies:
    return _unscaled(rotary_dim, base) / fields.number("factor"), 1.0


def _dynamic(fields: _Fields, rotary_dim: int, base: float, seq: int | None) -> _Frequencies:
    factor = fields.number("factor")
    trained = fields.number("max_position_embeddings", "original_max_position_embeddings")
    # Written so that the base is exactly the given one up to the trained length. One pair turns
    # by 1 per position whatever the base.
    growth = 1 + factor * (max(seq or 0, trained) / trained - 1)
    if rotary_dim > 2:
        base = base * growth ** (rotary_dim / (rotary_dim - 2))
    return _unscaled(rotary_dim, base), 1.0


def _yarn(fields: _Fields, rotary_dim: int, base: float, seq: int | None) -> _Frequencies:
    factor, trained = fields.length_ratio(), fields.trained_length()

    def pair_that_turns(times: float) -> float:
        """Index, as a real number, of the pair that turns so often within the trained length."""
        return rotary_dim / 2 * math.log(trained / (2 * math.pi * times), base)

    low = pair_that_turns(fields.number("beta_fast", default=32.0))
    high = pair_that_turns(fields.number("beta_slow", default=1.0))
    if fields.scaling.get("truncate") in (None, True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a step in place of a ramp
    slowed = np.clip((np.arange(rotary_dim // 2) - low) / (high - low), 0, 1)
    inv_freq = _unscaled(rotary_dim, base)
    inv_freq = inv_freq * (1 - slowed) + inv_freq / factor * slowed

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

    attention_factor = fields.optional("attention_factor")
    if attention_factor is None:
        mscale, all_dim = fields.scaling.get("mscale"), fields.scaling.get("mscale_all_dim")
        if mscale and all_dim:
            attention_factor = magnitude(mscale) / magnitude(all_dim)
        else:
            attention_factor = magnitude(1.0)
    return inv_freq, attention_factor


def _longrope(fields: _Fields, rotary_dim: int, base: float, seq: int | None) -> _Frequencies:
    trained = fields.trained_length()
    short = fields.per_pair("short_factor", rotary_dim // 2)
    long = fields.per_pair("long_factor", rotary_dim // 2)
    attention_factor = fields.optional("attention_factor")
    if attention_factor is None:
        growth = math.log(max(fields.length_ratio(), 1.0))
        attention_factor = math.sqrt(1 + growth / math.log(trained)) if growth else 1.0
    divisor = long if (seq or 0) > trained else short
    return _unscaled(rotary_dim, base) / divisor, attention_factor


def _llama3(fields: _Fields, rotary_dim: int, base: float, seq: int | None) -> _Frequencies:
    factor = fields.number("factor")
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if low == high:
        raise ValueError(f"scaling['high_freq_factor'] is {high!r}, as is 'low_freq_factor'")
    inv_freq = _unscaled(rotary_dim, base)
    turns = fields.trained_length() * inv_freq / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return inv_freq * kept + inv_freq / factor * (1 - kept), 1.0


def _proportional(fields: _Fields, rotary_dim: int, base: float, seq: int | None) -> _Frequencies:
    share = fields.scaling.get("partial_rotary_factor")
    share = 1.0 if share is None else share
    if not 0 <= share <= 1:
        raise ValueError(
            f"scaling['partial_rotary_factor'] is {share!r}; a number from 0 to 1 is accepted"
        )
    inv_freq = _unscaled(rotary_dim, base) / fields.number("factor", default=1.0)
    inv_freq[int(share * rotary_dim // 2) :] = 0  # pairs that stand still
    return inv_freq, 1.0


_RULES: dict[str, Callable[[_Fields, int, float, int | None], _Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}

ROPE_TYPES = tuple(_RULES)
