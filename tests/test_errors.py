"""Bad input: the right exception, with argument, value and what is accepted, before any launch.

Every row of the tables changes one valid call. Nothing is written to `out`, and a valid call
afterwards is right.
"""

import math
import re
from dataclasses import dataclass, field

import cupyattn
import ml_dtypes
import numpy as np
import pytest
from kinds import DTYPES, lift, mk
from problems import FUSED, MULTI_TOKEN, NEIGHBORHOOD, ROPE, check
from tolerance import identical

# --- valid calls, as keywords ----------------------------------------------------------------

TOKEN, KEY = (2, 12, 4, 8), (2, 12, 2, 8)
OPERATIONS = {
    "neighborhood_attention": lambda: dict(
        q=mk(0, TOKEN), k=mk(1, KEY), v=mk(2, KEY), kernel_size=5),
    "neighborhood_attention_backward": lambda: dict(
        dy=mk(3, TOKEN), q=mk(0, TOKEN), k=mk(1, KEY), v=mk(2, KEY), y=mk(4, TOKEN),
        lse=mk(5, TOKEN[:-1]), kernel_size=5),
    "fused_neighborhood_attention": lambda: dict(
        hidden_states=mk(0, (2, 12, 24)), q_weight=mk(1, (32, 24)), k_weight=mk(2, (16, 24)),
        v_weight=mk(3, (16, 24)), out_weight=mk(4, (24, 32)), q_bias=mk(5, (32,)),
        k_bias=mk(6, (16,)), v_bias=mk(7, (16,)), out_bias=mk(8, (24,)), num_heads=4,
        num_kv_heads=2, kernel_size=5),
    "multi_token_attention": lambda: dict(
        scores=mk(0, (2, 4, 9, 9)), weight=mk(1, (6, 2, 3, 3)), bias=mk(2, (6,)), groups=2),
    "multi_token_attention_backward": lambda: dict(
        dy=mk(3, (2, 6, 9, 9)), scores=mk(0, (2, 4, 9, 9)), weight=mk(1, (6, 2, 3, 3)),
        bias=mk(2, (6,)), groups=2),
    "rope": lambda: dict(q=mk(0, (2, 3, 7, 8)), k=mk(1, (2, 1, 7, 8)), cos=mk(2, (9, 4)),
                         sin=mk(3, (9, 4))),
    "rope_backward": lambda: dict(dq=mk(0, (2, 3, 7, 8)), dk=mk(1, (2, 1, 7, 8)),
                                  cos=mk(2, (9, 4)), sin=mk(3, (9, 4))),
}
OUTS = {"neighborhood_attention": TOKEN, "neighborhood_attention_backward": (TOKEN, KEY, KEY),
        "fused_neighborhood_attention": (2, 12, 24), "multi_token_attention": (2, 6, 9, 9),
        "multi_token_attention_backward": ((2, 4, 9, 9), (6, 2, 3, 3), (6,)),
        "rope": ((2, 3, 7, 8), (2, 1, 7, 8)), "rope_backward": ((2, 3, 7, 8), (2, 1, 7, 8))}


@dataclass
class Bad:
    """A change of a valid call, the exception, and texts that its message must hold."""

    operation: str
    change: dict
    error: type
    says: tuple[str, ...]
    label: str = field(default="")

    def __post_init__(self):
        values = ",".join(f"{k}={_short(v)}" for k, v in self.change.items())
        self.label = f"{self.operation}-{values}"


def _short(value):
    return (f"{value.dtype.name}{list(value.shape)}" if isinstance(value, np.ndarray)
            else str(value))


