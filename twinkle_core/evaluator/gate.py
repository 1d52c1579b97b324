"""May this model be released? A pure decision over two evaluations and the limits of `PublishConfig`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twinkle_core.config import PublishConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Example: `Verdict(passed=False, reasons=('held-out loss rose from 1.2000 to 1.3000 (+0.1000); at most +0.0000 is allowed',))`."""

    passed: bool
    reasons: tuple[str, ...]
    """What was compared, one sentence each; of a failed gate only what failed."""


def gate(before: Mapping[str, Any], after: Mapping[str, Any], publish: PublishConfig) -> Verdict:
    """Compare two results of `evaluate_model`: of the base model and of the trained one, on the same held-out rows.

    The loss may rise by at most `publish.max_loss_increase`, and the answer accuracy must reach `publish.min_accuracy` where
    that is set. Without any held-out row there is nothing to compare, and the gate does not pass. A loss that is not finite never passes.
    """
    old, new = before["numbers"]["all"], after["numbers"]["all"]
    checks = [_check_loss(old, new, publish.max_loss_increase)]
    if publish.min_accuracy is not None:
        checks.append(_check_accuracy(new, publish.min_accuracy))
    passed = all(ok for ok, _ in checks)
    return Verdict(passed=passed, reasons=tuple(reason for ok, reason in checks if ok == passed))


def _check_loss(old: Mapping[str, Any], new: Mapping[str, Any], limit: float) -> tuple[bool, str]:
    same_rows = (old["documents"], old["loss_tokens"]) == (new["documents"], new["loss_tokens"])
    if not same_rows:
        return False, (
            f"the two evaluations saw different rows: {old['documents']} documents with {old['loss_tokens']} supervised tokens before, "
            f"{new['documents']} with {new['loss_tokens']} after; evaluate both on the same held-out rows"
        )
    if not new["documents"]:
        return False, "there are no held-out rows, so nothing can be compared: raise held_out on a source, or give more rows"
    if old["loss"] is None or new["loss"] is None or not (math.isfinite(old["loss"]) and math.isfinite(new["loss"])):
        return False, f"held-out loss is not a finite number: {old['loss']} before, {new['loss']} after"
    rise = new["loss"] - old["loss"]
    verb = "fell" if rise < 0 else "rose" if rise > 0 else "stayed"
    return rise <= limit, f"held-out loss {verb} from {old['loss']:.4f} to {new['loss']:.4f} ({rise:+.4f}); at most {limit:+.4f} is allowed"


def _check_accuracy(new: Mapping[str, Any], limit: float) -> tuple[bool, str]:
    accuracy = new["answer_accuracy"]
    if accuracy is None:
        advice = "add rows with a scorer or drop min_accuracy"
        return False, f"answer accuracy must reach {limit:.1%}, but no held-out answer was scored; {advice}"
    share = f"{new['answers_correct']} of {new['answers_scored']}"
    return accuracy >= limit, f"answer accuracy is {accuracy:.1%} ({share}); at least {limit:.1%} is asked for"
