"""Choose a row: the first one of the table that does not refuse."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

from ._program import Device, Row

# Prefix that a row's name must have; set by tests and the bench only.
_forced: contextvars.ContextVar[str] = contextvars.ContextVar("cupyattn_forced_row", default="")


@contextlib.contextmanager
def force(prefix: str) -> Iterator[None]:
    """Within the block, consider only rows whose name starts with `prefix`.

    Tables without such a row, whose choices may be part of a program that others make, choose
    freely.
    """
    if not any(row.name.startswith(prefix) for table in tables().values() for row in table):
        raise ValueError(f"no row of any table has a name that starts with {prefix!r}")
    token = _forced.set(prefix)
    try:
        yield
    finally:
        _forced.reset(token)


def forced() -> str:
    """Return the prefix that is in force, or an empty string."""
    return _forced.get()


def refusals(table: Sequence[Row], problem: Any, device: Device) -> list[tuple[Row, str | None]]:
    """Return each row with the reason why it refuses (None: it would run), in table order."""
    prefix = _forced.get()
    if not any(row.name.startswith(prefix) for row in table):
        prefix = ""
    answers: list[tuple[Row, str | None]] = []
    for row in table:
        if not row.name.startswith(prefix):
            answers.append((row, f"name does not start with {prefix!r}"))
        elif row.target is not None and row.target.rstrip("a") != device.target:
            answers.append((row, f"needs {row.target}, the device is {device.target}"))
        else:
            answers.append((row, row.refuses(problem, device)))
    return answers


def choose(name: str, table: Sequence[Row], problem: Any, device: Device) -> Row:
    """Return the first row that does not refuse, or raise with every row's reason."""
    answers = refusals(table, problem, device)
    for row, reason in answers:
        if reason is None:
            return row
    width = max(len(row.name) for row, _ in answers)
    reasons = "\n".join(f"    {row.name + ':':{width + 1}} {reason}" for row, reason in answers)
    raise NotImplementedError(f"no {name} kernel for this problem:\n{reasons}")


def tables() -> dict[str, Sequence[Row]]:
    """Return every table of the package by the name of its pass."""
    from .configs import (
        fused_neighborhood,
        linear,
        multi_token_bwd,
        multi_token_fwd,
        neighborhood,
        rope,
    )

    return {
        "neighborhood_fwd": neighborhood.FORWARD,
        "neighborhood_bwd": neighborhood.BACKWARD,
        "fused_neighborhood_fwd": fused_neighborhood.FORWARD,
        "fused_neighborhood_bwd": fused_neighborhood.BACKWARD,
        "linear": linear.TABLE,
        "multi_token_fwd": multi_token_fwd.FORWARD,
        "multi_token_bwd": multi_token_bwd.BACKWARD,
        "rope": rope.TABLE,
    }
