import copy
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from twinkle_core.lazy_number import LazyNumber


def unread(value: float) -> LazyNumber:
    number = LazyNumber(lambda: number.give(value))
    assert not number.is_read
    return number


LOOKS: list[Callable[[Any], Any]] = [
    float, int, bool, str, repr, hash, abs, round, math.floor, math.isnan, np.isfinite, np.asarray,
    "{:.3f}".format, "{}".format, lambda n: format(n, ".2f"), lambda n: round(n, 1), lambda n: -n, lambda n: +n,
    lambda n: pickle.loads(pickle.dumps(n)), copy.copy,  # noqa: S301 (its own bytes)
    lambda n: n < 3, lambda n: n > 3, lambda n: n >= 2.5, lambda n: n <= 2, lambda n: n == 2.5, lambda n: n != 2.5,
    lambda n: n in [2.5], lambda n: {n: 1}[2.5], lambda n: 2 < n, lambda n: 2.5 == n,  # noqa: SIM300 (from the other side)
    lambda n: n + 1, lambda n: 1 + n, lambda n: n - 1, lambda n: 1 - n, lambda n: n * 2, lambda n: 2 * n, lambda n: n / 4, lambda n: 4 / n,
    lambda n: n // 2, lambda n: 7 // n, lambda n: n % 2, lambda n: 7 % n, lambda n: n**2, lambda n: 2**n, lambda n: divmod(n, 2),
    lambda n: sum([n, n]), lambda n: float(max(n, 1.0)), lambda n: min(n, 9.0) + 0.0, lambda n: float(np.float64(2) * n),
    lambda n: float(n * np.float64(2)),
    lambda n: n + unread(1.5), lambda n: unread(1.5) < n, lambda n: math.fsum([n, 1]), lambda n: n == pytest.approx(2.5),
    lambda n: pytest.approx(n) == 2.5,
]  # fmt: skip


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_sees_the_float_and_reads_it_once(look: Callable[[Any], Any]) -> None:
    number = unread(2.5)
    seen, expected = look(number), look(2.5)
    assert number.is_read
    assert seen == expected and isinstance(seen, type(expected))
    assert float(number) == 2.5, "the second time nothing is fetched"


def test_what_asks_for_the_type_is_told_so_and_a_number_that_nobody_has_is_an_error_each_time() -> None:
    with pytest.raises(TypeError, match="LazyNumber is not JSON serializable"):
        json.dumps(unread(1.0))
    assert not isinstance(unread(1.0), float)
    lost = LazyNumber(lambda: None)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="was not given"):
            float(lost)
    assert math.isnan(LazyNumber(value=math.nan))
