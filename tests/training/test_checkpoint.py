import copy
import errno
import json
import resource
import shutil

import pytest
import torch
from torch.distributed import checkpoint as dcp

from dlrm.model import DLRM
from dlrm.optim import RowOptimizer
from dlrm.training import checkpoint, run_directory

SIZES = [300, 20, 150]
KINDS = {"dense": {}, "paged": {"page_size": 64, "devices": ["cpu", "cpu+cpu"]}}


def make(kind, rule="adam", seed=0, options=None):
    torch.manual_seed(seed)
    options = KINDS[kind] if options is None else options
    recipe = {"num_dense": 2, "num_embeddings": SIZES, "embedding_dim": 8}
    recipe["plan"] = [(kind, options)] * 3
    recipe |= {"bottom_mlp": [4], "top_mlp": [4]}
    model = DLRM(**recipe)
    optimizers = [
        RowOptimizer(model.dense_parameters(), rule, lr=0.1),
        RowOptimizer(model.sparse_arch.parameters(), rule, lr=0.1),
    ]
    return recipe, model, optimizers


def train(model, optimizers, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        ids = torch.stack([torch.randint(0, rows, (9,), generator=generator) for rows in SIZES])
        model(torch.randn(2, 9, generator=generator), ids).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def save(path, recipe, model, optimizers, **rest):
    parts = checkpoint.Parts(model, optimizers)
    about = {"recipe": recipe, "config": json.dumps({"seed": 0}), "groups": parts.groups()}
    checkpoint.save(path, parts, about, **rest)
    return about


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("other", sorted(KINDS))
def test_what_is_saved_goes_on_alike_wherever_rows_lie(kind, other, tmp_path):
    """Dense tables and pages on several devices read each other's rows and optimizer state."""
    recipe, model, optimizers = make(kind)
    train(model, optimizers, 1)
    about = save(tmp_path / "checkpoints" / "step_3", recipe, model, optimizers)
    train(model, optimizers, 2)
    _, again, others = make(other, seed=5)
    checkpoint.load(tmp_path, again, others, groups=about["groups"])
    train(again, others, 2)
    pairs = zip(model.sparse_arch.to_dense(), again.sparse_arch.to_dense(), strict=True)
    for expected, found in pairs:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    for expected, found in zip(model.dense_parameters(), again.dense_parameters(), strict=True):
        assert torch.equal(found, expected)
    loaded, config = checkpoint.load_model(tmp_path)
    assert not loaded.training
    assert config == {"seed": 0}


def test_links_point_to_whole_checkpoints_and_the_rest_is_removed(tmp_path):
    recipe, model, optimizers = make("dense")
    directory = tmp_path / "checkpoints"

    def names():
        return sorted(path.name for path in directory.iterdir())

    both = [run_directory.LATEST, run_directory.BEST]
    save(directory / "step_1", recipe, model, optimizers, links=both)
    save(directory / "step_2", recipe, model, optimizers)
    assert names() == ["best", "latest", "step_1", "step_2"]
    assert run_directory.find_checkpoint(tmp_path).resolve() == directory / "step_2"
    assert run_directory.find_checkpoint(directory / "best").resolve() == directory / "step_1"
    assert run_directory.run_directory(tmp_path) == tmp_path
    (directory / "step_4.tmp").mkdir()  # of a process that was killed
    save(directory / "step_3", recipe, model, optimizers)
    assert names() == ["best", "latest", "step_1", "step_3"]
    save(directory / "step_3", recipe, model, optimizers, links=both)  # again, resumed since
    assert len(names()) == 3
    assert checkpoint.about(tmp_path)["recipe"] == recipe


def test_what_the_user_keeps_beside_checkpoints_stays(tmp_path):
    recipe, model, optimizers = make("dense")
    directory = tmp_path / "checkpoints"
    save(directory / "step_1", recipe, model, optimizers)
    own = {"before_the_change", "step_1_keep", "step_by_step"}
    for name in own:
        shutil.copytree(directory / "step_1", directory / name)
    save(directory / "step_2", recipe, model, optimizers)
    assert {path.name for path in directory.iterdir()} == {"latest", "step_2", *own}
    assert checkpoint.about(directory / "before_the_change")["recipe"] == recipe


def test_characters_in_the_name_of_a_checkpoint_stand_for_themselves(tmp_path):
    recipe, model, optimizers = make("dense")
    save(tmp_path / "epoch.1", recipe, model, optimizers)
    own = {"epoch_1", "epochs2"}
    for name in own:
        shutil.copytree(tmp_path / "epoch.1", tmp_path / name)
    save(tmp_path / "epoch.2", recipe, model, optimizers)
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "epoch.2", *own}


def test_the_run_of_a_checkpoint(tmp_path, monkeypatch):
    recipe, model, optimizers = make("dense")
    directory = tmp_path / "run" / "checkpoints"
    save(directory / "step_1", recipe, model, optimizers)
    assert run_directory.run_directory(tmp_path / "run") == run_directory.run_directory(
        directory / "latest"
    )
    monkeypatch.chdir(directory)
    assert run_directory.run_directory("latest") == tmp_path / "run"
    shutil.copytree(directory / "step_1", tmp_path / "copied")
    with pytest.raises(FileNotFoundError, match="copied is not in a run: name one in the"):
        run_directory.run_directory(tmp_path / "copied")


