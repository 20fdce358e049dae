"""The table: every case that is measured on a CPU."""

from __future__ import annotations

from .attention import attention_cases
from .cases import GROUPS, Case, map_cases
from .decoding import decoding_cases
from .learned import learned_cases
from .ordering import ordering_cases
from .output_layers import layer_cases
from .own_maps import own_map_cases
from .ragged import ragged_cases
from .routing import routing_cases
from .serving import serving_cases
from .sinks import sink_cases
from .sklearn import sklearn_cases
from .token_statistics import token_cases
from .transport import transport_cases


def table() -> list[Case]:
    cases = [
        *map_cases(),
        *learned_cases(),
        *own_map_cases(),
        *attention_cases(),
        *decoding_cases(),
        *serving_cases(),
        *ordering_cases(),
        *layer_cases(),
        *ragged_cases(),
        *token_cases(),
        *routing_cases(),
        *sink_cases(),
        *transport_cases(),
        *sklearn_cases(),
    ]
    order = list(GROUPS)
    return sorted(cases, key=lambda case: order.index(case.group))  # stable
