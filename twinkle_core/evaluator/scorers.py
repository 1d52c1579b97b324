"""Is a generated answer right? Each scorer takes (generated text, expected answer) and says yes or no.

A row of data names its scorer in `user_data`. The rules are stated here because a number in a report is only as good as
the rule behind it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal

from twinkle_core.errors import DataError

# A sign counts only where it cannot be a minus between two operands or a range: "10-3" ends in 3, "x=-3" in -3. U+2212 is a minus.
# Digits glued to a letter before them ("v2", "R2D2") are a name. Groups of three after commas are thousands.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]])[-+\u2212])?[$\u20ac\u00a3]?(?<![A-Za-z_])"
    r"(?P<digits>\d{1,3}(?:,\d{3})+(?![\d])(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\w)\.\d+)(?P<exponent>[eE][-+]?\d+)?"
)
# GSM8K's and LaTeX's ways to mark the answer. The first one holds, since a model that runs on makes up another question.
_MARKED = re.compile(rf"(?:####\s*|\\boxed\{{\s*)(?={_NUMBER.pattern})")


def contains(text: str, answer: str) -> bool:
    """The answer stands in the text as whole words, whatever the case: 'Ada' is in 'I am ada.' and not in 'Adamant'."""
    words = _plain(answer).casefold()
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", _plain(text).casefold()) is not None


def last_number(text: str, answer: str) -> bool:
    """The text's number equals the answer's, as numbers: '1,250.' is 1250, '$29.00' is 29, and -3 is not 3.

    The number of a text is the first that is marked by '####' or `\\boxed{}`, else the last one. Fractions and decimal
    commas are not read. Raises `DataError` when the expected answer holds no number.
    """
    expected = find_number(answer)
    if expected is None:
        raise DataError(f"scorer 'last_number' needs a number as answer, got {answer!r}: correct the row or name another scorer")
    return find_number(text) == expected


def exact(text: str, answer: str) -> bool:
    """The same text, case included; only white space at the ends and its amount between words do not count."""
    return _plain(text) == _plain(answer)


def find_number(text: str) -> Decimal | None:
    """The number that `last_number` compares, or None where there is none."""
    marked = _MARKED.search(text)
    match = _NUMBER.match(text, marked.end()) if marked else None
    if match is None:
        match = next(reversed(list(_NUMBER.finditer(text))), None)
    if match is None:
        return None
    value = Decimal(match["digits"].replace(",", "") + (match["exponent"] or ""))
    return -value if match["sign"] in ("-", "\u2212") else value


SCORERS: dict[str, Callable[[str, str], bool]] = {"contains": contains, "last_number": last_number, "exact": exact}


def score(scorer: str, text: str, answer: str | None) -> bool:
    """Apply a scorer by name. Raises `DataError` for an unknown name or a missing answer."""
    if scorer not in SCORERS:
        raise DataError(f"unknown scorer {scorer!r}: known are {', '.join(sorted(SCORERS))}")
    if answer is None or not answer.strip():
        raise DataError(f"scorer {scorer!r} needs an 'answer' in the row's user_data, got {answer!r}")
    return SCORERS[scorer](text, answer)


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())
