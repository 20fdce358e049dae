"""Attention with any map.

`verb` has the public functions and `packed` their version for packed sequences. `call` checks the arguments, with `operands` for what
other kinds of attention check too; `scores` is everything between q k^T and the map (masks, biases). `implementations` is the table of
what can compute a call: `torch_blockwise`, `torch_flash` (Triton), and `linear` for Taylor attention in linear time (torch's gradient:
`torch_linear`).
"""

from .call import is_causal_bias as is_causal_bias
from .call import kept_by as kept_by
from .linear import LinearState, linear_attention
from .verb import attention, explain_attention

__all__ = ["LinearState", "attention", "explain_attention", "linear_attention"]
