"""`from_config`: the transform that a config of transformers, vLLM or llama.cpp describes."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from .._array import is_number, number
from .._core.names import in_64_bits
from .._core.options import check_keywords
from .._core.spelling import nearest
from .base import Composed
from .config_llama import LLAMA_CPP
from .config_rows import Rows, System
from .config_systems import TRANSFORMERS, VLLM

SYSTEMS = {system.name: system for system in (TRANSFORMERS, VLLM, LLAMA_CPP)}
_CLASSES = {"GenerationConfig": "transformers", "SamplingParams": "vllm"}  # the names of classes that tell the system


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Configured(Composed):
    """The transform of a config, which `from_config` returns; `left` has the fields that it does not do, each with the reason.

    Examples
    --------
    >>> from anymax.transforms import from_config
    >>> made = from_config({"temperature": 0.5, "max_tokens": 100})
    >>> made.left
    {'max_tokens': 'it ends the text'}
    """

    left: dict[str, str] = dataclasses.field(default_factory=dict)


@check_keywords(
    {
        name: f'write from_config({{"{name}": ...}})'
        for system in SYSTEMS.values()
        for name in (*system.known, *system.aliases)
    }
)
def from_config(
    config: Any,
    *,
    order: str | None = None,
    tokens: Any = None,
    output: Any = None,
    generator: Any = None,
    leave: Any = (),
) -> Configured:
    """The transforms that a config describes, in the order of its system: transformers, vLLM or llama.cpp.

    A field that is off in that system is off here: `top_k` 0 (in vLLM and llama.cpp also -1), `top_p` 1, `min_p` 0, `typical_p` 1,
    `top_n_sigma` 0 and others. Greedy decoding, by `temperature=0` or `do_sample=False`, keeps the first of the largest scores. No field is
    ignored: what is not about scores, such as `max_tokens`, is in the result's `left`; what changes scores in a way that a transform can't
    is an error.

    Parameters
    ----------
    config
        A `GenerationConfig` of transformers, a `SamplingParams` of vLLM, or a dict with the names of their fields or of llama.cpp's
        (`temp`, `typ_p`, `penalty_repeat`, ..., or those of its server). Or a list of these, one for each row of the scores: then each
        row has its own parameters, and rows may be greedy.
    order
        "transformers", "vllm" or "llama.cpp": whose names, defaults and order. By default the class of the config says it, and a dict is
        vLLM's. llama.cpp's dict may have `samplers`: names, "top_k;top_p;temperature", or letters, "kpt".
    tokens
        All classes that came before, prompt and output, for repetition penalties, `bad_words_ids` and DRY: integers [..., length] with
        the leading axes of the scores; -1 where a row has fewer. A list of lists may have several lengths.
    output
        The classes of the output alone, for vLLM's frequency and presence penalties, bad words and `min_tokens`.
    generator
        The random numbers of llama.cpp's XTC, as in `xtc`.
    leave
        Names of fields that somebody else does, such as an engine that has applied the penalties: they are in `left`.

    Returns
    -------
    Configured
        A function scores -> scores, as from `compose`. Its `left` is a dict: field that it does not do -> reason.

    Examples
    --------
    >>> from_config({"temperature": 0.5, "top_k": -1, "top_p": 0.9, "min_p": 0.0})
    compose(temperature(T=0.5), topp(p=0.9))
    >>> from_config({"samplers": "kpt", "top_k": 3, "top_p": 1.0, "temp": 0.5}, order="llama.cpp")
    compose(topk(k=3), temperature(T=0.5))

    Two rows, the first of them greedy:

    >>> from_config([{"temperature": 0}, {"top_k": 2}])([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]])
    array([[-inf,   3., -inf],
           [-inf,   3.,   2.]])
    """
    configs = list(config) if isinstance(config, (list, tuple)) else [config]
    if not configs:
        raise ValueError("from_config: the list of configs is empty; give one for each row of the scores")
    read = [_read(c) for c in configs]
    system = _system(order, configs)
    known = system.known
    fields = [system.named(f) for f in read]
    leave = (leave,) if isinstance(leave, str) else tuple(leave)
    for name in leave:
        if name not in known:
            raise ValueError(f"from_config: leave={name!r} is no field of {system.name}{_near(name, known)}")
    left: dict[str, str] = {}
    values = []
    for c, own in zip(configs, fields, strict=True):
        row = dict(system.does)
        for name, value in own.items():
            if _unset(value, known.get(name)):
                continue
            if name in leave:
                left[name] = "it is left to others"
            elif name in system.does:
                row[name] = _checked(name, value, row[name])
            elif name in system.elsewhere:
                left.update({name: system.elsewhere[name][1]} if system.elsewhere[name][1] else {})
            elif name in system.cannot:
                raise ValueError(
                    f"from_config: {name}={value!r} can't be done by a transform: {system.cannot[name][1]}; "
                    f"do it elsewhere and say leave=({name!r},)"
                )
            elif isinstance(c, dict):
                raise TypeError(f"from_config: {name!r} is no field of {system.name}{_near(name, known)}")
            elif not name.startswith("_"):
                left[name] = "anymax does not know this field"
        values.append(row)
    rows = Rows(values, tokens, output, generator, leave)
    system.build(rows, fields)
    left.update(rows.left)
    return Configured(tuple(rows.parts), left)


def _unset(value: Any, known: Any) -> bool:
    """True if a field has the value that it has if nobody sets it."""
    usual = None if known is None else known[0]
    if value is None or (isinstance(value, (list, tuple, set, dict)) and not value and not usual):
        return True
    value = value.name if isinstance(value, enum.Enum) else value
    return type(value) in (bool, int, float, str) and value == usual


def _checked(name: str, value: Any, usual: Any) -> Any:
    """The value of a field, a number if it usually has one."""
    value = in_64_bits(number(value))
    if type(usual) in (int, float) and not is_number(value):
        raise TypeError(f"from_config: {name} must be a number, got {value!r}")
    return value


def _read(config: Any) -> dict[str, Any]:
    """The fields of a config by name."""
    if isinstance(config, dict):
        return config
    kind = type(config)
    names = [k.__name__ for k in kind.__mro__]
    if "GenerationConfig" in names and callable(getattr(config, "to_dict", None)):
        return config.to_dict()
    if hasattr(kind, "__struct_fields__"):  # msgspec's, as vLLM's SamplingParams
        return {name: getattr(config, name) for name in kind.__struct_fields__}
    if dataclasses.is_dataclass(config):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if any(name in _CLASSES for name in names):
        return dict(vars(config))
    raise TypeError(
        "from_config: config must be a GenerationConfig of transformers, a SamplingParams of vLLM, a dict with the names of their fields, "
        f"or a list of these, got {config!r}"
    )


def _system(order: Any, configs: list[Any]) -> System:
    if order is not None:
        if order not in SYSTEMS:
            raise ValueError(f"from_config: order must be {', '.join(map(repr, SYSTEMS))}, got {order!r}")
        return SYSTEMS[order]
    systems = []
    for config in configs:
        names = [k.__name__ for k in type(config).__mro__]
        system = next(
            (_CLASSES[name] for name in names if name in _CLASSES), "vllm" if isinstance(config, dict) else None
        )
        if system is None:
            raise TypeError(
                f"from_config: say order=, whose config {type(config).__name__} is: {', '.join(map(repr, SYSTEMS))}"
            )
        if system not in systems:
            systems.append(system)
    if len(systems) > 1:
        raise ValueError(
            f"from_config: the configs are of {' and '.join(systems)}, whose orders differ; give those of one system"
        )
    return SYSTEMS[systems[0]]


def _near(name: str, known: Any) -> str:
    near = nearest(name, known)
    others = [n for n, s in SYSTEMS.items() if name in s.known or name in s.aliases]
    hint = f"; did you mean {near!r}?" if near else ""
    return hint or (f"; it is one of {others[0]}, order={others[0]!r}" if others else "")
