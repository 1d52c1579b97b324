"""Contrastive learning of embeddings. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from twinkle_core.errors import ConfigError, DataError
from twinkle_core.loss.base import Loss, LossInputs, LossOutput, ModelOutputs, Need
from twinkle_core.types import DocumentKind

Gather = Callable[[torch.Tensor], Sequence[torch.Tensor]]
"""[D, E] of this rank -> the [D', E] of all ranks in their order; this rank's own is the very tensor that was given."""


@dataclass(frozen=True, kw_only=True)
class InfonceLoss(Loss):
    """-log(exp(s(q, d+) / t) / Z), a mean over anchors q; s is the cosine. https://arxiv.org/abs/1807.03748, eq. 4.

    Z sums exp(s / t) over d+, the anchor's own negatives and, with `use_batch`, the positives and negatives of all other anchors of the
    micro-batch; with `include_qq` s(q, q') of other anchors, with `include_dd` s(d+, d) of d+ with other anchors' positives; each but
    d+ may be left out by `mask_fake_negative`. https://arxiv.org/abs/2506.05176, eq. 1 and 2.
    Every ANCHOR is followed by one POSITIVE and its NEGATIVEs.

    In-batch negatives belong to the micro-batch: unlike the other losses this one changes with its size. Across ranks it does not, given
    `gather` or `process_group`: the value is that of this rank's anchors, the gradient that of all ranks' anchors with respect to this
    rank's embeddings, so that the sum over ranks is exactly the gradient of one process with all documents.
    """

    unit = "anchor"

    temperature: float = 0.1
    use_batch: bool = True
    hard_negatives: int | None = None
    """Take the first so many negatives of each anchor; None takes all. An anchor with fewer is refused."""
    mask_fake_negative: bool = False
    """Leave out of Z what is nearer than the positive by more than `fake_neg_margin`."""
    fake_neg_margin: float = 0.1
    include_qq: bool = False
    include_dd: bool = False
    process_group: Any = None
    """torch.distributed group to gather over."""
    gather: Gather | None = None
    """Own way to gather; called once on every rank, one without documents too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperature > 0:
            raise ConfigError(f"temperature is {self.temperature}; it is above 0")
        if self.hard_negatives is not None and self.hard_negatives < 0:
            raise ConfigError(f"hard_negatives is {self.hard_negatives}; it is 0 or more, or None")
        if self.gather is not None and self.process_group is not None:
            raise ConfigError("gather and process_group are both given; give one")
        if not self.use_batch and (self.include_qq or self.include_dd or self.gather or self.process_group):
            raise ConfigError("use_batch=False takes an anchor's own negatives only: no include_qq, include_dd, gather or process_group")

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"embeddings"})

    def __call__(self, inputs: LossInputs, outputs: ModelOutputs) -> LossOutput:
        embeddings = self.given(outputs.embeddings, "embeddings")
        if embeddings.ndim != 2 or len(embeddings) != inputs.num_documents:
            raise DataError(f"InfonceLoss: embeddings {tuple(embeddings.shape)} for {inputs.num_documents} documents; one each")
        units = torch.nn.functional.normalize(embeddings if embeddings.dtype == torch.float64 else embeddings.float(), dim=-1)
        roles = units.new_tensor(self._roles(inputs.kinds)).reshape(-1, 2)
        given = torch.cat([units, roles], dim=1)
        parts = self._gathered(given)
        whole = torch.cat(list(parts))
        losses = self._losses(whole[:, :-2], whole[:, -2].long(), self._groups(parts))
        own = torch.cat([torch.full((len(part),), part is given, device=whole.device) for part in parts])
        own = own[whole[:, -2] == DocumentKind.ANCHOR]
        # Value of this rank's anchors, gradient of all: other ranks' anchors meet this rank's documents.
        others = losses[~own].sum()
        return self.output(inputs, losses[own].sum() + (others - others.detach()) + units.sum() * 0)

    def _roles(self, kinds: Sequence[int]) -> list[tuple[float, float]]:
        """Kind and number of the anchor of each document; kind -1 for a negative beyond `hard_negatives`."""
        found: list[tuple[float, float]] = []
        group, positives, negatives = -1, 1, self.hard_negatives or 0
        for number, kind in enumerate([*kinds, int(DocumentKind.ANCHOR)]):
            if kind == DocumentKind.ANCHOR:
                if positives != 1 or negatives < (self.hard_negatives or 0):
                    raise DataError(
                        f"InfonceLoss: the anchor before document {number} has {positives} positives and {negatives} negatives; "
                        f"it needs one positive and {self.hard_negatives or 0} negatives"
                    )
                group, positives, negatives = group + 1, 0, 0
            elif group < 0 or kind not in (DocumentKind.POSITIVE, DocumentKind.NEGATIVE):
                raise DataError(f"InfonceLoss: document {number} is {DocumentKind(kind).name}; anchors, each with its positive, are needed")
            positives += kind == DocumentKind.POSITIVE
            negatives += kind == DocumentKind.NEGATIVE
            left_out = kind == DocumentKind.NEGATIVE and self.hard_negatives is not None and negatives > self.hard_negatives
            found.append((-1.0 if left_out else float(kind), float(group)))
        return found[:-1]

    def _gathered(self, values: torch.Tensor) -> Sequence[torch.Tensor]:
        if self.gather is not None:
            parts = self.gather(values)
            if sum(part is values for part in parts) != 1:
                raise ConfigError("gather has to give back, among the ranks' tensors, the very tensor it was given, once")
            return parts
        return [values] if self.process_group is None else gather_documents(values, self.process_group)

    @staticmethod
    def _groups(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """[N] number of each document's anchor, counted over all ranks."""
        starts, numbers = 0, []
        for part in parts:
            numbers.append(part[:, -1].detach().long() + starts)
            starts += int((part[:, -2] == DocumentKind.ANCHOR).sum())
        return torch.cat(numbers)

    def _losses(self, units: torch.Tensor, kinds: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """[A] losses of all anchors."""
        anchors, positives = kinds == DocumentKind.ANCHOR, kinds == DocumentKind.POSITIVE
        documents = positives | (kinds == DocumentKind.NEGATIVE)
        queries, targets = units[anchors], units[positives]
        aims = (queries * targets).sum(dim=-1, keepdim=True)
        same = groups[anchors][:, None] == groups[documents][None]
        taken = ~(same & positives[documents][None]) & (same | self.use_batch)
        terms = [(queries @ units[documents].T, taken)]
        other = ~torch.eye(len(queries), dtype=torch.bool, device=units.device)
        if self.include_qq:
            terms.append((queries @ queries.T, other))
        if self.include_dd:
            terms.append((targets @ targets.T, other))
        columns = [aims / self.temperature]
        for values, mask in terms:
            near = values.detach() > aims.detach() + self.fake_neg_margin
            kept = mask & ~near if self.mask_fake_negative else mask
            columns.append((values / self.temperature).masked_fill(~kept, -torch.inf))
        return torch.cat(columns, dim=1).logsumexp(dim=1) - columns[0][:, 0]


def gather_documents(values: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """The [D', C] of all ranks of a torch.distributed group, whose D' may differ; this rank's own keeps its graph.

    https://pytorch.org/docs/stable/distributed.html#torch.distributed.all_gather. Every rank has to call it.
    """
    size = dist.get_world_size(group)
    lengths = [torch.zeros((), dtype=torch.int64, device=values.device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor(len(values), dtype=torch.int64, device=values.device), group=group)
    counts = [int(length) for length in lengths]
    padded = values.detach().new_zeros(max(counts), values.shape[1])
    padded[: len(values)] = values.detach()
    found = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(found, padded, group=group)
    parts = [part[:count] for part, count in zip(found, counts, strict=True)]
    parts[dist.get_rank(group)] = values
    return parts