def test_a_failed_save_leaves_what_there_was(tmp_path, monkeypatch):
    recipe, model, optimizers = make("dense")
    directory = tmp_path / "checkpoints"
    save(directory / "step_1", recipe, model, optimizers)
    monkeypatch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save(directory / "step_2", recipe, model, optimizers)
    full = OSError(errno.ENOSPC, "No space left on device")

    def fails(error, then):
        def save(*_):
            try:
                raise error
            finally:
                raise then

        return save

    # As when the file under an archive can't be written, which the archive then finds too short.
    monkeypatch.setattr(torch, "save", fails(full, RuntimeError("unexpected pos 704 vs 598")))
    with pytest.raises(OSError, match="step_2 can't be written: No space left on device"):
        save(directory / "step_2", recipe, model, optimizers)
    monkeypatch.setattr(torch, "save", fails(KeyboardInterrupt(), KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        save(directory / "step_2", recipe, model, optimizers)
    monkeypatch.undo()
    monkeypatch.setattr(dcp.FileSystemReader, "read_data", fails(OSError(), KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        checkpoint.load(directory / "step_1", model, optimizers)
    monkeypatch.undo()
    parts = checkpoint.Parts(model, optimizers)
    parts.tensors["unwritable"] = torch.empty(1, device="meta")
    with pytest.raises(OSError, match="step_3 can't be written: "):
        checkpoint.save(directory / "step_3", parts, {})
    assert not list(directory.glob("step_3*"))
    assert run_directory.find_checkpoint(tmp_path).resolve() == directory / "step_1"
    checkpoint.load_model(tmp_path)


def test_a_disk_that_is_full_behind_the_tensors_leaves_what_there_was(tmp_path):
    recipe, model, optimizers = make("dense")
    directory = tmp_path / "checkpoints"
    save(directory / "step_1", recipe, model, optimizers)
    about = {"recipe": recipe, "long": "x" * 5_000_000}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, hard))
    try:
        with pytest.raises(OSError, match="step_2 can't be written: File too large"):
            checkpoint.save(directory / "step_2", checkpoint.Parts(model, optimizers), about)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(directory.glob("step_2*"))
    assert run_directory.find_checkpoint(tmp_path).resolve() == directory / "step_1"


def test_others_are_refused(tmp_path, caplog):
    recipe, model, optimizers = make("dense")
    about = save(tmp_path / "checkpoints" / "step_1", recipe, model, optimizers)
    with pytest.raises(ValueError, match="is of a model with a different embedding_dim, plan"):
        checkpoint.about(tmp_path, spec={**recipe, "embedding_dim": 4, "plan": []})
    groups = copy.deepcopy(about["groups"])
    _, model, others = make("dense", rule="sgd")
    with pytest.raises(ValueError, match="the saved optimizer is adam, this one is sgd"):
        checkpoint.load(tmp_path, model, others, groups=groups)
    with pytest.raises(FileNotFoundError, match="is not a checkpoint: name a run directory"):
        run_directory.find_checkpoint(tmp_path / "checkpoints")
    for pattern in ("*.distcp", ".metadata"):
        for damaged in (tmp_path / "checkpoints" / "step_1").glob(pattern):
            damaged.write_bytes(damaged.read_bytes()[:100])
        with pytest.raises(ValueError, match="can't be read as a checkpoint"):
            checkpoint.load_model(tmp_path)
    assert not any(record.exc_info for record in caplog.records)  # tracebacks that torch logs


def test_options_of_the_rule_are_those_that_the_resumed_run_gives(tmp_path):
    recipe, model, optimizers = make("dense")
    about = save(tmp_path / "checkpoints" / "step_1", recipe, model, optimizers)
    about["groups"][0][0]["lr"] = 0.3
    _, again, others = make("dense", seed=5)
    others[0].param_groups[0]["weight_decay"] = 0.25
    checkpoint.load(tmp_path, again, others, groups=about["groups"])
    (group,) = others[0].param_groups
    assert group["weight_decay"] == 0.25
    torch.testing.assert_close(group["lr"], torch.tensor(0.3))


def test_optimizers_are_restored_with_the_options_that_they_have(tmp_path):
    recipe, model, optimizers = make("dense")
    train(model, optimizers, 1)
    save(tmp_path / "checkpoints" / "step_1", recipe, model, optimizers)
    _, again, others = make("dense", seed=5)
    others[0].param_groups[0]["lr"] = 0.3
    checkpoint.load(tmp_path, again, others)
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    states = [optimizer.state for optimizer in (*optimizers, *others)]
    for expected, found in pairs:
        assert torch.equal(found, expected)
        before, after = [state[p] for p in (expected, found) for state in states if p in state]
        assert all(torch.equal(after[name], before[name]) for name in before)
    assert float(others[0].param_groups[0]["lr"]) == pytest.approx(0.3)
