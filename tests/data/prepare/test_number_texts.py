"""Numbers with a decimal comma, and with marks between thousands."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from dlrm.data.prepare.column_options import TableOptions
from dlrm.data.prepare.kinds import find_kind
from dlrm.data.prepare.plan_summary import format_plan
from dlrm.data.prepare.transform import Transform
from dlrm.data.prepare.values import BadValue, numbers
from dlrm.utils.validation import validate
from tests.kit import ALL_TRAIN, plan_rows, prepare_rows, write_rows

EVERYTHING = ALL_TRAIN | {"transform": "none"}


@pytest.mark.parametrize(
    ("texts", "decimal", "thousands", "values"),
    [
        (["3,14", "-2", " 0,5 ", "1e3", "", "NA"], ",", None, [3.14, -2, 0.5, 1000]),
        (["1.234,5", "12,25", "7"], ",", ".", [1234.5, 12.25, 7]),
        (["1,234.5", "12.25", "7"], ".", ",", [1234.5, 12.25, 7]),
        (["1,234,567", "12"], ".", ",", [1234567, 12]),
        (["1.234.567", "1.234"], ",", ".", [1234567, 1234]),
        (["0,125", "1,250"], ",", None, [0.125, 1.25]),
        (["1 234,5", "1\u00a0234\u202f567"], ",", " ", [1234.5, 1234567]),
        (["1'234.5", "8"], ".", "'", [1234.5, 8]),
        ([",5", "+1,5E-1"], ",", None, [0.5, 0.15]),
    ],
)
def test_how_numbers_are_written_is_found(texts, decimal, thousands, values):
    sample = pa.array(texts)
    found = find_kind("price", sample, True)
    assert (found.kind, found.marks.decimal, found.marks.thousands) == (
        "number",
        decimal,
        thousands,
    )
    assert found.why.startswith("numbers such as ")
    assert f"decimal {decimal!r}" in found.why
    result = numbers(sample, "price", found.marks)
    assert result[: len(values)].tolist() == pytest.approx(values)
    assert all(result[len(values) :] != result[len(values) :])  # missing


@pytest.mark.parametrize(
    "texts",
    [
        ["3,14", "2,5", "a"],
        ["1,2,3", "4,5,6"],
        ["12.5.2020,1", "1.5.2021,2"],
        ["1,23,456", "2"],
        ["192.168.0.1", "10.0.0.1"],
        [",", "."],
        ["", "NA"],
    ],
)
def test_texts_that_are_no_numbers(texts):
    assert find_kind("price", pa.array(texts), True).kind == "category"


def test_ids_and_texts_of_typed_files_stay_what_they_are():
    assert find_kind("user_id", pa.array(["1,5", "2,5"]), True).kind == "category"
    found = find_kind("price", pa.array(["$1.5", "$2.5"]), False)  # a text was meant as one
    assert found.kind == "category"
    assert found.why.endswith("columns: {price: {kind: number, decimal: ., symbol: $}}")


def test_a_comma_that_may_be_either_is_asked_for():
    found = find_kind("price", pa.array(["1,234", "12,500", "7"]), True)
    assert found.kind == "category"
    assert found.why == (
        "texts such as '1,234'; if these are numbers: columns: {price: {kind: number, "
        "decimal: ','}}, or with thousands in place of decimal"
    )


def table(path, prices, separator=";"):
    """A CSV with a label, a category and prices."""
    rows = len(prices)
    columns = {"label": [i % 2 for i in range(rows)], "city": ["abc"[i % 3] for i in range(rows)]}
    return write_rows(path, columns | {"price": prices}, separator)


def prepared(tmp_path, path, options=None):
    _, plan = prepare_rows(path, tmp_path / "out", {**EVERYTHING, **(options or {})})
    return plan, pq.read_table(tmp_path / "out" / "train.parquet")["price"].to_pylist()


def test_a_european_csv_is_prepared_and_scored(tmp_path):
    path = table(tmp_path / "rows.csv", [f"{i // 10},{i % 10}" for i in range(30)])
    plan, values = prepared(tmp_path, path)
    assert values == pytest.approx([i / 10 for i in range(30)])
    assert "numbers such as '0,0': decimal ','" in format_plan(plan)
    # The same by the YAML of --dry-run, and of rows to be scored, one of which says more.
    given = {"columns": {"price": {"kind": "number", "decimal": ","}}, **EVERYTHING}
    again = plan_rows(path, **given)[1]
    assert again.as_yaml() == plan.as_yaml()
    transform = Transform.load(tmp_path / "out")
    later = table(tmp_path / "later.csv", ["100,5", "7"])
    ((rows, _, _),) = transform.read([later])
    assert rows["price"].to_pylist() == [100.5, 7]
    wrong = table(tmp_path / "wrong.csv", ["100,5", "1.234,5"])
    message = "row 2, column 'price': '1.234,5' is not a number with decimal ','; correct it; or"
    with pytest.raises(ValueError, match=message):
        list(transform.read([wrong]))
    option = r', or if it is one, set columns: {price: {kind: number, decimal: ",", thousands: "\."'
    with pytest.raises(ValueError, match=message[:-4] + option):
        prepare_rows(
            wrong, tmp_path / "no", {"columns": {"price": {"kind": "number", "decimal": ","}}}
        )


def test_marks_can_be_given(tmp_path):
    path = table(tmp_path / "rows.csv", ["1,234", "12,500"] * 10)
    own = {"columns": {"price": {"kind": "number", "thousands": ","}}}
    assert prepared(tmp_path, path, own)[1] == [1234, 12500] * 10
    path = table(tmp_path / "more.csv", ["1.234", "12.500"] * 10)
    own = {"columns": {"price": {"kind": "number", "thousands": "."}}}
    (tmp_path / "2").mkdir()
    assert prepared(tmp_path / "2", path, own)[1] == [1234, 12500] * 10


def test_a_given_number_and_a_weight_need_no_marks_to_be_given(tmp_path):
    path = table(tmp_path / "rows.csv", ["1,5", "2,5"] * 10)
    plan, values = prepared(tmp_path, path, {"columns": {"price": "number"}})
    assert values == [1.5, 2.5] * 10
    assert plan.columns[2].why == "given; numbers such as '1,5': decimal ','"
    (tmp_path / "2").mkdir()
    _, values = prepared(tmp_path / "2", path, {"weight": "price"})
    assert values == [0.75, 1.25] * 10, "their mean is 1"


def test_one_other_text_among_numbers_is_named(tmp_path):
    prices = [f"{i},5" for i in range(60)]
    path = table(tmp_path / "rows.csv", [*prices, "12,x", *prices])
    with pytest.raises(ValueError, match=r"row 61, column 'price': '12,x' is not a number with"):
        prepared(tmp_path, path)


def test_a_split_by_numbers_with_a_comma(tmp_path):
    path = table(tmp_path / "rows.csv", [f"{i},5" for i in range(20)])
    split = {"by": "time", "column": "price", "val_from": "9,6", "test_from": "15,5"}
    meta, _ = prepare_rows(path, tmp_path / "out", {"split": split})
    assert [part.rows for part in meta.splits.values()] == [10, 5, 5]


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"decimal": ";"}, r"columns.price.decimal is ';'"),
        ({"decimal": ",", "thousands": ","}, r"decimal and thousands are both ','; name one"),
    ],
)
def test_marks_that_are_none(own, message):
    with pytest.raises(ValueError, match=message):
        validate(TableOptions, {"columns": {"price": own}})


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("3,14", r'{kind: number, decimal: ","}}'),
        ("$3", r'{kind: number, decimal: ".", symbol: "$"}}'),
        ("1,234", r'{kind: number, decimal: "," or thousands: ","}}'),
        ("x", "correct it, or set columns: {price: category}"),
    ],
)
def test_the_error_of_a_plain_number_tells_the_remedy(text, remedy):
    with pytest.raises(BadValue) as raised:
        numbers(pa.array(["1", text]), "price")
    assert remedy in str(raised.value)


@pytest.mark.parametrize(
    ("texts", "wanted", "told"),
    [
        (["$9.5", "$1,200.25", "-$3"], [9.5, 1200.25, -3], "thousands ',' and symbol '$'"),
        (["5%", "12.5 %", "100%"], [5, 12.5, 100], "decimal '.' and symbol '%'"),
        (["9,5 €", "1.200,25 €", "3 €"], [9.5, 1200.25, 3], "decimal ',' and thousands '.' and"),
        ([f"{i} km" for i in range(30)], [0, 1, 2], "numbers such as '0 km': decimal '.' and sym"),
        ([f"{i}.5EUR" for i in range(30)], [0.5, 1.5, 2.5], "decimal '.' and symbol 'EUR'"),
    ],
)
def test_numbers_with_a_symbol(tmp_path, texts, wanted, told):
    path = table(tmp_path / "rows.csv", texts * 100, ",")
    plan, found = prepared(tmp_path, path)
    assert told in format_plan(plan)
    assert found[:3] == wanted
    again = validate(TableOptions, yaml.safe_load(plan.as_yaml()))
    assert again.columns["price"].marks == plan.columns[2].options.marks
