"""An output layer for large vocabularies whose weight is a basis (codebook) embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from dlrm.embeddings.basis import check_codebook, code_bytes, fit_codebook
from dlrm.kernels.lookup.codebook import (
    Members,
    code_bits,
    codebook_sum,
    members,
    pack,
    selected_rows,
    selected_sum,
    unpack,
)

PLAIN_WORK = 200_000_000
"""Up to so many bytes of the decoded weight, times tokens and inputs per part, the plain product is
the faster one on a CPU: measured with 32 to 512 inputs, and right to within noise."""


class BasisLinear(nn.Module):
    """A drop-in for an ``nn.Linear`` with many outputs whose weight is a basis embedding.

    ``logits[n, v] = sum_p <x_p[n], centroid[p, code[v, p]]> + bias[v]``: the products of the input
    with all centroids are few, and each output adds up the ``parts`` of them that its codes select.

    On a CPU, the codes are kept unpacked as well, and a small layer in evaluation keeps the decoded
    weight: with few tokens, its plain product is faster. :meth:`footprint` counts both.

    Args:
        in_features: length of the input.
        out_features: number of outputs V, the size of the vocabulary.
        bias: add a bias.
        device, dtype: of the parameters.
        parts: number of parts of a row of the weight, a divisor of ``in_features``.
        clusters: number of centroids for each part.

    Reference:
        Shi and Yu, see :class:`dlrm.embeddings.basis.Basis`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        parts: int = 8,
        clusters: int = 384,
    ) -> None:
        super().__init__()
        clusters = min(clusters, out_features)
        check_codebook(parts, clusters, in_features, "in_features")
        self.in_features = in_features
        self.out_features = out_features
        self.parts = parts
        self.clusters = clusters
        self.bits = code_bits(clusters)

        shape = (parts, clusters, in_features // parts)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = (
            nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        )
        codes = torch.empty(
            out_features, code_bytes(parts, self.bits), dtype=torch.uint8, device=device
        )
        self.register_buffer("codes", codes)
        self.codes: Tensor  # [V, bytes]

        # Computed from the codes, or from codes and weight, when first needed.
        self._members: Members | None = None
        self._rows: Tensor | None = None
        self._derived_from: tuple[Tensor, int] | None = None  # the codes and their version
        self._decoded: Tensor | None = None
        self._decoded_from: tuple[Any, ...] = (None, None)  # codes and weight, and their versions
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw random codes, and centroids and bias as ``nn.Linear`` initializes its weights."""
        bound = self.in_features**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)
        shape = (self.out_features, self.parts)
        drawn = torch.randint(self.clusters, shape, device=self.codes.device)
        self.codes.copy_(pack(drawn, self.bits))

    @classmethod
    @torch.no_grad()
    def from_linear(cls, linear: nn.Linear, *, parts: int = 8, clusters: int = 384) -> Self:
        """Compress a trained layer, on its device and in its dtype, without references to it."""
        weight, bias = linear.weight, linear.bias
        made = cls(
            linear.in_features,
            linear.out_features,
            bias is not None,
            weight.device,
            weight.dtype,
            parts=parts,
            clusters=clusters,
        )
        made.codes.copy_(pack(fit_codebook(weight, made.weight), made.bits))
        if made.bias is not None:
            made.bias.copy_(bias)
        return made

    def forward(self, input: Tensor) -> Tensor:
        """Logits of the vocabulary: ``[..., in_features]`` to ``[..., out_features]``.

        Raises:
            ValueError: the input has another length.
        """
        if input.shape[-1] != self.in_features:
            raise ValueError(
                f"input has shape {tuple(input.shape)}, it must be [..., {self.in_features}]"
            )
        if self._plain(input.numel() // self.in_features):
            return functional.linear(input, self._decoded_weight(), self.bias)
        tokens = input.reshape(-1, self.parts, self.in_features // self.parts)
        products = torch.bmm(self.weight, tokens.permute(1, 2, 0))  # [parts, clusters, N]
        index = self._index() if torch.is_grad_enabled() else None
        if products.is_cuda:
            out = codebook_sum(products, self.codes, self.bias, self.bits, index)
        else:  # to unpack the codes each time would take longer than all else
            out = selected_sum(products, self._selected(), self.bias, index)
        return out.view(*input.shape[:-1], self.out_features)

    def codes_of_outputs(self) -> Tensor:
        """The codes, int64 ``[V, parts]``."""
        return unpack(self.codes, self.parts, self.bits)

    def _index(self) -> Members:
        """The outputs that use each centroid, computed again only when the codes have changed."""
        if not self._same_codes() or self._members is None:
            self._members = members(self.codes, self.parts, self.bits, self.clusters)
        return self._members

    def _selected(self) -> Tensor:
        """The unpacked codes, computed again only when they have changed."""
        if not self._same_codes() or self._rows is None:
            self._rows = selected_rows(self.codes, self.parts, self.bits, self.clusters)
        return self._rows

    def _same_codes(self) -> bool:
        """Whether the codes are those of the last call; if not, forget what was made of them."""
        codes, version = self._derived_from or (None, -1)
        same = codes is self.codes and version == self.codes._version
        if not same:
            self._members = self._rows = None
            self._derived_from = self.codes, self.codes._version
        return same

    def _plain(self, tokens: int) -> bool:
        """Whether the plain product of so many tokens is the faster one."""
        work = 4 * self.in_features**2 * self.out_features // self.parts * tokens
        return (
            not (self.training or torch.is_grad_enabled() or self.codes.is_cuda)
            and self.weight.dtype == torch.float32
            and work <= PLAIN_WORK
        )

    def _decoded_weight(self) -> Tensor:
        """The weight of :meth:`to_dense`, computed again only when centroids or codes changed."""
        codes, weight = self.codes, self.weight
        old_codes, old_weight, *old = self._decoded_from
        versions = [codes._version, weight._version]
        if old_codes is not codes or old_weight is not weight or old != versions:
            self._decoded = None
        if self._decoded is None:
            self._decoded, self._decoded_from = self.to_dense(), (codes, weight, *versions)
        return self._decoded

    def train(self, mode: bool = True) -> Self:
        """As in ``nn.Module``; the decoded weight is forgotten, since training changes it."""
        if mode:
            self._decoded = None
        return super().train(mode)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        # Another device or dtype, which does not change the version of a parameter.
        self._members = self._rows = self._decoded = None
        return super()._apply(fn, recurse)

    @torch.no_grad()
    def to_dense(self) -> Tensor:
        """The weight of the ``nn.Linear`` with the same outputs, ``[V, in_features]``."""
        codes = self.codes_of_outputs().t()
        return torch.cat([own[code] for own, code in zip(self.weight, codes, strict=True)], 1)

    def footprint(self) -> dict[str, int]:
        """Bytes by part. What is computed from the codes is kept from the first call on that needs
        it: ``index``, in training and on a CPU, and ``decoded``, the weight of a layer whose plain
        product is faster, in evaluation on a CPU."""
        bias = 0 if self.bias is None else self.bias.nbytes
        index = self._index().nbytes if self.training else 0
        if not self.codes.is_cuda:
            index += 4 * self.out_features * self.parts
        with torch.no_grad():
            decoded = 4 * self.in_features * self.out_features if self._plain(1) else 0
        return {
            "weights": self.weight.nbytes + bias,
            "codes": self.codes.nbytes,
            "index": index,
            "decoded": decoded,
        }

    def extra_repr(self) -> str:
        """Sizes for ``print(model)``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, parts={self.parts}, clusters={self.clusters}"
        )
