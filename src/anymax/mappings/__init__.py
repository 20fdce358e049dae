"""The catalogue of maps: one family a file, and this explicit tuple."""

from .._mapping import Mapping
from .budget import Budget
from .entmax import Entmax
from .normmax import NormMax
from .perturb_max import Noise as Noise
from .perturb_max import PerturbMax
from .ratio import Ratio
from .sigsoftmax import Sigsoftmax
from .softmax import Softmax
from .sparse_softmax import SparseSoftmax
from .sparsemax import Sparsemax
from .taylor import Taylor

CATALOGUE: tuple[type[Mapping], ...] = (
    Softmax,
    Sparsemax,
    Entmax,
    Budget,
    NormMax,
    Taylor,
    Sigsoftmax,
    Ratio,
    SparseSoftmax,
    PerturbMax,
)
