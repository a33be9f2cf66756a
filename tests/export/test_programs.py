"""Every kind of table becomes a program with a dynamic batch that scores like the model."""

import copy
import importlib.util

import pytest
import torch
from torch import nn

from dlrm.embeddings import available
from dlrm.embeddings.tt import TT
from dlrm.export.delta import changed_ids
from dlrm.export.inference import InferenceModel
from dlrm.export.programs import compile_program, has_compiler, save_onnx, save_program, trace
from dlrm.kernels.update.packed import PackedParameter
from dlrm.model import DLRM
from tests.kit import first

ROWS = [100, 5, 300, 1000, 7]
LISTS = [False, False, True, True, False]
CASES = {
    "hash": {"rows": 50},
    "drop": {"keep": 20},
    "block": {"keep": 20},
    "short": {"keep": 20},
    "robe": {"rows": 50},
    "cafe": {"rows": 50},
    "tt": {"rank": 32},
    "tt with a cache": {"rank": 8, "cache_rows": 20},
    "tt with exact rows": {"rank": 8, "keep": 20},
    "dynamic in pieces": {"rows": 40, "shared": 10, "pieces": 4},
    "paged": {"page_size": 64, "devices": ["cpu", "cpu"]},
}
CASES |= {kind: {} for kind in available() if kind not in CASES}
every_case = pytest.mark.parametrize("case", sorted(CASES))
TRACED = ("dense", "tt with a cache", "cafe")  # the others are slow tests
traced_cases = pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in TRACED else pytest.mark.slow) for c in sorted(CASES)]
)
BATCHES = (1, 2, 3, 40)


def model_of(case, **options):
    """A model with three tables of a kind and two dense ones."""
    kind = case.partition(" ")[0]
    plan = [(kind, CASES[case]) if rows > 10 else ("dense", {}) for rows in ROWS]
    sizes = {"bottom_mlp": (16,), "top_mlp": (16,), "cross_rank": 8}
    model = DLRM(3, ROWS, 16, plan, **sizes, **options)
    for group in model.sparse_arch.groups:
        if isinstance(group, TT) and group.cache is not None:
            group.observe(torch.arange(3)[:, None], torch.arange(30).expand(3, 30))
            group.cache_populate()
            nn.init.normal_(group.cache.rows[: group.cache.capacity])
    return model.eval()


def batch_of(size, lists=False):
    """What a program takes, and what the model does."""
    dense = torch.rand(3, size)
    ids = torch.stack([torch.randint(rows, (size,)) for rows in ROWS])
    if not lists:
        return (dense, ids), (dense, ids)
    lengths = torch.where(torch.tensor(LISTS)[:, None], torch.randint(0, 4, (5, size)), 1)
    lengths[2] = 0  # all bags of a feature are empty
    bags = [torch.randint(rows, (int(own.sum()),)) for rows, own in zip(ROWS, lengths, strict=True)]
    starts = nn.functional.pad(lengths.view(-1).cumsum(0), (1, 0))
    own = [nn.functional.pad(lengths[f].cumsum(0), (1, 0)) for f in range(5)]
    given = [values for f in (2, 3) for values in (bags[f], own[f])]
    single = torch.stack([bags[f] for f in (0, 1, 4)])
    return (dense, single, *given), (dense, torch.cat(bags), starts)


def reloaded(program, path):
    """A program that was saved and loaded, with its weights."""
    save_program(program, path)
    found = torch.export.load(path)
    found.state_dict.update(program.state_dict)
    return found.module()


