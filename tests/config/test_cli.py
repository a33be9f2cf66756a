import time

import pytest
import yaml

from dlrm.config.build import optimizer_specs
from dlrm.config.cli import parse
from dlrm.config.options import changed_options
from dlrm.embeddings import available

KINDS = available()


def mistakes(capsys, *argv):
    with pytest.raises(SystemExit) as stop:
        parse(argv, KINDS)
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_defaults_need_no_arguments():
    config, resolved = parse([], KINDS)
    assert config.emb == "dense"
    assert yaml.safe_load(resolved)["model"]["embedding_dim"] == 16
    assert [parse(["--emb", kind], KINDS)[0].emb for kind in KINDS] == [*KINDS]


def test_all_mistakes_are_reported_at_once(capsys):
    text = mistakes(
        capsys,
        *("--bach_size", "3", "--batch_size", "many", "--optim.dense", "sgdd"),
        *("--emb", "dens", "--epochs", "0", "--tt.rank", "0", "--optim.lr", "-1"),
    )
    assert "did you mean --batch_size" in text
    assert "--batch_size is 'many', it must be a whole number" in text
    assert "it must be one of sgd, adagrad, rowwise_adagrad, adam" in text
    assert "--emb is 'dens', did you mean 'dense'" in text
    assert "--epochs is 0" in text
    assert "rank" in text
    assert "lr is -1.0" in text
    assert "unexpected 'stray'" in mistakes(capsys, "stray")


def test_an_old_name_leads_to_the_new_one(capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("sharding: {wire: bf16}\n")
    now = "sharding.wire: it is called --sharding.comm_dtype now"
    assert f"unknown option --{now}" in mistakes(capsys, "--sharding.wire", "bf16")
    assert f"{path}: unknown option {now}" in mistakes(capsys, "--config", str(path))


def test_an_older_run_resumes_though_its_file_names_options_of_then(capsys, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("seed: 3\nsharding: {wire: bf16, gone: 1}\ntt: {lost: 2}\nkind: {a: 1}\n")
    config, resolved = parse(["--resume", str(tmp_path), f"--config={path}"], KINDS)
    assert (config.seed, config.sharding.comm_dtype) == (3, "bf16")
    told = capsys.readouterr().err
    for name in ("sharding.gone", "tt.lost", "kind"):
        assert f"note: {path}: this version has no option {name}, which is left out: " in told
        assert name.rpartition(".")[2] not in yaml.safe_load(resolved)
    assert told.count("note: ") == 3
    assert "did you mean" in mistakes(capsys, "--resume", "runs/x", "--sed", "3")


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("--lr", "0.1", "did you mean --optim.lr"),
        ("--batch_size", None, "--batch_size needs a value: a whole number"),
        ("--resume", None, "--resume needs a value: run directory or checkpoint to resume"),
        ("--name", ["my", "run", "--epochs", "2"], "takes one value, got 2: write 'my run'\n"),
        (
            "--tables.threshold",
            ["5", "--tables.largest", "3"],
            "--tables: threshold is 5, it must be null if largest is set",
        ),
        ("--optim.dense", ["adam", "--optim.betas", "0.9", "1"], "betas[1] is 1.0, it must be in"),
        ("--model.embedding_dim", "0", "--model.embedding_dim is 0, it must be at least 1"),
        ("--model.bottom_mlp", "[0]", "--model.bottom_mlp.0 is 0, it must be at least 1"),
        ("--model.top_mlp", "", "--model.top_mlp is '', it must be a list"),
        ("--tables.threshold", "-1", "threshold is -1"),
        ("--tables.largest", "-1", "largest is -1"),
        ("--sharding.tables", "{C3: rows}", "tables to one of auto, replicate, table, row"),
        ("--tables.kinds", "{C1: ttt}", "did you mean 'tt'"),
        ("--optim.betas", "[0.9, 1.0]", "betas is set, but it is no option of adagrad"),
        ("--optim.alpha", "0.9", "alpha is set, but it is no option of adagrad"),
        ("--optim.clip_norm", "0", "--optim.clip_norm is 0.0, it must be greater than 0"),
        ("--loader.window", "0", "window is 0"),
        ("--max_steps", "0", "max_steps is 0"),
        ("--config", "nowhere.yaml", "can't be read"),
        ("--config", "", "--config needs a value: a YAML file"),
        ("--seed", "-1", "seed is -1"),
        ("--seed", "99999999999999999999", "it must be less than 9223372036854775808"),
        ("--batch_size", "99999999999999999999", "it must be less than 2147483648"),
        ("--name", "", "name is '', it must name a directory in output"),
        ("--name", "../other", "name is '../other', it must name a directory in output"),
        ("--name", "..", "name is '..', it must name a directory in output"),
        ("--name", "a\nb", r"name is 'a\nb', it must name a directory in output, in printable"),
        ("--name", "x" * 256, "it must name a directory in output, in printable characters and at"),
        ("--emb", "TT", "did you mean 'tt'"),
        ("--emb", "Auto", "did you mean 'auto'"),
        ("--emb", "auto", "--emb auto needs a budget: set --budget 20MB or --budget 100x"),
        ("--tables.kinds", "{C1: auto}", "--tables.kinds C1 is 'auto'"),
        (
            "--optim.lr",
            "1e308",
            "--optim.lr is 1e+308, it must be at most 1000000000000000000000000000000",
        ),
        ("--optim.lr", ".nan", "--optim.lr is nan, it must be a finite number"),
        ("--optim.eps", ".inf", "eps is inf, it must be finite"),
        ("--optim.decay_start", "-5", "decay_start is -5"),
        ("--optim.decay_steps", "9", "--optim: decay_steps is 9, it must be 1 without decay_start"),
        ("--budget", "heaps", "--budget: 'heaps' is not an amount of memory"),
        ("--data", "", "--data is '', it must name a directory"),
        ("--output", "", "--output is '', it must name a directory"),
        ("--resume", "", "--resume is '', it must name a run or a checkpoint"),
        ("--init_from", "", "--init_from is '', it must name a run or a checkpoint"),
        ("--device", "gpu", "--device is 'gpu'"),
        ("--tables.kinds", "{C3:tt}", "as in {NAME: ...}"),
    ],
)
def test_bad_values_name_option_and_rule(capsys, option, value, rule):
    values = value if isinstance(value, list) else [value] * (value is not None)
    assert rule in mistakes(capsys, option, *values)


