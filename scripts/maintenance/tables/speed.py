"""Tables of docs/speed.md."""

from __future__ import annotations

import json
from operator import itemgetter

from scripts.maintenance.tables.markdown import ROOT, read, table

RECORDS = ROOT / "benchmarks" / "speedrun" / "records.json"


def cpu_step() -> str:
    """Training step on a CPU, compared with TorchRec."""
    columns = {
        "`--emb`": "`{kind}`",
        "optimizer": "{rule}",
        "precision": "{precision}",
        "ms": "{ms:.1f}",
        "times TorchRec's speed": "{times best peer}",
    }
    return table(columns, read("step_cpu")["results"], "step_cpu")


def busy_cpu() -> str:
    """Training next to other programs, with and without bounded spinning."""
    result = read("busy_cpu")
    names = {
        "ours": "bounded spin",
        "default": "PyTorch's default",
        "passive": "no spin",
        "one thread": "one thread",
    }
    states = {
        "idle": "idle",
        "busy": "busy",
        "busy_counting": "busy",
        "busy_training": "next to training",
    }
    rows = [
        {"machine": shown, "name": names[way], **result[state][way]}
        for state, shown in states.items()
        for way in names
        if way in result.get(state, {})
    ]
    columns = {
        "machine": "{machine}",
        "waiting threads": "{name}",
        "training, s": "{training:.1f}",
        "whole program, s": "{whole:.1f}",
    }
    return table(columns, rows, "busy_cpu")


def gpu_step() -> str:
    """Captured training step on one GPU, compared with the fastest other library."""
    return _steps("step_h100", {"times best peer": "{times best peer}"})


def gpu_step_h200() -> str:
    """Captured training step with more optimizers, without a comparison."""
    return _steps("step_h200", {})


def _steps(name: str, more: dict[str, str]) -> str:
    columns = {
        "`--emb`": "`{kind}`",
        "optimizer": "{rule}",
        "batch": "{batch:,}",
        "ms": "{ms:.2f}",
        "samples/s": "{Msamples/s:.1f} M",
        **more,
        "embeddings, MB": "{embedding_MB:,.0f}",
        "peak GPU, MB": "{peak_gpu_MB:,.0f}",
    }
    return table(columns, sorted(read(name)["results"], key=itemgetter("kind", "batch")), name)


def gpu_kinds() -> str:
    """Captured training step of the kinds that store rows, compared with dense."""
    results = sorted(read("step_kinds_h100")["results"], key=itemgetter("batch"))
    dense = {r["batch"]: r["ms"] for r in results if r["kind"] == "dense"}
    columns = {
        "`--emb`": "`{kind}`",
        "batch": "{batch:,}",
        "ms": "{ms:.3f}",
        "samples/s": "{Msamples/s:.1f} M",
        "speed relative to dense": "{share:.2f}",
        "embeddings, MB": "{embedding_MB:,.0f}",
    }
    rows = [{**r, "share": dense[r["batch"]] / r["ms"]} for r in results]
    return table(columns, rows, "step_kinds_h100")


def tt_alone() -> str:
    """Tensor-train look-ups: forward, backward and SGD."""
    shapes = {
        "bags": ("4, 4, 4", 32, "512 bags of 20"),
        "dim16": ("2, 2, 4", 32, "65,536"),
        "dim64": ("4, 4, 4", 32, "65,536"),
        "dim128-rank64": ("4, 4, 8", 64, "65,536"),
        "4-cores": ("2, 2, 2, 2", 32, "65,536"),
    }
    results = {(r["case"], r["ids"]): r for r in read("tt_h100")["results"]}
    rows = []
    for case, (q, rank, lookups) in shapes.items():
        uniform, skewed = results[case, "uniform"], results[case, "skewed"]
        floor = max(uniform["floor_step_arithmetic_us"], uniform["floor_step_bytes_us"])
        own = {"q": q, "rank": rank, "lookups": lookups, "floor": 1e-3 * floor}
        peer = {"reference_ms": "-", "times_reference": "-"}
        rows.append({**peer, **uniform, "skewed": skewed["step_ms"], **own})
    columns = {
        "q": "{q}",
        "rank": "{rank}",
        "look-ups": "{lookups}",
        "uniform ids, ms": "{step_ms:.3f}",
        "skewed, ms": "{skewed:.3f}",
        "floor, ms": "{floor:.3f}",
        "TT-Rec's kernel, ms": "{reference_ms}",
        "times faster": "{times_reference}",
    }
    return table(columns, rows, "tt_h100")


def lookup() -> str:
    """Dense look-ups: forward, backward and update of 26 tables."""
    rows = [r for r in read("lookup_h100")["results"] if r["ids"] == "skewed"]
    for r in rows:
        r["floor"] = r["forward_floor"] + r["update_floor"]
        r["peer"] = f"{r['fbgemm']:.2f}" if r.get("fbgemm") else "-"
    columns = {
        "dim": "{dim}",
        "batch": "{batch:,}",
        "optimizer": "{rule}",
        "ms": "{all:.3f}",
        "floor by bytes, ms": "{floor:.3f}",
        "FBGEMM, ms": "{peer}",
        "`nn.EmbeddingBag`, ms": "{embedding_bags:.2f}",
    }
    return table(columns, rows, "lookup_h100")


