"""The bench without a GPU: its workloads, its checks, its ledger and its worker processes."""

import dataclasses
import itertools
import json
import sys
import time

import numpy as np
import pytest

from bench import __main__ as cli
from bench import check, inputs, ledger, numpy_run, peers, plot, worker, workloads
from bench import run as run_module

SMALL = {w.operator: w for w in workloads.SMALL}
TINY = {
    "rope": workloads.Rope("tiny/rope", 8, 64, heads=4, kv_heads=2, dtype="f32"),
    "multi_token": workloads.MultiToken("tiny/mta", 2, 4, 3, 9, groups=2, dtype="f32"),
    "sparsemax": workloads.MultiToken(
        "tiny/sparsemax", 2, 2, 4, 7, activation="sparsemax", dtype="f32"
    ),
    "fused_neighborhood": workloads.Fused("tiny/fused", 2, (11,), 8, 2, 3, 2),
    "neighborhood": workloads.Neighborhood(
        "tiny/na", 2, (6, 7), 2, 4, (3, 2), dilation=(1, 2), stride=(2, 1), is_causal=(False, True),
        dtype="f32",
    ),
}  # fmt: skip


def test_every_published_workload_has_its_name():
    fused = {
        f"fused_na/b{b}-s{s}-h{h}-n{n}-k{k}-d{d}-{dtype}"
        for b, h, n, k, d in ((2, 512, 8, 7, 1), (4, 768, 12, 7, 1), (2, 1024, 16, 9, 1),
                              (2, 512, 8, 7, 2))
        for s in (64, 128, 256, 512, 1024, 2048, 4096)
        for dtype in ("f32", "tf32", "bf16")
    }  # fmt: skip
    mta = {f"mta/b2-c4-k3-l{2**e}-{d}" for e in range(5, 13) for d in ("bf16", "f32")}
    mta |= {
        "mta/b2-c16-k3-l1024-bf16",
        "mta/b2-c32-k3-l2048-bf16",
        "mta/b2-c4-k3-l64-sparsemax-f32",
    }
    mta |= {f"mta/b2-c4-k{k}-l{s}-bf16" for k in (5, 7, 11) for s in (256, 1024)}
    mta |= {f"mta/b2-c16-k3-g{g}-l{s}-bf16" for g in (4, 16) for s in (256, 1024)}
    rope = {f"rope/s{s}-h8192-bf16" for s in (1024, 2048, 4096, 8192, 16384)}
    rope |= {"rope/s2048-h512-bf16", "rope/s2048-h2048-bf16"}
    names = set(workloads.WORKLOADS)
    assert fused | mta | rope <= names
    assert fused == {n for n in names if n.startswith("fused_na/")}
    assert rope == {n for n in names if n.startswith("rope/")}
    assert len([n for n in names if n.startswith("na/")]) == 14
    published = set(workloads.PUBLISHED)
    assert len(published) == 28 + 6 + 7
    assert {n for n in published if n.startswith("fused_na/")} == {
        n for n in fused if n.endswith("-f32")
    }
    assert set(workloads.QUICK) <= names
    memory = workloads.MEMORY  # in order of importance, each once
    assert set(memory[:7]) == rope and set(memory) <= rope | mta | {
        "mta/b2-c4-k3-l256-sparsemax-f32", "mta/b2-c4-k3-l1024-sparsemax-f32"
    }  # fmt: skip
    assert {f"mta/b2-c4-k3-l{2**e}-bf16" for e in range(5, 13)} < set(memory[:17])
    assert {"mta/b2-c16-k3-l1024-bf16", "mta/b2-c32-k3-l2048-bf16"} < set(memory[:17])
    assert len(set(memory)) == len(memory) == 32
    assert [w.name for w in workloads.select(None, ["memory"])] == memory


