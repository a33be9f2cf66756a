"""Write the tables of README.md and docs/ from the results in ``benchmarks/``.

``python scripts/maintenance/readme_tables.py`` replaces what stands between the marks
``<!-- table: NAME -->`` and ``<!-- end -->``; with ``--check`` it only says whether that would
change anything.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from dlrm.utils.program import Parser

ROOT = Path(__file__).parents[2]
MARK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def read(name: str) -> dict[str, Any]:
    """One result."""
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; all columns but the first are right-aligned."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines) + "\n"


def table(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]], *names: str) -> str:
    """A table of rows of some results: by the head of a column how it shows a row."""
    lines = [[form.format_map(row) for form in columns.values()] for row in rows]
    return markdown(list(columns), lines) + source(*names)


def source(*names: str) -> str:
    """Where the numbers come from."""
    places = {read(name)["environment"].get("device") or "cpu" for name in names}
    cores = {read(name)["environment"]["cores"] for name in names}
    where = ", ".join(
        f"{count} CPU cores" if place == "cpu" else place.replace(" HBM3", "")
        for place, count in zip(sorted(places), sorted(cores), strict=True)
    )
    files = ", ".join(f"`benchmarks/{name}.json`" for name in names)
    return f"\n*{where}; {files}.*\n"


def pivot(result: dict[str, Any], metric: str = "AUC") -> str:
    """A metric of every kind by ratio, ``mean ± deviation`` where there are several seeds."""
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
        best = max(other[metric] or 0.0 for (_, at), other in rows.items() if at == ratio)
        return f"**{text}**" if ratio and row[metric] == best else text

    head = [f"`--emb` (dense: {cell('dense', '')})", *ratios]
    return markdown(head, [[f"`{kind}`", *(cell(kind, r) for r in ratios)] for kind in kinds])


def number(value: float) -> str:
    """A share with four places, a rate in thousands or millions."""
    if value < 1:
        return f"{value:.4f}"
    return f"{value / 1e6:.1f} M" if value >= 1e6 else f"{value / 1e3:.1f} k"


def sample() -> str:
    """Quality of every kind at equal bytes on real rows."""
    trees = [result["auc"] for result in read("trees_sample")["results"]]
    best = f"\nBoosted trees on the same rows reach {sum(trees) / len(trees):.4f}.\n"
    return pivot(read("frontier_sample")) + best + source("frontier_sample")


def sample_speed() -> str:
    """Samples per second of training steps there."""
    return pivot(read("frontier_sample"), "samples/s") + source("frontier_sample")


def full() -> str:
    """The same on synthetic rows at Kaggle's full size."""
    result = read("frontier_h100")
    best = f"\nThe best possible model reaches {result['best_possible']['auc']:.4f}.\n"
    return pivot(result) + best + source("frontier_h100")


def full_speed() -> str:
    """Samples per second of training steps there."""
    return pivot(read("frontier_h100"), "samples/s") + source("frontier_h100")


def tt_rec() -> str:
    """The grid of TT-Rec at Kaggle's full size."""
    return _grid("tt_rec_h100")


def tt_rec_sample() -> str:
    """The same on real rows, where tables are small and speed was not measured."""
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


def cpu_step() -> str:
    """A step on a CPU beside TorchRec's."""
    columns = {
        "`--emb`": "`{kind}`",
        "optimizer": "{rule}",
        "precision": "{precision}",
        "ms": "{ms:.1f}",
        "times TorchRec's speed": "{times best peer}",
    }
    return table(columns, read("step_cpu")["results"], "step_cpu")


def gpu_step() -> str:
    """A captured step on one GPU beside the fastest peer's."""
    return _steps("step_h100", {"times best peer": "{times best peer}"})


