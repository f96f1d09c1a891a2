"""The longhaul command, and the library: `from longhaul import Longhaul`."""

from typing import TYPE_CHECKING

__all__ = ["ApiError", "Longhaul", "Unreachable"]

if TYPE_CHECKING:
    from longhaul.api import ApiError, Longhaul, Unreachable
else:

    def __getattr__(name: str) -> object:
        """What is imported only when asked for, so that the command can catch a Ctrl-C meanwhile."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from longhaul import api

        return getattr(api, name)