@pytest.mark.parametrize("operator", TINY)
def test_work_and_bytes_against_counting(operator):
    w = TINY[operator]
    if operator in ("fused_neighborhood", "neighborhood"):
        mask = check.masks(w, np)(slice(0, w.tokens))
        assert w.pairs() == mask.sum() == sum(
            brute_force_inside(w, i, j)
            for i, j in itertools.product(np.ndindex(w.space), repeat=2)
        )  # fmt: skip
        attention = 4 * w.pairs() * w.batch * (w.hidden if hasattr(w, "hidden") else 8)
        product = 2 * 4 * w.batch * w.tokens * w.hidden**2 if hasattr(w, "hidden") else 0
        assert w.flops("forward") == attention + product
        assert w.flops("backward") == 2.5 * attention + 2 * product
    elif operator == "rope":
        assert w.nbytes("forward") == 4 * (2 * 8 * 6 * 16 + 2 * 8 * 16)
        assert w.nbytes("backward") == w.nbytes("forward")
    else:
        maps, length = w.batch * w.channels, w.seq
        triangle = sum(j <= i for i in range(length) for j in range(length))
        assert w.nbytes("forward") == 4 * maps * (triangle + length**2)
        assert w.nbytes("backward") == 4 * maps * (2 * triangle + length**2)


