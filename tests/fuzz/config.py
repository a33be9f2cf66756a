"""Fuzzes the configuration: YAML files of ``--config``, and the command line.

    python tests/fuzz/config.py --count 10000

What is accepted must say what the file or the command line says, and read back to the same.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from harness import Case, Outcome, main, refusal
from trees import NASTY, as_yaml, mutate_text, mutate_values

from dlrm.config.cli import parse
from dlrm.config.schema import RunConfig
from dlrm.embeddings import available

KINDS = available()
RUN = {
    "emb": "tt",
    "budget": None,
    "data": "data/demo",
    "seed": 3,
    "epochs": 2,
    "batch_size": 64,
    "precision": "fp32",
    "device": "cpu",
    "checkpoint": True,
    "model": {"embedding_dim": 16, "top_mlp": [8, 4], "interaction": "dot"},
    "tables": {"threshold": None, "largest": 3, "kinds": {"C3": "qr", "C4": "hash"}},
    "optim": {"dense": "adam", "lr": 0.01, "betas": [0.9, 0.99], "warmup_steps": 5},
    "loader": {"window": 2, "shuffle": False},
    "sharding": {"by": "auto", "tables": {"C3": "row"}},
    "tt": {"rank": {"C1": 4, "default": 8}, "q": [2, 2, 4]},
    "hash": {"rows": 64},
    "qr": {"collisions": 4},
}


def judge(*argv: str, given: dict[str, Any] | None = None) -> Outcome:
    """Parse a command line; what is accepted must hold the given values, and read back."""
    found: list[tuple[RunConfig, str]] = []

    def program(arguments: Sequence[str]) -> int:
        found.append(parse(arguments, KINDS))
        return 0

    if refusal(program, *argv) is not None:
        return Outcome.REFUSED
    config, resolved = found[0]
    path = Path(argv[0].partition("=")[2]).parent / "resolved.yaml"
    path.write_text(resolved)
    again, text = parse([f"--config={path}"], KINDS)
    assert (asdict(again), text) == (asdict(config) | {"resume": None}, resolved)
    values = yaml.safe_load(resolved)
    for name, value in given.items() if given is not None else ():
        if name != "resume" and not agree(value, values[name]):
            print(f"{name}: given {value!r}, found {values[name]!r}")
            return Outcome.SILENT
    return Outcome.EQUAL


def agree(given: Any, found: Any) -> bool:
    """Whether a value of the configuration is what a file says."""
    if isinstance(given, dict) and isinstance(found, dict):
        names = {str(name): value for name, value in given.items()}
        return all(name in found and agree(value, found[name]) for name, value in names.items())
    if isinstance(found, list):
        given = given if isinstance(given, list) else [given]
        return len(given) == len(found) and all(map(agree, given, found))
    if isinstance(given, str) and not isinstance(found, str):  # text that is YAML itself
        given = yaml.safe_load(given)
        given = float(given) if isinstance(given, str) else given  # 1e-3
        return agree(given, found)
    if type(given) in (int, float) and type(found) in (int, float):
        return type(found)(given) == found  # 2**63 - 1 and 10**40 are no floats
    return given == found or str(given).lower() == str(found).lower()


def edited(rng: random.Random, directory: Path) -> Case:
    """Options in a file with other values."""
    what, values = mutate_values(rng, RUN)
    return _case(what, as_yaml(values), directory)


def damaged(rng: random.Random, directory: Path) -> Case:
    """A file with other bytes."""
    return _case(*mutate_text(rng, yaml.safe_dump(RUN, sort_keys=False)), directory)


def _case(what: str, content: bytes, directory: Path) -> Case:
    path = directory / "run.yaml"
    path.write_bytes(content)

    def run() -> Outcome:
        try:
            given = yaml.load(content, Loader=yaml.CSafeLoader) if len(content) < 10**5 else None
        except Exception:
            given = None  # it must be refused, or the comparison below fails
        outcome = judge(f"--config={path}", given=given if isinstance(given, dict) else {})
        if outcome == Outcome.EQUAL and not isinstance(given, dict):
            return Outcome.SILENT
        return outcome

    return Case(what=what, run=run, size=len(content))


def command_line(rng: random.Random, directory: Path) -> Case:
    """Options on the command line."""
    path = directory / "empty.yaml"
    path.write_text("{}\n")
    argv = [f"--config={path}"]
    for name in rng.sample([*OPTIONS], rng.choice((1, 2, 4))):
        value = OPTIONS[name] if rng.random() < 0.6 else rng.choice(NASTY)
        text = value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True)
        text = text.removesuffix("\n").removesuffix("\n...").replace("\0", "\\0")
        argv += [f"--{name}", text] if rng.random() < 0.6 else [f"--{name}={text}"]
        argv += [text] if rng.random() < 0.05 else []
    return Case(what="options", run=lambda: judge(*argv), size=sum(map(len, argv)))


def _options() -> dict[str, Any]:
    flat = {}
    for name, value in RUN.items():
        for leaf, inner in value.items() if isinstance(value, dict) else [("", value)]:
            flat[f"{name}.{leaf}".rstrip(".")] = inner
    return flat


OPTIONS = _options()
FUZZED = {"edited": edited, "damaged": damaged, "command_line": command_line}

if __name__ == "__main__":
    sys.exit(main(FUZZED))
