"""Labels of a table: which values count as 1, which as 0, and that no other does so silently."""

import shlex

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlrm.data.prepare.codes import labels
from dlrm.data.prepare.column_options import TableOptions
from dlrm.data.prepare.plan_summary import format_plan
from dlrm.data.prepare.transform import Transform
from dlrm.utils.documents import read_yaml
from dlrm.utils.validation import validate
from tests.kit import ALL_TRAIN, prepare_rows, write_rows

NAN = float("nan")


def write(path, values, form="csv"):
    """Rows with these labels; returns their file."""
    city = ["a", "b", "c"] * (len(values) // 3)
    return write_rows(path / f"rows.{form}", {"bought": values, "city": city})


def prepare(path, tmp_path, *, block_bytes=1 << 14, bad_rows="stop", **options):
    """The labels of the training rows, all rows being such, and what became of the plan."""
    given = {"overwrite": True, "bad_rows": bad_rows, "block_bytes": block_bytes}
    options = {"label": "bought"} | ALL_TRAIN | options
    _, plan = prepare_rows(path, tmp_path / "out", options, **given)
    return pq.read_table(tmp_path / "out" / "train.parquet")["bought"].to_pylist(), plan


@pytest.mark.parametrize(
    ("no", "yes"), [("0", "1"), ("false", "true"), ("False", "True"), ("FALSE", "TRUE")]
)
def test_what_programs_write_for_no_and_yes(tmp_path, no, yes):
    """``TRUE`` is of Excel and R."""
    assert prepare(write(tmp_path, [yes, no, no] * 20), tmp_path)[0] == [1, 0, 0] * 20


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_the_one_other_value_counts_as_0(tmp_path, form):
    path = write(tmp_path, ["yes", "no", "no"] * 20, form)
    found, plan = prepare(path, tmp_path, positive="yes")
    assert found == [1, 0, 0] * 20
    assert plan.options.negative == ("no",)
    assert "1: yes, 0: no" in format_plan(plan)
    again = read_yaml_options(tmp_path, plan.as_yaml())
    assert (again.positive, again.negative) == (("yes",), ("no",))


def read_yaml_options(tmp_path, text):
    (tmp_path / "again.yaml").write_text(text)
    return validate(TableOptions, read_yaml(tmp_path / "again.yaml"))


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_a_third_value_in_the_first_rows_is_refused_with_counts(tmp_path, form):
    path = write(tmp_path, ["yes", "no", "perhaps"] * 20 + ["no", "no", "no"], form)
    message = (
        r"label 'bought': 'yes' counts as 1, but the first rows hold 'no' \(23\), 'yes' \(20\), "
        r"'perhaps' \(20\), and a model has one binary label; list the values that count as 0 with "
        r"negative: in the YAML, or use --label 'bought == yes' if all others do"
    )
    with pytest.raises(ValueError, match=message):
        prepare(path, tmp_path, positive="yes")
    both = [1, 0, 0] * 20 + [0, 0, 0]
    assert prepare(path, tmp_path, positive="yes", negative=["no", "perhaps"])[0] == both
    found, plan = prepare(path, tmp_path, positive="yes", negative="*")
    assert found == both
    assert "1: yes, 0: all others" in format_plan(plan)
    several, _ = prepare(path, tmp_path, positive=["yes", "perhaps"])
    assert several == [1, 0, 1] * 20 + [0, 0, 0]


def test_a_third_value_later_on_names_its_row_or_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr("dlrm.data.prepare.infer.SAMPLE_BYTES", 200)
    path = write(tmp_path, ["yes", "no", "no"] * 100 + ["perhaps", "yes", "no"])
    message = (
        r"row 301, column 'bought': the value is 'perhaps'; it must be 'yes' \(counts as 1\) or "
        r"'no' \(0\): correct it, or list all values that count as 0 with negative: in the YAML"
    )
    with pytest.raises(ValueError, match=message):
        prepare(path, tmp_path, positive="yes", block_bytes=200)
    found, _ = prepare(path, tmp_path, positive="yes", bad_rows="skip-all")
    assert found == [1, 0, 0] * 100 + [1, 0]


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize(
    ("values", "seen", "advice"),
    [
        (["no", "yes", "no"], "'no' (40), 'yes' (20)", "--positive yes"),
        (["1", "2", "2"], "'2' (40), '1' (20)", "--positive 2"),
        (["-1", "1", "1"], "'1' (40), '-1' (20)", "--positive 1"),
        (["did not", "did so", "did so"], "'did so' (40), 'did not' (20)", "--positive 'did so'"),
        (["click", "", ""], "'click' (20)", "--label \"bought != ''\""),
        (["3", "4", "5"], "'3' (20), '4' (20), '5' (20)", "--label 'bought >= 4'"),
        (["0.5", "-2.5", "10.5"], "'0.5' (20), '-2.5' (20)", "--label 'bought >= 0.5'"),
        (["c", "b", "a"], "'c' (20), 'b' (20), 'a' (20)", "--label 'bought == b'"),
    ],
)
def test_other_labels_are_listed_with_advice_that_works(tmp_path, form, values, seen, advice):
    path = write(tmp_path, values * 20, form)
    with pytest.raises(ValueError, match=r"row [12], column 'bought': .* label") as error:
        prepare(path, tmp_path)
    message = str(error.value)
    assert f"these rows hold {seen}" in message
    assert message.endswith(f"say which count as 1, as with {advice}")
    option, value = shlex.split(advice)
    assert {0, 1} == set(prepare(path, tmp_path, **{option.removeprefix("--"): value})[0])


def test_texts_are_compared_as_they_are_written(tmp_path):
    """pyarrow takes TRUE and 4.0 for other things than texts when it finds types."""
    path = write(tmp_path, ["TRUE", "FALSE", "FALSE"] * 20)
    assert prepare(path, tmp_path, positive="TRUE")[0] == [1, 0, 0] * 20
    path = write(tmp_path, ["4.0", "5.0", "3.5"] * 20)
    assert prepare(path, tmp_path, positive=["4.0", "5.0"])[0] == [1, 1, 0] * 20
    with pytest.raises(ValueError, match=r"'4.1' counts as 1, but the first rows hold '4.0' "):
        prepare(path, tmp_path, positive="4.1")


def test_numbers_are_compared_by_their_value(tmp_path):
    path = write(tmp_path, ["4.0", "5", "3.5"] * 20)
    assert prepare(path, tmp_path, positive=[4, 5])[0] == [1, 1, 0] * 20
    assert labels(pa.array(["0.0", "1.00", "0"]), "bought").to_pylist() == [0, 1, 0]


@pytest.mark.parametrize("missing", ["", None])
def test_a_missing_label_may_count_as_0(tmp_path, missing):
    """As with a time that only rows with a purchase have."""
    path = write(tmp_path, ["noon", missing, missing] * 20, "parquet")
    with pytest.raises(ValueError, match=r"missing \(40\); use --label \"bought != ''\" if these"):
        prepare(path, tmp_path, positive="noon")
    found, plan = prepare(path, tmp_path, label="bought != ''")
    assert found == [1, 0, 0] * 20
    assert "1 if != ''" in format_plan(plan)
    again = read_yaml_options(tmp_path, plan.as_yaml())
    assert prepare(path, tmp_path, label=again.label)[0] == found
    later = Transform.load(tmp_path / "out").read([path])
    assert next(later)[0]["bought"].to_pylist() == found


@pytest.mark.parametrize("options", [{}, {"positive": "1"}, {"label": "bought == 1"}])
def test_a_label_is_one_value(tmp_path, options):
    path = write(tmp_path, [[1], [0], [0]] * 20, "parquet")
    with pytest.raises(ValueError, match=r"rows.parquet, column 'bought': it holds list<"):
        prepare(path, tmp_path, **options)


def test_options_that_contradict_each_other():
    with pytest.raises(ValueError, match="negative needs positive"):
        validate(TableOptions, {"negative": "no"})
    with pytest.raises(ValueError, match="'no' is in positive and in negative"):
        validate(TableOptions, {"positive": ["yes", "no"], "negative": ["no"]})


def test_rows_to_score_have_the_same_labels(tmp_path):
    path = write(tmp_path, ["yes", "no", "no"] * 20)
    prepare(path, tmp_path, positive="yes")
    transform = Transform.load(tmp_path / "out")
    later = write(tmp_path, ["no", "yes", "perhaps"] * 20)
    with pytest.raises(ValueError, match=r"row 3, column 'bought': the value is 'perhaps'"):
        list(transform.read([later]))
    rows, _, numbers = next(iter(transform.read([later], skip_bad=True)))
    assert rows["bought"].to_pylist() == [0, 1] * 20
    assert numbers.tolist()[:4] == [1, 2, 4, 5]


def test_rows_to_score_may_lack_labels(tmp_path):
    prepare(write(tmp_path, ["yes", "no", "no"] * 20), tmp_path, positive="yes")
    transform = Transform.load(tmp_path / "out")
    for values in (["yes", "", "no"] * 20, [""] * 60):
        path = write(tmp_path, values)
        parts = [rows for rows, _, _ in transform.read([path], block_bytes=50)]
        assert len(parts) > 1
        assert len({part.schema for part in parts}) == 1
        found = pa.Table.from_batches(parts)["bought"].to_pylist()
        assert found == [{"yes": 1, "no": 0, "": None}[value] for value in values]


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        ("bought >= 4", [0, 1, 1]),
        ("bought>4", [0, 0, 1]),
        ("bought <= 4.0", [1, 1, 0]),
        ("bought < 4", [1, 0, 0]),
        ("bought == 4", [0, 1, 0]),
        ("bought != '4'", [1, 0, 1]),
    ],
)
def test_a_label_may_be_a_comparison(tmp_path, form, rule, wanted):
    path = write(tmp_path, ["3", "4", "5"] * 20, form)
    found, plan = prepare(path, tmp_path, label=rule)
    assert found == wanted * 20
    assert plan.label == "bought"
    assert f"  1 if {rule[6:].strip()[0]}" in format_plan(plan)
    again = read_yaml_options(tmp_path, plan.as_yaml())
    assert prepare(path, tmp_path, label=again.label)[0] == found
    later = Transform.load(tmp_path / "out").read([write(tmp_path, ["5", "3", "4"] * 20, form)])
    assert next(later)[0]["bought"].to_pylist() == [wanted[2], *wanted[:2]] * 20


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (["1", "2", "x"], {"label": "bought >= 2"}, r"row 3, column 'bought': 'x' is not a number"),
        (["1", "0", "  "], {}, r"row 3, .*: the value is missing; it must be 0.*without it$"),
        (["1", "1", ""], {}, r"row 3, .*, or count them as 0 with --label \"bought != ''\"$"),
        (["1", "2", ""], {"label": "bought >= 2"}, r"row 3, .*: the value is missing; the label"),
        ([1.0, NAN, 0.0], {"form": "parquet"}, r"row 2, .*: the value is missing; it must be 0"),
        ([1.0, NAN, NAN], {"form": "parquet", "positive": "1"}, r"missing \(40\)"),
        (["1", "2", "3"], {"label": "bought >= many"}, "'many' is not a number; compare with one"),
        (["1", "2", "3"], {"label": "paid >= 2"}, "has no label 'paid'"),
        (["1", "2", "3"], {"label": "bought=2"}, "no label 'bought=2', .* as in 'rating >= 4' or"),
        (["1", "2", "3"], {"label": "bought > 3"}, r"all 60 labels are 0 \(.*'bought', 1 if > 3\)"),
        (["1", "2", "3"], {"positive": ">= 2"}, "use --label 'bought >= 2' if all others do"),
        (["1", "2", "3"], {"positive": "9", "negative": "*"}, "all 60 labels are 0"),
        (
            ["yes"] * 3,
            {"positive": "yes"},
            r"but the first rows hold 'yes' \(60\), and a model has",
        ),
    ],
)
def test_labels_that_can_not_be_made(tmp_path, values, options, message):
    path = write(tmp_path, values * 20, options.pop("form", "csv"))
    with pytest.raises(ValueError, match=message) as error:
        prepare(path, tmp_path, **options)
    assert "--bad-rows" not in str(error.value)


def test_rows_in_the_order_of_the_label(tmp_path):
    path = write(tmp_path, ["0"] * 210 + ["1"] * 90)
    by = {"train": "0.8", "val": "0.1", "test": "0.1"}
    message = (
        r"all 30 labels of the val split are 1, and 70.00% of all labels are 0: for both in each "
        r"split, use --split-by random"
    )
    with pytest.raises(ValueError, match=message):
        prepare(path, tmp_path, split=by)
    assert set(prepare(path, tmp_path, split=by | {"by": "random"})[0]) == {0, 1}


def test_a_model_has_one_label(tmp_path, script, capsys):
    path = write(tmp_path, ["0", "1", "0"] * 40)
    given = [str(path), "--output", str(tmp_path / "out")]
    main = script("prepare_table").main
    assert main([*given, "--label", "bought", "--label", "city"]) == 2
    error = capsys.readouterr().err
    assert "given 2 times (bought, city), but a model has one binary label" in error
    assert main([*given, "--label", "city", "--positive", "a", "--positive", "b"]) == 0
    assert "1: a b, 0: c" in capsys.readouterr().out