def window_errors(operation, arrays):
    """Those of kernel_size, dilation, stride, is_causal, scale, boundary and precision."""
    integers = "integer"
    for name in ("kernel_size", "dilation", "stride"):
        yield Bad(operation, {name: 0}, ValueError, (name, "0", "1"))
        yield Bad(operation, {name: -2}, ValueError, (name, "-2"))
        yield Bad(operation, {name: (1, 1)}, ValueError, (name, r"\(1, 1\)", r"\b1\b"))
        for value in (3.0, "3", None, np.float32(3), True, np.bool_(True), [3.0]):
            shown = value[0] if isinstance(value, list) else value
            yield Bad(operation, {name: value}, TypeError,
                      (name, re.escape(str(shown)), integers))
    yield Bad(operation, {"kernel_size": 13, "boundary": "shift"}, ValueError,
              ("kernel_size", "13", "12"))
    yield Bad(operation, {"kernel_size": 4, "dilation": 4, "boundary": "shift"}, ValueError,
              ("kernel_size", "16", "12"))
    yield Bad(operation, {"kernel_size": 5, "stride": 6, "boundary": "shift"}, ValueError,
              ("stride", "6", "kernel_size", "5"))
    yield Bad(operation, {"kernel_size": 4, "boundary": "clip"}, ValueError,
              ("kernel_size", "4", "odd"))
    yield Bad(operation, {"stride": 2, "boundary": "clip"}, ValueError, ("stride", "2", "1"))
    for value in (1, 0, "yes", None, (1,)):
        yield Bad(operation, {"is_causal": value}, TypeError, ("is_causal", "True", "False"))
    yield Bad(operation, {"is_causal": (True, False)}, ValueError, ("is_causal", r"\(True, False"))
    for value in (math.nan, math.inf, -math.inf, np.float32("nan")):
        yield Bad(operation, {"scale": value}, ValueError, ("scale", str(float(value)), "finite"))
    for value in ("1", 1j, True, (1.0,)):
        yield Bad(operation, {"scale": value}, TypeError, ("scale", re.escape(str(value))))
    yield Bad(operation, {"boundary": "wrap"}, ValueError, ("boundary", "wrap", "shift", "clip"))
    yield Bad(operation, {"boundary": 1}, TypeError, ("boundary", "1", "shift", "clip"))
    yield Bad(operation, {"boundary": None}, TypeError, ("boundary", "None", "shift"))
    yield Bad(operation, {"precision": "bf16"}, ValueError, ("precision", "bf16", "fp32", "tf32"))
    yield Bad(operation, {"precision": 32}, TypeError, ("precision", "32", "fp32", "tf32"))


def array_errors(operation, names, required=True):
    """Those of any array argument: kind and dtype."""
    base = OPERATIONS[operation]()
    for name in names:
        x = base[name]
        for other in (np.int32, np.complex64, np.bool_):
            yield Bad(operation, {name: np.ones(x.shape, other)}, TypeError,
                      (name, np.dtype(other).name, "float"))
        yield Bad(operation, {name: x.tolist()}, TypeError, (name, "list", "NumPy"))
        yield Bad(operation, {name: 3.0}, TypeError, (name, "float", "NumPy"))
    if required:
        for name in names[1:]:
            yield Bad(operation, {name: base[name].astype(np.float64)}, TypeError,
                      (name, "float64", "float32"))


def neighborhood_errors():
    for operation in ("neighborhood_attention", "neighborhood_attention_backward"):
        yield from window_errors(operation, ("q", "k", "v"))
        yield from array_errors(operation, ("q", "k", "v"))
        shapes = [("k", (1, 12, 2, 8)), ("k", (2, 11, 2, 8)), ("k", (2, 12, 3, 8)),
                  ("k", (2, 12, 2, 9)), ("k", (2, 12, 8, 8)), ("v", (2, 12, 1, 8)),
                  ("v", (2, 13, 2, 8)), ("v", (2, 12, 16)), ("k", (2, 3, 4, 2, 8))]
        for name, shape in shapes:
            shown = str(shape) if shape not in ((2, 12, 3, 8), (2, 12, 8, 8)) else str(shape[2])
            yield Bad(operation, {name: mk(0, shape)}, ValueError, (name, re.escape(shown)))
        yield Bad(operation, {"q": mk(0, (12, 4, 8))}, ValueError, ("q", r"\(12, 4, 8\)", "batch"))
        yield Bad(operation, {"q": mk(0, (2, 2, 2, 2, 2, 4, 8))}, ValueError, ("q", "space"))
    for name in ("q", "v"):
        last = {"q": np.zeros((2, 12, 4, 0), np.float32), "k": np.zeros((2, 12, 2, 0), np.float32)}
        change = last if name == "q" else {"v": np.zeros((2, 12, 2, 0), np.float32)}
        yield Bad("neighborhood_attention", change, ValueError, (name, r", 0\)", "1"))
    yield Bad("neighborhood_attention", {"return_lse": 1}, TypeError, ("return_lse", "True"))
    backward = "neighborhood_attention_backward"
    yield from array_errors(backward, ("dy", "y"))
    for name in ("dy", "y"):
        yield Bad(backward, {name: mk(0, (2, 12, 4, 9))}, ValueError, (name, r"\(2, 12, 4, 9\)",
                                                                     r"\(2, 12, 4, 8\)"))
    for name in ("lse", "dlse"):
        yield Bad(backward, {name: mk(0, (2, 12, 2))}, ValueError, (name, r"\(2, 12, 2\)",
                                                                  r"\(2, 12, 4\)"))
        yield Bad(backward, {name: mk(0, (2, 12, 4), "f16")}, TypeError, (name, "float16",
                                                                        "float32"))


