"""What a drawn figure says, and that nothing of it is cut."""

from __future__ import annotations

from matplotlib import rcParams
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from kvbench.figures import style


def texts(figure: Figure) -> list[Text]:
    return [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]


def assert_nothing_is_cut(figure: Figure) -> None:
    canvas = FigureCanvasAgg(figure)
    with style.context():
        figure.set_dpi(rcParams["savefig.dpi"])
        canvas.draw()  # type: ignore[no-untyped-call]
        renderer = canvas.get_renderer()  # type: ignore[no-untyped-call]
        drawn = figure.get_tightbbox(renderer).transformed(figure.dpi_scale_trans)
        for extent in [drawn, *(text.get_window_extent(renderer) for text in figure.texts)]:
            assert extent.x0 >= -1
            assert extent.y0 >= -1
            assert extent.x1 <= figure.bbox.x1 + 1
            assert extent.y1 <= figure.bbox.y1 + 1
