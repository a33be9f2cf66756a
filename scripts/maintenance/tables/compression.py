"""Tables of docs/compression.md."""

from __future__ import annotations

import re
from statistics import fmean
from typing import Any

import pandas as pd

from scripts.maintenance.tables.markdown import ROOT, markdown, read, source, table


def pivot(result: dict[str, Any], metric: str = "AUC", seeds: int = 1) -> str:
    """A metric of each kind by compression ratio, with its standard deviation over seeds. The best
    of each ratio is in bold, among those of at least so many seeds.
    """
    rows = {(row["emb"], row["budget"]): row for row in result["results"]}
    ratios = sorted({ratio for _, ratio in rows if ratio}, key=lambda ratio: float(ratio[:-1]))
    kinds = sorted({kind for (kind, at), row in rows.items() if at and row[metric] is not None})

    def cell(kind: str, ratio: str) -> str:
        row = rows.get((kind, ratio), {})
        if row.get(metric) is None:
            return "-"
        text = number(row[metric])
        if row[f"{metric} std"] is not None:
            text += f" ± {row[f'{metric} std']:.4f}"
        known = [own for (_, at), own in rows.items() if at == ratio and own["seeds"] >= seeds]
        best = max((own[metric] or 0.0 for own in known), default=0.0)
        return f"**{text}**" if ratio and row[metric] == best else text

    head = [f"`--emb` (dense: {cell('dense', '')})", *ratios]
    return markdown(head, [[f"`{kind}`", *(cell(kind, r) for r in ratios)] for kind in kinds])


def number(value: float) -> str:
    """A share with four decimals, or a rate in thousands or millions."""
    if value < 1:
        return f"{value:.4f}"
    return f"{value / 1e6:.1f} M" if value >= 1e6 else f"{value / 1e3:.1f} k"


def measured_again(name: str, *later: str) -> dict[str, Any]:
    """A result in which the compressed tables of kinds that later files have are those of the last
    such file.
    """
    result = read(name)
    for again in later:
        new = [row for row in read(again)["results"] if row["budget"]]
        kinds = {row["emb"] for row in new}
        result["results"] = [row for row in result["results"] if row["emb"] not in kinds] + new
    return result


SAMPLE = "frontier_sample", "frontier_auto_sample", "frontier_types_sample"


def sample_results() -> dict[str, Any]:
    """The results of :func:`sample`: kinds with rows in fp32, and those of other types."""
    result = measured_again(*SAMPLE)
    of_old_kinds = [row for row in result["results"] if row["emb"] != "tt+cache"]
    return {**result, "results": of_old_kinds}


def sample() -> str:
    """Quality of each kind at equal memory, on real data."""
    trees = [result["auc"] for result in read("trees_sample")["results"]]
    best = f"\nBoosted trees on the same rows reach {sum(trees) / len(trees):.4f}.\n"
    return pivot(sample_results(), seeds=2) + best + source(*SAMPLE)


def sample_figure() -> pd.DataFrame:
    """What the figure of the sample shows: cells of several seeds; of kinds with rows of several
    types int8 alone.
    """
    rows = [row for row in sample_results()["results"] if row["seeds"] > 1]
    typed = {row["emb"].partition(" ")[0] for row in rows if " " in row["emb"]} - {"tt"}
    return pd.DataFrame([{**row, "data": "sample"} for row in rows if row["emb"] not in typed])


def sample_speed() -> str:
    """Training throughput of the models in :func:`sample`."""
    return pivot(read("frontier_sample"), "samples/s") + source("frontier_sample")


def retail() -> str:
    """Quality of each kind at equal memory, on the retail benchmark."""
    names = "frontier_retail", "frontier_auto_retail"
    return pivot(measured_again(*names)) + source(*names)


def full() -> str:
    """Quality of each kind at equal memory, on synthetic data of Kaggle's full size."""
    result = read("frontier_h100")
    best = f"\nThe best possible model reaches {result['best_possible']['auc']:.4f}.\n"
    return pivot(result) + best + source("frontier_h100")


