"""A number that is fetched from where it was computed when somebody first looks at it."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any


def _of_float(name: str) -> Any:
    """The method of that name, asked of the value."""

    def method(self: LazyNumber, *others: Any) -> Any:
        return getattr(float(self), name)(*(float(other) if isinstance(other, LazyNumber) else other for other in others))

    method.__name__ = name
    return method


class LazyNumber(numbers.Real):
    """Stands for a float that may still be on a device, or on its way there.

    Arithmetic, comparisons, `bool`, formatting, printing, `math`, numpy and pickle see the float, and the first of them reads it, which
    waits for the device and may raise `TrainingError`. What asks for the type itself (`json`, `isinstance(…, float)`) wants
    `float(number)`.
    """

    __slots__ = ("_fetch", "_value")

    def __init__(self, fetch: Callable[[], None] | None = None, *, value: float | None = None) -> None:
        """`fetch` calls `give`, or raises what a look is to raise. A number whose `value` is known needs none."""
        self._fetch, self._value = fetch, value

    @property
    def is_read(self) -> bool:
        return self._value is not None

    def give(self, value: float) -> None:
        self._value, self._fetch = value, None

    def __float__(self) -> float:
        if self._value is None and self._fetch is not None:
            self._fetch()
        if self._value is None:
            raise RuntimeError("a number that was fetched was not given: its fetch has to call give, or to raise")
        return self._value

    __add__, __radd__, __sub__, __rsub__ = _of_float("__add__"), _of_float("__radd__"), _of_float("__sub__"), _of_float("__rsub__")
    __mul__, __rmul__, __pow__, __rpow__ = _of_float("__mul__"), _of_float("__rmul__"), _of_float("__pow__"), _of_float("__rpow__")
    __truediv__, __rtruediv__ = _of_float("__truediv__"), _of_float("__rtruediv__")
    __floordiv__, __rfloordiv__ = _of_float("__floordiv__"), _of_float("__rfloordiv__")
    __mod__, __rmod__ = _of_float("__mod__"), _of_float("__rmod__")
    __neg__, __pos__, __abs__ = _of_float("__neg__"), _of_float("__pos__"), _of_float("__abs__")
    __trunc__, __round__ = _of_float("__trunc__"), _of_float("__round__")
    __floor__, __ceil__ = _of_float("__floor__"), _of_float("__ceil__")
    __lt__, __le__, __gt__, __ge__ = _of_float("__lt__"), _of_float("__le__"), _of_float("__gt__"), _of_float("__ge__")
    __eq__, __ne__, __hash__ = _of_float("__eq__"), _of_float("__ne__"), _of_float("__hash__")
    __int__, __repr__, __str__, __format__ = _of_float("__int__"), _of_float("__repr__"), _of_float("__str__"), _of_float("__format__")

    def __reduce__(self) -> Any:
        return float, (float(self),)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy as np

        return np.array(float(self), dtype=dtype)