@pytest.mark.parametrize("rows", [10**14, 10**18, 10**20])
def test_an_option_of_a_kind_that_memory_has_no_room_for(capsys, rows):
    text = mistakes(capsys, "--emb", "dynamic", "--dynamic.shared", f"{{C3: {rows}}}")
    assert (
        f"error: --dynamic.shared {rows}: there is not enough memory for that; lower it\n" in text
    )


def test_options_go_to_the_rules_that_have_them():
    config, _ = parse(["--optim.dense=adamw", "--optim.weight-decay=0.1", "--optim.rho=0.8",
                       "--optim.embeddings=adadelta", "--optim.betas", "0.8", "0.9"],
                      KINDS)  # fmt: skip
    assert optimizer_specs(config.optim) == [
        ("adamw", 0.001, {"betas": (0.8, 0.9), "weight_decay": 0.1}),
        ("adadelta", 3.0, {"weight_decay": 0.1, "rho": 0.8}),
    ]
    assert parse(["--tables.largest=3", "--tables.threshold=null"], KINDS)[0].tables.largest == 3


@pytest.mark.parametrize(
    ("given", "rates"),
    [
        ("--optim.lr 0.5", [0.5, 0.5]),
        ("--optim.lr 0.5 --optim.embeddings_lr 0", [0.5, 0.0]),  # they are frozen
        ("--optim.dense adam --optim.embeddings_lr 0.25", [0.001, 0.25]),
        ("--optim.dense adagrad", [0.015, 0.015]),
        ("--optim.dense sgd", [0.1, 0.015]),
    ],
)
def test_learning_rates_of_both_parts(given, rates):
    config, _ = parse(given.split(), KINDS)
    assert [lr for _, lr, _ in optimizer_specs(config.optim)] == rates


