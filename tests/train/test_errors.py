"""What is wrong is told in one line."""

import re
import shutil

import pytest
import torch

from dlrm.data import synthetic
from dlrm.data.schema import Meta


def test_mistakes_are_one_line_and_leave_nothing(run, data, tmp_path):
    cases = [
        (["--data", tmp_path / "none"], "does not exist"),
        (["--tables.kinds", "{C99: tt}"], "names table 'C99'"),
        (["--budget", "heaps"], "not an amount of memory"),
        (["--budget", "2x"], "--emb dense takes no budget"),
        (["--emb", "hash", "--budget", "1000000x"], "budget"),
        (["--device", "gpu"], "--device is 'gpu'"),
        (["--resume", tmp_path / "nothing"], "is not a checkpoint"),
    ]
    if not torch.cuda.is_available():
        cases.append((["--device", "cuda"], "there is no CUDA GPU"))
    for options, text in cases:
        given = ["--data", data, "--output", tmp_path / "out", *options]
        error = run("train", *given, status=2).stderr
        assert text in error
        assert error.count("error:") == 1
    assert not (tmp_path / "out").exists()


def test_addresses_of_object_stores_are_refused_in_one_line(run, two_steps, data, tmp_path):
    url = "s3://bucket/data"
    for program, *given in (
        ("train", "--data", url),
        ("train", "--output", url),
        ("train", "--resume", url),
        ("train", "--init_from", url),
        ("train", "--config", url),
        ("evaluate", url, data),
        ("evaluate", two_steps, url),
        ("predict", two_steps, data, url),
        ("compare", url),
        ("prepare_criteo", url, "--output", tmp_path / "out"),
        ("prepare_table", "rows.csv", f"--output={url}"),
        ("describe_parquet", url),
        ("make_synthetic", "--output", url),
        ("frontier", "--data", url),
    ):
        error = run(program, *given, status=2).stderr
        assert f"{url} is not supported: copy it to a local directory" in error, program
        assert error.count("error:") == 1
    (tmp_path / "own.yaml").write_text("data: gs://bucket/data\n")
    error = run("train", "--config", tmp_path / "own.yaml", status=2).stderr
    assert "own.yaml: data: gs://bucket/data is not supported: copy it to a local" in error
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="gs://bucket/data is not supported"):
        Meta.read("gs://bucket/data")


@pytest.mark.parametrize("split", ["val", "test"])
def test_a_file_that_is_not_to_be_read_at_once_is_looked_at_all_the_same(
    train, data, tmp_path, split
):
    damaged = shutil.copytree(data, tmp_path / "data")
    (path,) = damaged.glob(f"{split}-*.parquet")
    path.write_bytes(path.read_bytes()[:-100])
    done = train("run", data=damaged, status=2)
    assert f"{path} is not a complete Parquet file" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("room", [8000, 20_000])
def test_no_room_for_what_a_run_reports_is_one_line(start, command, tmp_path, room):
    given = command("run", "--log_every", "1", "--checkpoint", "false")
    done = start("train", *given, file_size=room).wait()
    assert done.returncode == 2
    assert f"error: {tmp_path / 'run'} can't be written: [Errno 27] File too large" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--optim.dense sgd --optim.lr 1e30 --log_every 1", "lower --optim.lr"),
        # Beyond any memory, and twice beyond 64 bits.
        *(
            (
                f"--model.embedding_dim {dim}",
                "error: out of memory: the largest table, C.*compress it with --emb and --budget",
            )
            for dim in (10**11, 10**18, 10**20)
        ),
        ("--batch_size 9601 --loader.drop_last", "leaves no batch"),
    ],
)
def test_runs_that_come_to_nothing_say_why(options, told, train):
    assert re.search(told, train("run", *options.split(), status=2).stderr)


def test_an_epoch_may_have_one_batch_and_a_run_is_not_overwritten(train):
    given = ["run", "--batch_size", "9600", "--loader.drop_last", "--max_steps", "1"]
    assert "100%" in train(*given).stderr
    assert "choose another --name" in train(*given, status=2).stderr


def test_files_where_directories_are_wanted(run, train, two_steps, data, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    train("run", output=file, status=2)
    run("predict", two_steps, data, file / "scores.parquet", status=2)
    done = run("predict", two_steps, data, tmp_path, status=2)
    assert f"OUTPUT: is '{tmp_path}', a directory; name the file to write" in done.stderr
    run("compare", two_steps, "--plot", file / "x.png", status=2)


def test_ids_outside_the_tables_of_the_model_are_refused(run, two_steps, tmp_path):
    """Even if they lie within the tables of the data."""
    other = tmp_path / "other"
    synthetic.write(other, rows=500, cardinalities=[4000] * 26, fractions=[0.5, 0, 0.5])
    for program, *rest in (("evaluate",), ("predict", tmp_path / "scores.parquet")):
        done = run(program, two_steps, other, *rest, "--device", "cpu", status=2)
        assert re.search(
            r"error: .*, outside the table of [\d,]+ rows; ids must be in", done.stderr
        )
    assert not (tmp_path / "scores.parquet").exists()


def test_bad_checkpoints_are_refused(run, data, tmp_path):
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "manifest.json").write_bytes(b"no checkpoint")
    assert "can't be read as a checkpoint" in run("evaluate", bad, data, status=2).stderr
    assert "is not a checkpoint" in run("evaluate", tmp_path, data, status=2).stderr
    assert "no result.json in" in run("compare", tmp_path, status=2).stderr


def test_a_run_directory_that_is_removed_while_it_is_written(
    script, command, tmp_path, capsys, monkeypatch
):
    module = script("train")

    class Run(module.Run):
        def _log(self, out):
            shutil.rmtree(self.directory)
            return super()._log(out)

    monkeypatch.setattr(module, "Run", Run)
    arguments = command("gone", "--log_every", "5", "--eval_every", "5", "--epochs", "1")
    assert module.main([*map(str, arguments)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1] == (
        f"error: {tmp_path / 'gone'} was removed or renamed while the run was being written to it: "
        "start the run again"
    )
    assert not any("Traceback" in line for line in lines)
