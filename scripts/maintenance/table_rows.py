"""The rows of the tables in ``tables.yaml`` whose cells are not simply those of the results.

Each function gets the results in the files of its table, and returns rows: values by name or, where
the columns depend on the results, texts by the head of their column.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter, sub
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import pandas as pd

ROOT = Path(__file__).parents[2]
Result = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]

RATIOS = ("2x", "10x", "30x", "100x", "300x", "1000x")  # of the bench
COMPARED = ("boosted trees", "`dense`", "`auto` 100x")


def read(name: str) -> Result:
    """A result by the name of its file, or one of those in a file of all: ``all_h200:step``."""
    name, _, part = name.partition(":")
    found = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())
    return {"environment": found["environment"], **found["results"][part]} if part else found


def spread(value: float, deviation: float | None, form: str = ".4f") -> str:
    """A number with its standard deviation, if there is one."""
    return f"{value:{form}}" + (f" ± {deviation:{form}}" if deviation else "")


# Of docs/speed.md


def steps(result: Result) -> Iterator[Mapping[str, Any]]:
    """Steps of a kind and a batch with each rule, in ms and relative to dense; "-": not timed."""
    found = {(r["kind"], r["batch"], r["rule"]): r for r in result["results"]}
    for kind, batch, _ in (key for key in found if key[2] == "sgd"):
        cells = {}
        for rule in ("sgd", "rowwise_adagrad", "adam"):
            ms = found.get((kind, batch, rule), {}).get("ms")
            cells[rule] = f"{ms:.3f} ({found['dense', batch, rule]['ms'] / ms:.2f})" if ms else "-"
        yield {**found[kind, batch, "sgd"], **cells}


def tt_alone(result: Result) -> Iterator[Mapping[str, Any]]:
    """Look-ups of uniform ids, next to the time of skewed ones and to the larger floor."""
    shapes = {
        "bags": ("4, 4, 4", 32, "512 bags of 20"),
        "dim16": ("2, 2, 4", 32, "65,536"),
        "dim64": ("4, 4, 4", 32, "65,536"),
        "dim128-rank64": ("4, 4, 8", 64, "65,536"),
        "4-cores": ("2, 2, 2, 2", 32, "65,536"),
    }
    found = {(r["case"], r["ids"]): r for r in result["results"]}
    for case, (q, rank, lookups) in shapes.items():
        uniform, skewed = found[case, "uniform"], found[case, "skewed"]
        floor = max(uniform["floor_step_arithmetic_us"], uniform["floor_step_bytes_us"])
        shape = {"q": q, "rank": rank, "lookups": lookups}
        times = {"skewed": skewed["step_ms"], "floor": 1e-3 * floor}
        yield {"reference_ms": "-", "times_reference": "-", **uniform, **times, **shape}


def lookups(result: Result) -> Iterator[Mapping[str, Any]]:
    """Look-ups of skewed ids, with the sum of their floors."""
    for r in result["results"]:
        if r["ids"] == "skewed":
            peer = f"{r['fbgemm']:.2f}" if r.get("fbgemm") else "-"
            yield {**r, "floor": r["forward_floor"] + r["update_floor"], "peer": peer}


def basis_on_cpu(result: Result) -> Iterator[Mapping[str, Any]]:
    """Some of the numbers of tokens."""
    directions = {(1, False): "forward", (8, False): "forward"}
    directions |= dict.fromkeys([(8, True), (128, True)], "forward and backward")
    for r in result["results"]:
        if direction := directions.get((r["tokens"], r["backward"])):
            yield {**r, "direction": direction}


def mlperf(result: Result) -> Iterator[Mapping[str, Any]]:
    """Steps on one GPU, and records of several by GPU."""
    device = result["environment"]["device"].removeprefix("NVIDIA ")
    for r in sorted(result["results"], key=itemgetter("batch")):
        row = {"by": f"ours, 1 x {device}, {r['bags']}", "batch": f"{r['batch']:,}"}
        yield {**row, "speed": r["Msamples/s"], "counted": "batches on the GPU, no communication"}
    for r in json.loads((ROOT / "benchmarks/speedrun/records.json").read_text())["records"]:
        if r["model"] == result["model"]:
            batch = f"{r['batch'] // r['gpus']:,}" if r["batch"] else "not the same"
            speed = r["Msamples/s"] / r["gpus"]
            counted = "loading and communication"
            yield {"by": r["by"], "batch": batch, "speed": speed, "counted": counted}


def rules(result: Result) -> Rows:
    """Milliseconds of every optimizer by dim, with the multiples of what the bytes take."""
    rows: dict[str, dict[str, str]] = {}
    for r in sorted(result["results"], key=itemgetter("dim")):
        if r["ids"] == "int32":
            cell = f"{r['all_ms']:.2f} ({r['times_floor']:.1f}, {r['update_times_floor']:.1f})"
            rows.setdefault(r["rule"], {"optimizer": r["rule"]})[f"dim {r['dim']}"] = cell
    return list(rows.values())


def exports(result: Result) -> Iterator[Mapping[str, Any]]:
    """Milliseconds of exported models and of others, by the size of the batch."""
    for r in result["results"]:
        row = {"model": r["model"].replace("tt", f"tt, {r.get('times_smaller', 0):.0f}x")}
        row["tables, MB"] = f"{r['table_bytes'] / 1e6:,.0f}" if "table_bytes" in r else ""
        row["load, s"] = f"{r['load_seconds']:.2f}" if "load_seconds" in r else ""
        for key in r:
            if key.startswith("batch_"):
                head = f"{int(key.removeprefix('batch_')):,}"
                row[head] = f"{r[key]['p50_ms']:.2f} ({r[key]['p99_ms']:.2f})"
        yield row


# Of docs/many_gpus.md


def distributed(*results: Result) -> Iterator[Mapping[str, Any]]:
    """Steps of several GPUs."""
    for result in results:
        device = result["environment"]["device"].split()[1]
        for r in (r for r in result["results"] if r["gpus"] > 1):
            wire = "" if r["wire"] in ("fp32", "-") else f", {r['wire']}"
            eight = r.get("predicted", {}).get("8")
            eight = f"{eight['Msamples/s']:.1f} M" if eight else "-"
            row = {"name": r["model"].capitalize(), "wire": wire, "device": device, "eight": eight}
            yield r | row


def offloaded(*results: Result) -> Iterator[Mapping[str, Any]]:
    """Offloaded tables whose rows are fetched ahead, with their speed relative to dense ones."""
    for result in results:
        device = result["environment"]["device"].split()[1]
        for r in (r for r in result["results"] if "host_bytes" in r):
            yield {"rows": "fp32", **r, "share": r.get("speed of dense", "-"), "device": device}


# Of docs/data.md


def prepared(result: Result) -> Rows:
    """Preparations by the millions of their rows."""
    return [{**r, "millions": r["rows"] / 1e6} for r in result["runs"]]


def _million(rate: Mapping[str, float]) -> str:
    return f"{rate['median'] / 1e6:.1f} M"


def loaded(*results: Result) -> Iterator[Mapping[str, Any]]:
    """Rows per second on either machine, next to the bounds."""
    for result, machine in zip(results, ("2 cores", "H100, 16 cores"), strict=True):
        rates = {(r["batch_size"], r["shuffle"]): r["rows_per_second"] for r in result["loader"]}
        for size in sorted({size for size, _ in rates}):
            yield {
                "machine": machine,
                "batch": f"{size:,}",
                "shuffled, rows/s": _million(rates[size, True]),
                "in order, rows/s": _million(rates[size, False]),
                "floor: pyarrow read": _million(result["floors"]["pyarrow_read"]),
                "floor: plain copy": _million(result["floors"]["plain_copy"]),
            }


def loaded_lists(*results: Result) -> Iterator[Mapping[str, Any]]:
    """Ids per second on either machine."""
    cores = results[1]["environment"]["cores"]
    for result, machine in zip(results, ("2 busy cores", f"H200, {cores} cores"), strict=True):
        for r in result["loader"]:
            rates = {k: f"{v['median'] / 1e6:,.0f} M" for k, v in r["ids_per_second"].items()}
            row = {"machine": machine, "batch": f"{r['batch_size']:,}", "order": r["order"]}
            row |= {"one-hot columns, ids/s": rates["flat"]}
            yield row | {"lists of fixed lengths": rates["lists"], "ragged": rates["ragged"]}


def predicted(result: Result) -> Iterator[Mapping[str, Any]]:
    """Scores of raw and of prepared rows, and the time of a few raw ones."""
    names = {"criteo": "Criteo", "table": "10 numbers, 10 texts"}
    times = {(r["data"], r["rows"]): f"{r['median_ms']:.0f}" for r in result["latencies"]}
    for r in result["runs"]:
        raw = r["rows"] == "raw"
        yield {
            "rows": f"{names[r['data']]}, {r['rows']}",
            "rows/s": f"{r['rows_per_second']:,}",
            "core seconds per M rows": f"{r['core_seconds_per_million_rows']:.0f}",
            "peak memory, GB": f"{r['peak_memory_gb']:.2f}",
            "1 row, ms": times[r["data"], 1] if raw else "",
            "1,024 rows, ms": times[r["data"], 1024] if raw else "",
        }


# Of docs/compression.md and docs/training.md


def pivot(results: Rows, metric: str = "AUC", seeds: int = 1) -> Rows:
    """A metric of each kind by compression ratio, with its standard deviation over seeds. The best
    of each ratio is in bold, among those of at least so many seeds.
    """
    rows = {(row["emb"], row["budget"]): row for row in results}
    ratios = sorted({ratio for _, ratio in rows if ratio}, key=lambda ratio: float(ratio[:-1]))
    kinds = sorted({kind for (kind, at), row in rows.items() if at and row[metric] is not None})

    def cell(kind: str, ratio: str) -> str:
        row = rows.get((kind, ratio), {})
        if row.get(metric) is None:
            return "-"
        deviation = row[f"{metric} std"]
        text = number(row[metric]) + ("" if deviation is None else f" ± {deviation:.4f}")
        comparable = [row for (_, at), row in rows.items() if at == ratio and row["seeds"] >= seeds]
        best = max((row[metric] or 0.0 for row in comparable), default=0.0)
        return f"**{text}**" if ratio and row[metric] == best else text

    head = f"`--emb` (dense: {cell('dense', '')})"
    return [{head: f"`{kind}`"} | {ratio: cell(kind, ratio) for ratio in ratios} for kind in kinds]


def number(value: float) -> str:
    """A share with four decimals, or a rate in thousands or millions."""
    if value < 1:
        return f"{value:.4f}"
    return f"{value / 1e6:.1f} M" if value >= 1e6 else f"{value / 1e3:.1f} k"


def latest(first: Result, *later: Result) -> list[dict[str, Any]]:
    """Results in which the compressed tables of a kind are those of the last file that has it."""
    rows = list(first["results"])
    for result in later:
        new = [row for row in result["results"] if row["budget"]]
        kinds = {row["emb"] for row in new}
        rows = [row for row in rows if row["emb"] not in kinds] + new
    return rows


def at_equal_bytes(*results: Result, metric: str = "AUC") -> Rows:
    """Quality, or another metric, of each kind at equal memory."""
    return pivot(latest(*results), metric)


def sample_quality(*results: Result) -> Rows:
    """The same on real data, kinds with rows of other types included."""
    return pivot([row for row in latest(*results) if row["emb"] != "tt+cache"], seeds=2)


def boosted_trees(*_: Result) -> str:
    """The AUC of another sort of model."""
    auc = fmean(result["auc"] for result in read("trees_sample")["results"])
    return f"Boosted trees on the same rows reach {auc:.4f}."


def best_possible(result: Result) -> str:
    """The bound of every model."""
    return f"The best possible model reaches {result['best_possible']['auc']:.4f}."


def sample_figure(result: Result) -> pd.DataFrame:
    """Points of the figure of the sample; of kinds of several types int8 only."""
    typed = {row["emb"].partition(" ")[0] for row in result["results"] if " " in row["emb"]}
    found = [row for row in result["results"] if row["emb"] not in typed]
    return pd.DataFrame([{**row, "data": "sample"} for row in found])


def grid(result: Result) -> Iterator[Mapping[str, Any]]:
    """Cells of TT-Rec's grid."""
    for r in result["results"]:
        kind = r["cell"].removeprefix("fitted-")
        found = re.fullmatch(r"tt(\d+)-r(\d+)(?:-c([\d.e-]+))?", kind)
        tables, rank, cache = found.groups() if found else ("-", "-", None)
        what = "dense, compressed" if kind != r["cell"] else "TT" if found else "dense"
        row = {**r, "embeddings": what, "tables": tables, "rank": rank}
        row["cache"] = f"{100 * float(cache):g}%" if cache else "-"
        row["spread"] = "" if r["loss, % std"] is None else f" ± {r['loss, % std']:.3f}"
        row["step"] = "-" if r.get("step, ms") is None else f"{r['step, ms']:.2f}"
        yield row