def basis() -> str:
    """A codebook output layer, compared with a linear one."""
    columns = {
        "hidden": "{hidden:,}",
        "vocabulary": "{vocabulary:,}",
        "forward: linear, ms": "{linear_forward:.3f}",
        "basis, ms": "{basis_forward:.3f}",
        "times faster": "{forward_times_faster:.1f}",
        "forward and backward: linear, ms": "{linear_forward_backward:.3f}",
        "basis, both, ms": "{basis_forward_backward:.3f}",
        "times faster, both": "{forward_backward_times_faster:.1f}",
        "linear, MB": "{linear_MB:.0f}",
        "basis, MB": "{basis_MB:.1f}",
    }
    return table(columns, read("basis_h100")["results"], "basis_h100")


def basis_cpu() -> str:
    """The same on a CPU."""
    columns = {
        "inputs": "{hidden:,}",
        "outputs": "{vocabulary:,}",
        "tokens": "{tokens}",
        "pass": "{way}",
        "linear, ms": "{linear:.2f}",
        "basis, ms": "{basis:.2f}",
        "times faster": "{times_faster:.2f}",
    }
    ways = {
        (1, False): "forward",
        (8, False): "forward",
        (8, True): "forward and backward",
        (128, True): "forward and backward",
    }
    found = [
        (row, ways.get((row["tokens"], row["backward"]))) for row in read("basis_cpu")["results"]
    ]
    rows = [{**row, "way": way} for row, way in found if way]
    return table(columns, rows, "basis_cpu")


def epoch() -> str:
    """An epoch on one GPU, from Parquet to test metrics."""
    columns = {
        "`--emb`": "`{kind}`",
        "batch": "{batch:,}",
        "training, s": "{training:.1f}",
        "test metrics, s": "{test_metrics:.2f}",
        "total, s": "{epoch:.1f}",
        "waiting for data": "{wait_share:.0%}",
        "rows/s": "{Mrows/s:.1f} M",
        "start, s": "{start:.0f}",
    }
    rows = read("epoch_h100")["results"]
    for r in rows:
        r["start"] = r["building"] + r["compiling_and_capturing"]
    return table(columns, rows, "epoch_h100")


def epoch_small() -> str:
    """The training loop at a small batch, where the CPU may be slower than the GPU."""
    columns = {
        "`--emb`": "`{kind}`",
        "rows gathered together": "{rows_gathered:,}",
        "a step alone, ms": "{step_ms:.3f}",
        "rows/s": "{Mrows/s:.2f} M",
        "of the step's speed": "{loop_of_step:.2f}",
    }
    return table(columns, read("epoch_small_h200")["results"], "epoch_small_h200")


def mlperf() -> str:
    """Steps of MLPerf's DLRM-DCNv2 on one GPU, next to records of several."""
    ours, records = read("speedrun/mlperf_h200"), json.loads(RECORDS.read_text())["records"]
    rows = [
        {
            "by": f"ours, 1 x {ours['environment']['device'].removeprefix('NVIDIA ')}, {r['bags']}",
            "batch": f"{r['batch']:,}",
            "speed": r["Msamples/s"],
            "counted": "batches on the GPU, no communication",
        }
        for r in sorted(ours["results"], key=itemgetter("batch"))
    ]
    for r in records:
        if r["model"] == ours["model"]:
            batch = f"{r['batch'] // r['gpus']:,}" if r["batch"] else "not the same"
            speed, counted = r["Msamples/s"] / r["gpus"], "loading and communication"
            rows.append({"by": r["by"], "batch": batch, "speed": speed, "counted": counted})
    columns = {
        "by": "{by}",
        "batch per GPU": "{batch}",
        "samples/s per GPU": "{speed:.2f} M",
        "counted": "{counted}",
    }
    return table(columns, rows, "speedrun/mlperf_h200")


def rules() -> str:
    """A look-up with its update under every rule, and how many times what its bytes take."""
    found: dict[str, dict[str, str]] = {}
    results = [r for r in read("rules_h200")["results"] if r["ids"] == "int32"]
    dims = sorted({r["dim"] for r in results})
    for r in results:
        cell = f"{r['all_ms']:.2f} ({r['times_floor']:.1f}, {r['update_times_floor']:.1f})"
        found.setdefault(r["rule"], {"rule": r["rule"]})[f"dim {r['dim']}"] = cell
    columns = {"optimizer": "{rule}"} | {f"dim {dim}": f"{{dim {dim}}}" for dim in dims}
    return table(columns, list(found.values()), "rules_h200")


def export() -> str:
    """Milliseconds of exported models and of others, by the size of the batch."""
    result = read("export_cpu")
    batches = [key for key in result["results"][0] if key.startswith("batch_")]
    columns = {"model": "{name}", "tables, MB": "{megabytes}", "load, s": "{load}"}
    columns |= {f"{int(key.removeprefix('batch_')):,}": f"{{{key}}}" for key in batches}
    rows = [
        {
            "name": one["model"].replace("tt", f"tt, {one.get('times_smaller', 0):.0f}x"),
            "megabytes": f"{one['table_bytes'] / 1e6:,.0f}" if "table_bytes" in one else "",
            "load": f"{one['load_seconds']:.2f}" if "load_seconds" in one else "",
        }
        | {key: f"{one[key]['p50_ms']:.2f} ({one[key]['p99_ms']:.2f})" for key in batches}
        for one in result["results"]
    ]
    return table(columns, rows, "export_cpu")


TABLES = (
    export,
    mlperf,
    rules,
    cpu_step,
    busy_cpu,
    gpu_step,
    gpu_step_h200,
    gpu_kinds,
    tt_alone,
    lookup,
    basis,
    basis_cpu,
    epoch,
    epoch_small,
)
