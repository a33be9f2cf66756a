"""Tables of docs/data.md."""

from __future__ import annotations

from scripts.maintenance.tables.markdown import markdown, read, table


def prepare() -> str:
    """Preparation: raw logs of Criteo to Parquet."""
    return _prepared("prepare_criteo")


def prepare_table() -> str:
    """Preparation: any table to Parquet."""
    return _prepared("prepare_table")


def _prepared(name: str) -> str:
    rows = read(name)["runs"]
    columns = {
        "M rows": "{millions:.3g}",
        "seconds": "{seconds:.1f}",
        "rows/s": "{rows_per_second:,}",
        "peak memory, GB": "{peak_memory_gb:.2f}",
    }
    return table(columns, [{**r, "millions": r["rows"] / 1e6} for r in rows], name)


def loader() -> str:
    """Loading: Parquet to batches."""

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
    head = ["machine", "batch", "shuffled, rows/s", "in order, rows/s"]
    head += ["floor: pyarrow read", "floor: plain copy"]
    return markdown(head, rows) + "\n*`benchmarks/loader.json`, `benchmarks/loader_h100.json`.*\n"


def loader_multi_hot() -> str:
    """Loading: ids in columns of lists and in columns of one id each."""
    rows = []
    for name in ("loader_multi_hot", "loader_multi_hot_h200"):
        result = read(name)
        cores = read(name)["environment"]["cores"]
        place = f"H200, {cores} cores" if "h200" in name else "2 busy cores"
        for one in result["loader"]:
            rates = one["ids_per_second"]
            found = [
                f"{rates[kind]['median'] / 1e6:,.0f} M" for kind in ("flat", "lists", "ragged")
            ]
            rows.append([place, f"{one['batch_size']:,}", one["order"], *found])
    head = [
        "machine",
        "batch",
        "order",
        "one-hot columns, ids/s",
        "lists of fixed lengths",
        "ragged",
    ]
    files = "`benchmarks/loader_multi_hot.json`, `benchmarks/loader_multi_hot_h200.json`"
    return markdown(head, rows) + f"\n*{files}.*\n"


def predict() -> str:
    """Scores of raw and of prepared rows, and the time of a few."""
    result = read("predict")
    names = {"criteo": "Criteo", "table": "10 numbers, 10 texts"}
    latencies = {(one["data"], one["rows"]): one["median_ms"] for one in result["latencies"]}
    rows = []
    for one in result["runs"]:
        raw = one["rows"] == "raw"
        times = [f"{latencies[one['data'], count]:.0f}" if raw else "" for count in (1, 1024)]
        rate, cores = one["rows_per_second"], one["core_seconds_per_million_rows"]
        memory = f"{one['peak_memory_gb']:.2f}"
        rows.append(
            [f"{names[one['data']]}, {one['rows']}", f"{rate:,}", f"{cores:.0f}", memory, *times]
        )
    head = [
        "rows",
        "rows/s",
        "core seconds per M rows",
        "peak memory, GB",
        "1 row, ms",
        "1,024 rows, ms",
    ]
    count, load = result["runs"][0]["count"], result["load_average"]
    note = f"{count:,} rows; 2 CPU cores, on which other programs ran too (load {load:.0f})"
    return markdown(head, rows) + f"\n*{note}; `benchmarks/predict.json`.*\n"


TABLES = (prepare, prepare_table, loader, loader_multi_hot, predict)