def bytes_kept(result: Result) -> Iterator[Mapping[str, Any]]:
    """Bytes that compressed tables keep in training and in serving."""
    for r in result["results"]:
        yield {
            "": f"`{r['method']}`" if " " in r["method"] else r["method"],
            "weights": "-" if r["ratio"] is None else f"{r['ratio']:g}x",
            "training, MB": f"{r['training_MB']:,.1f}",
            "smaller": f"{r['training_smaller']:g}x",
            "serving, MB": f"{r['serving_MB']:,.1f}",
            "smaller ": f"{r['serving_smaller']:g}x",
            "what is kept": ", ".join({**r["training"], **r["serving"]}),
        }


def _by_kind(result: Result, metric: str) -> dict[str, dict[str, str]]:
    """A test metric of boosted trees and of each kind at each ratio, by log."""
    name = metric.lower().replace(" ", "_")
    rows = {"boosted trees": {log: f"{r[name]:.4f}" for log, r in result["trees"].items()}}
    for r in sorted(result["results"], key=lambda r: (r["ratio"] > 1, len(r["budget"] or ""))):
        row = rows.setdefault(f"`{r['emb']}` {r['budget'] or ''}".strip(), {})
        row[r["log"]] = spread(r[metric], r[f"{metric} std"])
    return rows


