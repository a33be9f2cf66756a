import errno
import hashlib
import itertools
import json
import os
import random
import re
import resource
import shutil
import threading
import time
import weakref
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from dlrm.config.schema import RunConfig
from dlrm.distributed.world import World
from dlrm.embeddings import available
from dlrm.model import DLRM
from dlrm.optim import RowOptimizer
from dlrm.training import run_directory
from dlrm.training.checkpoint import Checkpoint, Parts, load_model, snapshot, tensor_files, writer
from dlrm.training.checkpoint.manifest import RunState
from dlrm.training.run_directory import MANIFEST
from dlrm.utils.local_shards import LocalShards
from tests.kit import best_name, corrupt, latest_step, optimizers_of, write_checkpoint

SIZES = [300, 20, 150]
KINDS = {"dense": {}, "paged": {"page_size": 64, "devices": ["cpu", "cpu+cpu"]}}
RUN = "0" * 32
FILE = "rank_00000.safetensors"
BEST = {}  # the step of the best checkpoint of each run


def make(kind, rule="adam", seed=0, options=None):
    torch.manual_seed(seed)
    options = KINDS[kind] if options is None else options
    spec = {"num_dense": 2, "num_embeddings": SIZES, "embedding_dim": 8}
    spec |= {"plan": [(kind, options)] * 3, "bottom_mlp": (4,), "top_mlp": (4,)}
    model = DLRM(**spec)
    return spec, model, optimizers_of(model, rule, lr=0.1)