def test_yaml_sets_and_the_command_line_overrides(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("emb: tt\nbatch_size: 64\ntt:\n  rank: 8\noptim: {lr: 0.5}\nname: 2024-01-01")
    config, _ = parse(["--batch-size", "32", "--config", str(path)], KINDS)
    assert config.name == "2024-01-01", "which YAML takes for a date"
    assert (config.emb, config.batch_size, config.optim.lr) == ("tt", 32, 0.5)
    assert config.methods["tt"] == {"rank": 8}


def test_tables_whose_names_are_numbers(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("tables: {kinds: {3: tt}}\ntt: {rank: {3: 8, default: 4}}\n")
    given = ["--tables.kinds", "{3: tt}", "--tt.rank", "{3: 8, default: 4}"]
    for argv in (given, ["--config", str(path)]):
        config, resolved = parse(argv, KINDS)
        assert config.tables.kinds == {"3": "tt"}
        assert config.methods["tt"] == {"rank": {"3": 8, "default": 4}}
        assert yaml.safe_load(resolved)["tables"]["kinds"] == {"3": "tt"}


def test_mistakes_in_yaml_name_the_file(capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("batch_sise: 3\nepochs: often\nmodel: {embeding_dim: 4}\n")
    text = mistakes(capsys, f"--config={path}")
    assert f"{path}: unknown option batch_sise, did you mean --batch_size" in text
    assert f"{path}: epochs is 'often'" in text
    assert "did you mean --model.embedding_dim" in text
    path.write_text("optim: 3\ntt:\nepochs: 2026-01-01\n")
    text = mistakes(capsys, f"--config={path}")
    assert f"{path}: optim is 3, it must hold options" in text
    assert f"{path}: tt is None, it must hold options" in text
    assert "epochs is datetime.date(2026, 1, 1), it must be a whole number" in text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("seed: 1" + "0" * 400, "can't be read: it holds a number of 401 characters"),
        ("name: " + "[" * 500 + "]" * 500, "can't be read: it is nested more than 32 deep"),
        ("seed: 1\nseed: 2", "can't be read: it names 'seed' twice"),
        (f"seed: {'x' * 9999}", f"seed is '{'x' * 199}..., it must be a whole number"),
        (f"tt: {{rank: '{'[' * 9999}'}}", f"tt.rank is '{'[' * 199}..., it must be a whole"),
        ("{" + ", ".join(f"x{i}: 1" for i in range(4000)) + "}", "error: 3,980 more mistakes\n"),
        ("name: 2024-02-30", "can't be read: day is out of range for month"),
        ("tt: {rank: {2024-01-01: 5}}", "tt.rank is {datetime"),
        ("tables: {kinds: &a {x: *a}}", "an alias refers to a value that contains it"),
        ("model: {top_mlp: ''}", "model.top_mlp is '', it must be a list, each a whole number"),
        ("tt: {q: ' # none'}", "tt.q is ' # none', it must be"),
        ("data:", "data is None, it must be text"),
        (f"model: {{top_mlp: ['{'9' * 70}', 4]}}", "it must be a list, each a whole number"),
        ("- a list", "must hold options as name: value"),
    ],
)
def test_yaml_that_no_options_can_be_is_refused_at_once(capsys, tmp_path, text, told):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    began = time.process_time()
    printed = mistakes(capsys, f"--config={path}")
    assert told in printed
    assert len(printed) < 5000
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "value", ["1" + "0" * 400, "[" * 500, "&a [*a]", "\udcff", "{a: {b: [1]}}"]
)
def test_values_beyond_the_limits_are_refused(capsys, value):
    assert "--tt.q is" in mistakes(capsys, "--tt.q", value)
    assert "--seed is" in mistakes(capsys, "--seed", value)


def test_an_option_of_a_thousand_tables_takes_no_time(tmp_path):
    path = tmp_path / "run.yaml"
    tables = {f"C{i}": [[2, 2, 4], [2, 4, 2], [4, 2, 2]][i % 3] for i in range(1000)}
    path.write_text(yaml.safe_dump({"model": {"embedding_dim": 16}, "tt": {"q": tables}}))
    began = time.process_time()
    config, resolved = parse([f"--config={path}"], KINDS)
    assert time.process_time() - began < 5
    assert config.methods["tt"]["q"] == tables
    assert yaml.safe_load(resolved)["tt"]["q"] == tables


def test_resolved_configuration_reads_back(tmp_path):
    argv = ["--emb", "qr", "--model.top_mlp", "8", "4", "--tables.kinds", "{C3: tt}", "--profile"]
    config, resolved = parse(argv, KINDS)
    assert config.model.top_mlp == (8, 4)
    assert config.profile
    path = tmp_path / "resolved.yaml"
    path.write_text(resolved)
    again, _ = parse(["--config", str(path)], KINDS)
    assert again.model == config.model
    assert again.tables == config.tables
    assert again.methods == config.methods


def test_lists_and_options_by_table():
    config, _ = parse(
        ["--tt.q", "2", "2", "4", "--tt.rank", "{C3: 64, default: 16}", "--model.top_mlp", "8"],
        KINDS,
    )
    assert config.methods["tt"] == {"q": [2, 2, 4], "rank": {"C3": 64, "default": 16}}
    assert config.model.top_mlp == (8,)


@pytest.mark.parametrize(
    "options",
    [
        ["--tt.d", "4", "--tt.q", "2", "2", "2", "2"],
        ["--tt.q", "4", "4", "--tt.p", "4", "5", "--tt.d", "2"],
        ["--tt.d", "{C3: 4, default: 3}", "--tt.q", "{C3: [2, 2, 2, 2]}"],
        ["--tt.p", "2", "2", "3"],
    ],
)
def test_options_that_need_each_other_or_small_tables_are_taken(options):
    assert parse(options, KINDS)[0].methods["tt"]