def bench(result: Result, *, metric: str) -> Rows:
    """A test metric on each log with all ratios: of boosted trees, and of each kind."""
    rows, logs = _by_kind(result, metric).items(), _logs(result)
    return [{"": kind, **{log: row.get(log, "-") for log in logs}} for kind, row in rows]


def bench_means(result: Result, *, metric: str) -> Rows:
    """The mean over these logs of what each kind changes from dense tables with the same seed, with
    its standard error over the seeds."""
    every = result["results"]
    found = {(r["emb"], r["budget"] or "", r["log"]): r[f"{metric} by seed"] for r in every}
    logs, rows = _logs(result), dict[str, dict[str, str]]()
    for kind, budget in dict.fromkeys(key[:2] for key in found if key[0] != "dense"):
        row = rows.setdefault(f"`{kind}`", dict.fromkeys(RATIOS, "-"))
        if all((kind, budget, log) in found for log in logs):
            dense = [found["dense", "", log] for log in logs]
            pairs = zip((found[kind, budget, log] for log in logs), dense, strict=True)
            changes = [list(map(sub, scores, other)) for scores, other in pairs]
            error = sum(variance(change) / len(change) for change in changes) ** 0.5 / len(logs)
            row[budget] = f"{fmean(map(fmean, changes)):+.4f} ± {error:.4f}"
    return [{"`--emb`": kind, **row} for kind, row in rows.items()]


def _logs(result: Result) -> list[str]:
    """The logs on which there is each ratio."""
    return sorted({r["log"] for r in result["results"] if r["budget"] == RATIOS[0]})


def by_task(result: Result) -> Iterator[Mapping[str, Any]]:
    """Both test metrics on each log, of boosted trees, ``dense`` and ``auto`` at 100x."""
    found = {metric: _by_kind(result, metric) for metric in ("AUC", "log loss")}
    cells = [(metric, kind) for metric in found for kind in COMPARED]
    for log in sorted(result["trees"]):
        yield {"": log} | {f"{metric}, {kind}": found[metric][kind][log] for metric, kind in cells}


def over_days(result: Result) -> Rows:
    """Progressive AUC on each log, of each kind at each ratio."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for r in result["summary"]:
        cells = rows.setdefault((r["log"], r["kind"]), dict.fromkeys(("1x", "10x", "100x"), ""))
        cells[f"{r['ratio']:g}x"] = spread(r["auc"], r["spread"])
    return [{"log": log, "`--emb`": f"`{kind}`", **cells} for (log, kind), cells in rows.items()]
