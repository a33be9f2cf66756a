import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from dlrm.commands import prepare_table
from dlrm.data.prepare.telling import FEW_NUMBERS, telling
from dlrm.data.prepare.transform import Transform
from dlrm.data.prepare.workspace import OPTIONS_FILE
from dlrm.data.schema import Meta

ROWS, MANY = 3000, 40
SAYS = ("x30", "x37", "x39")  # alone, and two of which the product says something


def numbers(*weights):
    """Numbers and labels that follow one of them and a product, and others by ``weights``."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(MANY, ROWS))
    logit = 1.5 * values[30] + 1.5 * values[37] * values[39]
    for number, weight in enumerate(weights):
        logit += weight * values[number]
    labels = rng.random(ROWS) < 1 / (1 + np.exp(-logit))
    values[:5, rng.random(ROWS) < 0.3] = np.nan
    return values, labels.astype(np.int8)


def prepare(directory, values, labels, *options, more=None):
    table = pa.table({f"x{at}": own for at, own in enumerate(values)} | (more or {}))
    parquet.write_table(table.append_column("label", pa.array(labels)), directory / "t.parquet")
    given = [str(directory / "t.parquet"), "--output", str(directory / "data"), *options]
    assert prepare_table.main(given) == 0
    return Meta.read(directory / "data")


def own(meta):
    return [name for name in meta.dense if "(" not in name]


@pytest.mark.parametrize(
    ("with_ids", "given", "kept"),
    [
        (True, "{}", SAYS),
        (False, "{}", SAYS),
        (False, "{x7: number, x2: number}", ("x2", "x7", *SAYS)),
    ],
)
def test_many_numbers_that_say_nothing_are_left_out(tmp_path, capsys, with_ids, given, kept):
    values, labels = numbers()
    values[11] = 0.5
    more = {"id": np.arange(ROWS) % 9} if with_ids else {}
    meta = prepare(tmp_path, values, labels, "--columns", given, more=more)
    assert tuple(own(meta)) == kept
    told = capsys.readouterr()
    assert f"of {MANY - given.count('x')} numbers are left out" in told.err
    assert "columns: {x0: number} keeps one" in told.err
    assert f"{len(kept):,} numbers: {', '.join(kept)}\n" in told.out


def test_buckets_are_of_numbers_that_say_something(tmp_path):
    """Wherever they are; a table without ids needs some."""
    meta = prepare(tmp_path, *numbers())
    assert sorted(meta.tables) == [f"{name}_bucket" for name in SAYS]


def test_all_numbers_are_kept_if_most_say_something(tmp_path, capsys):
    values, labels = numbers(*np.full(25, 0.4))
    assert len(own(prepare(tmp_path, values, labels))) == MANY
    assert "left out" not in capsys.readouterr().err


@pytest.mark.parametrize("few", [True, False])
def test_all_numbers_are_kept_if_they_are_few_or_none_says_anything(tmp_path, few):
    values, labels = numbers()
    if few:
        values = values[-FEW_NUMBERS:]
    else:
        values[30:] = np.random.default_rng(1).normal(size=(10, ROWS))
    meta = prepare(tmp_path, values, labels)
    assert len(own(meta)) == len(values)
    assert 0 < len(meta.tables) <= 32


def test_equal_labels_and_equal_or_missing_numbers_say_nothing():
    values, labels = numbers()
    assert not telling(values, np.ones(ROWS)).any()
    sure = telling([values[30], np.full(ROWS, 2.5), np.full(ROWS, np.nan)], labels)
    assert (sure > 0).tolist() == [True, False, False]


@pytest.mark.parametrize("period", [2, 3])
def test_some_of_many_rows_tell_as_much_where_labels_alternate(monkeypatch, period):
    """As if each positive came with as many drawn negatives."""
    values, labels = numbers()
    positives, negatives = (np.flatnonzero(labels == label) for label in (1, 0))
    groups = min(len(positives), len(negatives) // (period - 1))
    drawn = negatives[: groups * (period - 1)].reshape(groups, -1)
    rows = np.hstack([positives[:groups, None], drawn]).ravel()
    monkeypatch.setattr("dlrm.data.prepare.telling.MOST_ROWS", len(rows) // period)
    sure = telling(values[:, rows], labels[rows])
    assert sure[30] > 1
    assert sure[:30].max() < sure[30]


def test_no_row_of_validation_or_test_decides(tmp_path):
    """Labels of later rows follow a number of which those of training rows are independent."""
    values, labels = numbers()
    later = slice(ROWS * 8 // 10, None)
    labels[later] = values[20, later] > 0
    assert own(prepare(tmp_path, values, labels)) == [*SAYS]


def test_copies_of_a_number_say_what_it_says():
    values, labels = numbers()
    values[:10] = values[30]
    sure = telling(values, labels) > 1
    assert [at for at in range(MANY) if sure[at]] == [*range(10), 30, 37, 39]


def test_later_rows_have_the_same_numbers_and_need_no_others(tmp_path):
    values, labels = numbers()
    meta = prepare(tmp_path, values, labels)
    table = parquet.read_table(tmp_path / "t.parquet", columns=[*SAYS, "label"])
    parquet.write_table(table, tmp_path / "fewer.parquet")
    options = ["--ids-of", str(tmp_path / "data"), "--output", str(tmp_path / "later")]
    assert prepare_table.main([str(tmp_path / "fewer.parquet"), *options]) == 0
    assert Meta.read(tmp_path / "later").dense == meta.dense
    assert Transform.load(tmp_path / "data").needed == SAYS
    assert "  x0: drop\n" in (tmp_path / "data" / OPTIONS_FILE).read_text()
