"""Contrastive loss by hand, and across ranks."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from twinkle_core.loss import build_loss
from twinkle_core.loss.base import LossInputs, ModelOutputs
from twinkle_core.loss.infonce import InfonceLoss
from twinkle_core.types import DocumentKind

A, P, N = DocumentKind.ANCHOR, DocumentKind.POSITIVE, DocumentKind.NEGATIVE
KINDS = (A, P, N, A, P, N)
# Angles in the plane, so that cosines are known: q1 0, d1+ 60, d1- 90; q2 180, d2+ 120, d2- 300 degrees.
ANGLES = (0, 60, 90, 180, 120, 300)


def inputs_of(kinds: Sequence[int]) -> LossInputs:
    return LossInputs(labels=torch.ones(0, dtype=torch.int64), num_loss_tokens=(0,) * len(kinds), kinds=tuple(int(kind) for kind in kinds))


def at(angles: Sequence[float], length: float = 2.0) -> torch.Tensor:
    radians = torch.tensor(angles, dtype=torch.float64) * math.pi / 180
    return length * torch.stack([radians.cos(), radians.sin()], dim=1)


def loss_of(kinds: Sequence[int] = KINDS, angles: Sequence[float] = ANGLES, **arguments: object) -> float:
    output = build_loss("InfonceLoss", {"temperature": 1.0, **arguments})(inputs_of(kinds), ModelOutputs(embeddings=at(angles)))
    assert output.weight == kinds.count(A)
    return output.loss_sum.item()


def cos(degrees: float) -> float:
    return math.exp(math.cos(math.radians(degrees)))


def test_own_negatives_only() -> None:
    # q1: 60 against 90 degrees; q2: 60 against 120
    expected = -math.log(cos(60) / (cos(60) + cos(90))) - math.log(cos(60) / (cos(60) + cos(120)))
    assert loss_of(use_batch=False) == pytest.approx(expected)


def test_the_other_anchors_documents_are_negatives_too() -> None:
    first = cos(60) / (cos(60) + cos(90) + cos(120) + cos(60))  # its own 60, 90; the other's 120, 300
    second = cos(60) / (cos(60) + cos(120) + cos(120) + cos(90))
    assert loss_of() == pytest.approx(-math.log(first) - math.log(second))
    assert loss_of(temperature=0.5, kinds=(A, P, A, P), angles=(0, 0, 180, 180)) == pytest.approx(2 * math.log1p(math.exp(-4)))


def test_queries_and_positives_among_themselves() -> None:
    both = (A, P, A, P)
    angles = (0, 60, 180, 120)
    own, cross, queries, documents = cos(60), cos(120), cos(180), cos(60)
    for arguments, rest in (
        ({"include_qq": True}, cross + queries),
        ({"include_dd": True}, cross + documents),
        ({"include_qq": True, "include_dd": True}, cross + queries + documents),
    ):
        assert loss_of(both, angles, **arguments) == pytest.approx(-2 * math.log(own / (own + rest)))


def test_what_is_nearer_than_the_positive_is_taken_for_a_false_negative() -> None:
    # q at 0, d+ at 60 (cosine 0.5), negatives at 30 (0.866) and 57 (0.545, within the margin 0.1)
    kinds, angles = (A, P, N, N), (0, 60, 30, 57)
    assert loss_of(kinds, angles) == pytest.approx(-math.log(cos(60) / (cos(60) + cos(30) + cos(57))))
    assert loss_of(kinds, angles, mask_fake_negative=True) == pytest.approx(-math.log(cos(60) / (cos(60) + cos(57))))
    assert loss_of(kinds, angles, mask_fake_negative=True, fake_neg_margin=0.0) == pytest.approx(0.0)


def test_a_number_of_hard_negatives() -> None:
    kinds, angles = (A, P, N, N), (0, 60, 90, 180)
    assert loss_of(kinds, angles, hard_negatives=1) == pytest.approx(-math.log(cos(60) / (cos(60) + cos(90))))
    assert loss_of(kinds, angles, hard_negatives=0) == pytest.approx(0.0)
    with pytest.raises(ValueError, match="1 positives and 2 negatives; it needs one positive and 3 negatives"):
        loss_of(kinds, angles, hard_negatives=3)


def test_the_length_of_an_embedding_does_not_matter() -> None:
    long = build_loss("InfonceLoss", {"temperature": 1.0})(inputs_of(KINDS), ModelOutputs(embeddings=at(ANGLES, 7.0))).loss_sum.item()
    assert long == pytest.approx(loss_of())


@pytest.mark.parametrize(
    ("kinds", "why"), [((P,), "document 0 is POSITIVE"), ((A, A, P), "has 0 positives"), ((A, P, P), "has 2 positives")]
)
def test_documents_that_make_no_groups_are_refused(kinds: tuple[int, ...], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        loss_of(kinds, (0.0,) * len(kinds))


SHARES = ((0, 6), (6, 6), (6, 8))
MANY = (*KINDS, A, P)
SETTINGS = {"include_qq": True, "include_dd": True, "mask_fake_negative": True}


def whole() -> tuple[float, torch.Tensor]:
    embeddings = at((*ANGLES, 20, 75)).requires_grad_()
    loss_sum = InfonceLoss(**SETTINGS)(inputs_of(MANY), ModelOutputs(embeddings=embeddings)).loss_sum
    return loss_sum.item(), torch.autograd.grad(loss_sum, embeddings)[0]


def test_the_ranks_sum_and_gradient_are_those_of_one_process() -> None:
    """Three ranks with two, no and one anchors, gathered by a function of the caller."""
    embeddings = at((*ANGLES, 20, 75))
    given: list[torch.Tensor] = []

    def share(rank: int, gather) -> tuple[float, torch.Tensor]:
        start, end = SHARES[rank]
        own = embeddings[start:end].clone().requires_grad_()
        loss_sum = InfonceLoss(**SETTINGS, gather=gather)(inputs_of(MANY[start:end]), ModelOutputs(embeddings=own)).loss_sum
        return loss_sum.item(), torch.autograd.grad(loss_sum, own)[0]

    for rank in range(3):
        share(rank, lambda own: given.append(own.detach()) or [own])
    found = [share(rank, lambda own, rank=rank: [*given[:rank], own, *given[rank + 1 :]]) for rank in range(3)]
    loss_sum, gradient = whole()
    assert sum(value for value, _ in found) == pytest.approx(loss_sum)
    torch.testing.assert_close(torch.cat([grad for _, grad in found]), gradient)


def test_a_gather_that_loses_the_own_share_is_refused() -> None:
    with pytest.raises(ValueError, match="the very tensor it was given"):
        loss_of(gather=lambda own: [own.clone()])
    with pytest.raises(ValueError, match="own negatives only"):
        build_loss("InfonceLoss", {"use_batch": False, "include_qq": True})


def _rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    start, end = ((0, 6), (6, 8))[rank]
    own = at((*ANGLES, 20, 75))[start:end].requires_grad_()
    loss = InfonceLoss(**SETTINGS, process_group=dist.group.WORLD)
    loss_sum = loss(inputs_of(MANY[start:end]), ModelOutputs(embeddings=own)).loss_sum
    (grad,) = torch.autograd.grad(loss_sum, own)
    Path(folder, f"{rank}.txt").write_text(json.dumps([loss_sum.item(), grad.tolist()]))
    dist.destroy_process_group()


@pytest.mark.slow  # two processes that import torch
def test_two_processes_over_gloo(tmp_path: Path) -> None:
    mp.spawn(_rank, args=(str(tmp_path),), nprocs=2)
    found = [json.loads((tmp_path / f"{rank}.txt").read_text()) for rank in range(2)]
    loss_sum, gradient = whole()
    assert sum(value for value, _ in found) == pytest.approx(loss_sum)
    torch.testing.assert_close(torch.tensor(found[0][1] + found[1][1], dtype=torch.float64), gradient)
