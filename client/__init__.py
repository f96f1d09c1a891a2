"""The longhaul command, and the library: `from client import Longhaul`."""

from client.api import Longhaul
from client.connection import ApiError, Unreachable

__all__ = ["ApiError", "Longhaul", "Unreachable"]
