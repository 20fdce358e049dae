"""The API reference: every public name once, on the page of the module that defines it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import types
from pathlib import Path
from typing import Any

import anymax

from . import text

# page -> (title, what it holds)
PAGES = {
    "maps": (
        "Maps",
        "A map and its parameters, as frozen data. {doc}`Pages with pictures </generated/maps/index>` say when each helps.",
    ),
    "functional": ("Applying maps", "Scores in, probabilities out, as the same kind of array."),
    "losses": ("Losses", "For any map, with the signature of `torch.nn.functional.cross_entropy`."),
    "transforms": (
        "Transforms",
        "Functions from scores to scores that compose with every map; and `mix`, which comes after the map.",
    ),
    "margins": ("Margins", "They make the target's cosine smaller, so that training must move the embedding closer."),
    "samplers": (
        "Samplers",
        "Randomness comes from a generator, a key or a seed, or from NumPy's or torch's global generator.",
    ),
    "transport": ("Transport", "Matrices whose rows and columns both have given sums; {doc}`/transport` says how."),
    "segments": ("Ragged rows", "Rows of unequal length, without padding; {doc}`/segments` says how."),
    "decoding": ("Decoding", "For language models; {doc}`/decoding` says how, and in which order."),
    "distributions": (
        "Distributions",
        "log p, entropy and divergences, for policies and trainers; `anymax.nn.Categorical` is a `torch.distributions.Distribution`.",
    ),
    "output_layers": (
        "Output layers",
        "Losses of many classes, in blocks of scores; {doc}`/large_vocabularies` says when to use them.",
    ),
    "attention": ("Attention", "Any map in attention, on NumPy, PyTorch and JAX."),
    "inspection": ("Inspection", "What a map promises, its derivatives, and which engine computes it."),
    "distributed": (
        "Classes on several processes",
        "`anymax.distributed`, for torch and JAX; {doc}`/many_machines` says how.",
    ),
    "nn": ("Torch modules", "`anymax.nn`, which loads torch."),
    "routing": (
        "Routers",
        "`anymax.routing`, for mixtures of experts; {doc}`/routers` has the arguments for each model.",
    ),
    "hf": ("Hugging Face", "`anymax.hf`, for transformers 5."),
    "vllm": ("vLLM", "`anymax.vllm`, for vLLM 0.33; {doc}`/vllm` says how to serve with it."),
    "numpyro": ("NumPyro", "`anymax.numpyro`, for models in NumPyro."),
    "sklearn": ("scikit-learn", "`anymax.sklearn`, estimators."),
    "plot": ("Pictures", "`anymax.plot`: each function draws on `ax` and returns it."),
    "contract": (
        "Writing a map",
        "The contract of a map of your own; {doc}`contributing </contributing>` has an example.",
    ),
}
GROUPS = {  # the order of the site; each page once
    "Train": "maps functional losses transforms margins nn sklearn distributions numpyro",
    "Attend": "attention hf segments transport samplers decoding vllm",
    "Scale": "output_layers routing distributed",
    "Look inside": "inspection plot contract",
}
# where a name is defined -> its page
OF = {
    "mappings": "maps", "_random.noises": "maps", "functional": "functional", "thresholds": "functional", "losses": "losses",
    "transforms": "transforms", "sampling.samplers": "samplers", "sampling.decoding": "decoding", "sampling.most_probable": "decoding",
    "segments": "segments",
    "likelihood": "distributions", "linear": "output_layers",
    "_attention": "attention",
    "_config": "inspection", "inspection": "inspection", "kernels": "inspection", "_core": "contract", "contract": "contract",
    "transport": "transport",
}  # fmt: skip
TYPES = {  # names in signatures -> what they mean
    "ArrayT": "an array of NumPy, torch or JAX; what comes back is of the same kind.",
    "Array, AnyArray": "an array of any kind.",
    "Numbers": "lists of numbers, up to three deep; what comes back is an array of NumPy.",
    "Parameter": "a number, or an array with one value for each row.",
    "Axes": "an axis, or a tuple of them.",
    "Mask": "booleans, as an array or as lists.",
    "Target": "class indices or distributions, as an array, a number or lists.",
    "Weight": "one number for each class.",
    "DType": "a dtype of the array's own framework.",
    "Reduction": '`"mean"`, `"sum"` or `"none"`.',
    "Entropy": '`"shannon"`, `"renyi"`, `"renyi2"` or `"tsallis"`.',
}
RESULTS = {  # page -> types that its functions return or raise, and functions that have no name in the root
    "output_layers": ("linear.linear_threshold", "linear.explain_linear_loss"),
    "transforms": ("transforms.Transform", "transforms.Composed", "transforms.Configured"),
    "samplers": ("sampling.Sample", "sampling.Support"),
    "decoding": ("sampling.TopK", "sampling.Accepted", "sampling.recovered_tokens", "sampling.top", "sampling.Top"),
    "transport": ("transport.gumbel_sinkhorn",),
    "inspection": ("kernels.Explanation",),
    "contract": ("contract.BrokenLaw",),
}
# modules whose own names are public
MODULES = ("distributed", "margins", "nn", "routing", "hf", "vllm", "numpyro", "sklearn", "plot")


def names() -> dict[str, list[str]]:
    """page -> the full names on it."""
    out: dict[str, list[str]] = {page: [] for page in PAGES}
    for name in anymax.__all__:
        thing = getattr(anymax, name)
        if isinstance(thing, types.ModuleType) or name == "__version__":
            continue
        out[_page(name, thing.__module__)].append(f"anymax.{name}")
    for page, types_ in RESULTS.items():
        out[page] += [f"anymax.{name}" for name in types_]
    for module in MODULES:
        if importlib.util.find_spec(f"anymax.{module}") and (module != "numpyro" or importlib.util.find_spec(module)):
            out[module] = [f"anymax.{module}.{name}" for name in _own(importlib.import_module(f"anymax.{module}"))]
    return {page: found for page, found in out.items() if found}


def _page(name: str, module: str) -> str:
    """The page of what is defined in a module."""
    place = f"{module.removeprefix('anymax.')}."
    found = next((page for home, page in OF.items() if place.startswith(f"{home}.")), None)
    if found is None:
        raise LookupError(f"anymax.{name} is defined in {module}: say on which page of the API it belongs")
    return found


def _own(module: types.ModuleType) -> list[str]:
    listed = getattr(module, "__all__", None)
    return [
        name
        for name, thing in vars(module).items()
        if (name in listed if listed is not None else not name.startswith("_"))
        and (inspect.isclass(thing) or inspect.isfunction(thing))
        and (listed is not None or thing.__module__ == module.__name__)
        and thing.__doc__
    ]


def _entry(name: str, members: bool) -> str:
    thing = _find(name)
    if not inspect.isclass(thing):
        return f".. autofunction:: {name}\n"
    own = "\n   :members:\n   :undoc-members:" if members else ""
    return f".. autoclass:: {name}\n   :show-inheritance:{own}\n"


def _find(name: str) -> Any:
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def write(folder: Path) -> None:
    pages = names()
    for page, found in pages.items():
        title, words = PAGES[page]
        table = ".. autosummary::\n   :nosignatures:\n\n" + "".join(f"   {name}\n" for name in found)
        entries = "\n".join(_entry(name, page == "contract") for name in found)
        blocks = [f"```{{eval-rst}}\n{block}\n```" for block in (table, entries)]
        text.save(folder / f"{page}.md", text.page([f"# {title}", words, *blocks]))
    types_ = "\n".join(f"- {', '.join(f'`{n}`' for n in name.split(', '))}: {words}" for name, words in TYPES.items())
    parts = ["# API reference", "Every public name. Arrays in, the same kind of array out: NumPy, PyTorch or JAX."]
    for group, ordered in GROUPS.items():
        listed = [page for page in ordered.split() if page in pages]
        lines = "\n".join(f"- {{doc}}`{PAGES[page][0]} <{page}>`: {PAGES[page][1]}" for page in listed)
        parts += [text.section(group, lines), text.toctree(listed, f":hidden:\n:caption: {group}")]
    parts.append(text.section("Types in signatures", types_))
    text.save(folder / "index.md", text.page(parts))