def fused_errors():
    operation = "fused_neighborhood_attention"
    yield from window_errors(operation, ("hidden_states",))
    names = list(OPERATIONS[operation]())[:9]
    yield from array_errors(operation, names)
    for name in ("num_heads", "num_kv_heads"):
        yield Bad(operation, {name: 0}, ValueError, (name, "0"))
        yield Bad(operation, {name: -1}, ValueError, (name, "-1"))
        for value in (4.0, "4", True):
            yield Bad(operation, {name: value}, TypeError, (name, str(value), "integer"))
    yield Bad(operation, {"num_heads": None}, TypeError, ("num_heads", "None"))
    yield Bad(operation, {"num_kv_heads": 3}, ValueError, ("num_kv_heads", "3", "4"))
    yield Bad(operation, {"num_heads": 5, "num_kv_heads": 5}, ValueError, ("num_heads", "5", "32"))
    yield Bad(operation, {"num_kv_heads": 4}, ValueError, ("k_weight", "16", "32"))
    for name, shape in (("q_weight", (32, 25)), ("k_weight", (17, 24)), ("v_weight", (8, 24)),
                        ("out_weight", (32, 24)), ("q_bias", (16,)), ("k_bias", (32,)),
                        ("v_bias", (16, 1)), ("out_bias", (32,)), ("q_weight", (32,)),
                        ("hidden_states", (2, 24)), ("hidden_states", (2, 12, 23))):
        blamed = "q_weight" if shape == (2, 12, 23) else name
        shown = r"\b23\b" if shape == (2, 12, 23) else re.escape(str(shape))
        yield Bad(operation, {name: mk(0, shape)}, ValueError, (blamed, shown))
    table = mk(0, (12, 4))
    for rope, error, says in (
            (table, TypeError, ("rope", "cos", "sin")), ((table,), ValueError, ("rope", "1")),
            ((table, table, 1), TypeError, ("rope", "1", "True")),
            ((table, None), TypeError, ("rope", "None")),
            ((table, table, True, 0), ValueError, ("rope", "4")),
            ((table, mk(0, (12, 3))), ValueError, ("sin", r"\(12, 3\)", r"\(12, 4\)")),
            ((table[:11],) * 2, ValueError, ("rope", "11", "12")),
            ((mk(0, (12, 5)),) * 2, ValueError, ("10", "8")),
            ((table, mk(0, (12, 4), "f16")), TypeError, ("sin", "float16", "float32")),
            ((mk(0, (3, 12, 4)),) * 2, ValueError, ("cos", r"\(3, 12, 4\)", "2"))):
        yield Bad(operation, {"rope": rope}, error, says)
    yield Bad(operation, {"return_residuals": 1}, TypeError, ("return_residuals", "True"))