def full_speed() -> str:
    """Training throughput of the models in :func:`full`."""
    return pivot(read("frontier_h100"), "samples/s") + source("frontier_h100")


def tt_rec() -> str:
    """The grid of TT-Rec on synthetic data of Kaggle's full size."""
    return _grid("tt_rec_h100")


def tt_rec_sgd() -> str:
    """The cells with 7 tables by the paper's own recipe, on synthetic data of Kaggle's size."""
    return _grid("tt_rec_sgd_h200")


def tt_rec_sample() -> str:
    """The grid of TT-Rec on real data, with smaller tables and without step times."""
    return _grid("tt_rec_sample")


def _grid(name: str) -> str:
    rows = read(name)["results"]
    for r in rows:
        kind = r["cell"].removeprefix("fitted-")
        found = re.fullmatch(r"tt(\d+)-r(\d+)(?:-c([\d.e-]+))?", kind)
        tables, rank, cache = found.groups() if found else ("-", "-", None)
        what = "dense, compressed" if kind != r["cell"] else "TT" if found else "dense"
        r |= {"what": what, "tables": tables, "rank": rank}
        r["cache"] = f"{100 * float(cache):g}%" if cache else "-"
        r["several"] = "" if r["loss, % std"] is None else f" ± {r['loss, % std']:.3f}"
        r["step"] = "-" if r.get("step, ms") is None else f"{r['step, ms']:.2f}"
    columns = {
        **{"embeddings": "{what}", "tables": "{tables}", "rank": "{rank}", "cache": "{cache}"},
        **{"compression": "{ratio:.1f}x", "MB": "{MB:,.1f}"},
        **{"accuracy lost, points": "{loss, %:.3f}{several}", "AUC": "{AUC:.4f}"},
        **({"step, ms": "{step}"} if "step, ms" in rows[0] else {}),
    }
    return table(columns, rows, name)


def compressed() -> str:
    """Change of the AUC when a trained model is compressed."""
    names = "compressed_sample", "compressed_auto_sample"
    results = measured_again(*names)["results"]
    changes = {(r["emb"], r["budget"]): r["auc_change"] for r in results if r["budget"]}
    kinds = list(dict.fromkeys(kind for kind, _ in changes))
    ratios = sorted({ratio for _, ratio in changes})
    kinds.sort(key=lambda kind: -changes.get((kind, 10.0), -1.0))

    def change(kind: str, ratio: float) -> str:
        return f"{changes[kind, ratio]:+.4f}" if (kind, ratio) in changes else "-"

    rows = [[f"`{kind}`", *(change(kind, ratio) for ratio in ratios)] for kind in kinds]
    head = ["`--emb`", *(f"{ratio:g}x" for ratio in ratios)]
    return markdown(head, rows) + source(*names)


def packed_sample() -> str:
    """Quality of rows of 8 and 4 bits on real data."""
    rows = [
        [f"`{row['dtype']}`", f"{row['AUC']:.4f} ± {row['AUC std']:.4f}",
         f"{row['log loss']:.4f}", f"{row['MB']:.2f}", f"{row['ratio']:.1f}x"]
        for row in read("packed_sample")["results"]
    ]  # fmt: skip
    head = ["`--tables.dtype`", "AUC", "log loss", "MB", "smaller"]
    return markdown(head, rows) + source("packed_sample")


def true_bytes() -> str:
    """What compressed tables keep in training and in serving."""
    rows = [
        [
            f"`{row['method']}`" if " " in row["method"] else row["method"],
            "-" if row["ratio"] is None else f"{row['ratio']:g}x",
            *(
                text
                for where in ("training", "serving")
                for text in (f"{row[f'{where}_MB']:,.1f}", f"{row[f'{where}_smaller']:g}x")
            ),
            ", ".join(part for part in {**row["training"], **row["serving"]}),
        ]
        for row in read("true_bytes")["results"]
    ]
    head = ["", "weights", "training, MB", "smaller", "serving, MB", "smaller", "what is kept"]
    return markdown(head, rows) + source("true_bytes")


