"""The longhaul command, and the library: `from longhaul import Longhaul`."""

from longhaul.api import Longhaul
from longhaul.connection import ApiError, Unreachable

__all__ = ["ApiError", "Longhaul", "Unreachable"]
