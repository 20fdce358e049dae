"""Words of errors as tables: the name of a mistake -> (call, error, words).

WRONG = {"weight": (lambda: A.nll(Softmax(), X, T, np.ones(3)), ValueError, "each of the 4 classes")}

@each(WRONG)
def test_mistakes(call, error, words):
    refuses(call, error, words)
"""

import pytest


def each(table):
    """A test of each row of a table."""
    rows = [pytest.param(*row, id=name) for name, row in table.items()]
    return pytest.mark.parametrize(("call", "error", "words"), rows)


def refuses(call, error, words):
    with pytest.raises(error, match=words):
        call()