def test_options_that_do_not_fit_each_other_are_refused(capsys):
    text = mistakes(capsys, "--tt.d", "4", "--tt.q", "2", "2", "2", "--tt.rank", "0")
    assert "--tt.rank 0: rank must be at least 1" in text
    text = mistakes(capsys, "--tt.d", "{C3: 4}", "--tt.q", "2", "2", "2", "2")
    assert "--tt.q [2, 2, 2, 2]: q is [2, 2, 2, 2], it must have d = 3 factors" in text


def test_help_explains_every_option_with_its_default(capsys):
    with pytest.raises(SystemExit) as stop:
        parse(["--help"], KINDS)
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert " [--config FILE] [--emb KIND] [--OPTION VALUE ...]\n\n" in text
    entries = text[text.index("\noptions:") :].split("\n  --")[1:]
    assert len(entries) > 40
    assert "`" not in text
    assert "--tt.q Q " in text
    for entry in entries:
        name, _, rest = entry.partition(" ")
        explanation = " ".join(rest.split())
        assert "default:" in explanation or "required" in explanation, name
        assert len(explanation.split("(type:")[0].split()) > 3, f"{name} is not explained"


def test_options_of_kinds_that_no_table_has_are_noted(capsys, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("tt:\n  rank: 8\n")  # a file may serve several kinds
    parse(["--config", str(file), "--emb", "qr", "--tt.rank=4", "--qr.collisions", "8"], KINDS)
    note = "note: --tt.rank has no effect, no table is of kind tt\n"
    assert capsys.readouterr().err == note
    parse(["--emb", "qr", "--tables.kinds", "{C3: tt}", "--tt.rank", "4"], KINDS)
    parse(["--resume", "runs/one", "--tt.rank", "4"], KINDS)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", ["block", "drop"])
def test_a_list_of_one_for_each_table_is_for_code_alone(capsys, kind):
    text = mistakes(capsys, "--emb", kind, f"--{kind}.keep", "5", "6")
    assert f"--{kind}.keep is '[5, 6]', it must be a whole number or a mapping of tables" in text
    config, _ = parse([f"--{kind}.keep={{C3: 5, default: 7}}"], KINDS)
    assert config.methods[kind] == {"keep": {"C3": 5, "default": 7}}


def test_the_configuration_is_printed_as_config_reads_it(capsys, tmp_path):
    given = ["--emb", "tt", "--optim.betas", "0.8", "0.9", "--optim.dense", "adam"]
    config, resolved = parse(given, KINDS)
    with pytest.raises(SystemExit) as stop:
        parse([*given, "--print_config"], KINDS)
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert printed == resolved
    (tmp_path / "run.yaml").write_text(printed)
    assert parse(["--config", str(tmp_path / "run.yaml")], KINDS) == (config, resolved)
    text = mistakes(capsys, "--print-config", "--emb", "ttt")
    assert "did you mean 'tt'" in text, "only what is right is printed"
    assert "--print_config takes no value, got tt" in mistakes(capsys, "--print_config", "tt")


def test_options_that_differ_from_their_defaults():
    given = ["--emb", "tt", "--tt.rank", "8", "--qr.collisions", "9", "--optim.lr", "0.5"]
    given += ["--model.top_mlp", "[512, 256]", "--log_every", "7", "--tables.largest", "3"]
    options = yaml.safe_load(parse(given, KINDS)[1])
    changed = changed_options(options, KINDS)
    expected = {"emb": "tt", "optim.lr": 0.5, "tables.largest": 3, "tt.rank": 8}
    assert changed == expected, "without housekeeping, and options of kinds that no table has"
    assert changed_options(options | {"of_an_older_version": 1, "optim": None}, KINDS) == {
        name: value for name, value in expected.items() if name != "optim.lr"
    }


def test_with_a_budget_some_kinds_have_rows_of_fewer_bits_unless_told_otherwise():
    for options, expected in [
        (["--emb", "tt", "--budget", "10x"], "bf16"),
        (["--emb", "tt", "--budget", "10x", "--tables.dtype", "fp32"], "fp32"),
        (["--emb", "tt"], "fp32"),
        (["--emb", "drop", "--budget", "10x"], "fp32"),
        (["--emb", "dynamic", "--budget", "2MB"], "int8"),
        (["--emb", "dynamic"], "fp32"),
        (["--emb", "drop", "--budget", "10x", "--tables.dtype", "bf16"], "bf16"),
    ]:
        assert parse(options, KINDS)[0].tables_dtype == expected
