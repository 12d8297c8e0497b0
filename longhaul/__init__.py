"""longhaul: run Mixture-of-Experts GGUF models that are larger than memory.

Importing it loads no shared library.
"""

from .config import Config
from .errors import LonghaulError

__all__ = ["Config", "LonghaulError", "__version__"]

__version__ = "0.1.0"
