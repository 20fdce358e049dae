"""Words of errors as tables: the name of a mistake -> (call, error, words).

WRONG = {"weight": (lambda: A.nll(Softmax(), X, T, np.ones(3)), ValueError, "each of the 4 classes")}

@each(WRONG)
def test_mistakes(call, error, words):
    refuses(call, error, words)
"""

import re

import pytest


def each(table):
    """A test of each row of a table."""
    rows = [pytest.param(*row, id=name) for name, row in table.items()]
    return pytest.mark.parametrize(("call", "error", "words"), rows)


def refuses(call, error, words):
    with pytest.raises(error, match=words):
        call()


def said(error, *rows):
    """Rows `(call, words)` of one error, named by their words, which stand in it as they are; `…` is anything."""
    table = {words: (call, error, re.escape(words).replace("…", ".*")) for call, words in rows}
    assert len(table) == len(rows), "two rows have the same words"
    return table


def one_sentence(call, error, words):
    """The error is ours: one line, raised by this package, and says what to do."""
    with pytest.raises(error, match=words) as raised:
        call()
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400
    assert "/anymax/" in str(raised.traceback[-1].path)
