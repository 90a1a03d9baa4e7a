"""Matrix products and column sums: which row, which launches, and every row against float64."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from kinds import DTYPES, mk
from tolerance import agree, identical

from cupyattn import _device, _launch, _select
from cupyattn._program import ITEMSIZE, Device, Program, cdiv
from cupyattn.configs import linear, linear_hopper, linear_teams
from cupyattn.configs.linear import TABLE, Matrix, Problem, Product
from cupyattn.configs.linear_mma import ROWS as MMA

H200 = Device(0, "NVIDIA H200", (9, 0), 132, 232448, 60 << 20)
A100 = Device(0, "NVIDIA A100", (8, 0), 108, 166912, 40 << 20)  # no rows of one architecture
ALONG = tuple(product((True, False), repeat=2))  # unit stride along depth, for a and for b


# --- without a GPU: rows and launches ---------------------------------------------------------


def dense(name, rows, columns):
    return Matrix(name, rows, columns, columns, 1)


def projections(dtype="bf16", tokens=256, hidden=512, count=3, precision="fp32"):
    x = dense("x", tokens, hidden)
    return Problem(dtype, precision, tuple(
        Product(x, dense(f"w{i}", hidden, hidden), dense(f"c{i}", tokens, hidden), f"bias{i}")
        for i in range(count)))


def weight_gradient(dtype, tokens, hidden):
    g, x = dense("g", tokens, hidden), dense("x", tokens, hidden)
    return Problem(dtype, "fp32", (Product(g.T, x.T, dense("d", hidden, hidden)),))


def chosen(problem, device=A100):
    return _select.choose("linear", TABLE, problem, device)


@pytest.mark.parametrize("dtype, precision, start", [
    ("f16", "fp32", "mma_f16_"), ("bf16", "fp32", "mma_bf16_"), ("bf16", "tf32", "mma_bf16_"),
    ("f32", "fp32", "mma_f32_"), ("f32", "tf32", "mma_tf32_"), ("f64", "fp32", "plain_f64")])
def test_rows_by_dtype_and_precision(dtype, precision, start):
    problem = projections(dtype, precision=precision)
    assert chosen(problem).name.startswith(start)
    # three projections are one launch, over the tiles of all of them
    three = linear.program(problem, A100).steps
    one = chosen(problem).program(replace(problem, products=problem.products[:1]), A100).steps
    assert three[0].grid[0] == 3 * one[0].grid[0]
    assert sum(step.kernel.function != "linear_mma_reduce" for step in three) == 1


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_the_row_taken_is_the_cheapest(dtype):
    for tokens, hidden in ((1, 8), (128, 512), (512, 768), (4096, 1024)):
        problem = projections(dtype, tokens, hidden)
        rows = [row for row in MMA if (row.dtype, row.tf32) == (dtype, False)]
        costs = [row.cost(problem, A100)[0] for row in rows]
        assert chosen(problem) == rows[costs.index(min(costs))]
        refused = [row.refuses(problem, A100) for row in rows if row != chosen(problem)]
        assert all("by the cost rule" in reason and chosen(problem).name in reason
                   for reason in refused)


def test_force_looks_for_the_cheapest_of_the_forced_rows():
    problem = projections()
    for row in MMA:
        if row.dtype == "bf16":
            with _select.force(row.name):
                assert chosen(problem).name.startswith(row.name)
    with _select.force("plain_bf16"):
        assert chosen(problem).name == "plain_bf16"


def with_matrix(problem, place, **changes):
    first = problem.products[0]
    changed = replace(first, **{place: getattr(first, place)._replace(**changes)})
    return replace(problem, products=(changed, *problem.products[1:]))


@pytest.mark.parametrize("place, changes, words", [
    ("a", {"align": 8}, ("a is neither", "address 8")),
    ("b", {"align": 2}, ("b is neither", "w0", "address 2")),
    ("a", {"row_stride": 516}, ("a is neither", "stride 1032")),
    ("b", {"row_stride": 1024, "column_stride": 2}, ("b is neither", "w0: 2")),
    ("b", {"row_stride": 1, "column_stride": 512}, ("b is neither",)),  # the others are along
    ("c", {"column_stride": 2}, ("c0", "unit column stride"))])
def test_what_matrix_units_refuse_the_plain_row_does(place, changes, words):
    problem = with_matrix(projections(), place, **changes)
    assert chosen(problem).name == "plain_bf16"
    reasons = [reason for row, reason in _select.refusals(TABLE, problem, A100)
               if row.name.startswith("mma_bf16")]
    assert reasons and all(word in reason for reason in reasons for word in words)


def test_what_does_not_matter_is_not_refused():
    """Strides between the lines of one line, along an axis of one element; rows that overlap."""
    problem = projections(tokens=1)
    assert chosen(with_matrix(problem, "c", row_stride=3)).name.startswith("mma")
    one = projections(tokens=1, count=1)
    assert chosen(with_matrix(one, "a", row_stride=3)).name.startswith("mma")
    thin = projections(hidden=8, count=1)
    thin = with_matrix(with_matrix(thin, "a", columns=1, row_stride=8, column_stride=5), "b",
                       columns=1)
    assert chosen(thin).name.startswith("mma")
    assert chosen(with_matrix(projections(count=1), "a", row_stride=0)).name.startswith("mma")


def test_devices_before_sm_80_and_small_shared_memory():
    problem = projections(tokens=8192)
    turing = replace(A100, capability=(7, 5), shared_memory=65536)
    assert chosen(problem, turing).name == "plain_bf16"
    ada = replace(A100, capability=(8, 9), shared_memory=101376)
    for dtype, tokens in (("bf16", 8192), ("f32", 8192), ("f32", 256)):
        row = chosen(projections(dtype, tokens), ada)
        assert row.name.startswith("mma")
        (step,) = row.program(projections(dtype, tokens), ada).steps
        assert step.shared + 4 * row.n <= ada.shared_memory


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_deep_products_are_divided(dtype):
    """The chunks together walk over all of depth, and their sums have a place each."""
    problem = weight_gradient(dtype, 16384, 512)
    row, program = chosen(problem), linear.program(problem, A100)
    product_step, reduce_step = program.steps
    (name, layout), = program.scratch.items()
    chunks, share = product_step.grid[1], product_step.values["share"]
    assert chunks > 1 and product_step.values["chunks"] == chunks
    assert (chunks - 1) * share * row.depth < 16384 <= chunks * share * row.depth
    assert layout.shape == (chunks * 512 * 512,) and layout.dtype == "f32"
    assert product_step.buffers["partial"] == reduce_step.buffers["partial"] == name
    assert reduce_step.kernel.function == "linear_mma_reduce"
    shallow = linear.program(projections(dtype, 4096, 512), A100)
    assert len(shallow.steps) == 1 and not shallow.scratch


def test_scratch_of_joined_programs_does_not_collide():
    """Programs that are joined share scratch of one name: so a name stands for one size."""
    x, y, z = dense("x", 5000, 512), dense("x", 5000, 256), dense("x", 900, 256)
    parts = [*(linear.program(weight_gradient(*size), A100) for size in (
        ("f32", 16384, 512), ("f32", 16384, 256), ("bf16", 16384, 512), ("f32", 8192, 320))),
        *(linear.column_sums("f32", [(m, "s"), (m, "t")], A100) for m in (x, y, z))]
    joined = Program(())
    for part in parts:
        joined += part
    assert len(joined.scratch) > 6
    for part in parts:
        assert part.scratch and all(joined.scratch[n] == part.scratch[n] for n in part.scratch)


def test_column_sums_launch_once_or_twice():
    def steps(dtype, *shapes, **changes):
        sums = [(dense(f"x{i}", *shape)._replace(**changes), f"s{i}")
                for i, shape in enumerate(shapes)]
        return linear.column_sums(dtype, sums, H200).steps

    assert linear.column_sums("f32", [], H200).steps == ()
    (one,) = steps("bf16", (20, 64), (20, 64))
    assert one.grid == (2, 1, 1)
    first, last = steps("f32", *[(16384, 768)] * 4)
    assert first.grid[0] == 4 * 6 and first.grid[0] * first.grid[1] >= 4 * H200.multiprocessors
    assert first.grid[1] * first.values["share"] >= 16384 and last.grid == (24, 1, 1)
    assert "_v4" in first.kernel.name
    assert "_v1" in steps("f32", (16384, 768), align=8)[0].kernel.name
    assert "_v1" in steps("f32", (16384, 767))[0].kernel.name


def test_values_of_a_problem():
    numbers, buffers = linear.values(replace(projections(), summed=True))
    assert buffers == {"a.0.data": "x", "b.0.data": "w0", "c.0.data": "c0", "bias.0": "bias0",
                       "a.1.data": "x", "b.1.data": "w1", "a.2.data": "x", "b.2.data": "w2"}
    assert (numbers["products"], numbers["summed"]) == (3, True)
    assert (numbers["rows.2"], numbers["columns.2"], numbers["depth.2"]) == (256, 512, 512)


def gradient(dtype, tokens, hidden, precision="fp32"):
    """d_weight of four weights, of which three meet one array."""
    x, y = dense("x", tokens, hidden), dense("y", tokens, hidden)
    return Problem(dtype, precision, tuple(
        Product(dense(f"g{i}", tokens, hidden).T, (x if i < 3 else y).T,
                dense(f"d{i}", hidden, hidden)) for i in range(4)))


@pytest.mark.parametrize("dtype, precision, name", [
    ("f32", "fp32", "hopper_fp32"), ("f32", "tf32", "hopper_tf32"), ("bf16", "fp32", "hopper_bf16"),
    ("f16", "fp32", "hopper_f16"), ("f64", "fp32", "plain_f64")])
def test_hopper_does_large_products(dtype, precision, name):
    assert chosen(projections(dtype, 4096, precision=precision), H200).name == name
    if name != "plain_f64":
        assert not chosen(projections(dtype, 64, precision=precision), H200).name.startswith("hop")


@pytest.mark.parametrize("dtype, precision", [("f32", "fp32"), ("f32", "tf32"), ("bf16", "fp32")])
@pytest.mark.parametrize("size", [(1024, 512), (8192, 512), (16384, 768), (4096, 1024)])
def test_hopper_steps_fit_the_device(dtype, precision, size):
    for problem in (projections(dtype, *size, precision=precision),
                    gradient(dtype, *size, precision)):
        row = next(r for r in linear_hopper.ROWS if r.refuses(problem, H200) is None)
        assert row.precision == (precision if dtype == "f32" else "")
        program = row.program(problem, H200)
        for step in program.steps:
            assert step.shared <= H200.shared_memory
            for path, box in step.maps.items():
                assert f"{path}.address" in step.buffers
                assert all(stride % 16 == 0 for stride in box.strides)
                assert max(box.box) <= 256 and box.box[0] * ITEMSIZE.get(box.dtype, 4) == 128
        # every number of every c belongs to one split of one tile
        plan = row.plan(problem, H200)
        assert plan.splits == 1 or sum(p.a.rows * p.b.rows for p in problem.results) == (
            program.steps[-1].values["numbers"])


@pytest.mark.parametrize("dtype, precision, tokens, count, tile", [
    ("f32", "fp32", 128, 1, (64, 16)), ("f32", "fp32", 128, 3, (64, 32)),
    ("f32", "fp32", 256, 1, (64, 16)), ("f32", "fp32", 256, 3, (64, 48)),
    ("f32", "fp32", 512, 1, (64, 32)), ("f32", "fp32", 512, 3, (64, 96)),
    ("f32", "fp32", 1024, 1, (64, 64)), ("f32", "fp32", 1024, 3, (128, 96)),
    ("f32", "tf32", 256, 1, (64, 32)), ("f32", "tf32", 256, 3, (64, 48)),
    ("f32", "tf32", 1024, 3, (128, 96)), ("bf16", "fp32", 256, 1, (64, 32)),
    ("bf16", "fp32", 256, 3, (64, 64)), ("bf16", "fp32", 512, 3, (64, 96)),
    ("f16", "fp32", 1024, 3, (128, 96))])
def test_one_wave_of_tiles_does_products_of_few_tokens(dtype, precision, tokens, count, tile):
    """By the tile that was fastest when all were measured."""
    problem = projections(dtype, tokens, count=count, precision=precision)
    row = chosen(problem, H200)
    assert row in linear_teams.ROWS
    (step,) = row.program(problem, H200).steps
    tiling = row.plan(problem, H200).tiling
    assert (tiling.rows, tiling.columns) == tile
    assert step.grid[0] == cdiv(tokens, tiling.rows) * cdiv(512 * count, tiling.columns) <= 132
    assert step.maps["a_map.0"].box[1] == tiling.rows
    for s in range(count):
        assert tiling.columns % step.maps[f"b_map.{s}"].box[1] == 0


def test_the_tiling_taken_is_the_cheapest():
    for row in linear_teams.ROWS:
        problem = projections(row.dtype, precision=row.precision or "fp32")
        us = {tiling: replace(row, tilings=(tiling,)).plan(problem, H200).us
              for tiling in row.tilings}
        plan = row.plan(problem, H200)
        assert (plan.tiling, plan.us) == (min(us, key=us.get), min(us.values()))
        for tiling in row.tilings:
            assert row._shared(tiling) <= H200.shared_memory


@pytest.mark.parametrize("place, changes, words", [
    ("a", {"align": 8}, "a (x) has"), ("b", {"row_stride": 516 * 4 + 2}, "b (w0) has"),
    ("b", {"row_stride": 1, "column_stride": 512}, "b (w0) has"),
    ("c", {"row_stride": 514}, "c (c0) has"), ("a", {"row_stride": 0}, "a (x) has"),
    ("b", {"rows": 508}, "508 columns")])
def test_what_teams_refuse(place, changes, words):
    problem = with_matrix(projections("f32"), place, **changes)
    row = next(row for row in linear_teams.ROWS if row.name == "teams_fp32")
    assert words in row.refuses(problem, H200) and chosen(problem, H200) != row


def test_teams_leave_many_tokens_and_sums_to_others():
    (row,) = (row for row in linear_teams.ROWS if row.name == "teams_fp32")
    assert "waves" in row.refuses(projections("f32", 2048), H200)
    assert "add" in row.refuses(replace(projections("f32"), summed=True), H200)
    assert "differ in a" in row.refuses(with_matrix(projections("f32"), "a", buffer="y"), H200)
    with _select.force("teams_"):
        assert chosen(projections("f32", 8192), H200) == row


def test_teams_leave_deep_products_of_few_tiles_to_rows_that_divide_depth():
    (row,) = (row for row in linear_teams.ROWS if row.name == "teams_fp32")
    def deep(depth):
        return Problem("f32", "fp32", (Product(dense("x", 64, depth), dense("w", 512, depth),
                                               dense("y", 64, 512)),))
    assert chosen(deep(768), H200) == row
    assert "by the cost rule, mma_f32_32x32_k4" in row.refuses(deep(4096), H200)
    assert chosen(projections("f32", 256, 2048, count=1), H200) == row  # no tiles to spare


def test_what_hopper_refuses_warps_do():
    for problem in (projections("bf16", 4096, 508),
                    with_matrix(projections("bf16", 4096), "a", align=8)):
        assert not chosen(problem, H200).name.startswith("hopper")
    mixed = projections("bf16", 4096)
    mixed = replace(mixed, products=(gradient("bf16", 4096, 512).products[0], *mixed.products[1:]))
    reasons = [reason for row, reason in _select.refusals(TABLE, mixed, H200)
               if row.name == "hopper_bf16"]
    assert reasons == ["the a of some products have rows inside, of others depth"]


@pytest.mark.parametrize("tokens, hidden", [(8192, 512), (2048, 768), (512, 1024)])
def test_tf32_copies_b_where_depth_is_not_inside(tokens, hidden):
    """And takes a as it is."""
    straight = projections("f32", tokens, hidden, precision="tf32")
    turned = replace(straight, products=tuple(
        replace(p, b=Matrix(p.b.buffer, hidden, hidden, 1, hidden)) for p in straight.products))
    both = gradient("f32", tokens, hidden, "tf32")
    with _select.force("hopper_tf32"):
        one, two, three = (linear.program(p, H200) for p in (straight, turned, both))
    assert one.steps[0].kernel.function == "linear_hopper"
    for program, copies in ((two, 3), (three, 2)):
        copy, multiply = program.steps[:2]
        assert copy.kernel.function == "linear_planes" and copy.grid[1] == copies
        made = {copy.buffers[f"planes.{s}"] for s in range(copies)}
        assert {name for path, name in multiply.buffers.items() if "b_map" in path} == made
        assert all(program.scratch[name].dtype == "f32" for name in made)
        assert multiply.maps["b_map.0"].strides[0] == 4 * program.scratch[min(made)].shape[-1]
    assert three.steps[1].kernel.name.endswith("_tn") and two.steps[1].kernel.name.endswith("_nn")


@pytest.mark.parametrize("precision, tokens, names", [
    ("fp32", 64, ("mma_f32", "mma_f32")), ("fp32", 8192, ("hopper_fp32", "hopper_fp32")),
    ("tf32", 64, ("mma_tf32", "mma_tf32")), ("tf32", 512, ("mma_tf32", "hopper_tf32")),
    ("tf32", 2048, ("hopper_tf32", "hopper_tf32")), ("tf32", 8192, ("hopper_tf32", "hopper_tf32"))])
def test_gradients_take_the_row_of_least_time(precision, tokens, names):
    """That of the input, and those of the weights: by the cost rules."""
    hidden, w = dense("dx", tokens, 512), [dense(f"w{i}", 512, 512) for i in range(3)]
    to_input = Problem("f32", precision, tuple(
        Product(dense(f"g{i}", tokens, 512), x.T, hidden) for i, x in enumerate(w)), True)
    for problem, name in zip((to_input, gradient("f32", tokens, 512, precision)), names):
        row = chosen(problem, H200)
        us = {r.name: r.plan(problem, H200).us for r in linear_hopper.ROWS
              if r._mismatch(problem, H200) is None}
        us |= {r.name: r.cost(problem, H200)[0] for r in MMA if r._mismatch(problem, H200) is None}
        assert row.name == min(us, key=us.get) and row.name.startswith(name)
        for r in linear_hopper.ROWS:
            if r.name in us and r != row:
                assert "by the cost rule" in r.refuses(problem, H200)


def test_planes_are_made_once_and_first():
    """Of each operand b, whatever product it is in; four operands a launch."""
    (row,) = (r for r in linear_hopper.ROWS if r.name == "hopper_fp32")
    program = Program(())
    for problem in (projections("f32", 4096), gradient("f32", 4096, 512), projections("f32", 4096)):
        program += row.program(problem, H200)
    assert [s.kernel.function for s in program.steps].count("linear_planes") == 3
    joined = linear_hopper.planes_first(program)
    functions = [s.kernel.function for s in joined.steps]
    assert functions[:2] == ["linear_planes"] * 2 and "linear_planes" not in functions[2:]
    made = [s.buffers[f"planes.{i}"] for s in joined.steps[:2] for i in range(s.grid[1])]
    assert len(made) == len(set(made)) == 5  # three weights, x and y transposed
    used = {s.buffers[path] for s in joined.steps[2:] for path in s.buffers if "b_map" in path}
    assert used == set(made) <= set(joined.scratch)
    assert linear_hopper.planes_first(Program(())) == Program(())


# --- on the GPU ------------------------------------------------------------------------------


class Memory:
    """Matrices on the GPU by name, each between NaNs, its lines at 16-byte boundaries."""

    def __init__(self, kind, dtype):
        self.kind, self.dtype = kind, np.dtype(dtype)
        self.bases, self.before, self.views, self.addresses = {}, {}, {}, {}

    def put(self, name, x, along=True, off=0):
        """Place a matrix with unit stride along its columns, or its rows; `off`: elements more."""
        lines = x if along else x.T
        step = max(16 // self.dtype.itemsize, 1)
        length = cdiv(lines.shape[1] + off, step) * step + 2 * step
        base = np.full((lines.shape[0] + 2, length), np.nan, self.dtype)
        view = (slice(1, -1), slice(step + off, step + off + lines.shape[1]))
        base[view] = lines
        self.before[name], self.views[name] = base, (view, along)
        self.bases[name] = self.kind.put(base)
        self.addresses[name] = (self.kind.pointer(self.bases[name])
                                + (length + step + off) * self.dtype.itemsize)
        strides = (length, 1) if along else (1, length)
        return Matrix(name, *x.shape, *strides, align=16 if off == 0 else self.dtype.itemsize)

    def get(self, name):
        """Return a matrix; fail if anything around it changed."""
        after = np.array(self.kind.get(self.bases[name]))
        view, along = self.views[name]
        result = after[view].copy()
        after[view] = self.before[name][view]
        identical(after, self.before[name], what=f"memory around {name}")
        return result if along else result.T

    def run(self, program):
        """Launch a program on these matrices."""
        device = _device.device(0)
        scratch = {name: self.kind.xp.full(layout.shape, np.nan, DTYPES[layout.dtype])
                   for name, layout in program.scratch.items()}
        addresses = {**self.addresses, **{n: self.kind.pointer(x) for n, x in scratch.items()}}
        number = {name: i for i, name in enumerate(addresses)}
        for step in program.steps:
            _launch.Launch(step, device, number)(list(addresses.values()), 0)
        self.kind.sync()


def numbers(seed, shape, dtype):
    return mk(seed, shape, dtype)


def build(kind, dtype, sizes, along_a=True, along_b=True, *, precision="fp32", summed=False,
          bias=True, off=0, make=numbers, one_a=False):
    """Return the problem, its memory and what its results should be, exactly and plainly."""
    memory, products, terms = Memory(kind, DTYPES[dtype]), [], []
    for i, (rows, columns, depth) in enumerate(sizes):
        a = terms[0][0] if one_a and i else make(3 * i, (rows, depth), dtype)
        b = make(3 * i + 1, (columns, depth), dtype)
        views = (products[0].a if one_a and i else memory.put(f"a{i}", a, along_a),
                 memory.put(f"b{i}", b, along_b))
        has_bias = bias and not (summed and i)
        of_bias = mk(3 * i + 2, (columns,), dtype) if has_bias else None
        if has_bias:  # every other element of a longer vector
            memory.put(f"bias{i}", np.repeat(of_bias, 2)[None])
        c = (products[0].c if summed and i else
             memory.put(f"c{i}", np.full((rows, columns), np.nan, DTYPES[dtype]), off=off))
        products.append(Product(*views, c, f"bias{i}" if has_bias else None, 2))
        terms.append((a, b, of_bias))
    problem = Problem(dtype, precision, tuple(products), summed)
    groups = [terms] if summed else [[term] for term in terms]

    def total(wide):
        results = []
        for group in groups:
            with np.errstate(invalid="ignore", over="ignore"):
                c = sum(a.astype(wide) @ b.astype(wide).T for a, b, _ in group)
            results.append(c if group[0][2] is None else c + group[0][2].astype(wide))
        return results

    return problem, memory, total


def results(memory, problem):
    return [memory.get(p.c.buffer) for p in problem.results]


def exact_type(dtype):
    return np.longdouble if dtype == "f64" else np.float64


def hold(row, problem, memory, total):
    """Run a row and hold its results to the rule; TF32 to its own precision."""
    dtype = problem.dtype
    memory.run(row.program(problem, _device.device(0)))
    tf32 = dtype == "f32" and problem.precision == "tf32" and not row.name.startswith("plain")
    for ours, exact, plain in zip(results(memory, problem), total(exact_type(dtype)),
                                  total(np.float64 if dtype == "f64" else np.float32)):
        agree(ours, exact, plain.astype(DTYPES[dtype]), what="c", row=row.name,
              case=2.0 ** -10 if tf32 else None)


HOPPER = tuple(replace(row, tilings=(tiling,)) for row in linear_hopper.ROWS
               for tiling in row.tilings)
TEAMS = tuple(replace(row, tilings=(tiling,)) for row in linear_teams.ROWS
                for tiling in row.tilings)
OTHERS = tuple(row for row in TABLE if not row.target)
ROWS = (*HOPPER, *TEAMS, *OTHERS)


def takes(row, problem):
    """Skip a row for another architecture; fail if one refuses that should not."""
    device = _device.device(0)
    if row.target is not None and row.target.rstrip("a") != device.target:
        pytest.skip(f"needs {row.target}")
    assert getattr(row, "_mismatch", row.refuses)(problem, device) is None  # whatever pays


def fitted(row, sizes, *along):
    """Sizes and layouts that a row takes: those of sm_90a want 8 columns, some depth inside."""
    if row.target:
        sizes = [(rows, cdiv(columns, 8) * 8, depth) for rows, columns, depth in sizes]
        along = (True, True) if row in TEAMS else along
    return (sizes, *along)


def each_row(rows=ROWS):
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.name + (
        "_{}x{}".format(*row.tilings[0]) if row in TEAMS else
        f"_c{row.tilings[0].columns}" if row in HOPPER else ""))


def precision_of(row):
    return "tf32" if "tf32" in row.name else "fp32"


@pytest.mark.gpu
@each_row()
@pytest.mark.parametrize("along", ALONG, ids=lambda along: "".join("lt"[not x] for x in along))
def test_layouts_and_odd_sizes(cupy_kind, row, along):
    for sizes in ([(70, 45, 100)], [(1, 1, 1)], [(33, 257, 17)], [(200, 136, 96)]):
        problem, memory, total = build(cupy_kind, row.dtype, *fitted(row, sizes, *along),
                                       precision=precision_of(row))
        takes(row, problem)
        hold(row, problem, memory, total)


@pytest.mark.gpu
@each_row((*HOPPER, *OTHERS))
def test_products_of_one_launch(cupy_kind, row):
    for sizes, bias in (([(70, 64, 96), (70, 48, 96), (70, 136, 96), (24, 8, 32)], True),
                        ([(40, 24, 64), (130, 8, 320)], False)):
        problem, memory, total = build(cupy_kind, row.dtype, sizes, bias=bias,
                                       precision=precision_of(row))
        takes(row, problem)
        hold(row, problem, memory, total)


@pytest.mark.gpu
@pytest.mark.smoke
@each_row((*HOPPER, *TEAMS, *{(row.dtype, row.tf32): row for row in MMA}.values()))
def test_smoke(cupy_kind, row):
    problem, memory, total = build(cupy_kind, row.dtype, *fitted(row, [(70, 48, 200)]),
                                   precision=precision_of(row))
    takes(row, problem)
    hold(row, problem, memory, total)


@pytest.mark.gpu
@each_row(TEAMS)
@pytest.mark.parametrize("columns", [(64, 48, 136, 8), (96, 160, 24)])
def test_products_of_one_matrix(cupy_kind, row, columns):
    """Tiles lie in two results or more, and stick out of them all."""
    unit = row.tilings[0].unit
    sizes = [(200, cdiv(n, unit) * unit, 96) for n in columns[:-1]] + [(200, columns[-1], 96)]
    for bias in (True, False):
        problem, memory, total = build(cupy_kind, row.dtype, sizes, bias=bias, one_a=True,
                                       precision=precision_of(row))
        takes(row, problem)
        hold(row, problem, memory, total)


@pytest.mark.gpu
@each_row(TEAMS)
def test_many_slices_in_few_stages(cupy_kind, row):
    """Stages are taken again."""
    for size in ((70, 40, 4100), (130, 72, 2050), (1, 8, 3000)):
        problem, memory, total = build(cupy_kind, row.dtype, [size], precision=precision_of(row))
        takes(row, problem)
        hold(row, problem, memory, total)


@pytest.mark.gpu
@each_row((*HOPPER, *OTHERS))
def test_products_that_add(cupy_kind, row):
    problem, memory, total = build(
        cupy_kind, row.dtype, *fitted(row, [(70, 48, 64), (70, 48, 8), (70, 48, 136)], True, False),
        summed=True, precision=precision_of(row))
    takes(row, problem)
    hold(row, problem, memory, total)


@pytest.mark.gpu
@each_row(OTHERS)
def test_results_that_take_no_wide_stores(cupy_kind, row):
    problem, memory, total = build(cupy_kind, row.dtype, [(70, 45, 64)], False, True, off=1,
                                   precision=precision_of(row))
    takes(row, problem)
    hold(row, problem, memory, total)


@pytest.mark.gpu
@each_row((*HOPPER, *OTHERS))
@pytest.mark.parametrize("summed", [False, True])
def test_deep_products(cupy_kind, row, summed):
    """Depth in chunks, where the row divides it."""
    sizes = fitted(row, [(70, 40, 4100), (70, 40, 1000)], False, False)
    problem, memory, total = build(cupy_kind, row.dtype, *sizes, summed=summed,
                                   precision=precision_of(row))
    takes(row, problem)
    if not row.name.startswith("plain"):
        functions = [step.kernel.function for step in row.program(problem, _device.device(0)).steps]
        assert functions[-1] in ("linear_mma_reduce", "linear_total")
    hold(row, problem, memory, total)


@pytest.mark.gpu
@each_row()
def test_same_bits(cupy_kind, row):
    for sizes in ([(300, 200, 96)], [(64, 64, 4096)]):
        problem, memory, _ = build(cupy_kind, row.dtype, sizes, precision=precision_of(row))
        takes(row, problem)
        program = row.program(problem, _device.device(0))
        memory.run(program)
        first = results(memory, problem)
        for _ in range(3):
            memory.run(program)
            for ours, other in zip(results(memory, problem), first):
                identical(ours, other)


def scaled(seed, shape, dtype):
    """Rows between 1e-6 and 1e6."""
    scale = 10.0 ** np.random.default_rng(seed + 1000).uniform(-6, 6, (shape[0], 1))
    return (mk(seed, shape, "f64") * scale).astype(DTYPES[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [64, 512, 4096])
@pytest.mark.parametrize("make", [numbers, scaled], ids=["normal", "scaled"])
@each_row([row for row in ROWS if row.dtype == "f32" and precision_of(row) == "fp32"
           and not row.name.startswith("plain")])
def test_float32_is_no_worse_than_cublas(cupy_kind, row, make, depth):
    """Root mean square of the errors, each against the sum of its terms' sizes."""
    problem, memory, total = build(cupy_kind, "f32", [(256, 192, depth)], bias=False, make=make)
    takes(row, problem)
    memory.run(row.program(problem, _device.device(0)))
    (ours,), (exact,) = results(memory, problem), total(np.float64)
    a, b = memory.get("a0"), memory.get("b0")
    cublas = cupy_kind.get(cupy_kind.put(a) @ cupy_kind.put(b).T)
    size = np.abs(a).astype(np.float64) @ np.abs(b).T

    def error(c):
        return np.sqrt((((c - exact) / size) ** 2).mean())

    assert error(ours) <= error(cublas)