def multi_token_errors():
    for operation in ("multi_token_attention", "multi_token_attention_backward"):
        yield from array_errors(operation, ("scores", "weight", "bias"))
        for name in ("groups", "dilation"):
            yield Bad(operation, {name: 0}, ValueError, (name, "0", "1"))
            yield Bad(operation, {name: -1}, ValueError, (name, "-1"))
            for value in (2.0, "2", True, None):
                yield Bad(operation, {name: value}, TypeError, (name, str(value), "integer"))
        yield Bad(operation, {"dilation": (1, 2, 3)}, ValueError, ("dilation", "3", "2"))
        yield Bad(operation, {"dilation": (1, 0)}, ValueError, ("dilation", "0", "1"))
        yield Bad(operation, {"groups": 3}, ValueError, ("groups", "3", "4"))
        yield Bad(operation, {"groups": 1}, ValueError, ("weight", r"\(6, 2, 3, 3\)", "4"))
        yield Bad(operation, {"groups": 4, "weight": mk(0, (6, 1, 3, 3))}, ValueError,
                  ("groups", "4", "6"))
        yield Bad(operation, {"padding": "valid"}, ValueError, ("padding", "valid", "same",
                                                                "causal"))
        yield Bad(operation, {"padding": 1}, TypeError, ("padding", "1", "same", "causal"))
        yield Bad(operation, {"activation": "relu"}, ValueError, ("activation", "relu", "softmax",
                                                                  "sparsemax"))
        yield Bad(operation, {"activation": None}, TypeError, ("activation", "None", "softmax"))
        for name, shape in (("scores", (2, 4, 9)), ("scores", (2, 4, 9, 8)), ("weight", (6, 2, 3)),
                            ("weight", (6, 2, 0, 3)), ("weight", (6, 2, 3, 0)), ("bias", (4,)),
                            ("bias", (6, 1))):
            yield Bad(operation, {name: mk(0, shape)}, ValueError,
                      (name, re.escape(str(shape))))
    backward = "multi_token_attention_backward"
    yield from array_errors(backward, ("dy",))
    yield Bad(backward, {"dy": mk(0, (2, 4, 9, 9))}, ValueError, ("dy", r"\(2, 4, 9, 9\)",
                                                                r"\(2, 6, 9, 9\)"))


def rope_errors():
    for operation, q, k in (("rope", "q", "k"), ("rope_backward", "dq", "dk")):
        for name in (q, k, "cos"):
            base = OPERATIONS[operation]()[name]
            for other in (np.int64, np.complex64, np.bool_):
                yield Bad(operation, {name: np.ones(base.shape, other)}, TypeError,
                          (rf"\b{name}\b", np.dtype(other).name))
            yield Bad(operation, {name: base.tolist()}, TypeError, (rf"\b{name}\b", "list"))
        yield Bad(operation, {k: mk(0, (2, 1, 7, 8), "f16")}, TypeError,
                  (rf"\b{q}\b", rf"\b{k}\b", "float16"))
        for shape, says in (((3, 1, 7, 8), (r"\b3\b", r"\b2\b")), ((2, 1, 6, 8), ("6", "7")),
                            ((2, 1, 7, 6), ("6", "8")), ((2, 7, 8), (r"\(2, 7, 8\)",))):
            yield Bad(operation, {k: mk(0, shape)}, ValueError, (rf"\b{k}\b", *says))
        yield Bad(operation, {q: None, k: None}, TypeError, (rf"\b{q} and {k}\b", "None"))
        for name in ("cos", "sin"):
            yield Bad(operation, {name: None}, TypeError, (name, "None", "array"))
        yield Bad(operation, {"sin": mk(0, (9, 3))}, ValueError, ("sin", r"\(9, 3\)",
                                                                r"\(9, 4\)"))
        yield Bad(operation, {"sin": mk(0, (9, 4), "f16")}, TypeError, ("sin", "float16"))
        for tables, says in ((mk(0, (3, 9, 4)), (r"\(3, 9, 4\)", "2")),
                             (mk(0, (4,)), (r"\(4,\)",)), (mk(0, (9, 5)), ("cos", "10", "8")),
                             (mk(0, (9, 9)), ("cos", "18", "8")), (mk(0, (6, 4)), ("6",))):
            yield Bad(operation, {"cos": tables, "sin": tables}, ValueError, says)
        for value in (7, 10, -2):
            yield Bad(operation, {"rotary_dim": value}, ValueError, ("rotary_dim", str(value),
                                                                     "even", "8"))
        yield Bad(operation, {"rotary_dim": 6}, ValueError, ("cos", "4", "3", "6"))
        for value in (8.0, "8", True):
            yield Bad(operation, {"rotary_dim": value}, TypeError, ("rotary_dim", str(value),
                                                                    "integer"))
        yield Bad(operation, {"interleaved": 1}, TypeError, ("interleaved", "1", "True"))
        yield Bad(operation, {"layout": "sbhd"}, ValueError, ("layout", "sbhd", "bhsd", "bshd"))
        yield Bad(operation, {"layout": 0}, TypeError, ("layout", "0", "bhsd", "bshd"))
        for value, row in ((3, 9), (-1, -1), ((0, 3), 9), ((-4, 0), -4)):
            yield Bad(operation, {"offset": value}, ValueError, (rf"(?<![\d-]){row}\b", "9 rows"))
        yield Bad(operation, {"offset": (0, 1, 2)}, ValueError, ("offset", "3", "2"))
        for value in (1.0, "1", True, None, (0, 1.0)):
            yield Bad(operation, {"offset": value}, TypeError, ("offset", "integer"))
        for dtype in (np.float32, np.bool_, np.int16, np.uint32):
            yield Bad(operation, {"position_ids": np.zeros(7, dtype)}, TypeError,
                      ("position_ids", np.dtype(dtype).name, "int32", "int64"))
        for shape in ((6,), (3, 7), (2, 6), (2, 1, 7), ()):
            yield Bad(operation, {"position_ids": np.zeros(shape, np.int64)}, ValueError,
                      ("position_ids", re.escape(str(shape))))
        yield Bad(operation, {q: np.zeros((2, 3, 7, 0), np.float32), k: None}, ValueError,
                  ("head_dim", "0"))
    yield Bad("rope", {"inverse": 1}, TypeError, ("inverse", "1", "True"))