@every_case
@pytest.mark.parametrize("lists", [False, True])
def test_the_module_scores_like_the_model(case, lists):
    model = model_of(case, interaction="dcn" if lists else "dot")
    module = InferenceModel(copy.deepcopy(model), LISTS if lists else [False] * 5)
    given, own = batch_of(40, lists)
    with torch.no_grad():
        expected = torch.sigmoid(model(*own))
    torch.testing.assert_close(module(*given), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", ["dynamic", "dynamic in pieces"])
def test_a_delta_knows_the_columns_of_the_ids_that_came_and_left(case):
    model, states, held = model_of(case), [], []
    (group,) = (own for own in model.sparse_arch.groups if own.kind() == "dynamic")
    for begin in (0, 20):
        for _ in range(8):
            group.place(torch.arange(begin, begin + 30).repeat(3, 1) + torch.arange(3)[:, None])
        every = torch.arange(300).repeat(3, 1)
        rows, few = (
            group.local_rows(torch.arange(3)[:, None], every),
            torch.tensor(group.num_shared)[:, None],
        )
        held.append([set(own.nonzero()[:, 0].tolist()) for own in rows >= few])
        module = InferenceModel(copy.deepcopy(model), [False] * 5)
        states.append(copy.deepcopy(module.state_dict()))
    columns = [{"name": f"C{feature}"} for feature in range(5)]
    found = changed_ids(module, *states, columns)
    features = [feature for feature, rows in enumerate(ROWS) if rows > 10]
    for feature, before, after in zip(features, *held, strict=True):
        assert set(found[f"came:C{feature}"].tolist()) == after - before
        assert set(found[f"evicted:C{feature}"].tolist()) == before - after
    assert any(map(len, found.values()))


@pytest.mark.parametrize("case", ["dense", "drop", "hash", "block", "robe", "cafe"])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_tables_trained_in_int8_and_int4(case, dtype):
    model = model_of(case, tables_dtype=dtype)
    given, own = batch_of(40)
    with torch.no_grad():
        expected = torch.sigmoid(model(*own))
    module = InferenceModel(copy.deepcopy(model), [False] * 5)
    assert not any(isinstance(p, PackedParameter) for p in module.parameters())
    torch.testing.assert_close(module(*given), expected, rtol=1e-6, atol=1e-6)
    small = InferenceModel(copy.deepcopy(model), [False] * 5, precision=None)
    assert (small(*given) - expected).abs().max() < 3e-2
    sizes = [sum(v.nbytes for v in own.tables.state_dict().values()) for own in (small, module)]
    if case not in ("robe", "cafe"):  # whose own look-ups are exported
        assert sizes[0] < 0.65 * sizes[1]  # rows of block are too short for a scale of their own


@traced_cases
@first("lists", [True, False], slow=pytest.mark.slow)
def test_so_does_the_program_with_any_batch(case, lists, tmp_path):
    model = model_of(case)
    program = trace(InferenceModel(copy.deepcopy(model), LISTS if lists else [False] * 5), 3)
    scores = reloaded(program, tmp_path / "model.pt2")
    for size in BATCHES:
        given, own = batch_of(size, lists)
        with torch.no_grad():
            expected = torch.sigmoid(model(*own))
        torch.testing.assert_close(scores(*given), expected, rtol=1e-6, atol=1e-6)
    if not lists:
        assert scores(torch.rand(3, 0), torch.zeros(5, 0, dtype=torch.int64)).shape == (0,)


@every_case
@pytest.mark.parametrize(("precision", "bound"), [("bf16", 2e-3), ("int8", 2e-3), ("int4", 3e-2)])
def test_number_formats(case, precision, bound):
    model = model_of(case)
    stored = InferenceModel(copy.deepcopy(model), [False] * 5, precision=precision)
    given, own = batch_of(200)
    with torch.no_grad():
        expected = torch.sigmoid(model(*own))
    assert (stored(*given) - expected).abs().max() < bound
    trained = sum(value.nbytes for value in model.sparse_arch.state_dict().values())
    if case in ("dense", "hash", "drop", "paged", "offload"):
        held = sum(value.nbytes for value in stored.tables.state_dict().values())
        assert held < {"bf16": 0.52, "int8": 0.3, "int4": 0.18}[precision] * trained


def test_a_program_of_a_table_without_numbers(tmp_path):
    sizes = {"bottom_mlp": (16,), "top_mlp": (16,)}
    model = DLRM(0, ROWS, 16, [("dense", {})] * 5, **sizes).eval()
    scores = reloaded(trace(InferenceModel(model, [False] * 5), 0), tmp_path / "model.pt2")
    dense, ids = torch.empty(0, 7), batch_of(7)[0][1]
    torch.testing.assert_close(scores(dense, ids), torch.sigmoid(model(dense, ids)))


def test_a_program_without_its_weights_scores_nothing(tmp_path):
    program = trace(InferenceModel(model_of("dense"), [False] * 5), 3)
    save_program(program, tmp_path / "model.pt2")
    found = torch.export.load(tmp_path / "model.pt2").module()
    given, _ = batch_of(3)
    assert found(*given).isnan().all()
    assert not program.module()(*given).isnan().any()
    assert (tmp_path / "model.pt2").stat().st_size < 200_000
    assert b"/export/inference.py" not in (tmp_path / "model.pt2").read_bytes()


@pytest.mark.parametrize(
    ("case", "where", "lists", "static"),
    [
        pytest.param("block", "cpu", True, True, marks=pytest.mark.slow),
        pytest.param("cafe", "cpu", False, False, marks=pytest.mark.slow),
        pytest.param("tt with a cache", "cpu", True, False, marks=pytest.mark.slow),
        *(
            pytest.param(case, "cuda", True, False, marks=pytest.mark.gpu)
            for case in ("block", "cafe", "tt with a cache")
        ),
    ],
)
def test_compiled_programs(case, where, lists, static, tmp_path):
    """Also with a compiler that links its library statically, where it has a static one."""
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nexec g++ -static-libstdc++ "$@"\n')
    compiler.chmod(0o755)
    model = model_of(case)
    program = trace(InferenceModel(copy.deepcopy(model), LISTS if lists else [False] * 5), 3)
    with torch._inductor.config.patch({"cpp.cxx": (str(compiler),)} if static else {}):
        compile_program(program, tmp_path / "compiled.pt2", where)
    compiled = torch._inductor.aoti_load_package(str(tmp_path / "compiled.pt2"))
    names = compiled.get_constant_fqns()
    weights = {name: program.state_dict[name].to(where) for name in names}
    compiled.load_constants(weights, check_full_update=True, user_managed=True)
    bound = 1e-6 if where == "cpu" else 1e-5
    for size in BATCHES:
        given, own = batch_of(size, lists)
        with torch.no_grad():
            expected = torch.sigmoid(model(*own))
        found = compiled(*(value.to(where) for value in given)).cpu()
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
    scored = program.module()(*given)  # it is on the CPU as before
    torch.testing.assert_close(scored, expected, rtol=1e-6, atol=1e-6)


ONNX = [(case, "fp32", False) for case in sorted(CASES)]
ONNX += [("dense", precision, False) for precision in ("bf16", "int8", "int4")]
ONNX += [("block", "fp32", True)]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "precision", "lists"), ONNX)
def test_onnx(case, precision, lists, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    stored = InferenceModel(model_of(case), LISTS if lists else [False] * 5, precision=precision)
    path, program = tmp_path / "model.onnx", trace(stored, 3)
    if case == "tt with a cache":
        with pytest.raises(ValueError, match=r"as ONNX: No ONNX function found for .*searchsorted"):
            save_onnx(program, path)
        return
    save_onnx(program, path)
    session = runtime.InferenceSession(path)
    names = [entry.name for entry in session.get_inputs()]
    for size in BATCHES:
        given, _ = batch_of(size, lists)
        fed = {name: value.numpy() for name, value in zip(names, given, strict=True)}
        (found,) = session.run(None, fed)
        torch.testing.assert_close(torch.from_numpy(found), stored(*given), rtol=1e-5, atol=1e-6)


def test_missing_packages_and_compilers(monkeypatch, tmp_path):
    program = trace(InferenceModel(model_of("dense"), [False] * 5), 3)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--onnx needs onnx, onnxscript: pip install"):
        save_onnx(program, tmp_path / "model.onnx")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="--compile cuda needs a GPU, and there is none"):
            compile_program(program, tmp_path / "model.pt2", "cuda")
    # Not by monkeypatch, which would remove the option instead of restoring it.
    missing = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
    none = pytest.raises(ValueError, match=r"needs a C\+\+ compiler, and there is none: install")
    with missing, none:
        assert not has_compiler()
        compile_program(program, tmp_path / "model.pt2", "cpu")
