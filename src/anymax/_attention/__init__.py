"""Attention with any map, one idea a file.

`verb` is what a caller says, `call` its arguments, checked (`operands`: q, k and v; `scores`: masks, biases and what else stands between
q k^T and the map); `packed` is it for packed sequences, imported late. `implementations` is the table of those who serve: `blockwise` and
`flash` (Triton) are torch's, imported late; `linear` is Taylor attention in linear time, with torch's gradient of the compiled engine in
`linear_torch`.
"""

from .call import is_causal_bias as is_causal_bias
from .call import kept_by as kept_by
from .linear import LinearState, linear_attention
from .verb import attention, explain_attention

__all__ = ["LinearState", "attention", "explain_attention", "linear_attention"]
