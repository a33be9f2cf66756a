"""Models as a configuration describes them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from dlrm.config import build
from dlrm.config.build import build_model, build_optimizers
from dlrm.config.cli import parse
from dlrm.config.model_spec import model_spec, note_plan
from dlrm.data import synthetic
from dlrm.data.frequencies import IdStatistics
from dlrm.data.schema import Meta
from dlrm.distributed.world import World
from dlrm.embeddings import available


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("build") / "data"
    synthetic.write(directory, rows=200, cardinalities=[9000] + 25 * [10])
    return directory


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam"])
def test_trains_move_as_dense_rows_under_plain_sgd_only(rule, data):
    given = ["--data", str(data), "--emb", "tt", "--optim.embeddings", rule]
    config = parse(given, available())[0]
    meta = Meta.read(data)
    torch.manual_seed(0)
    model, _ = build_model(
        config,
        model_spec(config, meta, IdStatistics(config.data, meta)),
        meta,
        World.from_environment(),
        list,
    )
    group = next(group for group in model.sparse_arch.groups if group.kind() == "tt")
    build_optimizers(config.optim, model)
    first, second, last = (core.detach().std().item() for core in group.cores)
    assert first == pytest.approx(second, rel=0.1)
    if rule == "sgd":
        (_, r1, r2, _) = group.ranks  # a row of the product of the first two cores has norm 1
        assert r1 * first**2 * r2 * second**2 == pytest.approx(1, rel=0.1)
        assert last == pytest.approx((3 * 9000) ** -0.5, rel=0.05)
    else:
        assert first == pytest.approx(last, rel=0.1)
    deviation = group.rows(0, torch.arange(9000)).std().item()
    assert deviation == pytest.approx((3 * 9000) ** -0.5, rel=0.05)


@pytest.mark.parametrize(("kind", "rule"), [("auto", "adagrad"), ("hash", "adam"), ("tt", "sgd")])
def test_a_budget_may_count_the_state_of_the_optimizer(data, kind, rule):
    meta, sizes = Meta.read(data), {}
    for counts in ("serving", "training"):
        given = ["--data", str(data), "--emb", kind, "--optim.embeddings", rule]
        given += ["--budget", "80KB", "--budget_counts", counts]
        config = parse(given, available())[0]
        spec = model_spec(config, meta, IdStatistics(config.data, meta))
        model = build_model(config, spec, meta, World.from_environment(), list)[0]
        rows = sum(sum(table.values()) for table in model.sparse_arch.footprint())
        optimizer = build_optimizers(config.optim, model)[1]
        sizes[counts] = rows, rows + optimizer.state_bytes(model.sparse_arch.parameters())
    assert 60_000 < sizes["training"][1] <= 80_000  # a row of two weights has twice the state
    assert 70_000 < sizes["serving"][0] <= 80_000
    assert (sizes["serving"][1] > 80_000) == (rule != "sgd")


def test_rows_of_large_tables_are_drawn_where_they_will_be(data, monkeypatch):
    """Not in host memory, which may have no room for tables of 100 GB."""
    monkeypatch.setattr(build, "LARGE", 1000)
    config = parse(["--data", str(data)], available())[0]
    meta, world, drawn = Meta.read(data), World.from_environment(), set()
    spec = model_spec(config, meta, IdStatistics(config.data, meta))
    world.join(torch.device("meta"))
    monkeypatch.setattr(nn.init, "uniform_", lambda rows, *_: drawn.add(rows.device.type))
    build_model(config, spec, meta, world, list)
    assert drawn == {"meta"}


@pytest.mark.parametrize(("tables", "interaction"), [(512, "dot"), (513, "dcn")])
def test_many_tables_interact_by_a_cross_network(data, capsys, tables, interaction):
    """The pairs of 2,500 tables took 13 GB of weights and gradients, for 40 rows."""
    meta = Meta.read(data)
    names = [replace(meta.categorical[0], name=f"C{i}") for i in range(tables)]
    meta = replace(meta, categorical=tuple(names))
    config = parse(["--data", str(data)], available())[0]
    spec = model_spec(config, meta, IdStatistics(config.data, meta))
    assert spec["interaction"] == interaction
    note_plan(config, spec, 1.0)
    told = capsys.readouterr().err
    assert told.startswith("note: 513 tables interact by a cross network of rank 64") == (
        interaction == "dcn"
    )
