"""Attention with any map, one idea a file.

`verb` is what a caller says, `call` its arguments, checked (`operands`: q, k and v; `scores`: masks, biases and what else stands between
q k^T and the map); `packed` serves packed sequences. `implementations` is the table of what can compute it: `torch_blockwise` and
`torch_flash` (Triton) for torch, `linear` for Taylor attention in linear time, whose gradient for torch is in `torch_linear`.
"""

from .call import is_causal_bias as is_causal_bias
from .call import kept_by as kept_by
from .linear import LinearState, linear_attention
from .verb import attention, explain_attention

__all__ = ["LinearState", "attention", "explain_attention", "linear_attention"]
