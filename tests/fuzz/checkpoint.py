"""Fuzzes checkpoints: their tensors, their manifests, their links, and what lies beside them.

    python tests/fuzz/checkpoint.py --count 10000
    python tests/fuzz/checkpoint.py --kind forged --seed 3 --first 17 --count 1

A changed run is resumed, trained on with ``--init_from``, evaluated or used for predictions. Its
results must be those of the unchanged one or, if a warning names the damage, those of the
checkpoint before it. A manifest whose author computed its digests anew is that of another model,
and its values are the author's: there, a case is bad if it starts a program, unpickles an object,
takes too much memory or time, or fails with more than one line. That is so in all other cases too.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from harness import Case, Limits, Outcome, flip_bits, main, mutate, refusal, run_case, scratch
from trees import NASTY, as_json, mutate_text, mutate_values

from dlrm.commands import evaluate, predict, train
from dlrm.data import synthetic
from dlrm.training.checkpoint import Checkpoint, load_model
from dlrm.training.run_directory import MANIFEST

TENSORS = "rank_00000.safetensors"
SMALL = "--model.bottom_mlp [4] --model.top_mlp [4] --model.embedding_dim 4 --tables.threshold 50"
SMALL += " --emb hash --hash.rows 32 --batch_size 64 --eval_every 3 --device cpu --epochs 9"
USES = ("resume", "init_from", "evaluate", "predict")
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen")
FORBIDDEN += ("pickle.find_class",)
"""Audit events of a program that is started, and of an object that is unpickled."""


@cache
def originals() -> Path:
    """A directory with data and two runs of one kind, each with checkpoints ``step_3`` and
    ``step_6``.
    """
    place = scratch()
    rows = [200 if column < 3 else 9 for column in range(26)]
    synthetic.write(place / "data", rows=900, cardinalities=rows, fractions=[0.7, 0.1, 0.2])

    def make() -> Outcome:
        for seed, name in enumerate(("one", "two")):
            given = f"--data {place / 'data'} --output {place} --name {name} --seed {seed}"
            refused = refusal(train.main, *given.split(), *SMALL.split(), "--max_steps", 6)
            assert refused is None, refused
        with Checkpoint.open(place / "one", best=True) as best:
            assert best.path.name == "step_6", "what is evaluated is not what is changed"
        return Outcome.EQUAL

    in_fork(make)
    return place


@cache
def expected(use: str) -> tuple[str, str]:
    """The results of a use of the first run: of its latest checkpoint, and of the earlier one."""
    found = []
    for which in ("step_6", "step_3"):
        with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
            place = Path(directory)
            shutil.copytree(originals() / "one", place / "run", symlinks=True)

            def make(which: str = which, place: Path = place) -> Outcome:
                refused, _, results = used(use, place / "run" / "checkpoints" / which, place)
                assert refused is None, refused
                (place / "results").write_text(results)
                return Outcome.EQUAL

            in_fork(make)
            found.append((place / "results").read_text())
    return found[0], found[1]


def in_fork(make: Callable[[], Outcome]) -> None:
    """Call a function in a fork, so that no thread of PyTorch is started here."""
    result = run_case(make, Limits(seconds=200, memory=8 << 30))
    assert result.outcome == Outcome.EQUAL, result.detail


def used(use: str, given: Path, place: Path) -> tuple[str | None, str, str]:
    """Use a checkpoint.

    Args:
        use: one of :data:`USES`.
        given: the run, ``place/run``, or its checkpoint.
        place: directory of the case, and of what is written.

    Returns:
        The error message, all that was printed, and the results.
    """
    data, found, printed = originals() / "data", "", io.StringIO()
    new = ["--data", data, "--output", place, "--name", "new", "--max_steps", 2]
    with redirect_stdout(printed):
        if use == "resume":
            refused = refusal(train.main, "--resume", given, "--max_steps", 9)
        elif use == "init_from":
            refused = refusal(train.main, *SMALL.split(), *new, "--init_from", given)
        elif use == "evaluate":
            refused = refusal(evaluate.main, given, data, "--device", "cpu")
        else:
            refused = refusal(
                predict.main, given, data, place / "scores.parquet", "--device", "cpu"
            )
    text = printed.getvalue()
    print(text)
    if refused is None and use == "evaluate":
        found = text[text.index("{") : text.index("}")]
    elif refused is None and use == "predict":
        found = str(pq.read_table(place / "scores.parquet").to_pydict())
    elif refused is None:
        run = place / ("run" if use == "resume" else "new")
        metrics = json.loads((run / "result.json").read_text())["metrics"]
        quality = {k: v for k, v in metrics.items() if k.startswith(("test/", "val/", "fitted/"))}
        model, _ = load_model(run)
        weights = {name: value.tolist() for name, value in model.state_dict().items()}
        found = str((sorted(quality.items()), weights))
    return refused, text, hashlib.sha256(found.encode()).hexdigest()


def judged(rng: random.Random, what: str, place: Path, *, trusted: str = "") -> Case:
    """The case of using the changed run in ``place``.

    Args:
        rng: chooses the use.
        what: the change.
        place: directory of the case.
        trusted: which results may be others: ``all``, those of ``earlier`` without a warning, or
            those of a run that is ``resumed``.
    """
    use = rng.choice(USES)
    given = place / "run"
    if rng.random() < 0.3:
        given = given / "checkpoints" / rng.choice(("latest", "step_6"))
    size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())

    latest, earlier = expected(use)

    def run() -> Outcome:
        events: list[str] = []
        sys.addaudithook(partial(watch, events))
        refused, printed, results = used(use, given, place)
        assert not events, f"it ran {events[0]}"
        if refused is not None:
            return Outcome.REFUSED
        if results == latest:
            return Outcome.EQUAL
        told = trusted == "earlier" or re.search(r"warning: .* is damaged: ", printed)
        if results == earlier and told:
            return Outcome.EARLIER
        others = trusted == "all" or (trusted == "resumed" and use == "resume")
        return Outcome.WRITTEN if others else Outcome.SILENT

    return Case(what=what, run=run, size=size)


def watch(events: list[str], event: str, values: tuple[Any, ...]) -> None:
    """Note what a checkpoint must not do, as an audit hook."""
    if event in FORBIDDEN:
        events.append(f"{event} {values!r:.200}")


def copied(place: Path) -> Path:
    """A copy of the first run in ``place``; returns its latest checkpoint."""
    shutil.copytree(originals() / "one", place / "run", symlinks=True)
    return place / "run" / "checkpoints" / "step_6"


def tensors(rng: random.Random, place: Path) -> Case:
    """The file of tensors with other bytes."""
    path = copied(place) / TENSORS
    what, content = changed_tensors(rng, path.read_bytes())
    path.write_bytes(content)
    return judged(rng, what, place)


def changed_tensors(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    """A file of safetensors with a change, and its name."""
    length = 8 + int.from_bytes(data[:8], "little")
    header, values = data[8:length], data[length:]
    at = rng.randrange(len(values))

    def swapped() -> bytes:
        """Two tensors of one size change places."""
        entries = [e["data_offsets"] for n, e in json.loads(header).items() if "data" in str(e)]
        sizes = [stop - start for start, stop in entries]
        first, second = rng.choice(
            [
                (one, two)
                for one, size in zip(entries, sizes, strict=True)
                for two in entries
                if size
                and one < two
                and two[1] - two[0] == size
                and values[slice(*one)] != values[slice(*two)]
            ]
        )
        new = bytearray(values)
        new[slice(*first)], new[slice(*second)] = values[slice(*second)], values[slice(*first)]
        return data[:length] + new

    def edited() -> bytes:
        """The header has other values, and its right length."""
        _, new = mutate_values(rng, json.loads(header))
        text = as_json(new)
        return len(text).to_bytes(8, "little") + text + values

    changes: dict[str, Callable[[], bytes]] = {
        "bits": lambda: flip_bits(rng, data),
        "block zeroed": lambda: data[: length + at] + bytes(4096) + data[length + at + 4096 :],
        "truncated": lambda: data[: rng.randrange(len(data))],
        "appended": lambda: data + rng.randbytes(rng.choice((1, 8, 4096))),
        "tensors swapped": swapped,
        "header edited": edited,
        "header's length": lambda: rng.randbytes(8) + data[8:],
        "bytes": lambda: mutate(rng, data)[1],
    }
    name = rng.choice([*changes])
    return name, changes[name]()


def manifest(rng: random.Random, place: Path) -> Case:
    """The manifest with other values or bytes, and its old digest."""
    path = copied(place) / MANIFEST
    if rng.random() < 0.6:
        what, changed = mutate_values(rng, json.loads(path.read_text()))
        content = as_json(changed)
    else:
        what, content = mutate_text(rng, path.read_text())
    path.write_bytes(content)
    return judged(rng, what, place)


def forged(rng: random.Random, place: Path) -> Case:
    """The manifest, and perhaps the tensors, with digests computed anew."""
    step = copied(place)
    outer = json.loads((step / MANIFEST).read_text())
    content = outer["content"]
    if rng.random() < 0.2:
        what, file = "values", bytearray((step / TENSORS).read_bytes())
        start = content["files"][TENSORS]["header"]
        for at in rng.sample(range(start, len(file) - 3, 4), rng.choice((1, 9, 999))):
            file[at : at + 4] = rng.choice((b"\0" * 4, b"\x00\x00\x80\x7f", rng.randbytes(4)))
        (step / TENSORS).write_bytes(file)
        for tensor in content["tensors"].values():
            for shard in tensor["shards"]:
                *_, shape, _, start, _ = shard
                size = {"F32": 4, "I64": 8, "F64": 8, "I32": 4}.get(tensor["dtype"], 1)
                stop = start + size * math.prod(shape)
                shard[-1] = hashlib.sha256(file[start:stop]).hexdigest()
    else:
        part = rng.choice(("state", "state", "tensors", "files", "all"))
        if part == "all":
            what, content = mutate_values(rng, content)
        else:
            what, content[part] = mutate_values(rng, content[part])
        what = f"{part}: {what}"
    with contextlib.suppress(ValueError):  # it can't be written as the program would
        body = json.dumps(content, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        outer["sha256"] = hashlib.sha256(body.encode()).hexdigest()
    outer["content"] = content
    (step / MANIFEST).write_bytes(as_json(outer))
    return judged(rng, what.split(": ")[0], place, trusted="all")


def links(rng: random.Random, place: Path) -> Case:
    """Links, pipes and devices in place of files and directories."""
    step = copied(place)
    other = originals() / "two" / "checkpoints" / "step_6"
    names = ("step_6", TENSORS, MANIFEST, "checkpoints", "config.yaml")
    name = rng.choice(names)
    inside = name in (TENSORS, MANIFEST)
    top = name in ("checkpoints", "config.yaml")
    path = place / "run" / name if top else (step / name if inside else step.parent / name)
    targets = {
        "step_3": Path("step_3"),
        "another run's": other / name if inside else other,
        "nothing": Path("nothing"),
        "itself": Path(name),
        "/dev/zero": Path("/dev/zero"),
        "/etc/passwd": Path("/etc/passwd"),
        "a pipe": None,
        "a directory": None,
        "the directory above": Path(".."),
    }
    what = rng.choice([*targets])
    if path.is_dir() and not path.is_symlink():
        path.rename(place / "aside")
    else:
        path.unlink()
    if what == "a pipe":
        os.mkfifo(path)
    elif what == "a directory":
        path.mkdir()
    else:
        path.symlink_to(targets[what] or "")
    trusted = "earlier" if what == "step_3" or name == "step_6" else ""
    return judged(rng, f"{name}: {what}", place, trusted=trusted)


def others(rng: random.Random, place: Path) -> Case:
    """The files of a run besides its checkpoints, and files that do not belong there."""
    step = copied(place)
    run = place / "run"
    names = ("config.yaml", "metrics.jsonl", "result.json", ".lock.json", "new")
    name = rng.choice(names)
    if name == "new":
        names = ("step_9", "step_9999999999999999999", "step_7.tmp", "step_-1", "a\nb", "\x1b[31m")
        path = step.with_name(rng.choice(names))
        if rng.random() < 0.5:
            path.write_bytes(rng.randbytes(100))
        else:
            shutil.copytree(step, path)
            (path / rng.choice((MANIFEST, TENSORS))).unlink()
    else:
        path = run / name
        text = path.read_text() if path.exists() else str(rng.choice(NASTY))
        path.write_bytes(mutate_text(rng, text)[1])
    trusted = "resumed" if name == "config.yaml" else ""
    return judged(rng, name, place, trusted=trusted)


KINDS = {each.__name__: each for each in (tensors, manifest, forged, links, others)}

if __name__ == "__main__":
    torch.set_num_threads(1)  # threads do not survive a fork
    sys.exit(main(KINDS))