def special(seed, shape, dtype):
    """Zeros, and a few inf, -inf and NaN."""
    random = np.random.default_rng(seed)
    x = mk(seed, shape, dtype)
    x[random.random(shape) < 0.1] = 0
    for value in (np.inf, -np.inf, np.nan):
        x[tuple(random.integers(0, n, 4) for n in shape)] = value
    return x


@pytest.mark.gpu
@each_row()
@pytest.mark.parametrize("depth", [24, 3000])
def test_infinity_and_nan(cupy_kind, row, depth):
    """As in IEEE arithmetic: where a result is inf, -inf or NaN, and all others right."""
    problem, memory, _ = build(cupy_kind, row.dtype, [(70, 48, depth)], bias=False, make=special,
                               precision=precision_of(row))
    takes(row, problem)
    memory.run(row.program(problem, _device.device(0)))
    (ours,) = results(memory, problem)
    a, b = (memory.get(name).astype(np.float64) for name in ("a0", "b0"))
    with np.errstate(invalid="ignore"):
        exact = (a[:, None] * b).sum(-1)
    finite = np.isfinite(exact)
    assert finite.any() and np.isnan(exact).any() and np.isinf(exact).any()
    np.testing.assert_array_equal(np.where(finite, 0, ours.astype(np.float64)),
                                  np.where(finite, 0, exact))
    agree(ours[finite], exact[finite], case=2.0 ** (-6 if row.dtype == "bf16" else -9))