def train(model, optimizers, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        ids = torch.stack([torch.randint(0, rows, (9,), generator=generator) for rows in SIZES])
        model(torch.randn(2, 9, generator=generator), ids).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def save(run, steps, made, by=RUN, **options):
    """Write a checkpoint of a run; returns its directory."""
    spec, model, optimizers = made
    parts = Parts(model, optimizers)
    state = RunState(model=spec, config={"seed": 0}, groups=parts.groups(), steps=steps)
    if options.get("best"):
        state.best_step = BEST[run] = steps
    state.best_step = BEST.get(run, -1)
    write_checkpoint(run, parts, state, by=by, **options)
    return run / "checkpoints" / f"step_{steps}"


@pytest.fixture
def run(tmp_path):
    """A run with three checkpoints, the first of which is the best."""
    made = make("dense")
    for steps in (1, 2, 3):
        train(*made[1:], steps)
        save(tmp_path / "run", steps, made, best=steps == 1)
    return tmp_path / "run"


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def values(path):
    """The tensors of a checkpoint's model, and its steps."""
    model, state = load_model(path, last=True)
    return state.steps, model.state_dict()


def equal(one, other):
    return one[0] == other[0] and all(torch.equal(one[1][name], other[1][name]) for name in one[1])


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("other", sorted(KINDS))
def test_what_is_saved_goes_on_alike_wherever_rows_lie(kind, other, tmp_path, monkeypatch):
    """Dense tables and pages on several devices read each other's rows and optimizer state."""
    monkeypatch.setattr(tensor_files, "PART", 256)  # so tables have several
    made = make(kind)
    _, model, optimizers = made
    train(model, optimizers, 1)
    manifest = json.loads((save(tmp_path, 3, made) / MANIFEST).read_text())
    stored = manifest["content"]["tensors"].values()
    assert any(len(tensor["shards"]) > 1 for tensor in stored)
    train(model, optimizers, 2)
    _, again, others = make(other, seed=5)
    Checkpoint.open(tmp_path).load(again, others, groups=True)
    train(again, others, 2)
    pairs = zip(model.sparse_arch.to_dense(), again.sparse_arch.to_dense(), strict=True)
    for expected, found in pairs:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    for expected, found in zip(model.dense_parameters(), again.dense_parameters(), strict=True):
        assert torch.equal(found, expected)
    loaded, state = load_model(tmp_path)
    assert not loaded.training
    assert state.config == {"seed": 0}
    assert state.model == made[0]


@pytest.mark.parametrize("kind", sorted(available()))
def test_a_model_of_every_kind_is_built_from_its_checkpoint(kind, tmp_path):
    made = make(kind, options={"clusters": 16} if kind == "basis" else {})
    save(tmp_path, 1, made)
    model, _ = load_model(tmp_path)
    assert all(
        torch.equal(*pair) for pair in zip(made[1].parameters(), model.parameters(), strict=True)
    )


def test_rows_are_not_drawn_before_they_are_loaded(tmp_path, monkeypatch):
    """Of large tables that takes seconds, and of any without memory the import of a compiler."""
    made, drawn = make("dense"), []
    save(tmp_path, 1, made)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "uniform_", lambda own, *_, **__: drawn.append(own))
        patch.setattr(torch.Tensor, "normal_", lambda own, *_, **__: drawn.append(own))
        model, _ = load_model(tmp_path)
    assert not drawn
    for one, other in zip(made[1].parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_every_type_and_shape_is_restored_and_other_programs_read_it(tmp_path):
    torch.manual_seed(0)
    tensors = {
        **{str(t): torch.randn(5, 3).to(t) for t in (torch.float32, torch.bfloat16, torch.float16)},
        **{str(t): torch.randint(0, 99, (4,)).to(t) for t in (torch.int64, torch.int32)},
        **{str(t): torch.randint(0, 99, (7,)).to(t) for t in (torch.uint8, torch.int8)},
        **{"bool": torch.tensor([True, False, True]), "scalar": torch.tensor(3.5)},
        **{"empty": torch.empty(0, 4), "empty row": torch.empty(4, 0), "odd": torch.ones(1).bool()},
        **{"turned": torch.randn(6, 4).t(), "part": torch.randn(9, 9)[2:7, 3:5]},
    }
    shards = [((0, 0), torch.randn(2, 6)), ((2, 0), torch.randn(3, 2)), ((2, 2), torch.randn(3, 4))]
    tensors["sharded"] = LocalShards((5, 6), shards, torch.float32)
    parts = Parts(torch.nn.Module())
    parts.tensors = tensors
    write_checkpoint(tmp_path, parts, RunState(model={}, config={}))
    blank = Parts(torch.nn.Module())
    blank.tensors = {
        name: torch.empty(t.shape, dtype=t.dtype).fill_(9) for name, t in tensors.items()
        if name != "sharded"
    }  # fmt: skip
    columns = [((0, 0), torch.empty(5, 3)), ((0, 3), torch.empty(5, 3))]
    blank.tensors["sharded"] = LocalShards((5, 6), columns, torch.float32)
    found = Checkpoint.open(tmp_path)
    found.load_parts(blank)
    whole = torch.cat([shards[0][1], torch.cat([shards[1][1], shards[2][1]], 1)])
    assert torch.equal(torch.cat([columns[0][1], columns[1][1]], 1), whole)
    with safe_open(found.path / FILE, "pt") as file:
        for name, tensor in tensors.items():
            if name != "sharded":
                assert torch.equal(blank.tensors[name], tensor), name
                assert torch.equal(file.get_tensor(name), tensor), name
        assert torch.equal(file.get_tensor("sharded@2,2"), shards[2][1])
        assert file.metadata()["run"] == RUN


def known(run):
    """The step of the latest checkpoint of a run, and the name of the best one."""
    return latest_step(run), best_name(run)


def test_the_latest_and_the_best_are_kept_and_old_ones_are_removed(run):
    assert names(run) == ["step_1", "step_2", "step_3"]
    directory = run / "checkpoints"
    assert Checkpoint.open(run).path == directory / "step_3"
    for which, step in (("latest", "step_3"), ("best", "step_1")):
        assert Checkpoint.open(directory / which).path == directory / step
    made = make("dense")
    save(run, 4, made)
    assert names(run) == ["step_1", "step_3", "step_4"]
    save(run, 4, made, best=True)  # again, resumed since
    assert names(run) == ["step_3", "step_4+"]
    assert known(run) == (4, "step_4+")
    assert Checkpoint.open(run).path.name == "step_4+"
    save(run, 10, made, keep=1)
    save(run, 20, made, keep=1)
    assert names(run) == ["step_20", "step_4+"]


def test_what_is_not_complete_is_not_named(run, monkeypatch):
    """Of a process that is killed before its checkpoint has its name."""
    monkeypatch.setattr(writer, "sync_directory", failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        save(run, 4, make("dense"), best=True)
    assert known(run) == (3, "step_1")
    assert Checkpoint.open(run).path.name == "step_3"
    assert Checkpoint.open(run, best=True).path.name == "step_1"


def test_what_the_user_keeps_beside_checkpoints_stays(run):
    directory = run / "checkpoints"
    own = {"before_the_change", "step_1_keep", "step_by_step", "step_x.tmp"}
    for name in own:
        shutil.copytree(directory / "step_1", directory / name)
    save(run, 4, make("dense"), keep=1, best=True)
    assert set(names(run)) == {"step_4", *own}
    assert Checkpoint.open(directory / "before_the_change").state.steps == 1


def test_the_run_of_a_checkpoint(run, tmp_path, monkeypatch):
    directory = run / "checkpoints"
    assert run_directory.run_directory(run) == run
    assert run_directory.run_directory(directory / "latest") == run
    assert run_directory.run_directory(directory / "step_2") == run
    monkeypatch.chdir(directory)
    assert run_directory.run_directory("latest") == run
    shutil.copytree(directory / "step_1", tmp_path / "copied")
    with pytest.raises(FileNotFoundError, match="copied is not in a run: name one in the"):
        run_directory.run_directory(tmp_path / "copied")
    assert Checkpoint.open(tmp_path / "copied").state.steps == 1


def failing(error):
    def fails(*_, **__):
        raise error

    return fails


def test_a_failed_save_leaves_what_there_was(run, monkeypatch):
    before, made = names(run), make("dense")
    full = OSError(errno.ENOSPC, "No space left on device")
    for where, name in ((tensor_files.os, "fsync"), (tensor_files.hashlib, "sha256")):
        monkeypatch.setattr(where, name, failing(full))
        with pytest.raises(OSError, match="step_4 can't be written: No space left on device"):
            save(run, 4, made)
        monkeypatch.setattr(where, name, failing(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            save(run, 4, made)
        monkeypatch.undo()
    monkeypatch.setattr(tensor_files.TensorFiles, "read_into", failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        load_model(run)
    monkeypatch.undo()
    parts = Parts(*made[1:])
    parts.tensors["unwritable"] = torch.empty(1, device="meta")
    with pytest.raises(OSError, match="step_4 can't be written: "):
        write_checkpoint(run, parts, RunState(model={}, config={}, steps=4))
    assert names(run) == before
    assert values(run)[0] == 3


def test_the_state_of_some_of_the_weights_of_a_table_is_saved():
    _, model, _ = make("paged", options={"page_size": 64, "devices": ["cpu", "cpu"]})
    (name, weight), *others = model.sparse_arch.named_parameters()
    assert others  # that another optimizer, or none, updates
    parts = Parts(model, [RowOptimizer([weight], "adagrad")])
    states = [name for name in parts.tensors if name.startswith("optimizer.")]
    assert states == [f"optimizer.sparse_arch.{name}.sum"]


def test_a_disk_that_is_full_behind_the_tensors_leaves_what_there_was(run):
    before, made = names(run), make("dense")
    parts = Parts(*made[1:])
    state = RunState(model=made[0], config={"long": "x" * 5_000_000}, steps=4)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, hard))
    try:
        with pytest.raises(OSError, match="step_4 can't be written: File too large"):
            write_checkpoint(run, parts, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(run) == before
    load_model(run)


def test_others_are_refused(run, tmp_path, caplog):
    found = Checkpoint.open(run)
    with pytest.raises(ValueError, match="is of a model with a different embedding_dim, plan"):
        found.require_spec({**found.state.model, "embedding_dim": 4, "plan": []})
    found.state.model["plan"] = 5
    with pytest.raises(ValueError, match="is of a model with a different plan"):
        found.require_spec({**found.state.model, "plan": []})
    _, model, others = make("dense", rule="sgd")
    with pytest.raises(ValueError, match="the saved optimizer is adam, this one is sgd"):
        found.load(model, others, groups=True)
    with pytest.raises(ValueError, match=r"it has no tensor model\.0.*train again"):
        found.load(make("dense", rule="adam")[1].bottom_mlp)
    with pytest.raises(FileNotFoundError, match="is not a checkpoint: name a run directory"):
        Checkpoint.open(run / "checkpoints")
    with pytest.raises(FileNotFoundError, match=rf"name a run directory, such as {run}$"):
        Checkpoint.open(run.parent)
    (tmp_path / "manifest.json").write_text('{"format": "dlrm export"}')
    with pytest.raises(ValueError, match="it is an export: name the run"):
        Checkpoint.open(tmp_path)
    assert not any(record.exc_info for record in caplog.records)  # tracebacks that torch logs


@pytest.mark.parametrize("groups", [True, False])
def test_optimizers_are_restored_with_rates_only_if_asked_for(groups, tmp_path):
    """Other options are those of the run."""
    made = make("dense")
    _, model, optimizers = made
    train(model, optimizers, 1)
    save(tmp_path, 1, made)
    _, again, others = make("dense", seed=5)
    (group,) = others[0].param_groups
    group["lr"].fill_(0.3)
    group["weight_decay"] = 0.25
    Checkpoint.open(tmp_path).load(again, others, groups=groups)
    states = [optimizer.state for optimizer in (*optimizers, *others)]
    for expected, found in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(found, expected)
        before, after = [state[p] for p in (expected, found) for state in states if p in state]
        assert all(torch.equal(after[name], before[name]) for name in before)
    (group,) = others[0].param_groups
    assert group["weight_decay"] == 0.25
    assert float(group["lr"]) == pytest.approx(0.1 if groups else 0.3)


@pytest.mark.parametrize("name", [FILE, MANIFEST])
def test_a_changed_byte_is_found(name, run):
    """Whichever it is: the checkpoint is refused, or its values are the same."""
    path, expected = run / "checkpoints" / "step_2", values(run / "checkpoints" / "step_2")
    content, outcomes = (path / name).read_bytes(), []
    places = random.Random(0).sample(range(len(content)), 60)
    for at in places:
        corrupt(path / name, at)
        try:
            assert equal(values(path), expected), at
        except ValueError as error:
            outcomes.append(str(error))
        (path / name).write_bytes(content)
    assert len(outcomes) >= (60 if name == FILE else 55)
    assert "\n" not in "".join(outcomes)


def test_damage_names_the_tensor_and_the_file(run):
    path = run / "checkpoints" / "step_2"
    whole = (path / FILE).read_bytes()

    def refused(match):
        with pytest.raises(ValueError, match=f"step_2 can't be read as a checkpoint: .*{match}"):
            Checkpoint.open(path)

    corrupt(path / FILE)
    refused(f"tensor (model|optimizer).* in {FILE} does not have the digest.*; there are step_3, ")
    (path / FILE).write_bytes(whole[:4096] + bytes(4096) + whole[8192:])
    refused("does not have the digest of the manifest")
    (path / FILE).write_bytes(whole[:-1])
    refused(f"{FILE} has [\\d,]+ bytes, not")
    shutil.copy(run / "checkpoints" / "step_3" / FILE, path / FILE)  # of the same sizes
    refused(f"the header in {FILE} does not have the digest")
    (path / FILE).unlink()
    refused(f"{FILE}: No such file")
    (path / FILE).symlink_to(run / "checkpoints" / "step_3" / FILE)
    refused(f"{FILE} is a link")
    (path / FILE).unlink()
    (path / FILE).write_bytes(whole)
    (path / "rank_00001.safetensors").write_bytes(whole)
    refused("rank_00001.safetensors is not in its manifest")
    (path / "rank_00001.safetensors").unlink()
    assert Checkpoint.open(path).state.steps == 2


def test_a_damaged_latest_is_replaced_by_the_newest_intact_one(run, capsys):
    directory = run / "checkpoints"
    for step, other in ((3, "step_2"), (2, "step_1")):
        corrupt(directory / f"step_{step}" / (FILE if step == 3 else MANIFEST))
        for path in (run, directory / "latest"):
            assert Checkpoint.open(path).path == directory / other
            error = capsys.readouterr().err
            assert f"warning: {directory / 'step_3'} is damaged: tensor " in error
            assert f"warning: {directory / other} is read instead" in error
    with pytest.raises(ValueError, match=r"step_3 can't be read as .*there are step_2"):
        Checkpoint.open(directory / "step_3")
    assert Checkpoint.open(run).path == directory / "step_1"
    corrupt(directory / "step_1" / FILE)
    with pytest.raises(ValueError, match=r"run has no intact checkpoint: .*step_3: ten") as error:
        Checkpoint.open(run)
    assert "remove" not in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["", "checkpoints/best"])
def test_a_newer_checkpoint_that_might_be_better_is_not_left_out_silently(name, run, capsys):
    corrupt(run / "checkpoints" / "step_3" / MANIFEST)
    assert Checkpoint.open(run / name, best=True).path.name == "step_1"
    assert f"warning: {run / 'checkpoints' / 'step_3'} is damaged: " in capsys.readouterr().err


def test_a_run_without_a_best_checkpoint_says_so(tmp_path):
    save(tmp_path, 1, make("dense"))
    assert Checkpoint.open(tmp_path, best=True).path.name == "step_1"
    with pytest.raises(FileNotFoundError, match="has no best checkpoint: it was not validated"):
        Checkpoint.open(tmp_path / "checkpoints" / "best")


def test_another_checkpoint_is_not_taken_for_the_best(run, capsys):
    """Not one of another run or step in its place."""
    best = run / "checkpoints" / "step_1"
    other = save(run.parent / "other", 1, make("dense", seed=7), by="1" * 32)
    for source, why in ((other, "of another run"), (best.with_name("step_2"), "of step 2, not 1")):
        shutil.rmtree(best)
        shutil.copytree(source, best)
        assert Checkpoint.open(run, best=True).path.name == "step_3"
        told = capsys.readouterr().err
        assert re.search(f"warning: {best} is damaged: it is .*{why}\n", told)
    shutil.rmtree(best)
    assert Checkpoint.open(run, best=True).path.name == "step_3"
    told = capsys.readouterr().err
    assert f"warning: {best} is damaged: {MANIFEST}: No such file" in told
    assert f"warning: {best.with_name('step_3')} is read instead" in told
    with pytest.raises(ValueError, match=r"best has no intact checkpoint: .*step_1: manifest"):
        Checkpoint.open(run / "checkpoints" / "best")


def test_links_directories_and_pipes_in_place_of_what_a_run_has(run, capsys):
    path = run / "checkpoints" / "step_3"
    for make, name in itertools.product((os.mkdir, os.mkfifo), (MANIFEST, FILE)):
        (path / name).rename(run / "aside")
        make(path / name)
        assert Checkpoint.open(run).path.name != "step_3"
        assert f"step_3 is damaged: {name} is not a regular file\n" in capsys.readouterr().err
        (path / name).rmdir() if make is os.mkdir else (path / name).unlink()
        (run / "aside").rename(path / name)
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").symlink_to("checkpoints")  # a link to itself leads nowhere
    with pytest.raises(FileNotFoundError, match="run"):
        Checkpoint.open(run)


def test_what_is_read_while_a_run_writes_belongs_together(tmp_path):
    """Every tensor and the state are of one checkpoint, though old ones are removed meanwhile."""
    spec, model, optimizers = make("dense")
    stop = threading.Event()

    def write():
        steps = 0
        while not stop.is_set():
            steps += 1
            for tensor in model.state_dict().values():
                tensor.fill_(steps)
            save(tmp_path, steps, (spec, model, optimizers), keep=1, best=steps % 3 == 0)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while "step_4" not in str([*tmp_path.glob("checkpoints/*")]):
            pass
        seen = set()
        for path in [tmp_path, tmp_path / "checkpoints" / "best"] * 20:
            steps, tensors = values(path)
            assert all(bool((tensor == steps).all()) for tensor in tensors.values())
            seen.add(steps)
    finally:
        stop.set()
        writer.join()
    assert len(seen) > 3


def edited(path, change):
    """Change the content of a manifest, and let its digest be right."""
    outer = json.loads((path / MANIFEST).read_bytes())
    change(outer["content"])
    body = json.dumps(outer["content"], ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    outer["sha256"] = hashlib.sha256(body.encode()).hexdigest()
    (path / MANIFEST).write_text(json.dumps(outer))


def shard_of(content):
    return next(t["shards"][0] for t in content["tensors"].values() if len(t["shape"]) == 2)


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


ATTACKS = {
    "rows": lambda c: next(iter(c["tensors"].values())).update(shape=[2**62, 8]),
    "huge": lambda c: next(iter(c["tensors"].values())).update(shape=[10**400]),
    "negative": lambda c: shard_of(c)[0].__setitem__(0, -1),
    "overlap": lambda c: next(iter(c["tensors"].values()))["shards"].append(shard_of(c)),
    "missing": lambda c: next(iter(c["tensors"].values()))["shards"].clear(),
    "gone": lambda c: (
        c["tensors"].pop("model.bottom_mlp.layers.0.weight", None) or c["tensors"].popitem()
    ),
    "outside": lambda c: shard_of(c).__setitem__(2, "../step_1/rank_00000.safetensors"),
    "absolute": lambda c: c["files"].update({"/etc/passwd": c["files"].popitem()[1]}),
    "no digest": lambda c: shard_of(c).__setitem__(4, ""),
    "dtype": lambda c: next(iter(c["tensors"].values())).update(dtype="OBJ"),
    "deep": lambda c: c["state"].update(fitted=nested(500)),
    "bottomless": lambda c: c["state"].update(fitted=nested(900)),
    "steps": lambda c: c["state"].update(steps=-3),
    "text": lambda c: c["state"].update(steps="3"),
    "surrogate": lambda c: c["state"].update(best_name="\ud800"),
    "run": lambda c: c.update(run="../../x"),
    "state": lambda c: c.update(state=[]),
    "batch size": lambda c: c["state"]["config"].update(eval_batch_size="many"),
    "groups": lambda c: c["state"].update(groups={"tuple": [{"tuple": [{"rule": 1}]}]}),
    "group": lambda c: c["state"].update(groups={"tuple": [3]}),
    "rate": lambda c: c["state"]["groups"]["tuple"][0]["tuple"][0].update(lr=1e308),
    "model": lambda c: c["state"].update(model={"plan": 5}),
    "tables": lambda c: c["state"]["model"].update(num_embeddings=[2**62, 20, 150]),
    "memory": lambda c: c["state"]["model"].update(num_embeddings=[2**30, 20, 150]),
    "ranks": lambda c: c["state"]["model"].update(plan=[["tt", {"rank": 2**14}]] * 3),
    "layers": lambda c: c["state"]["model"].update(top_mlp=[2**40]),
    "many layers": lambda c: c["state"]["model"].update(top_mlp=[1] * 900_000),
    "cross layers": lambda c: c["state"]["model"].update(interaction="dcn", cross_layers=10**9),
    "many tables": lambda c: c["state"]["model"].update(
        num_embeddings=[1] * 100_000, plan=[["dense", {}]] * 100_000
    ),
    "text for a size": lambda c: c["state"]["model"].update(embedding_dim="8"),
    "kind": lambda c: c["state"]["model"].update(plan=[["no such kind", {}]] * 3),
    "other model": lambda c: c["state"]["model"].update(bottom_mlp=[5]),
}


@pytest.mark.parametrize("attack", sorted(ATTACKS))
def test_a_manifest_that_someone_wrote_to_do_harm_is_refused(attack, run):
    path = run / "checkpoints" / "step_3"
    try:
        edited(path, ATTACKS[attack])
    except UnicodeEncodeError:
        text = (path / MANIFEST).read_text()
        (path / MANIFEST).write_text(text.replace('"best_name":"step_1"', r'"best_name":"\ud800"'))
    began = time.process_time()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="step_3") as error:
        load_model(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10
    assert time.process_time() - began < 10
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 700


def test_a_run_that_names_no_option_is_evaluated_with_the_defaults(run):
    path = run / "checkpoints" / "step_3"
    edited(path, lambda content: content["state"].update(config={}))
    _, state = load_model(path)
    assert state.used_options.eval_batch_size == RunConfig.eval_batch_size


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"null", b'{"format": "dlrm checkpoint", "version": 2}', b"{" * 100_000, b"\xff",
     b'{"format": "dlrm checkpoint", "version": 1, "content": NaN}', b"[" * 2_000_000,
     b'{"format": "dlrm checkpoint", "version": 1, "content": 1' + b"0" * 5000 + b"}"],
    ids=lambda content: content[:60].decode(errors="replace") + f" {len(content)}",
)  # fmt: skip
def test_a_file_that_is_no_manifest_is_refused(content, run):
    path = run / "checkpoints" / "step_3"
    (path / MANIFEST).write_bytes(content)
    with pytest.raises(ValueError, match=r"step_3 can.t be read as .*: manifest.json: it"):
        load_model(path)
    os.truncate(path / MANIFEST, 1 << 30)  # which is not read
    with pytest.raises(ValueError, match=r"manifest.json: it has more than"):
        load_model(path)


def test_a_run_is_held_by_one_process(run):
    lock = run_directory.RunLock(run)
    with pytest.raises(
        ValueError, match=rf"run is being written by process {os.getpid()} on '"
    ) as e:
        run_directory.RunLock(run)
    assert "since 20" in str(e.value)
    threading.Timer(0.3, lock.release).start()
    again = run_directory.RunLock(run, patience=20)
    again.release()
    assert (run / ".lock").exists()


def test_a_new_run_that_wrote_nothing_leaves_nothing(tmp_path):
    lock = run_directory.RunLock(tmp_path / "new", new=True)
    with pytest.raises(ValueError, match="is being written by"):
        run_directory.RunLock(tmp_path / "new", new=True)
    lock.release()
    assert not (tmp_path / "new").exists()
    run_directory.RunLock(tmp_path / "deep" / "new", new=True).release()
    assert not (tmp_path / "deep").exists()
    lock = run_directory.RunLock(tmp_path / "new", new=True)
    (tmp_path / "new" / "notes.txt").write_text("mine")
    lock.release()
    with pytest.raises(ValueError, match=r"new exists: choose another --name$"):
        run_directory.RunLock(tmp_path / "new", new=True)


def test_state_is_restored_to_the_type(tmp_path):
    state = RunState(
        model={"plan": [("tt", {"q": (2, 2), "rank": 4})], "sizes": (1, 2)},
        config={"a": float("inf"), "b": {"c": None, "d": [1.5, True]}},
        fitted={"fitted/calibration": float("nan"), "x": 0.1},
        validated=(5, {"auc": 0.5}),
        steps=7,
    )
    parts = Parts(torch.nn.Linear(1, 1))
    write_checkpoint(tmp_path, parts, state)
    found = Checkpoint.open(tmp_path).state
    assert repr(found) == repr(replace(state, groups=()))


@pytest.fixture
def saving(tmp_path, monkeypatch):
    """Saves checkpoints in the background, each of which is written when the gate opens."""
    gate, made = threading.Event(), make("dense")
    real = writer.write_file

    def write_file(*given):
        assert gate.wait(60)
        return real(*given)

    monkeypatch.setattr(writer, "write_file", write_file)
    (tmp_path / "checkpoints").mkdir()
    writers = []

    def saving(keep=2):
        own = writer.CheckpointWriter(tmp_path, RUN, World(), keep)
        writers.append(own)

        def step(steps, *, best=False, best_step=-1, last=False):
            parts = Parts(*made[1:])
            for tensor in made[1].state_dict().values():
                tensor.fill_(steps)
            state = RunState(model=made[0], config={}, groups=parts.groups(), steps=steps)
            state.best_step = steps if best else best_step
            own.save(parts, state, best=best, last=last)

        return own, step, gate

    yield saving
    gate.set()
    for own in writers:
        own.close()


def test_a_step_is_saved_twice_before_the_first_one_is_written(saving, tmp_path):
    own, step, gate = saving()
    step(1)
    step(1, best=True)  # by an evaluation, after the time for a checkpoint
    gate.set()
    own.wait()
    assert known(tmp_path) == (1, "step_1+")
    assert Checkpoint.open(tmp_path).path.name == "step_1+"


def test_training_continues_while_a_checkpoint_is_written(saving, tmp_path):
    own, step, gate = saving()
    step(1, best=True)
    assert own.copied > 0
    step(2, best_step=1)  # waits
    copy = weakref.ref(own._writes[-1][0].pieces[0].values)
    step(3, best_step=1)  # in its place
    assert copy() is None, "copies are large"
    assert names(tmp_path) in (["step_1.tmp"], [])
    gate.set()
    own.wait()
    assert names(tmp_path) == ["step_1", "step_3"]
    assert known(tmp_path) == (3, "step_1")
    for name, steps in (("step_1", 1), ("step_3", 3)):
        found, tensors = values(tmp_path / "checkpoints" / name)
        assert found == steps
        assert all(bool((tensor == steps).all()) for tensor in tensors.values())


@pytest.mark.parametrize("best", [False, True])
def test_the_last_checkpoint_replaces_one_that_is_being_written(best, saving, tmp_path):
    """Unless that is the best one."""
    own, step, gate = saving()
    step(1, best=best)
    while not (tmp_path / "checkpoints" / "step_1.tmp").exists():
        time.sleep(0.01)
    step(2, best_step=1 if best else -1)
    step(3, best_step=1 if best else -1, last=True)
    gate.set()
    own.wait()
    assert names(tmp_path) == (["step_1", "step_3"] if best else ["step_3"])
    assert values(tmp_path)[0] == 3


@pytest.mark.parametrize(("keep", "best"), [(2, True), (3, False)])
def test_a_checkpoint_that_is_wanted_is_waited_for(keep, best, saving, tmp_path):
    """The best one so far, and every one if more than two are to be kept."""
    own, step, gate = saving(keep)
    began = time.perf_counter()
    threading.Timer(0.3, gate.set).start()
    step(1)
    step(2, best=best)
    step(3, best_step=2 if best else -1)
    assert time.perf_counter() - began >= 0.3
    own.wait()
    assert names(tmp_path)[-2:] == ["step_2", "step_3"]


def test_other_work_is_done_before_the_next_checkpoint_while_training_continues(saving, tmp_path):
    own, step, gate = saving()
    gate.set()
    step(1)
    proceed, found = threading.Event(), []
    own.then(lambda: found.append(proceed.wait(60) and latest_step(tmp_path)))
    step(2)
    step(3)  # in its place
    proceed.set()
    own.wait()
    assert found == [1]
    assert names(tmp_path) == ["step_1", "step_3"]


def test_without_room_for_copies_training_waits(saving, monkeypatch, tmp_path):
    own, step, gate = saving()
    monkeypatch.setattr(snapshot, "free_memory", lambda device: 0)
    gate.set()
    step(1)
    assert names(tmp_path) == ["step_1"]
    assert own.copied == 0


def test_an_error_in_the_background_is_raised_at_the_next_step(saving, monkeypatch, tmp_path):
    own, step, _ = saving()
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(writer, "write_file", failing(full))
    step(1)

    def steps():
        for _ in range(1000):
            own.check()
            time.sleep(0.01)

    done = []
    own.then(lambda: done.append("of another state"))
    with pytest.raises(OSError, match="step_1 can't be written: No space left on device"):
        steps()
    own.close()
    assert (names(tmp_path), done) == ([], [])


@pytest.mark.gpu
def test_a_checkpoint_of_a_gpu_hardly_stops_training(tmp_path):
    """6.6 GB of state: training stops for the copy alone."""
    tables = torch.nn.ParameterList(
        torch.nn.Parameter(torch.randn(1_050_000, 16, device="cuda")) for _ in range(98)
    )
    parts, state = Parts(tables), RunState(model={}, config={}, steps=1)
    (tmp_path / "checkpoints").mkdir()
    own = writer.CheckpointWriter(tmp_path, RUN, World(), 2)
    torch.cuda.synchronize()
    began = time.perf_counter()
    own.save(parts, state, best=False)
    stalled = time.perf_counter() - began
    own.wait()
    own.close()
    assert own.copied == 98 * 1_050_000 * 64
    assert stalled < 0.3
    found = Parts(torch.nn.ParameterList(torch.empty_like(table) for table in tables))
    with Checkpoint.open(tmp_path) as checkpoint_read:
        checkpoint_read.load_parts(found)
    for name, value in found.tensors.items():
        assert torch.equal(value, parts.tensors[name]), name