def out_errors():
    """`out=` of the wrong number, shape, dtype or kind."""
    for operation, shapes in OUTS.items():
        single = not isinstance(shapes[0], tuple)
        shapes = (shapes,) if single else shapes
        wrong = tuple(np.zeros(s[:-1] + (s[-1] + 1,), np.float32) for s in shapes)
        short = tuple(np.zeros(s, np.float16) for s in shapes)
        pairs = [(wrong, ValueError, (re.escape(str(wrong[0].shape)), re.escape(str(shapes[0])))),
                 (short, TypeError, ("float16", "float32"))]
        for arrays, error, says in pairs:
            value = arrays[0] if single else (arrays[0], *[None] * (len(shapes) - 1))
            yield Bad(operation, {"out": value}, error, ("out", *says))
        right = tuple(np.zeros(s, np.float32) for s in shapes)
        yield Bad(operation, {"out": (*right, None)}, ValueError, ("out", str(len(right))))
        yield Bad(operation, {"out": "here" if single else ("here", *[None] * (len(shapes) - 1))},
                  TypeError, ("out", "str"))


ERRORS = [*neighborhood_errors(), *fused_errors(), *multi_token_errors(), *rope_errors(),
          *out_errors()]


def valid_call(kind, operation):
    """Make the unchanged call, with and without `out`: the next may find what this one left."""
    arguments = {name: lift(kind, value) for name, value in OPERATIONS[operation]().items()}
    function, shapes = getattr(cupyattn, operation), OUTS[operation]
    function(**arguments)
    if isinstance(shapes[0], tuple):
        out = tuple(kind.put(np.zeros(s, np.float32)) for s in shapes)
    else:
        out = kind.put(np.zeros(shapes, np.float32))
    function(**arguments, out=out)


@pytest.mark.parametrize("bad", ERRORS, ids=lambda bad: bad.label)
def test_message_and_nothing_written(kind, bad):
    valid_call(kind, bad.operation)
    arguments = {**OPERATIONS[bad.operation](), **bad.change}
    if "out" not in arguments:
        shapes = OUTS[bad.operation]
        one = not isinstance(shapes[0], tuple)
        buffers = tuple(kind.put(np.full(s, 7, np.float32)) for s in ((shapes,) if one else shapes))
        fewer = any(bad.change.get(name, 0) is None for name in ("q", "k", "dq", "dk"))
        if not fewer and not {"return_lse", "return_residuals"} & set(bad.change):
            arguments["out"] = buffers[0] if one else buffers
    else:
        buffers = ()
    arguments = {name: lift(kind, value) for name, value in arguments.items()}
    with pytest.raises(bad.error) as caught:
        getattr(cupyattn, bad.operation)(**arguments)
    assert type(caught.value) is bad.error
    message = str(caught.value)
    for text in bad.says:
        assert re.search(text, message), f"{text!r} is not in: {message}"
    for buffer in buffers:
        assert (kind.get(buffer) == 7).all()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_unchanged_calls_are_valid(kind, operation):
    arguments = {name: lift(kind, value) for name, value in OPERATIONS[operation]().items()}
    shapes = OUTS[operation]
    results = getattr(cupyattn, operation)(**arguments)
    if not isinstance(shapes[0], tuple):
        results, shapes = (results,), (shapes,)
    assert [tuple(r.shape) for r in results] == list(shapes)


