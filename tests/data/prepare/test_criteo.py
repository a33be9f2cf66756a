"""The whole preparation against a plain one in Python, through restarts, errors and the script."""

import gzip
import hashlib
import json
import math
import multiprocessing
import resource
import shutil
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlrm.data import criteo
from dlrm.data.criteo import Options, prepare
from dlrm.data.loader import BatchLoader
from dlrm.data.prepare import learner, split_writer
from dlrm.data.prepare.splitting import split_by_days, split_by_shares
from dlrm.data.prepare.transform import Transform
from dlrm.data.prepare.workspace import Workspace
from dlrm.data.schema import CRITEO_CATEGORICAL, CRITEO_DENSE, HASHED, SPLITS, Meta
from dlrm.utils.validation import validate
from tests.kit import contents, corrupt, criteo_rows, read_splits, write_criteo

ROOT = Path(__file__).parents[3]
SHARED = ROOT.parent / "shared" / "data"
KAGGLE = SHARED / "criteo_kaggle_137k.tsv.gz"
ROWS = 700  # of the file that most tests prepare
BLOCK = 35_000  # bytes, some 150 rows: several blocks of few rows


@pytest.fixture
def raw(tmp_path):
    """A raw file, which the test may change."""
    return write_criteo(tmp_path / "train.txt", criteo_rows(ROWS))


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A raw file of 1,000 rows that stays as it is, prepared as ``whole``."""
    directory = tmp_path_factory.mktemp("shared")
    quiet(
        write_criteo(directory / "raw", criteo_rows(1000)), directory / "whole", block_bytes=BLOCK
    )
    return directory


def quiet(inputs, output, options: Options | None = None, **kwargs) -> Meta:
    inputs = inputs if isinstance(inputs, list) else [inputs]
    return prepare(inputs, output, options or Options(), progress=False, **kwargs)


def split_rows(options: Options, rows: list[int]) -> dict[str, range]:
    """The rows of each split, by the rows of each file."""
    if options.split == ("days",):
        return split_by_days(rows)
    return split_by_shares(sum(rows), *options.split_options().shares()[:2])


def check_against_plain_python(rows: list[list[str]], ranges: dict, output: Path, options: Options):
    """Every label, number, id and vocabulary entry of ``output``."""
    meta = Meta.read(output)
    counted = ranges["train"] if options.vocabulary == "train" else range(len(rows))
    tables = read_splits(output)
    for name, table in tables.items():
        labels = [int(rows[i][0]) for i in ranges[name]]
        assert table["label"].to_pylist() == labels
        assert (meta.splits[name].rows, meta.splits[name].positives) == (len(labels), sum(labels))
    low, shift = (0, 1) if options.dense_transform == "log1p" else (-2, 3)
    for column, name in enumerate(CRITEO_DENSE, 1):
        x = [math.log(max(float(row[column] or 0), low) + shift) for row in rows]
        for split, table in tables.items():
            expected = np.array([x[i] for i in ranges[split]], np.float32)
            assert table[name].to_numpy() == pytest.approx(expected, rel=1e-6)
    for column, described in enumerate(meta.categorical, 14):
        keys = [int(row[column], 16) if row[column] else -1 for row in rows]
        if options.cap:
            keys = [key % options.cap if key >= 0 else key for key in keys]
        counts = Counter(keys[i] for i in counted)
        kept = [key for key in counts if counts[key] >= options.min_count]
        kept.sort(key=lambda key: (-counts[key], key))
        entries = [("" if key < 0 else f"{key:08x}", counts[key]) for key in kept]
        if options.vocabulary == "train" or options.min_count > 1:
            rare = len(counted) - sum(count for _, count in entries)
            assert described.oov_id == sum(count >= rare for _, count in entries)
            entries.insert(described.oov_id, (None, rare))
            kept.insert(described.oov_id, None)
        else:
            assert described.oov_id is None
        vocabulary = pq.read_table(output / "vocabulary" / f"{described.name}.parquet")
        assert vocabulary.select(["value", "count"]).to_pylist() == [
            {"value": value, "count": count} for value, count in entries
        ]
        assert vocabulary["id"].to_pylist() == list(range(described.cardinality))
        ids = {key: i for i, key in enumerate(kept)}
        for split, table in tables.items():
            expected = [ids.get(keys[i], described.oov_id) for i in ranges[split]]
            assert table[described.name].to_pylist() == expected


@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(vocabulary="all"),
        Options(split=("0.4", "0", "0.6"), min_count=3),  # two blocks behind the training rows
        Options(split=("0.5", "0.25", "0.25"), vocabulary="all", min_count=2, cap=50),
        Options(cap=7, dense_transform="log3"),
    ],
)
def test_every_value(raw, tmp_path, options, monkeypatch):
    """Vocabularies are merged from one block, and from several chunks of blocks."""
    ranges = split_rows(options, [ROWS])
    quiet(raw, tmp_path / "one block", options)
    monkeypatch.setattr(learner, "CHUNK_BYTES", 1600)
    quiet(raw, tmp_path / "blocks", options, block_bytes=BLOCK)
    check_against_plain_python(criteo_rows(ROWS), ranges, tmp_path / "blocks", options)
    assert read_splits(tmp_path / "blocks") == read_splits(tmp_path / "one block")


@pytest.mark.parametrize(
    "options", [Options(), Options(min_count=3, cap=50, dense_transform="log3"), Options(cap=1)]
)
def test_later_rows_get_the_ids_of_those_prepared_before(raw, tmp_path, options):
    before, after = tmp_path / "before", tmp_path / "after"
    later = write_criteo(tmp_path / "later.txt", rows := criteo_rows(400, seed=1))
    old = quiet(raw, before, options)
    new = quiet(later, after, Options(split=("0", "0.5", "0.5"), ids_of=str(before)))
    assert new.categorical == old.categorical
    tables = read_splits(after)
    table = pa.concat_tables([tables["val"], tables["test"]])
    assert table["label"].to_pylist() == [int(row[0]) for row in rows]
    (scored, _, _), *_ = Transform.load(before).read([later])
    assert table.equals(pa.Table.from_batches([scored]))
    unlisted = 0
    for column, described in enumerate(old.categorical, 14):
        copied = pq.read_table(after / old.vocabulary_file(described.name))
        assert copied.equals(pq.read_table(before / old.vocabulary_file(described.name)))
        listed = copied["value"].to_pylist()
        values = [row[column] for row in rows]
        if options.cap:
            values = [v and f"{int(v, 16) % options.cap:08x}" for v in values]
        assert [listed[i] for i in table[described.name].to_pylist()] == [
            value if value in listed else None for value in values
        ]
        unlisted += sum(value not in listed for value in values)
    assert unlisted or options.cap == 1


@pytest.mark.parametrize("cap", [None, 50])
def test_hashed_ids_are_the_values_themselves(raw, tmp_path, cap):
    whole, later = tmp_path / "whole", tmp_path / "later"
    old = quiet(raw, whole, Options(ids="hash", cap=cap), block_bytes=BLOCK)
    given = Options(split=("1", "0", "0"), ids_of=str(whole))
    new = quiet(write_criteo(tmp_path / "day", days := criteo_rows(90, seed=1)), later, given)
    assert (new.tables, new.fingerprint) == (old.tables, old.fingerprint)
    assert {column.cardinality for column in old.categorical} == {HASHED}
    assert not old.effects

    # Those of a day, and of rows that are scored.
    (scored, _, _), *_ = Transform.load(whole).read([raw])
    ranges = split_rows(Options(), [ROWS])
    tables = [
        *((pq.read_table(whole / f"{split}.parquet"), criteo_rows(ROWS)[ranges[split].start :])
        for split in SPLITS),
        (pq.read_table(later / "train.parquet"), days),
        (scored, criteo_rows(ROWS)),
    ]  # fmt: skip
    for described in new.categorical:
        assert described.values == len(set(tables[3][0][described.name].to_pylist()))
    for table, rows in tables:
        for column, name in enumerate(CRITEO_CATEGORICAL, 14):
            values = [int(row[column], 16) if row[column] else None for row in rows]
            ids = [2**32 if v is None else v % (cap or 2**32) for v in values]
            assert table[name].to_pylist() == ids[: table.num_rows]

    for more in ({"append_new": True}, {"append_new": True, "forget": 2}, {"min_count": 2}):
        option = f"--{min(more).replace('_', '-')}"
        with pytest.raises(ValueError, match=f"--ids hash makes no vocabulary, .*: drop {option}|"
                           "--min-count is 2, but"):  # fmt: skip
            quiet(raw, tmp_path / "no", Options(ids_of=str(whole), **more))


def test_ids_that_cannot_be_taken_over(raw, tmp_path):
    known, others = tmp_path / "known", tmp_path / "others"
    quiet(raw, known, Options(vocabulary="all", cap=1000))
    later = write_criteo(tmp_path / "later.txt", criteo_rows(40, seed=1))
    with pytest.raises(
        ValueError, match=r"C\d+: \d+ values, such as '.{8}', have no id in .*known"
    ):
        quiet(later, others, Options(ids_of=str(known)))
    with pytest.raises(ValueError, match=r"--cap is 7, but .*known was prepared with 1000: leave"):
        quiet(later, others, Options(ids_of=str(known), cap=7))
    with pytest.raises(ValueError, match="is also the output"):
        quiet(later, known, Options(ids_of=str(known)))
    bad = write_criteo(tmp_path / "bad.txt", [["2"]])
    with pytest.raises(ValueError, match=r"1 of 1 rows do not fit .*, row 1: 1 fields, a row"):
        quiet(bad, others, Options(ids_of=str(known), bad_rows="skip"))
    meta = json.loads((known / "meta.json").read_text())
    (known / "meta.json").write_text(
        json.dumps(meta | {"options": meta["options"] | {"cap": None}})
    )
    with pytest.raises(ValueError, match=r"--cap is 7, but .*known was prepared without it"):
        quiet(later, others, Options(ids_of=str(known), cap=7))
    (known / "meta.json").write_text(json.dumps(meta | {"options": {}}))
    with pytest.raises(ValueError, match="was not made with --criteo"):
        quiet(later, others, Options(ids_of=str(known)))


def test_a_vocabulary_that_is_damaged_or_of_other_data_gives_no_ids(raw, tmp_path):
    known, other, out = tmp_path / "known", tmp_path / "other", tmp_path / "out"
    quiet(raw, known)
    quiet(raw, other, Options(min_count=5))
    path = known / "vocabulary" / "C3.parquet"
    kept = path.read_bytes()
    values = pq.ParquetFile(path).metadata.row_group(0).column(0)
    middle = values.data_page_offset + values.total_compressed_size // 2
    flipped = bytes(255 - byte for byte in kept[middle : middle + 4])
    for content, reason in (
        (kept[:middle] + flipped + kept[middle + 4 :], "could not verify page integrity"),
        (kept[:-9], "Parquet magic bytes not found"),
        ((other / "vocabulary" / "C3.parquet").read_bytes(), r"it has \d+ rows, meta.json says"),
        (None, "No such file"),
    ):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"C3.parquet can't be .*{reason}.* prepare .*known"):
            quiet(raw, out, Options(ids_of=str(known)))
        assert not (out / "meta.json").exists()


def test_columns_and_meta(shared):
    meta = Meta.read(shared / "whole")
    schema = pq.read_schema(shared / "whole" / "train.parquet")
    assert schema.names == ["label", *CRITEO_DENSE, *CRITEO_CATEGORICAL]
    assert schema.types == [pa.uint8()] + [pa.float32()] * 13 + [pa.int32()] * 26
    data = (shared / "raw").read_bytes()
    assert meta.inputs == (
        {"name": "raw", "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()},
    )
    assert meta.options["vocabulary"] == "train"
    assert json.loads((shared / "whole" / "bad_rows.json").read_text())["skipped"] == 0
    assert not (shared / "whole" / ".prepare").exists()


def test_a_flipped_bit_in_the_results_is_found(shared, tmp_path):
    shutil.copytree(shared / "whole", tmp_path, dirs_exist_ok=True)
    path = tmp_path / "train.parquet"
    group = pq.read_metadata(path).row_group(0)
    for column in map(group.column, range(group.num_columns)):
        start = column.dictionary_page_offset or column.data_page_offset
        corrupt(path, last := start + column.total_compressed_size - 1)
        with pytest.raises(ValueError, match=f"column '{column.path_in_schema}' cannot be read"):
            list(BatchLoader(tmp_path, "train", batch_size=100))
        corrupt(path, last)  # as it was


def test_row_groups_are_of_one_size(raw, tmp_path, monkeypatch):
    monkeypatch.setattr(split_writer, "ROW_GROUP_ROWS", 300)
    meta = quiet(raw, tmp_path / "out", Options(split=("1", "0", "0")), block_bytes=BLOCK)
    file = pq.ParquetFile(tmp_path / "out" / "train.parquet").metadata
    sizes = [file.row_group(i).num_rows for i in range(file.num_row_groups)]
    assert sizes == [300] * (ROWS // 300) + [ROWS % 300]
    assert pq.read_metadata(tmp_path / "out" / "test.parquet").num_rows == 0
    assert meta.splits["test"].rows == 0


def test_a_split_keeps_nothing_of_blocks_of_other_splits(tmp_path):
    rows = pa.record_batch({"x": pa.array(range(10**6))})
    with split_writer.split_writer(tmp_path / "test.parquet", rows.schema, []) as write:
        write(rows.slice(10**6, 0))
        before = pa.total_allocated_bytes()
        del rows
        assert pa.total_allocated_bytes() <= before - 8 * 10**6


def test_several_compressed_inputs_and_a_limit(tmp_path):
    rows = criteo_rows(450)
    days = []
    for day, part in enumerate((rows[:200], rows[200:400], rows[400:])):
        plain = write_criteo(tmp_path / "plain", part).read_bytes()
        compressed = [gzip.compress(plain), pa.compress(plain, "zstd", asbytes=True), plain][day]
        days.append(tmp_path / f"day_{day}")
        days[-1].write_bytes(compressed)
    meta = quiet(days, tmp_path / "all", block_bytes=BLOCK)
    check_against_plain_python(
        rows, split_rows(Options(), [200, 200, 50]), tmp_path / "all", Options()
    )
    assert [record["name"] for record in meta.inputs] == ["day_0", "day_1", "day_2"]

    options = Options(limit=250, split=("0.6", "0.2", "0.2"))
    meta = quiet(days, tmp_path / "some", options, block_bytes=BLOCK)
    ranges = split_rows(options, [250])
    check_against_plain_python(rows[:250], ranges, tmp_path / "some", options)
    assert [record["name"] for record in meta.inputs] == ["day_0", "day_1"]


class Killed(BaseException):
    """Not caught by anything, like a signal."""


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_stopped_at_any_step_and_restarted_it_ends_with_the_same_bytes(
    tmp_path, monkeypatch, every
):
    raw = write_criteo(tmp_path / "raw", criteo_rows(300))
    replace = Path.replace  # by which all complete files get their names
    done, allowed = 0, math.inf

    def counted(path, target):
        nonlocal done
        done += 1
        if done > allowed:
            raise Killed
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", counted)
    quiet(raw, tmp_path / "whole", Options(min_count=2), block_bytes=BLOCK)
    expected, steps = contents(tmp_path / "whole"), done
    assert steps > 35
    for step in range(steps) if every else (1, 20, *range(steps - 8, steps, 2), steps - 1):
        out = tmp_path / f"out{step}"
        done, allowed = 0, step
        with pytest.raises(Killed):
            quiet(raw, out, Options(min_count=2), block_bytes=BLOCK)
        assert not (out / "meta.json").exists()
        allowed = math.inf
        quiet(raw, out, Options(min_count=2), block_bytes=BLOCK)
        assert contents(out) == expected, step


@pytest.mark.parametrize("room", [1000, 2050, 4000])
def test_where_there_is_no_room_the_file_is_named_and_a_restart_goes_on(shared, tmp_path, room):
    raw, out = shared / "raw", tmp_path / "out"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(learner.Learner, "learn_all", Mock(side_effect=Killed))
        with pytest.raises(Killed):
            quiet(raw, out, block_bytes=BLOCK)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(OSError, match=r"(ids/\d+|parquet) can't be written: .*File too large"):
            quiet(raw, out, block_bytes=BLOCK)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(out.rglob("*.parquet.tmp"))
    quiet(raw, out, block_bytes=BLOCK)
    assert contents(out) == contents(shared / "whole")


@pytest.mark.slow
def test_killed_again_and_again(shared, tmp_path):
    raw = shared / "raw"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([criteo.__name__])
    out, kills, patience = tmp_path / "out", 0, 0.05
    while not (out / "meta.json").exists():
        process = context.Process(
            target=prepare,
            args=([raw], out, Options()),
            kwargs={"block_bytes": BLOCK, "progress": False},
        )
        process.start()
        process.join(patience)
        process.kill()
        process.join()
        kills += process.exitcode == -9
        patience += 0.05
    quiet(raw, out, block_bytes=BLOCK)  # whatever the last kill left undone
    assert kills > 0
    assert contents(out) == contents(shared / "whole")


def test_blocks_of_an_earlier_run_are_used_but_not_those_of_other_options(raw, tmp_path):
    bad = criteo_rows(400)
    bad[350][5] = "x"
    write_criteo(raw, bad)
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="row 351"):
        quiet(raw, out, block_bytes=BLOCK)
    spilled = {p: p.stat().st_mtime_ns for p in (out / ".prepare" / "blocks").iterdir()}
    assert len(spilled) > 1
    times = []

    def watch(self, **options):
        times.append({p: p.stat().st_mtime_ns for p in spilled if p.exists()})
        return learn_all(self, **options)

    learn_all = learner.Learner.learn_all
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learner.Learner, "learn_all", watch)
        quiet(raw, out, Options(bad_rows="skip"), block_bytes=BLOCK)
    assert times == [spilled]

    with pytest.raises(ValueError, match="row 351"):
        quiet(raw, out, block_bytes=BLOCK)
    kept = next((out / ".prepare" / "blocks").iterdir())
    kept.write_bytes(b"left by another version")
    options = Options(bad_rows="skip", min_count=2)
    meta = quiet(raw, out, options, overwrite=True, block_bytes=BLOCK)
    good = bad[:350] + bad[351:]
    check_against_plain_python(good, split_rows(Options(), [399]), out, options)
    assert meta.options["min_count"] == 2


def test_a_restart_reads_an_input_again_that_changed_but_not_in_size(raw, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(learner.Learner, "learn_all", Mock(side_effect=Killed))
        with pytest.raises(Killed):
            quiet(raw, tmp_path / "out", block_bytes=BLOCK)
    assert list((tmp_path / "out" / ".prepare" / "blocks").iterdir())
    rows, size = criteo_rows(ROWS), raw.stat().st_size
    for row in rows:
        row[0] = str(1 - int(row[0]))
    assert write_criteo(raw, rows).stat().st_size == size
    quiet(raw, tmp_path / "out", block_bytes=BLOCK)
    ranges = split_rows(Options(), [ROWS])
    check_against_plain_python(rows, ranges, tmp_path / "out", Options())


def test_an_earlier_result_is_replaced_as_a_whole(raw, tmp_path):
    quiet(raw, tmp_path / "out", Options(vocabulary="all"), block_bytes=BLOCK)
    (tmp_path / "out" / "mine.txt").write_text("not touched")
    before = contents(tmp_path / "out")
    quiet(raw, tmp_path / "out", Options(vocabulary="all"), block_bytes=BLOCK)  # the same again
    with pytest.raises(ValueError, match=r"out was prepared before, with other vocabulary and cap"):
        quiet(raw, tmp_path / "out", Options(cap=7), block_bytes=BLOCK)
    assert contents(tmp_path / "out") == before
    quiet(raw, tmp_path / "out", Options(cap=7), overwrite=True, block_bytes=BLOCK)
    quiet(raw, tmp_path / "fresh", Options(cap=7), block_bytes=BLOCK)
    found = contents(tmp_path / "out")
    assert found.pop("mine.txt")
    assert found == contents(tmp_path / "fresh")


def test_a_cap_above_all_values_changes_nothing(shared, tmp_path):
    quiet(shared / "raw", tmp_path / "capped", Options(cap=10**20), block_bytes=BLOCK)
    capped, free = contents(tmp_path / "capped"), contents(shared / "whole")
    assert capped.keys() == free.keys()
    assert all(capped[name] == free[name] for name in free if name.endswith(".parquet"))


@pytest.mark.parametrize("name", ["train.parquet", "meta.json", "vocabulary/notes.txt"])
def test_data_that_no_preparation_made_is_left_alone(raw, tmp_path, name):
    mine = tmp_path / "own" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(
        ValueError, match=rf"own contains {name.partition('/')[0]}, not made by a prep"
    ):
        quiet(raw, tmp_path / "own")
    assert contents(tmp_path / "own").keys() == {name}
    assert mine.read_text() == "mine"


def test_two_at_once_are_refused(raw, tmp_path):
    message = r"another process is preparing .*out; wait for it"
    with Workspace(tmp_path / "out", {}), pytest.raises(ValueError, match=message):
        quiet(raw, tmp_path / "out")
    quiet(raw, tmp_path / "out")


def test_first_bad_row_of_several_files_stops(tmp_path):
    days = [write_criteo(tmp_path / f"day_{day}", criteo_rows(200, day)) for day in range(3)]
    write_criteo(days[1], [*criteo_rows(3), ["1"] * 39, *criteo_rows(200)])
    message = r"day_1, row 4: 39 fields, a row has 40: .*; or skip such rows with --bad-rows skip"
    with pytest.raises(ValueError, match=message):
        quiet(days, tmp_path / "out", block_bytes=BLOCK)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".prepare"]


def test_an_empty_file(raw, tmp_path, capsys):
    other = tmp_path / "empty"
    other.touch()
    with pytest.raises(ValueError, match=r"empty: the file is empty; replace it"):
        quiet(other, tmp_path / "out")
    meta = quiet([raw, other], tmp_path / "out", block_bytes=BLOCK)
    assert "empty has nothing in it and counts as 0 rows" in capsys.readouterr().err
    assert sum(split.rows for split in meta.splits.values()) == ROWS


@pytest.mark.parametrize("bad_rows", ["stop", "skip"])
@pytest.mark.parametrize("limit", [None, 100])
def test_no_row_of_a_damaged_file_is_taken(raw, tmp_path, bad_rows, limit):
    """Rows before the damage may be wrong: the checksum is behind them."""
    whole = gzip.compress(raw.read_bytes())
    (tmp_path / "broken.gz").write_bytes(whole[:-8] + bytes(8))  # another checksum
    with pytest.raises(ValueError, match=r"broken.gz: the compressed data is damaged or"):
        quiet(tmp_path / "broken.gz", tmp_path / "out", Options(bad_rows=bad_rows, limit=limit))
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".prepare"]


def test_nothing_to_train_on(raw, tmp_path):
    with pytest.raises(
        ValueError, match=f"{ROWS} rows were read and the split leaves none for training; choose"
    ):
        quiet(raw, tmp_path / "out", Options(split=("0", "0", "1")))
    quiet(raw, tmp_path / "out", Options(split=("0", "0", "1"), vocabulary="all"))
    raw.write_text("bad\n")
    with pytest.raises(ValueError, match=r"prepared before, with other .*inputs: its ids"):
        quiet(raw, tmp_path / "out", Options(bad_rows="skip"))
    with pytest.raises(ValueError, match="1 of 1 rows do not fit"):
        quiet(raw, tmp_path / "out", Options(bad_rows="skip"), overwrite=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": ("0.5", "0.4")}, "--split is 0.5 0.4; it must be days, or the shares"),
        ({"split": ("0.5", "0.4", "0.2")}, "--split is 0.5 0.4 0.2"),
        ({"split": ("-0.5", "1", "0.5")}, "--split is -0.5 1 0.5"),
        ({"split": ("week",)}, "--split is week"),
        ({"min_count": 0}, "min_count is 0, it must be at least 1"),
        ({"cap": -1}, "cap is -1, it must be at least 1"),
        ({"limit": 0}, "limit is 0, it must be at least 1"),
        ({"vocabulary": "tain"}, "vocabulary is 'tain', did you mean 'train'"),
        ({"dense_transform": "log"}, "dense_transform is 'log', did you mean 'log"),
        ({"ids": "hash", "vocabulary": "all"}, "no vocabulary, as --vocabulary needs: drop"),
        ({"ids": "hash", "min_count": 2}, "no vocabulary, as --min-count needs: drop"),
        ({"ids": "hashes"}, "ids is 'hashes', did you mean 'hash'"),
        ({"bad_rows": "keep"}, "bad_rows is 'keep'; valid: skip, skip-all, stop"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        validate(Options, options)


@pytest.mark.parametrize(
    ("inputs", "output", "message"),
    [
        (["train.txt", "link.txt"], "out", ".txt is given more than once"),
        (["train.txt"], "train.txt", "train.txt is not a directory; give another --output"),
        (["train.txt"], "train.txt/out", "train.txt/out is not a directory"),
        (["no-such-file"], "out", "no-such-file: no such file"),
    ],
)
def test_wrong_paths(raw, tmp_path, run, inputs, output, message):
    (tmp_path / "link.txt").symlink_to(raw)
    paths = [tmp_path / name for name in inputs]
    error = run("prepare_criteo", *paths, "--output", tmp_path / output, status=2).stderr
    assert message in error
    assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.txt", "train.txt"]


def test_the_program(raw, tmp_path, run):
    out, options = tmp_path / "out", Options(split=("0.5", "0", "0.5"), cap=30)
    result = run("prepare_criteo", raw, "--output", out, "--split", *options.split, "--cap", 30)
    assert f"train {ROWS // 2:>13,} rows" in result.stdout
    assert "rows/s, peak memory" in result.stdout
    assert all(phase in result.stderr for phase in ("read: 100%", "learn: 100%", "write: 100%"))
    check_against_plain_python(criteo_rows(ROWS), split_rows(options, [ROWS]), out, options)


def test_columns_without_a_number_are_noted(run, tmp_path):
    rows = criteo_rows(50)
    for row in rows:
        row[3] = row[5] = ""
        row[4] = "7"
    path = write_criteo(tmp_path / "raw", rows)
    printed = run("prepare_criteo", path, "--output", tmp_path / "out")
    (note,) = [line for line in printed.stderr.splitlines() if "the same number" in line]
    assert "the same number, or none, in all 43 training rows, of which" in note
    assert note.endswith(": I3, I4, I5")
    write_criteo(path, criteo_rows(50))
    printed = run("prepare_criteo", path, "--output", tmp_path / "out", "--overwrite")
    assert "the same number" not in printed.stderr


def test_zstd_without_checksums_is_noted(raw, run, tmp_path):
    frame = bytearray(pa.compress(raw.read_bytes(), "zstd", asbytes=True))
    frame[4] |= 4  # says that a checksum follows, which is missing
    (tmp_path / "checked.zst").write_bytes(frame)
    (tmp_path / "unchecked.zst").write_bytes(pa.compress(raw.read_bytes(), "zstd", asbytes=True))
    for name, status, noted in (
        ("checked.zst", 2, False),
        ("unchecked.zst", 0, True),
        (raw, 0, False),
    ):
        arguments = tmp_path / name, "--output", tmp_path / f"out {noted} {status}"
        printed = run("prepare_criteo", *arguments, status=status).stderr
        assert ("unchecked.zst has no checksums" in printed) == noted


@pytest.mark.parametrize("days", [(0, 2, 9, 10, 11), (0, 10, 11, 2, 9)])
def test_days_in_the_order_of_letters_are_noted(days, script, capsys, tmp_path):
    paths = [
        str(write_criteo(tmp_path / f"day_{day}.tsv", criteo_rows(9, seed=day))) for day in days
    ]
    program = script("prepare_criteo")
    assert program.main([*paths, "--output", str(tmp_path / "out")]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note")]
    known = f"note: {paths[2]} comes before {paths[3]}, but inputs must be in the order of time"
    assert [note.startswith(known) for note in notes] == [True] * (days[-1] == 9)


@pytest.mark.skipif(not KAGGLE.exists(), reason="the real rows are not here")
def test_real_rows_with_the_vocabulary_of_all(tmp_path):
    options = Options(vocabulary="all", split=("0.85", "0", "0.15"))
    meta = quiet(KAGGLE, tmp_path / "out", options)
    assert [meta.splits[name].rows for name in SPLITS] == [116_568, 0, 20_571]
    stats = json.loads((SHARED / "criteo_kaggle_137k.stats.json").read_text())
    for column in meta.categorical:
        counted = stats[column.name]
        assert column.cardinality == counted["distinct"] + (counted["missing"] > 0)
    lines = gzip.decompress(KAGGLE.read_bytes()).decode().splitlines()
    for name in ("C1", "C3", "C22"):
        vocabulary = pq.read_table(tmp_path / "out" / "vocabulary" / f"{name}.parquet")["value"]
        tables = [pq.read_table(tmp_path / "out" / f"{split}.parquet") for split in SPLITS]
        values = vocabulary.take(pa.concat_tables(tables)[name])
        column = 13 + int(name[1:])
        assert values.to_pylist() == [line.split("\t")[column] for line in lines]
