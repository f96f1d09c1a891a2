"""A matplotlib figure as the bytes of a PNG."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def png(figure: Figure) -> bytes:
    """The picture, drawn once. `Figure.savefig` draws it twice: first to lay it out, which drawing does anyway."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # half a second: only where something is drawn

    out = io.BytesIO()
    FigureCanvasAgg(figure).print_png(out)  # type: ignore[no-untyped-call]
    return out.getvalue()