def gpu_step_h200() -> str:
    """The same with more optimizers, on a GPU on which no peer was measured."""
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
    """A captured step of the kinds that keep rows, beside the dense one."""
    results = sorted(read("step_kinds_h100")["results"], key=itemgetter("batch"))
    dense = {r["batch"]: r["ms"] for r in results if r["kind"] == "dense"}
    columns = {
        "`--emb`": "`{kind}`",
        "batch": "{batch:,}",
        "ms": "{ms:.3f}",
        "samples/s": "{Msamples/s:.1f} M",
        "speed of dense": "{share:.2f}",
        "embeddings, MB": "{embedding_MB:,.0f}",
    }
    rows = [{**r, "share": dense[r["batch"]] / r["ms"]} for r in results]
    return table(columns, rows, "step_kinds_h100")


def tt_alone() -> str:
    """Look-ups of tensor trains: forward, backward and SGD."""
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
    """Dense look-ups: forward, backward and update of all 26 tables."""
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


def prepare() -> str:
    """From raw logs to Parquet."""
    rows = read("prepare_criteo")["runs"]
    columns = {
        "M rows": "{millions:.3g}",
        "seconds": "{seconds:.1f}",
        "rows/s": "{rows_per_second:,}",
        "peak memory, GB": "{peak_memory_gb:.2f}",
    }
    return table(columns, [{**r, "millions": r["rows"] / 1e6} for r in rows], "prepare_criteo")


def loader() -> str:
    """From Parquet to batches."""

    def million(rate: dict[str, float]) -> str:
        return f"{rate['median'] / 1e6:.1f} M"

    rows = []
    for name in ("loader", "loader_h100"):
        result = read(name)
        place = "H100, 16 cores" if "h100" in name else "2 cores"
        floors = [million(result["floors"][floor]) for floor in ("pyarrow_read", "plain_copy")]
        rates = {(r["batch_size"], r["shuffle"]): r["rows_per_second"] for r in result["loader"]}
        for size in sorted({size for size, _ in rates}):
            ordered = [million(rates[size, shuffle]) for shuffle in (True, False)]
            rows.append([place, f"{size:,}", *ordered, *floors])
    head = ["where to", "batch", "shuffled, rows/s", "in order, rows/s"]
    head += ["floor: pyarrow reads", "floor: a copy"]
    return markdown(head, rows) + "\n*`benchmarks/loader.json`, `benchmarks/loader_h100.json`.*\n"


def epoch() -> str:
    """From Parquet to test metrics on one GPU."""
    columns = {
        "`--emb`": "`{kind}`",
        "batch": "{batch:,}",
        "training, s": "{training:.1f}",
        "test metrics, s": "{test_metrics:.2f}",
        "both, s": "{epoch:.1f}",
        "waiting for data": "{wait_share:.0%}",
        "rows/s": "{Mrows/s:.1f} M",
        "start, s": "{start:.0f}",
    }
    rows = read("epoch_h100")["results"]
    for r in rows:
        r["start"] = r["building"] + r["compiling_and_capturing"]
    return table(columns, rows, "epoch_h100")


def pages() -> str:
    """Rows by address: through the link, from a peer, and steps of paged tables."""
    name = "pages_2xh200"
    found = read(name)
    link, peers = found["link"], found["peers"]
    near, *_, far, sorted_ = found["host"]
    to, copy = "to_gpu", peers["copy_from_peer"]
    lines = [
        ["pinned host memory", near["gather"], link[to], near["index_select_and_copy"]],
        ["... 4 GB of it", far["gather"], link[to], far["index_select_and_copy"]],
        ["... in ascending order", sorted_["gather"], link[to], sorted_["index_select_and_copy"]],
        ["another GPU", peers["all_on_peer"], copy, "-"],
        ["half on each GPU", peers["half_on_peer"], "-", peers["half_on_peer_portable"]],
        ["this GPU", peers["all_local"], "-", "-"],
    ]
    head = ["131,072 rows of 512 bytes", "by address, GB/s", "plain copy", "without addresses"]
    return markdown(head, lines) + source(name)


