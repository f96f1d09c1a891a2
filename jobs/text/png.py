"""Pictures: their colours, and a matplotlib figure as the bytes of a PNG."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# -- colours -----------------------------------------------------------------------------------------------------------
# Colours of pictures. A mid-grey page with light text is readable beside a white terminal and in a dark chat alike.

PAGE, PLOT, INK, GRID = "#2b2d31", "#232428", "#e3e5e8", "#4a4d55"
LIMIT = "#ffb454"
MEMORY = {
    "weights": "#7fb2ff",
    "gradients": "#5f84c4",
    "optimizer": "#b48ef0",
    "activations": "#6fcf97",
    "temporaries": "#d9c76a",
    "context": "#8a8f98",
}
"""By category of a memory plan, in the order of a bar."""
LINES = (
    "#7fb2ff", "#ffb454", "#6fcf97", "#f07f8e", "#b48ef0", "#d9c76a", "#67d3d8", "#f0a3d8", "#a5b0bd", "#c58b5c",
)  # fmt: skip
"""Of the curves of several jobs, in their order."""


# -- png ---------------------------------------------------------------------------------------------------------------


def png(figure: Figure) -> bytes:
    """The picture, drawn once. `Figure.savefig` draws it twice: first to lay it out, which drawing does anyway."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # half a second: only where something is drawn

    out = io.BytesIO()
    FigureCanvasAgg(figure).print_png(out)  # type: ignore[no-untyped-call]
    return out.getvalue()
