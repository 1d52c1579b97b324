"""What every loss keeps: how rows are packed, ordered and split into micro-batches changes neither the loss nor its gradient."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.loss.worlds import NAMES, Part, World, learn, make, random_part, row
from twinkle_core.loss import build_loss
from twinkle_core.loss.base import LossInputs, ModelOutputs
from twinkle_core.types import DocumentKind


def assert_same(found, expected) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-9)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_packing_order_and_split_gives_the_same_gradient(name: str, data: st.DataObject) -> None:
    seeds = data.draw(st.lists(st.integers(0, 50), min_size=2, max_size=5, unique=True))
    weighed = data.draw(st.booleans())
    parts = [random_part(name, seed, weight=0.25 * (1 + seed % 5) if weighed else None) for seed in seeds]
    expected = learn(make(name), [[row(parts)]])
    assume(torch.count_nonzero(expected[1][0]) > 0)  # not all ratios are clipped
    order = data.draw(st.permutations(parts))
    cuts = data.draw(st.lists(st.booleans(), min_size=len(parts), max_size=len(parts)))
    rows: list[list[Part]] = [[]]
    for part, cut in zip(order, cuts, strict=True):
        rows = [*rows, [part]] if cut and rows[-1] else [*rows[:-1], [*rows[-1], part]]
    packed = [row(one) for one in rows]
    assert_same(learn(make(name), [packed]), expected)
    assert_same(learn(make(name), [[one] for one in packed]), expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_weight_of_a_row_is_known_before_its_forward_pass(name: str) -> None:
    rows = [row([random_part(name, seed, weight=[None, 0.5, 2.0][seed % 3]) for seed in range(start, start + 2)]) for start in (0, 3, 5)]
    loss, world = make(name), World()
    weights = [loss.row_weight(one) for one in rows]
    assert all(weight > 0 for weight in weights)
    assert [loss(*world.inputs([one])).weight for one in rows] == pytest.approx(weights)
    assert loss(*world.inputs(rows)).weight == pytest.approx(sum(weights))


FROM_LABELS = [name for name in NAMES if name not in ("MSELoss", "RewardModelLoss", "InfonceLoss")]


@pytest.mark.parametrize("name", FROM_LABELS)
def test_what_is_masked_or_weighs_nothing_changes_nothing(name: str) -> None:
    part, other = random_part(name, 3, weight=1.0), random_part(name, 5, weight=1.0)
    masked = replace(other, num_prompt_tokens=99)
    alone = learn(make(name), [[row([part])]])
    assert_same(learn(make(name), [[row([masked, part])], [row([masked])]]), alone)
    assert_same(learn(make(name), [[row([part, replace(other, weight=0.0)])]]), alone)
    prompt = Part(documents=((1, 2, 3),), kinds=(DocumentKind.PROMPT,), num_prompt_tokens=99)
    assert_same(learn(make(name), [[row([prompt, part])]]), alone)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("masked", [False, True])
def test_nothing_to_learn_gives_zero_with_a_graph(name: str, masked: bool) -> None:
    """A rank without a supervised token goes backwards like the others (reported: huggingface/trl#7077)."""
    rows = [row([replace(random_part(name, 3), num_prompt_tokens=99)])] if masked and name in FROM_LABELS else []
    output = make(name)(*World().inputs(rows))
    assert output.weight == 0
    assert output.loss_sum.item() == 0
    output.loss_sum.backward()


SAMPLED = ("advantages", "old_log_probs")
NEEDED = {
    **dict.fromkeys(("GSPOLoss", "SAPOLoss", "CISPOLoss", "BNPOLoss", "DRGRPOLoss"), SAMPLED),
    "GRPOLoss": (*SAMPLED, "ref_log_probs"),
    "DPOLoss": ("ref_log_probs",),
    "KTOLoss": ("ref_log_probs", "kl"),
    "GKDLoss": ("teacher_logits",),
    "MSELoss": ("targets",),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_input_is_an_error_and_never_a_zero_loss(name: str) -> None:
    loss = make(name)
    inputs, outputs = World().inputs([row([random_part(name, 3)])])
    with pytest.raises(ValueError, match=f"{name} needs"):
        loss(inputs, ModelOutputs())
    for field in ("advantages", "old_log_probs", "ref_log_probs", "kl", "teacher_logits", "targets"):
        without = replace(inputs, **{field: None})
        if field in NEEDED.get(name, ()):
            with pytest.raises(ValueError, match=f"{name} needs {field}"):
                loss(without, outputs)
        else:
            assert loss(without, outputs).loss_sum.item() == loss(inputs, outputs).loss_sum.item()


@pytest.mark.parametrize("name", NAMES)
def test_only_what_a_loss_names_is_needed(name: str) -> None:
    loss = make(name)
    inputs, outputs = World().inputs([row([random_part(name, 3)])])
    fields = {"hidden", "head_weight"} if loss.needs == {"hidden"} else loss.needs
    few = ModelOutputs(**{field: getattr(outputs, field) for field in fields})
    assert loss(inputs, few).loss_sum.item() == loss(inputs, outputs).loss_sum.item()


def test_unknown_names_and_arguments_are_refused_naming_the_known() -> None:
    with pytest.raises(ValueError, match="loss is 'ppo'; known: CrossEntropyLoss, "):
        build_loss("ppo")
    with pytest.raises(ValueError, match="DPOLoss takes no 'betta'; known: ignore_index, beta"):
        build_loss("DPOLoss", {"betta": 0.2})
    with pytest.raises(ValueError, match="ignore_index is -1"):
        build_loss("SimPOLoss", {"ignore_index": -1})
    with pytest.raises(ValueError, match="give a name"):
        build_loss(3)  # type: ignore[arg-type]


def test_classes_and_callables_are_taken_as_they_are() -> None:
    loss = make("DPOLoss")
    assert build_loss(loss) is loss
    assert build_loss(type(loss), {"beta": 0.5}).beta == 0.5  # type: ignore[attr-defined]
    assert build_loss(learn) is learn  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="made already"):
        build_loss(loss, {"beta": 0.2})
    assert type(build_loss("LigerFusedLinearCrossEntropyLoss")).__name__ == "FusedLinearCrossEntropyLoss"


def test_inputs_that_do_not_fit_are_refused() -> None:
    labels = torch.tensor([1, 2, 3])
    with pytest.raises(ValueError, match="3 labels for documents of"):
        LossInputs(labels=labels, num_loss_tokens=(1, 1))
    with pytest.raises(ValueError, match="old_log_probs has 2 entries for 3 tokens"):
        LossInputs(labels=labels, num_loss_tokens=(3,), old_log_probs=torch.zeros(2))
    with pytest.raises(ValueError, match="advantages has 2 entries for 1 documents"):
        LossInputs(labels=labels, num_loss_tokens=(3,), advantages=torch.zeros(2))
    with pytest.raises(ValueError, match="advantages are not all finite"):
        LossInputs(labels=labels, num_loss_tokens=(3,), advantages=torch.tensor([float("nan")]))
    with pytest.raises(ValueError, match="log_probs have the shape"):
        make("SimPOLoss")(LossInputs(labels=labels, num_loss_tokens=(3,)), ModelOutputs(log_probs=torch.zeros(1)))


def test_pairs_are_checked() -> None:
    loss, plain, chosen, rejected = make("SimPOLoss"), DocumentKind.PLAIN, DocumentKind.CHOSEN, DocumentKind.REJECTED
    for kinds, counts, why in (
        ((chosen, plain), (1, 1), "chosen document 0 is not followed by its rejected one"),
        ((plain, rejected), (0, 1), "rejected document 1 does not follow a chosen one"),
        ((plain,), (1,), "learns from pairs, but document 0 is PLAIN"),
        ((chosen, rejected), (1, 0), "only one side of the pair at document 0"),
    ):
        inputs = LossInputs(labels=torch.ones(sum(counts), dtype=torch.int64), num_loss_tokens=counts, kinds=kinds)
        with pytest.raises(ValueError, match=why):
            loss(inputs, ModelOutputs(log_probs=torch.zeros(sum(counts))))