def offload() -> str:
    """Tables in host memory behind a cache of their rows."""
    columns = {
        "model": "{model}, {host_bytes:,.0f} MB",
        "optimizer": "{rule}",
        "batch": "{batch:,}",
        "ms": "{ms:.2f}",
        "samples/s": "{Msamples/s:.1f} M",
        "speed of dense": "{share}",
        "hit rate": "{hit_rate:.2f}",
        "MB each way": "{MB_in:.1f}",
        "of the link": "{link_share:.0%}",
    }
    rows = [r for r in read("offload_h100")["results"] if r["variant"] == "offload"]
    for r in rows:
        r["share"] = f"{r['speed of dense']:.2f}" if "speed of dense" in r else "-"
    return table(columns, rows, "offload_h100")


def basis() -> str:
    """A codebook output layer beside a linear one."""
    columns = {
        "hidden": "{hidden:,}",
        "vocabulary": "{vocabulary:,}",
        "forward: linear, ms": "{linear_forward:.3f}",
        "basis, ms": "{basis_forward:.3f}",
        "times faster": "{forward_times_faster:.1f}",
        "and backward: linear, ms": "{linear_forward_backward:.3f}",
        "basis, both, ms": "{basis_forward_backward:.3f}",
        "times faster, both": "{forward_backward_times_faster:.1f}",
        "linear, MB": "{linear_MB:.0f}",
        "basis, MB": "{basis_MB:.1f}",
    }
    return table(columns, read("basis_h100")["results"], "basis_h100")


def compressed() -> str:
    """What every kind makes of a trained model."""
    results = read("compressed_sample")["results"]
    changes = {(r["emb"], r["budget"]): r["auc_change"] for r in results if r["budget"]}
    kinds, ratios = (list(dict.fromkeys(keys)) for keys in zip(*changes, strict=True))
    kinds.sort(key=lambda kind: -changes.get((kind, 10.0), -1.0))

    def change(kind: str, ratio: float) -> str:
        return f"{changes[kind, ratio]:+.4f}" if (kind, ratio) in changes else "-"

    rows = [[f"`{kind}`", *(change(kind, ratio) for ratio in ratios)] for kind in kinds]
    head = ["`--emb`", *(f"{ratio:g}x" for ratio in ratios)]
    return markdown(head, rows) + source("compressed_sample")


def distributed() -> str:
    """Steps over several GPUs of one host."""
    names = ("distributed_2xh200", "distributed_4xh200")
    found = [row for name in names for row in read(name)["results"] if row["gpus"] > 1]
    found.sort(key=itemgetter("model", "kind", "gpus", "threshold", "ms"))
    columns = {
        "model": "{name}, `{kind}`",
        "GPUs": "{gpus}",
        "exchange by": "{exchange}{wire}",
        "sharded from rows": "{threshold:,}",
        "ms": "{ms:.2f}",
        "samples/s": "{Msamples/s:.1f} M",
        "of linear scaling": "{scaling:.2f}",
        "communicating or waiting, ms": "{communication_ms:.2f}",
    }
    for r in found:
        r["name"] = r["model"].capitalize()
        r["wire"] = "" if r["wire"] in ("fp32", "-") else f", {r['wire']}"
    return table(columns, found, *names)


TABLES = (
    *(sample, sample_speed, full, full_speed, tt_rec, tt_rec_sample, compressed),
    *(cpu_step, gpu_step, gpu_step_h200, gpu_kinds, tt_alone, lookup, basis),
    *(prepare, loader, epoch, pages, offload, distributed),
)


def main(argv: list[str] | None = None) -> int:
    """Write or check the tables; returns the exit status."""
    parser = Parser(__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if outdated")
    options = parser.parse_args(argv)
    tables = {table.__name__: table for table in TABLES}
    outdated = False
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        old = path.read_text()
        new = MARK.sub(lambda mark: mark[1] + "\n" + tables[mark[2]]() + "\n" + mark[3], old)
        outdated |= new != old
        if not options.check:
            path.write_text(new)
    return int(outdated and options.check)


if __name__ == "__main__":
    sys.exit(main())
