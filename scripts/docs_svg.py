"""A few shapes of SVG as text, so that the same code gives the same bytes on every machine."""

from __future__ import annotations

from html import escape

INK, PAPER, GREY = "#1b2733", "#ffffff", "#8894a0"
BLUE, GREEN, ORANGE, RED = "#2f6fb7", "#2e8b57", "#c9741a", "#b3403a"
PALE = {BLUE: "#e3edf8", GREEN: "#e2f2e9", ORANGE: "#fbeedd", RED: "#f8e5e3", GREY: "#eef1f4"}


class Picture:
    """Shapes in the order in which they were drawn; all lengths in pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._shapes: list[str] = []
        self.box(0, 0, width, height, fill=PAPER, edge=PAPER)

    def box(
        self, x: float, y: float, width: float, height: float, *, fill: str = PAPER, edge: str = INK
    ) -> None:
        """A rectangle with round corners, (x, y) its upper left one."""
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
            f'fill="{fill}" stroke="{edge}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 12,
        anchor: str = "middle",
        color: str = INK,
        bold: bool = False,
    ) -> None:
        """One line of text, (x, y) on its base line."""
        weight = ' font-weight="bold"' if bold else ""
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{color}"{weight}>{escape(text)}</text>'
        )

    def lines(self, x: float, y: float, texts: list[str], **how: object) -> None:
        """Several lines of text, 15 pixels apart."""
        for number, text in enumerate(texts):
            self.text(x, y + 15 * number, text, **how)  # type: ignore[arg-type]

    def line(
        self,
        points: list[tuple[float, float]],
        *,
        color: str = INK,
        arrow: bool = True,
        dashed: bool = False,
        width: float = 1.5,
    ) -> None:
        """A line through points, with a head at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        head = f' marker-end="url(#head{color[1:]})"' if arrow else ""
        self._shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" '
            f'stroke-width="{width:g}"{dash}{head}/>'
        )

    def svg(self) -> str:
        """The whole file."""
        width, height = self._size
        heads = "".join(
            f'<marker id="head{color[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="10" '
            f'markerHeight="10" markerUnits="userSpaceOnUse" orient="auto">'
            f'<path d="M0 0 8 4 0 8z" fill="{color}"/></marker>'
            for color in (INK, GREY, BLUE, GREEN, ORANGE, RED)
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" font-family="Helvetica, Arial, sans-serif" role="img">\n'
            f"<title>{escape(self._title)}</title>\n<defs>{heads}</defs>\n"
            + "\n".join(self._shapes)
            + "\n</svg>\n"
        )