def test_right_after_errors(kind):
    """The device and its memory are as before."""
    for bad in ERRORS[::25]:
        with pytest.raises(bad.error):
            getattr(cupyattn, bad.operation)(**{
                name: lift(kind, value)
                for name, value in {**OPERATIONS[bad.operation](), **bad.change}.items()})
    for group in (NEIGHBORHOOD, FUSED, MULTI_TOKEN, ROPE):
        check(group[0], kind, "f32")


# --- residuals, tables, overlap --------------------------------------------------------------


def fused_backward_arguments(kind):
    forward = {n: lift(kind, v) for n, v in OPERATIONS["fused_neighborhood_attention"]().items()}
    _, residuals = cupyattn.fused_neighborhood_attention(return_residuals=True, **forward)
    return dict(forward, residuals=residuals, dy=kind.put(mk(9, (2, 12, 24))))


@pytest.mark.parametrize("change, error, says", [
    ({"residuals": None}, TypeError, ("residuals", "NoneType", "return_residuals")),
    ({"residuals": ()}, ValueError, ("residuals", "0", "5")),
    ({"dy": mk(0, (2, 12, 23))}, ValueError, ("dy", r"\(2, 12, 23\)", r"\(2, 12, 24\)")),
    ({"dy": mk(0, (2, 12, 24), "f16")}, TypeError, ("float16", "float32")),
    ({"num_heads": 2, "num_kv_heads": 1}, ValueError, ("residuals",)),
    ({"kernel_size": 4}, ValueError, ("kernel_size", "4", "odd"))], ids=str)
def test_fused_backward(kind, change, error, says):
    arguments = fused_backward_arguments(kind)
    arguments.update({name: lift(kind, value) for name, value in change.items()})
    with pytest.raises(error) as caught:
        cupyattn.fused_neighborhood_attention_backward(**arguments)
    for text in says:
        assert re.search(text, str(caught.value)), str(caught.value)


