"""The optimizers of a run, from its configuration."""

from __future__ import annotations

from typing import Any

from dlrm.config.schema import OptimConfig
from dlrm.kernels.update.rules import OPTIONS, make_rule


def optimizer_specs(optim: OptimConfig) -> list[tuple[str, float, dict[str, Any]]]:
    """Rule, learning rate and options of the dense part, and of the embeddings.

    Raises:
        ValueError: an option that neither rule uses, or a value out of range.
    """
    given, rules = optim.rule_options, (optim.dense, optim.embeddings)
    idle = [name for name in given if not any(name in OPTIONS[rule] for rule in rules)]
    if idle:
        neither = f"neither {rules[0]} nor {rules[1]} uses it"
        raise ValueError("; ".join(f"{name} is set, but {neither}" for name in idle))
    rates = optim.lr, optim.lr if optim.embeddings_lr is None else optim.embeddings_lr
    specs = []
    for rule, lr in zip(rules, rates, strict=True):
        options = {name: value for name, value in given.items() if name in OPTIONS[rule]}
        make_rule(rule, **options)
        specs.append((rule, lr, options))
    return specs
