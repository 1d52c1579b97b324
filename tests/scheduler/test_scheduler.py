import math

import pytest

from twinkle_core.errors import ConfigError
from twinkle_core.scheduler import SCHEDULERS, lr_factor


def test_ten_steps_with_two_of_warm_up_by_hand():
    cosine = [0.5 * (1 + math.cos(math.pi * k / 8)) for k in range(8)]
    linear = [(8 - k) / 8 for k in range(8)]
    for name, rest in (("CosineWarmupScheduler", cosine), ("LinearWarmupScheduler", linear), ("ConstantWarmupScheduler", [1.0] * 8)):
        assert [lr_factor(name, step, 10, 2) for step in range(10)] == pytest.approx([0.5, 1.0, *rest]), name


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (2, 1), (7, 7), (100, 5)])
def test_no_step_is_taken_at_rate_zero_the_peak_is_reached_and_the_end_is_zero(name: str, steps: int, warmup: int):
    factors = [lr_factor(name, step, steps, warmup) for step in range(steps)]
    assert all(0 < factor <= 1 for factor in factors) and max(factors) == 1.0
    assert factors[:warmup] == sorted(factors[:warmup])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    assert lr_factor(name, steps, steps, warmup) == 0.0


def test_wrong_settings_are_refused_with_their_values():
    with pytest.raises(ConfigError, match="'CosineScheduler'; known: CosineWarmupScheduler"):
        lr_factor("CosineScheduler", 0, 10, 2)
    for steps, warmup in ((0, 0), (5, 6), (5, -1)):
        with pytest.raises(ConfigError, match=f"{warmup} warm-up steps of {steps}"):
            lr_factor("CosineWarmupScheduler", 0, steps, warmup)