@pytest.mark.gpu
@each_row([row for row in ROWS if row.dtype == "f32" and precision_of(row) == "fp32"])
def test_the_largest_numbers(cupy_kind, row):
    """What would round up to inf in bf16 does not; what overflows is inf."""
    largest = float(np.finfo(np.float32).max)
    a = np.zeros((4, 8), np.float32)
    a[[0, 1, 2, 3], [0, 1, 2, 3]] = largest, -largest, 1e30, -1e30

    def make(seed, shape, dtype):
        return a if seed % 3 == 0 else np.eye(8, dtype=np.float32)[:, ::-1] + np.eye(
            8, dtype=np.float32) * np.float32(1e30)

    problem, memory, _ = build(cupy_kind, "f32", [(4, 8, 8)], bias=False, make=make)
    takes(row, problem)
    memory.run(row.program(problem, _device.device(0)))
    (ours,) = results(memory, problem)
    with np.errstate(over="ignore"):
        expected = (a.astype(np.float64) @ memory.get("b0").astype(np.float64).T).astype(np.float32)
    identical(ours, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shapes, along", [
    ([(5, 8)], True), ([(300, 64), (300, 40), (20, 64), (300, 72)], True), ([(4000, 33)], True),
    ([(100, 64), (70, 7)], False)])
def test_column_sums(cupy_kind, dtype, shapes, along):
    memory = Memory(cupy_kind, DTYPES[dtype])
    arrays = [mk(i, shape, dtype) for i, shape in enumerate(shapes)]
    sums = []
    for i, x in enumerate(arrays):
        out = memory.put(f"s{i}", np.full((1, x.shape[1]), np.nan, x.dtype), off=1)
        sums.append((memory.put(f"x{i}", x, along), out.buffer))
    program = linear.column_sums(dtype, sums, _device.device(0))
    memory.run(program)
    first = [memory.get(name) for _, name in sums]
    memory.run(program)
    wide = exact_type(dtype)
    for ours, x, (_, name) in zip(first, arrays, sums):
        identical(memory.get(name), ours)
        plain = x.astype(np.float64 if dtype == "f64" else np.float32).sum(0).astype(x.dtype)
        agree(ours[0], x.astype(wide).sum(0), plain, what=name)