def brute_force_inside(w, query, key):
    """Whether the key is in the query's window, from the definition, one axis after another."""
    for i, j, (length, kernel, d, s, causal, boundary) in zip(query, key, w.axes(), strict=True):
        if i % d != j % d:
            return False
        p, n = i // d, len(range(i % d, length, d))
        if boundary == "clip":
            low, high = max(p - kernel // 2, 0), min(p + kernel // 2 + 1, n)
        elif causal:
            low, high = max(min(p // s * s + s - 1, n - 1) - kernel + 1, 0), p + 1
        else:
            leader = min(p // s * s + s // 2, n - 1)
            low = min(max(leader - kernel // 2, 0), n - kernel)
            high = low + kernel
        if not low <= j // d < high:
            return False
    return True


def test_figures_of_known_workloads():
    hunyuan = workloads.WORKLOADS["na/3d-hunyuan"]
    assert hunyuan.pairs() == 30 * 48 * 80 * 18 * 24 * 24
    rope = workloads.WORKLOADS["rope/s16384-h8192-bf16"]
    assert rope.nbytes("forward") == 2 * 16384 * (2 * 40 * 256 + 2 * 256)


@pytest.mark.parametrize("operator", TINY)
def test_answers_have_exact_gradients(operator):
    """The checks' own gradients against central differences of the checks' own results."""
    w = TINY[operator]
    x = {n: a.astype(np.float64) for n, a in inputs.make(w, "backward", np).items()}
    rng = np.random.default_rng(5)
    if operator == "rope":
        x.update(q=rng.standard_normal(x["dq"].shape), k=rng.standard_normal(x["dk"].shape))
    names = [n for n in x if n not in ("dy", "dq", "dk", "cos", "sin")]
    results = dict(zip(names, check.answers(w, "backward", x, np, exact=True), strict=True))
    given = ("dq", "dk") if operator == "rope" else ("dy",)
    given = check.select(w, [x[name] for name in given])

    def loss(arrays):
        outputs = check.answers(w, "forward", arrays, np, exact=True)
        return sum((y * dy).sum() for y, dy in zip(outputs, given, strict=True))

    for name in names:
        gradient = results[name]
        if operator == "neighborhood":  # back from [slice, token, channel]
            gradient = gradient.reshape(w.batch, w.heads, *w.space, -1)
            gradient = np.moveaxis(gradient, 1, -2)
        for _ in range(3):
            step = rng.standard_normal(x[name].shape) * 1e-6
            after, before = ({**x, name: x[name] + sign * step} for sign in (1, -1))
            change = (loss(after) - loss(before)) / 2
            expected = (gradient * step).sum()
            assert change == pytest.approx(expected, rel=2e-5, abs=2e-11), name


@pytest.mark.parametrize("operator", ["rope", "multi_token", "fused_neighborhood", "neighborhood"])
@pytest.mark.parametrize("direction", workloads.DIRECTIONS)
def test_numpy_run(operator, direction):
    (row,) = numpy_run.measure([TINY[operator]], [direction], 0.01, lambda text: None)
    assert row["error"] < 1e-6 and row["plain_error"] < 1e-5
    assert 0 < row["call_us"][0] <= row["call_us"][1] <= row["call_us"][2]


def test_wrong_results_are_seen():
    w = TINY["neighborhood"]
    x = inputs.make(w, "forward", np)
    exact = check.answers(w, "forward", x, np, exact=True)
    wrong = [exact[0] + 0.1 * np.abs(exact[0]).max()]
    assert check.error(w, "forward", exact, exact, np) == 0
    assert check.error(w, "forward", wrong, exact, np) == pytest.approx(0.1)
    wrong[0].flat[3] = np.nan
    assert np.isnan(check.error(w, "forward", wrong, exact, np))
    with pytest.raises(ValueError, match="shape"):
        check.error(w, "forward", [exact[0][:1]], exact, np)


@pytest.mark.parametrize("direction", workloads.DIRECTIONS)
@pytest.mark.parametrize("operator", TINY)
def test_plain_bf16_is_near_and_not_exact(operator, direction):
    w = dataclasses.replace(TINY[operator], dtype="bf16")
    x = inputs.make(w, direction, np)
    exact = check.answers(w, direction, x, np, exact=True)
    plain = check.answers(w, direction, x, np, exact=False)
    assert all(a.dtype == np.float32 for a in plain)
    assert all(np.array_equal(a, inputs.rounder("bf16", np)(a)) for a in plain)
    assert 1e-4 < check.error(w, direction, plain, exact, np) < 3e-2


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_rounding_to_16_bits(dtype):
    x = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    expected = x.astype(inputs.numpy_dtype(dtype)).astype(np.float32)
    assert np.array_equal(inputs.rounder(dtype, np)(x), expected)


def test_inputs_repeat():
    first, second = (inputs.make(SMALL["rope"], "forward", np) for _ in range(2))
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert not np.array_equal(first["q"][:, :8], first["k"])
    assert first["q"].shape == (1, 32, 256, 16)


def example_row(**changes):
    row = dict.fromkeys(ledger.FIELDS)
    row.update(
        run="2026-01-01T00:00:00Z-abc123", operator="rope", workload="rope/s2048-h512-bf16",
        direction="forward", provider="cupyattn", row="plain", graph_us=[1.0, 2.0, 3.0],
        call_us=[4.0, 5.0, 6.0], host_us=[7.0, 8.0, 9.0], floor_us=1.6, peak_bytes=0, error=1e-3,
        plain_error=2e-3, gpu="Some GPU", dirty=False, note="",
    )  # fmt: skip
    return {**row, **changes}


def test_ledger_round_trip(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPYATTN_BENCH_LEDGER", str(tmp_path / "deep" / "ledger.jsonl"))
    file = ledger.path("Some GPU")
    rows = [example_row(), example_row(provider="liger", graph_us=None, note="a reason")]
    for row in rows:
        ledger.append(file, row)
    assert ledger.read(file) == rows
    assert list(json.loads(file.read_text().splitlines()[0])) == ledger.FIELDS
    assert ledger.join_run("abc123", rows, "Some GPU") == rows[0]["run"]
    assert ledger.join_run("other", rows, "Some GPU").endswith("-other")
    assert ledger.join_run(None, rows, "Some GPU") != rows[0]["run"]
    with pytest.raises(ValueError, match="Some GPU"):
        ledger.join_run("abc123", rows, "Another GPU")


def test_ledger_path_and_commit(monkeypatch):
    monkeypatch.delenv("CUPYATTN_BENCH_LEDGER", raising=False)
    assert ledger.path("NVIDIA H200").name == "NVIDIA-H200.jsonl"
    monkeypatch.setenv("CUPYATTN_BENCH_COMMIT", "0123abc-dirty")
    assert ledger.commit() == ("0123abc", True)
    monkeypatch.setenv("CUPYATTN_BENCH_COMMIT", "0123abc")
    assert ledger.commit() == ("0123abc", False)


def test_table():
    rows = [
        example_row(),
        example_row(provider="liger", graph_us=[9.0, 10.0, 11.0]),
        example_row(provider="torch", graph_us=None, call_us=None, host_us=None, note="too slow"),
        example_row(provider="copy", graph_us=[1.0, 1.0, 1.0]),
    ]
    heading, ours, liger, torch, copy = ledger.table(rows).splitlines()
    assert heading.split()[:4] == ["workload", "direction", "provider", "row"]
    assert ours.split()[4:] == ["2.00", "5.00", "8.00", "5.00", "1.25", "1.0e-03", "2.0e-03"]
    assert liger.split()[7:9] == ["1.00", "6.25"]
    assert torch.split()[4:9] == ["-"] * 5 and torch.endswith("too slow")
    assert copy.split()[7] == "10.00"
    # A provider that was timed last stands with its workload all the same.
    mixed = [rows[0], example_row(workload="rope/other"), rows[1]]
    assert [line.split()[2] for line in ledger.table(mixed).splitlines()[1:3]] == [
        "cupyattn", "liger",
    ]  # fmt: skip


def test_custom_shape():
    w = workloads.custom(
        "neighborhood", ["space=12x14", "kernel_size=3x5", "is_causal=truexfalse", "dtype=f16"]
    )
    assert (w.space, w.kernel_size, w.is_causal) == ((12, 14), (3, 5), (True, False))
    assert workloads.custom("fused_neighborhood", ["space=64", "hidden=32"]).space == (64,)
    assert workloads.from_json(json.loads(json.dumps(workloads.to_json(w)))) == w
    with pytest.raises(ValueError, match="headz"):
        workloads.custom("neighborhood", ["headz=3"])


def test_every_workload_survives_the_pipe():
    for w in workloads.WORKLOADS.values():
        assert workloads.from_json(json.loads(json.dumps(workloads.to_json(w)))) == w


def test_selection():
    names = [w.name for w in workloads.select(["rope"], ["published", "na/*"])]
    assert len(names) == 7 and all(name.startswith("rope/") for name in names)
    with pytest.raises(ValueError, match="nothing-like-it"):
        workloads.select(None, ["nothing-like-it"])


SCRIPT = """
import json, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request.get("sleep"):
        time.sleep(60)
    if request.get("die"):
        sys.exit("it broke")
    print(json.dumps({"echo": request}), flush=True)
"""


def test_worker_is_reused_and_killed_at_the_limit():
    slow = worker.Worker([sys.executable, "-c", SCRIPT])
    try:
        assert slow.start() == {"ready": True}
        first = slow._process
        assert slow.ask({"case": 1}, 20) == {"echo": {"case": 1}}
        assert slow.ask({"case": 2}, 20) == {"echo": {"case": 2}}
        assert slow._process is first
        start = time.perf_counter()
        with pytest.raises(worker.TimedOut, match="time limit"):
            slow.ask({"sleep": True}, 0.3)
        assert time.perf_counter() - start < 20
        assert first.poll() is not None
        assert slow.ask({"case": 3}, 20) == {"echo": {"case": 3}}  # a new one took its place
        with pytest.raises(worker.Died, match="it broke"):
            slow.ask({"die": True}, 20)
    finally:
        slow.stop()


def run_of(arguments, problems, name="liger"):
    """Return a run of these problems by one provider, on no device."""
    run = run_module.Run(cli.parser().parse_args(arguments), [])
    run.workers = {name: run_module.provider_worker(name)}
    run.cases = [(w, d, name) for w in problems for d in workloads.DIRECTIONS]
    run.run, run.done, run.rates = "x", set(), {}
    run.facts = dict.fromkeys(("gpu", "driver", "cuda", "cupy", "torch"))
    run.commit = run.dirty = None
    return run


def answer_by(monkeypatch, script):
    monkeypatch.setattr(
        run_module, "provider_worker", lambda name: worker.Worker([sys.executable, "-c", script])
    )


ANSWERS = """
import json, sys, time
print("{}", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    w, ask = request["workload"], request["ask"]
    if LATE:
        time.sleep(60)
    print(json.dumps({"healthy": True, "note": ask}), flush=True)
"""


def test_a_slow_provider_leaves_a_row_that_says_so(monkeypatch):
    monkeypatch.setattr(run_module, "FIRST_CASE_SECONDS", 0.0)
    answer_by(monkeypatch, ANSWERS.replace("LATE", "True"))
    run = run_of(["--limit", "0.3"], [TINY["multi_token"]])
    forward, backward = run.execute()
    assert forward["graph_us"] is None and "time limit of 0.3 s" in forward["note"]
    assert backward["graph_us"] is None and "not tried" in backward["note"]


def test_peers_compile_side_by_side(monkeypatch):
    """One of four workloads never compiles: it loses its rows, the others do not."""
    monkeypatch.setattr(run_module.os, "cpu_count", lambda: 4)
    answer_by(monkeypatch, ANSWERS.replace("LATE", "w['seq'] == 3 and ask == 'compile'"))
    problems = [workloads.MultiToken(f"tiny/{seq}", seq=seq) for seq in range(4)]
    run = run_of(["--compile-limit", "2"], problems)
    notes = {(r["workload"], r["direction"]): r["note"] for r in run.execute()}
    late = {case: note for case, note in notes.items() if note != "case"}
    assert late == {
        ("tiny/3", "forward"): "no result within the time limit of 2 s, to compile",
        ("tiny/3", "backward"): "not tried: tiny/3 forward did not compile within 2 s",
    }
    assert len(notes) == 8


def test_what_is_larger_than_what_did_not_compile_is_not_tried(monkeypatch):
    late = "(w['seq'], request['direction']) == (32, 'backward')"
    answer_by(monkeypatch, ANSWERS.replace("LATE", late))
    problems = [workloads.MultiToken(f"tiny/{seq}", seq=seq) for seq in (16, 32, 64)]
    run = run_of(["--compile-limit", "1"], problems)
    run._compile("liger", problems[::-1])
    assert run.uncompiled == {
        ("tiny/32", "backward", "liger"): "no result within the time limit of 1 s, to compile",
        ("tiny/64", "backward", "liger"): "not tried: tiny/32 backward did not compile within 1 s",
    }


def test_the_ledger_says_what_does_not_compile(monkeypatch):
    """An earlier row of the same versions saves the trying, unless more time is given now."""
    monkeypatch.setattr(ledger, "peer_version", lambda name: "1.0")
    row = example_row(
        workload="mta/b2-c4-k3-l512-bf16", provider="liger", peer_version="1.0",
        note="no result within the time limit of 60 s, to compile",
    )  # fmt: skip
    assert run_module.not_compiled([{**row, "peer_version": "0.9"}], "Some GPU") == []
    assert run_module.not_compiled([row], "Another GPU") == []
    assert run_module.not_compiled([{**row, "note": "not tried: too slow"}], "Some GPU") == []
    (late,) = run_module.not_compiled([row], "Some GPU")
    assert (late.limit, late.direction, late.run) == (60.0, "forward", row["run"])

    answer_by(monkeypatch, ANSWERS.replace("LATE", "False"))
    names = ["l256-bf16", "l512-bf16", "l1024-f32", "l1024-sparsemax-f32"]
    problems = [workloads.WORKLOADS[f"mta/b2-c4-k3-{name}"] for name in names]
    for limit, passed in (("60", [0, 3]), ("61", [0, 1, 2, 3])):
        run = run_of(["--compile-limit", limit], problems)
        run.late = [late]
        notes = [r["note"] for r in run.execute()]
        assert [i for i in range(4) if notes[2 * i] == "case"] == passed
        for note in notes:
            assert note == "case" or note == (
                "not tried: mta/b2-c4-k3-l512-bf16 forward did not compile within 60 s "
                f"(run {row['run']})"
            )
        assert all(notes[2 * i] == notes[2 * i + 1] for i in range(4))


@pytest.mark.parametrize("changes, expected", [
    ({}, True), ({"seq": 4096}, True), ({"dtype": "f32"}, True), ({"channels": 8}, True),
    ({"seq": 128}, False), ({"activation": "sparsemax", "seq": 512}, False),
    ({"seq": 512, "channels": 2}, False)])  # fmt: skip
def test_asks_as_much(changes, expected):
    small = workloads.MultiToken("small")
    large = dataclasses.replace(small, name="other", **changes)
    assert run_module.asks_as_much(large, small) is expected


def test_asks_as_much_per_axis():
    na = workloads.WORKLOADS["na/2d-96-w24"]
    assert run_module.asks_as_much(dataclasses.replace(na, space=(96, 97)), na)
    assert not run_module.asks_as_much(dataclasses.replace(na, space=(95, 97)), na)
    assert not run_module.asks_as_much(dataclasses.replace(na, space=(96,)), na)
    assert not run_module.asks_as_much(dataclasses.replace(na, is_causal=True), na)
    assert not run_module.asks_as_much(workloads.WORKLOADS["na/3d-cosmos"], TINY["rope"])


def test_total_ends_the_run(monkeypatch):
    """A case under way gets what is left, and no row if that is too little; none starts after."""
    monkeypatch.setattr(run_module, "FIRST_CASE_SECONDS", 0.0)
    answer_by(monkeypatch, ANSWERS.replace("LATE", "w['seq'] == 2"))
    problems = [workloads.MultiToken(f"tiny/{seq}", seq=seq) for seq in range(1, 5)]
    run = run_of(["--limit", "30", "--total", "3"], problems, name="torch")
    rows = run.execute()
    assert run.elapsed() < 10
    assert [(r["workload"], r["note"]) for r in rows] == [("tiny/1", "case")] * 2


def test_the_slowest_provider_comes_last(monkeypatch):
    monkeypatch.setattr(peers.Provider, "missing", lambda self: None)
    names = ["torch_compile", "copy", "torch"]
    options = cli.parser().parse_args(["--provider", *names])
    run = run_module.Run(options, [SMALL["multi_token"], SMALL["rope"]])
    assert [name for _, _, name in run.cases] == ["copy", "torch"] * 2 + ["copy"] * 2 + [
        "torch_compile"
    ] * 4


def test_sparsemax_of_torch():
    torch = pytest.importorskip("torch")
    from bench.torch_peers import _sparsemax

    z = np.random.default_rng(3).standard_normal((2, 5, 7))
    z[:, :, 5:] = -np.inf
    t = torch.tensor(z, requires_grad=True)
    p = _sparsemax(t, -1)
    np.testing.assert_allclose(
        p.detach().numpy(), check._activation("sparsemax", z, np), atol=1e-15
    )
    dp = np.random.default_rng(4).standard_normal(z.shape)
    (gradient,) = torch.autograd.grad(p, t, torch.tensor(dp))
    support = p.detach().numpy() > 0
    mean = np.where(support, dp, 0).sum(-1, keepdims=True) / support.sum(-1, keepdims=True)
    np.testing.assert_allclose(gradient.numpy(), np.where(support, dp - mean, 0), atol=1e-14)


def test_tables_are_not_shared():
    """A provider that writes to its tables must not change those of the next."""
    first = inputs.make(TINY["rope"], "forward", np)
    kept = first["cos"].copy()
    first["cos"][:] = 7
    np.testing.assert_array_equal(inputs.make(TINY["rope"], "forward", np)["cos"], kept)


def test_providers():
    assert list(peers.PROVIDERS) == [
        "cupyattn", "naive", "copy", "huggingface", "cublas", "torch", "torch_compile", "flex",
        "cudnn", "natten", "liger",
    ]  # fmt: skip
    assert set(plot.COLOURS) == set(peers.PROVIDERS)
    for entry in peers.PROVIDERS.values():
        assert set(entry.operators) <= set(workloads.OPERATORS)
    flux = workloads.WORKLOADS["na/2d-flux-w80"]
    assert peers.stand_in("naive", flux).space == (128, 128)
    assert peers.stand_in("cupyattn", flux) is flux


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [example_row(), example_row(provider="liger"), example_row(direction="backward")]
    (file,) = plot.draw(rows, tmp_path)
    assert file.name == "Some-GPU-rope.png" and file.stat().st_size > 1000


def test_plot_draws_curves_where_there_are_sizes(tmp_path):
    pytest.importorskip("matplotlib")
    names = ["rope/s2048-h512-bf16", "rope/s2048-h2048-bf16", "rope/s1024-h8192-bf16"]
    rows = [example_row(workload=name, provider=p) for name in names for p in ("liger", "cupyattn")]
    assert plot._families(rows) == {}  # too few
    rows += [example_row(workload="rope/s4096-h8192-bf16", direction="backward")]
    ((rest, pairs),) = plot._families(rows).items()
    assert rest == "bf16" and [size for size, _ in pairs] == sorted(
        [2**20, 2**20, 2**22, 2**22, 2**23, 2**23, 2**25]
    )
    (file,) = plot.draw(rows, tmp_path)
    assert file.stat().st_size > 1000


def test_plot_shows_one_run_per_workload():
    """The last with a peer in it, else the last."""
    rows = [
        example_row(run="1", provider="liger"), example_row(run="1"),
        example_row(run="2", provider="torch"), example_row(run="2"),
        example_row(run="3"), example_row(run="3", provider="naive"),
        example_row(run="3", direction="backward"),
    ]  # fmt: skip
    newest = plot.latest(rows)
    assert {key[1:]: r["run"] for key, r in newest.items()} == {
        ("forward", "torch"): "2", ("forward", "cupyattn"): "2", ("backward", "cupyattn"): "3",
    }  # fmt: skip


def test_plot_command_draws_from_the_ledger_alone(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(ledger, "RESULTS", tmp_path)
    ledger.append(tmp_path / "Some-GPU.jsonl", example_row())
    assert cli.main(["plot"]) == 0
    assert str(tmp_path / "Some-GPU-rope.png") in capsys.readouterr().out


def test_figures_cite_natten():
    row = example_row(workload="na/2d-96-w24", direction="backward", gpu="NVIDIA H200")
    assert "NATTEN, cited, 3,200 |" in ledger.figures([row])
    assert "NATTEN" not in ledger.figures([{**row, "gpu": "Some GPU"}])
    assert set(workloads.NATTEN) == set(workloads.NEIGHBORHOOD)


def test_gains_over_the_plain_kernels():
    """As in the paper: per cent, the mean over workloads; both directions are one time."""
    times = {"na/1d-a": {"forward": (1.0, 10.0), "backward": (3.0, 14.0)},
             "na/1d-b": {"forward": (2.0, 6.0)}, "na/3d-c": {"backward": (1.0, 2.0)}}
    rows = [example_row(workload=name, direction=direction, provider=who, graph_us=[0.0, us, 9e9])
            for name, each in times.items() for direction, both in each.items()
            for who, us in zip(("cupyattn", "naive"), both, strict=True)]
    assert ledger.gains(rows) == [
        "over the plain kernels, 1-D: forward 550 % (of 2), forward and backward 500 % (of 1)"]
    assert ledger.figures(rows).endswith(ledger.gains(rows)[0])
    rows[1]["note"] = "timed on a grid of (8, 8) and scaled by the work, x4"
    assert "forward 550 % (of 2, 1 scaled from a smaller grid)" in ledger.gains(rows)[0]
    assert not ledger.gains(row for row in rows if row["provider"] != "naive")


def test_figures_of_one_run(tmp_path, monkeypatch, capsys):
    """Each case beside its best peer of the same run; without a floor or a peer a dash."""
    monkeypatch.setattr(ledger, "RESULTS", tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["figures"])  # an empty ledger
    rows = [
        example_row(run="2026-11-29-1", graph_us=[1.0, 2.0, 3.0], floor_us=1.25),
        example_row(run="2026-11-29-1", provider="liger", graph_us=[8.0, 9.0, 9.5]),
        example_row(run="2026-11-29-1", provider="torch", graph_us=[7.0, 7.5, 9.5]),
        example_row(run="2026-11-29-1", provider="copy", graph_us=[1.0, 1.0, 1.0]),
        example_row(run="2026-11-30-2", direction="backward", floor_us=None),
    ]  # fmt: skip
    for row in rows:
        ledger.append(tmp_path / "Some-GPU.jsonl", row)
    assert cli.main(["figures", "--run", "1"]) == 0
    (line,) = capsys.readouterr().out.strip().splitlines()[2:]
    assert "| forward | 2.00 / " in line and "| torch 7.50 / " in line and "| 1.25 |" in line
    assert cli.main(["figures"]) == 0  # the newest
    (line,) = capsys.readouterr().out.strip().splitlines()[2:]
    assert "| backward |" in line and "| - | - |" in line
    name = example_row()["workload"]
    assert cli.main(["figures", "--run", "1", "--workload", name]) == 0
    assert "| forward | 2.00 / " in capsys.readouterr().out
    with pytest.raises(SystemExit):  # no such workload in the ledger
        cli.main(["figures", "--operator", "multi_token"])
    capsys.readouterr()
    with pytest.raises(SystemExit):
        cli.main(["figures", "--run", "nothing"])
    assert "--run nothing: no run of the ledger ends so" in capsys.readouterr().err


def test_command_line(capsys):
    assert cli.main(["--list", "--operator", "rope"]) == 0
    assert "rope/s16384-h8192-bf16" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["--shape", "seq=3"])
    assert "--shape needs one --operator" in capsys.readouterr().err


@pytest.mark.skipif(cli.gpu_missing() is None, reason="there is a GPU")
@pytest.mark.parametrize("command", ["host", "products"])
def test_what_needs_a_gpu_says_so(capsys, command):
    assert cli.main([command]) == 0
    assert capsys.readouterr().out.startswith("No GPU is used (")


@pytest.mark.skipif(cli.gpu_missing() is None, reason="there is a GPU")
def test_quick_without_a_gpu(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    from bench import photo

    picture = tmp_path / "photo.png"
    monkeypatch.setattr(photo.main, "__defaults__", (picture,))
    monkeypatch.setattr(workloads, "SMALL", [TINY["rope"]])
    assert cli.main(["--quick"]) == 0
    printed = capsys.readouterr().out
    assert "No GPU is used" in printed and "tiny/rope" in printed and str(picture) in printed
    assert picture.stat().st_size > 10_000


def test_photograph_window():
    from bench.photo import window_of

    assert window_of((0, 63), (75, 64)) == (slice(0, 7), slice(57, 64))
    assert window_of((40, 30), (75, 64)) == (slice(37, 44), slice(27, 34))
