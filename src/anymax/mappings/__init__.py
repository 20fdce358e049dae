"""The catalogue of maps, one family per file. Names in `__all__` are also public in `anymax`; tables list the maps in this order."""

from .._core.mapping import Mapping
from .bounded import Bounded
from .budget import Budget
from .elementwise import Elementwise
from .entmax import Entmax
from .fusedmax import Fusedmax
from .normmax import NormMax
from .perturb_max import Noise, PerturbMax
from .ranks import Ranks
from .ratio import Ratio
from .sigsoftmax import Sigsoftmax
from .sink import Sink
from .softmax import Softmax
from .softpick import Softpick
from .sparse_softmax import SparseSoftmax
from .sparsemax import Sparsemax
from .taylor import Taylor

__all__ = [
    "Softmax",
    "Sparsemax",
    "Entmax",
    "Budget",
    "Bounded",
    "Fusedmax",
    "NormMax",
    "Ranks",
    "Taylor",
    "Sigsoftmax",
    "Ratio",
    "SparseSoftmax",
    "PerturbMax",
    "Sink",
    "Elementwise",
    "Softpick",
    "Noise",
]

CATALOGUE: tuple[type[Mapping], ...] = tuple(
    kind for kind in map(globals().__getitem__, __all__) if issubclass(kind, Mapping)
)