def test_fused_backward_of_another_size(kind):
    """Residuals of a longer sequence do not fit."""
    arguments = fused_backward_arguments(kind)
    arguments["hidden_states"] = kind.put(mk(0, (2, 11, 24)))
    arguments["dy"] = kind.put(mk(0, (2, 11, 24)))
    with pytest.raises(ValueError, match="residuals"):
        cupyattn.fused_neighborhood_attention_backward(**arguments)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("change, error, says", [
    ({"seq": -1}, ValueError, ("seq", "-1", "0")), ({"seq": 4.0}, TypeError, ("seq", "4.0")),
    ({"seq": True}, TypeError, ("seq", "True")), ({"seq": None}, TypeError, ("seq", "None")),
    ({"rotary_dim": 7}, ValueError, ("rotary_dim", "7", "even")),
    ({"rotary_dim": -2}, ValueError, ("rotary_dim", "-2")),
    ({"rotary_dim": 8.0}, TypeError, ("rotary_dim", "8.0", "integer")),
    ({"base": 0.0}, ValueError, ("base", "0.0", "positive")),
    ({"base": -1.0}, ValueError, ("base", "-1")),
    ({"base": math.nan}, ValueError, ("base", "nan", "finite")),
    ({"base": "1e4"}, TypeError, ("base", "1e4")),
    ({"base": True}, TypeError, ("base", "True")),
    ({"scaling": "yarn"}, TypeError, ("scaling", "str", "dict")),
    ({"scaling": {"rope_type": "other"}}, ValueError,
     ("rope_type", "other", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")),
    ({"scaling": {"factor": 2.0}}, ValueError, ("rope_type",)),
    ({"scaling": {"rope_type": "linear"}}, ValueError, ("factor", "linear")),
    ({"scaling": {"rope_type": "dynamic", "factor": 2.0}}, ValueError,
     ("max_position_embeddings", "dynamic")),
    ({"scaling": {"rope_type": "llama3", "factor": 8.0}}, ValueError, ("llama3", "freq_factor")),
    ({"scaling": {"rope_type": "longrope", "original_max_position_embeddings": 64}}, ValueError,
     ("longrope", "(short|long)_factor")),
    ({"positions": np.zeros(3)}, TypeError, ("positions", "float64")),
    ({"positions": np.zeros(3, bool)}, TypeError, ("positions", "bool")),
    ({"dtype": np.int32}, TypeError, ("dtype", "int32", "float32")),
    ({"dtype": "half-ish"}, TypeError, ("dtype", "half-ish", "float16"))], ids=str)
def test_rope_table(change, error, says):
    with pytest.raises(error) as caught:
        cupyattn.rope_table(**{"seq": 4, "rotary_dim": 8, **change})
    for text in says:
        assert re.search(text, str(caught.value)), str(caught.value)


def test_rope_table_scaling_is_not_changed():
    scaling = dict(YARN)
    cupyattn.rope_table(4, 8, scaling=scaling)
    assert scaling == YARN


@pytest.mark.parametrize("operation", OPERATIONS)
def test_out_must_not_overlap_an_input(kind, operation):
    """By address range: the same memory, or a part of it."""
    valid_call(kind, operation)
    shapes = OUTS[operation]
    single = not isinstance(shapes[0], tuple)
    shape = shapes if single else shapes[0]
    arguments = OPERATIONS[operation]()
    name = next(n for n, x in arguments.items()
                if isinstance(x, np.ndarray) and x.shape == shape) if operation not in (
        "multi_token_attention",) else "scores"
    size = math.prod(shape)
    memory = kind.put(np.zeros(4 * size, np.float32))
    source = arguments[name]
    inside = memory[size:size + source.size].reshape(source.shape)
    inside[...] = kind.put(source)
    arguments = {n: lift(kind, value) for n, value in arguments.items()}
    arguments[name] = inside
    for start in (size - 4, size + source.size - 4):
        overlapping = memory[start:start + size].reshape(shape)
        out = overlapping if single else (overlapping, *[None] * (len(shapes) - 1))
        before = np.array(kind.get(memory))
        with pytest.raises(ValueError, match="(?s)out.*overlap"):
            getattr(cupyattn, operation)(**arguments, out=out)
        identical(kind.get(memory), before, what="memory")


def test_exactly_an_input_is_an_overlap_but_for_rope(kind):
    q, k, v = (kind.put(mk(i, TOKEN)) for i in range(3))
    for x in (q, k, v):
        with pytest.raises(ValueError, match="out.*overlap"):
            cupyattn.neighborhood_attention(q, k, v, 3, out=x)
    table = kind.put(mk(3, (12, 4)))
    new = [kind.put(mk(4, TOKEN)) for _ in range(2)]
    cupyattn.rope(q, k, table, table, layout="bshd", out=tuple(new))
    cupyattn.rope(q, k, table, table, layout="bshd", out=(q, k))
    with pytest.raises(ValueError, match="out.*overlap"):  # crossed over
        cupyattn.rope(q, k, table, table, layout="bshd", out=(k, q))
    with pytest.raises(ValueError, match="out.*overlap"):  # twice the same
        out = kind.put(mk(4, TOKEN))
        cupyattn.rope(q, k, table, table, layout="bshd", out=(out, out))
    reversed_q = q[:, ::-1]
    with pytest.raises(ValueError, match="out.*overlap"):  # the same range, other elements
        cupyattn.rope(q, None, table, table, layout="bshd", out=(reversed_q, None))


def test_out_with_shared_elements(kind):
    q = kind.put(mk(0, TOKEN))
    out = kind.xp.broadcast_to(kind.put(mk(1, (1, *TOKEN[1:]))), TOKEN)
    with pytest.raises(ValueError, match="out"):
        cupyattn.neighborhood_attention(q, q, q, 3, out=out)


# --- kinds -----------------------------------------------------------------------------------


class ElsewhereOnTheHost:
    """Some library's array in host memory."""

    shape = (1, 8, 1, 8)

    def __dlpack__(self, **options):
        raise AssertionError("not to be exported: it is on no CUDA device")

    def __dlpack_device__(self):
        return 1, 0


def test_other_arrays_on_the_host_are_refused():
    x = ElsewhereOnTheHost()
    with pytest.raises(TypeError, match=r"(?s)\bq\b.*(CUDA|CuPy)"):
        cupyattn.neighborhood_attention(x, x, x, 3)


@pytest.mark.torch
def test_torch_tensors_on_the_host_are_refused():
    torch = pytest.importorskip("torch")
    x = torch.ones((1, 8, 1, 8))
    with pytest.raises(TypeError, match=r"(?s)\bq\b.*torch.*\.cuda\(\).*\.numpy\(\)"):
        cupyattn.neighborhood_attention(x, x, x, 3)


def test_masked_arrays_are_refused():
    x = np.ma.ones((1, 8, 1, 8))
    with pytest.raises(TypeError, match="masked"):
        cupyattn.neighborhood_attention(x, x, x, 3)


def test_legal_values_of_unusual_types(kind):
    """`operator.index` decides, tuples and lists are alike, NumPy booleans are booleans."""
    arrays = [kind.put(mk(i, (1, 6, 8, 1, 8))) for i in range(3)]
    right = kind.get(cupyattn.neighborhood_attention(*arrays, (3, 5), dilation=(2, 1),
                                                     is_causal=(True, False)))
    again = cupyattn.neighborhood_attention(
        *arrays, [np.int8(3), np.array(5)], dilation=(np.uint16(2), 1),
        is_causal=[np.bool_(True), False], stride=np.int64(1))
    identical(kind.get(again), right)


@pytest.mark.gpu
def test_head_dims_beyond_every_row(cupy_kind):
    """A legal value that no row supports: each row's reason is listed."""
    from cupyattn import _select

    for head_dim, value_dim in ((513, 8), (8, 513)):
        q, k, v = (cupy_kind.put(mk(i, (1, 8, 1, d))) for i, d in enumerate(
            (head_dim, head_dim, value_dim)))
        with pytest.raises(NotImplementedError, match="513") as caught:
            cupyattn.neighborhood_attention(q, k, v, 3)
        for row in _select.tables()["neighborhood_fwd"]:
            assert row.name in str(caught.value)


def test_head_dims_beyond_every_row_run_on_the_host():
    q = mk(0, (1, 4, 1, 513))
    assert cupyattn.neighborhood_attention(q, q, q, 3).shape == q.shape


def test_kernel_error_is_a_runtime_error():
    assert issubclass(cupyattn.KernelError, RuntimeError)
    assert issubclass(cupyattn.PerformanceWarning, UserWarning)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_warning_in_an_ordinary_call(cupy_kind, dtype, recwarn):
    """One table of plain rows warns of nothing; a fast row's refusal warns once a problem."""
    check(NEIGHBORHOOD[0], cupy_kind, dtype)
    check(NEIGHBORHOOD[0], cupy_kind, dtype)
    seen = [str(w.message) for w in recwarn if issubclass(w.category, cupyattn.PerformanceWarning)]
    assert len(seen) == len(set(seen))


def test_bfloat16_is_that_of_ml_dtypes():
    x = np.ones((1, 4, 1, 8), ml_dtypes.bfloat16)
    assert cupyattn.neighborhood_attention(x, x, x, 3).dtype == ml_dtypes.bfloat16


def test_out_for_a_result_that_is_not_there(kind):
    x, table = kind.put(mk(0, (1, 2, 5, 8))), kind.put(mk(1, (5, 4)))
    with pytest.raises(ValueError, match="out has an array for k"):
        cupyattn.rope(x, None, table, table, out=(None, kind.put(mk(2, (1, 2, 5, 8)))))
    scores, weight = kind.put(mk(0, (1, 1, 5, 5))), kind.put(mk(1, (1, 1, 3, 3)))
    with pytest.raises(ValueError, match="out has 3 entries"):
        cupyattn.multi_token_attention_backward(scores, scores, weight, out=(
            None, None, kind.put(mk(2, (1,)))))


def test_strides_that_are_no_multiple_of_the_item():
    x = np.zeros(8, [("flag", "i1"), ("x", "f4")])["x"].reshape(1, 8, 1, 1)
    with pytest.raises(ValueError, match=r"(?s)\bq\b.*strides.*item size 4"):
        cupyattn.neighborhood_attention(x, x, x, 3)