def tt_steps() -> str:
    """How far a step of SGD moves a row of a tensor train."""
    results = read("tt_steps")["results"]
    moved = {(r["rows"], r["rank"], r["start"]): r["moved"] for r in results}
    starts = list(dict.fromkeys(r["start"] for r in results))
    cells = list(dict.fromkeys((r["rows"], r["rank"]) for r in results if r["rank"] in (8, 32)))
    shown = [cell for cell in cells if cell[0] in (cells[0][0], cells[-1][0])]
    rows = [
        [f"{rows:,}", str(rank), *(f"{moved[rows, rank, start]:.2g}" for start in starts)]
        for rows, rank in shown
    ]
    return markdown(["rows", "rank", *starts], rows) + source("tt_steps")


def tt_sgd() -> str:
    """Quality under plain SGD before and after the scale of trains went into the last core."""
    names = {
        "tt_rec_sgd_synthetic": "synthetic, 430,000 rows",
        "tt_rec_sgd_sample": "the sample",
    }
    names = {
        name: text
        for name, text in names.items()
        if (ROOT / "benchmarks" / f"{name}.json").exists()
    }
    found = {}
    for name, text in names.items():
        for at, file in (("before", f"{name}_before"), ("now", name)):
            for row in read(file)["results"]:
                found[row["cell"], f"{text}, {at}"] = row
    columns = list(dict.fromkeys(column for _, column in found))
    cells = {"dense": "dense", "tt7-r8": "7 tables, rank 8", "tt7-r32": "7 tables, rank 32"}

    def auc(row: dict[str, Any]) -> str:
        return f"{row['AUC']:.4f}" + (f" ± {row['AUC std']:.4f}" if row["AUC std"] else "")

    rows = [
        [text, *(auc(found[cell, column]) for column in columns)] for cell, text in cells.items()
    ]
    return markdown(["embeddings", *columns], rows) + source(*names)


def tt_changes() -> str:
    """What each part of tensor-train tables is worth at equal bytes."""
    names = {
        "trains": "trains alone, fp32",
        "exact rows": "and exact rows for the frequent ids",
        "bf16": "in bf16",
        "int8": "exact rows in int8, trains in bf16",
        "int4": "exact rows in int4, trains in bf16",
        "cache": "in bf16, and a cache",
        "auto": "`--emb auto`",
    }
    files = [f"tt_changes_{name}" for name in ("sample", "retail")]
    files = [name for name in files if (ROOT / "benchmarks" / f"{name}.json").exists()]
    found = {
        (f"{name.removeprefix('tt_changes_')}, {row['budget']:g}x", row["variant"]): row
        for name in files
        for row in read(name)["results"]
    }
    columns = list(dict.fromkeys(column for column, _ in found))

    def cell(column: str, variant: str) -> str:
        row = found.get((column, variant))
        if row is None:
            return "-"
        return f"{row['auc']:.4f}" + (f" ± {row['auc_std']:.4f}" if row["auc_std"] else "")

    rows = [[text, *(cell(column, key) for column in columns)] for key, text in names.items()]
    head = ["`--emb tt --budget`", *columns]
    return markdown(head, rows) + source(*files)


def fine_tuning() -> str:
    """What another epoch of a trained model reaches that was compressed."""
    rows = []
    for row in read("fine_tuning_sample")["results"]:
        means = {name: fmean(row[name]) for name in ("scratch", "fitted", "fine_tuned")}
        rows.append(row | means | {"budget": row["budget"] or ""})
    columns = {
        "`--emb`": "`{emb}`",
        "budget": "{budget}",
        "from scratch": "{scratch:.4f}",
        "fitted": "{fitted:.4f}",
        "fine-tuned": "{fine_tuned:.4f}",
        "gained over the better": "{gained:+.4f}",
    }
    return table(columns, rows, "fine_tuning_sample")


FIGURES = {"frontier_sample": sample_figure}

TABLES = (
    fine_tuning,
    tt_changes,
    sample,
    sample_speed,
    retail,
    full,
    full_speed,
    tt_rec,
    tt_rec_sgd,
    tt_rec_sample,
    compressed,
    packed_sample,
    true_bytes,
    tt_steps,
    tt_sgd,
)
