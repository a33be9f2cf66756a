"""Groups of tables, and the order of the features in a batch, by group, and in what is returned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dlrm.embeddings.common.row_caches import Ids
from dlrm.embeddings.registry import available
from dlrm.sparse_arch.table_plan import TablePlan, owners_of
from dlrm.utils.bags import Bags
from dlrm.utils.offsets import offsets_of


class FeatureOrder(nn.Module):
    """The order of the features in a batch and by groups of tables.

    Args:
        groups: features of each group, in the order of its tables.
        returned: features of each group, in the order of the vectors that it returns.
        sharing: how many features each table of a group has, one after another. Their ids become
            those of so many times as many samples.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        returned: Sequence[Sequence[int]],
        sharing: Sequence[int],
    ) -> None:
        super().__init__()
        self.groups = [list(features) for features in groups]
        self.sharing = list(sharing)
        self.num_features = sum(map(len, groups))
        by_group = [feature for features in groups for feature in features]
        order = [feature for features in returned for feature in features]
        self.register_buffer("by_group", torch.tensor(by_group), persistent=False)
        self.register_buffer("positions", torch.tensor(order).argsort(), persistent=False)
        self.by_group: Tensor  # [F], the features of the groups, one group after the other
        self.positions: Tensor  # [F], where the vectors of each feature are among all returned

    def split(
        self,
        groups: Iterable[int],
        ids: Ids,
        *,
        bounds: Sequence[int] | None = None,
        grouped: bool = False,
    ) -> dict[int, Ids]:
        """Split a batch into the parts that belong to groups of tables.

        Args:
            groups: indices of the groups.
            ids: of all features, ``[F, B]`` or bags.
            bounds: where the ids of each feature begin, and the end, ``[F + 1]``. Without them the
                host reads them from the offsets of several groups, and waits for the device.
            grouped: whether ``ids [F, B]`` are in the order of :attr:`by_group` already.

        Returns:
            The look-ups of each of the groups, by index.
        """
        if self.sharing == [1]:
            return {0: ids}

        sizes = [len(features) for features in self.groups]
        if isinstance(ids, Tensor):  # one gather for all groups
            if len(ids) != self.num_features:
                raise ValueError(
                    f"ids have shape {tuple(ids.shape)}, they must be "
                    f"[{self.num_features}, B]: a row per table"
                )
            parts = (ids if grouped else ids[self.by_group]).split(sizes)
            return {i: parts[i].reshape(sizes[i] // self.sharing[i], -1) for i in groups}

        # The ids of bags are stored feature by feature: take the spans of each group's features.
        offsets, batch = ids.offsets, ids.count // self.num_features
        if not bounds:
            bounds = offsets[::batch].tolist() if batch else [0] * (self.num_features + 1)
        lengths = offsets.diff().view(self.num_features, batch)[self.by_group].split(sizes)
        shares: dict[int, Ids] = {}
        for index in groups:
            spans = [slice(bounds[feature], bounds[feature + 1]) for feature in self.groups[index]]
            values = torch.cat([ids.ids[span] for span in spans])
            shares[index] = Bags(values, offsets_of(lengths[index]))
        return shares

    def of_features(self, group: int, vectors: Tensor) -> Tensor:
        """The vectors of the features of a group, ``[B, F, D]``, from those of its tables."""
        sharing = self.sharing[group]
        if sharing == 1:
            return vectors
        rows, tables, dim = vectors.shape
        parts = vectors.view(sharing, rows // sharing, tables, dim).permute(1, 2, 0, 3)
        return parts.reshape(rows // sharing, tables * sharing, dim)


def features_of_tables(plan: TablePlan) -> dict[int, list[int]]:
    """The features of each table, by the one that it is named after.

    Raises:
        ValueError: a feature shares the table of one that has none.
    """
    owners = owners_of(plan)
    features: dict[int, list[int]] = {f: [] for f, owner in enumerate(owners) if f == owner}
    for feature, owner in enumerate(owners):
        if owner not in features:
            raise ValueError(f"feature {feature} shares the table of {owner}, which has none")
        features[owner].append(feature)
    return features


def group_tables(plan: TablePlan) -> list[tuple[list[int], str, dict[str, Any]]]:
    """Group the tables that are looked up together: those of one kind with equal options, which
    equally many features share.

    Options in ``Embedding.per_table`` may differ; the group has a list of their values.

    Returns:
        The tables, the kind and the options of each group.
    """
    kinds = available()

    def per_table(kind: str) -> frozenset[str]:
        return kinds[kind].per_table if kind in kinds else frozenset()

    members: dict[str, list[int]] = {}
    for table, features in features_of_tables(plan).items():
        kind, options = plan[table]
        named = sorted(options.items())  # in whatever order they came
        equal = [(name, None if name in per_table(kind) else value) for name, value in named]
        members.setdefault(repr((kind, equal, len(features))), []).append(table)
    groups = []
    for tables in members.values():
        kind, options = plan[tables[0]]
        lists = {n: [plan[t][1][n] for t in tables] for n in options if n in per_table(kind)}
        groups.append((tables, kind, {**options, **lists}))
    return groups
