"""The pictures of docs/: drawn from the code, so that a test can see when they are out of date."""

from __future__ import annotations

import ast
from pathlib import Path

from docs_states import Edges, decode_edges, prefill_edges
from docs_svg import BLUE, GREEN, GREY, INK, ORANGE, PALE, PAPER, RED, Picture

from sglang_smartgen.core.proactive import proactive_blocks
from sglang_smartgen.transfer import messages as m

ROOT = Path(__file__).parents[1]


def pictures() -> dict[str, str]:
    """File name -> SVG of every picture."""
    return {
        "life.svg": life(),
        "overlap.svg": overlap(),
        "prefill_room.svg": states(
            "A room on P",
            prefill_edges(),
            {
                "announced": (40, 90),
                "pushing": (300, 90),
                "serving": (560, 90),
                "ending": (430, 260),
                "gone": (170, 260),
            },
        ),
        "decode_room.svg": states(
            "A room on D",
            decode_edges(),
            {
                "opened": (40, 90),
                "partial": (300, 90),
                "local": (560, 90),
                "releasing": (430, 260),
                "gone": (170, 260),
            },
        ),
        "modules.svg": modules(),
    }


def life() -> str:
    """The messages and writes of one request, from top to bottom."""
    picture = Picture(900, 860, "The life of a request")
    lanes = {"client": 70, "router": 220, "P": 430, "D": 760}
    for name, x in lanes.items():
        title = {"P": "prefill node (P)", "D": "decode node (D)"}.get(name, name)
        picture.box(x - 62, 14, 124, 28, fill=PALE[GREY])
        picture.text(x, 33, title, bold=True)
        picture.line([(x, 42), (x, 845)], color=GREY, arrow=False, dashed=True)

    def send(y: int, start: str, end: str, text: str, color: str = INK) -> None:
        a, b = lanes[start], lanes[end]
        picture.line([(a, y), (b, y)], color=color, width=2.5 if color != INK else 1.5)
        picture.text((a + b) / 2, y - 5, text, color=color)

    def note(y: int, lane: str, texts: list[str], color: str = GREY) -> None:
        height = 12 + 15 * len(texts)
        picture.box(lanes[lane] - 118, y, 236, height, fill=PALE[color], edge=color)
        picture.lines(lanes[lane], y + 18, texts)

    send(68, "client", "router", "request")
    send(68, "router", "P", "request, room")
    picture.line([(lanes["router"], 86), (lanes["D"], 86)])
    picture.text(600, 81, "the same request, the same room")
    note(96, "D", ["row and slots for the whole prompt;", "its mask: all remote; new generation"])
    send(162, "D", "P", f"{m.Registration.__name__} (once)")
    send(182, "P", "D", f"{m.Hello.__name__} (once)")
    send(206, "D", "P", f"{m.OpenRoom.__name__}: slots, row, generation")
    note(220, "P", ["prefill, layer by layer:", "KV of each layer -> host store"])
    send(290, "P", "D", "one-sided: layers 0, 1; metadata; K_r best blocks", BLUE)
    send(312, "P", "D", "when they are complete: the mask, 1 = local", BLUE)
    send(338, "P", "D", f"{m.Started.__name__}, then SGLang's Success")
    note(350, "P", ["GPU copy is free;", "the store keeps what is left"])
    note(
        350,
        "D",
        [
            "a decode step, layer by layer:",
            "select k entries, split by the mask,",
            "gather the local",
        ],
    )
    picture.box(375, 424, 515, 190, fill="none", edge=ORANGE)
    picture.text(384, 440, "each step, while entries are left", anchor="start", color=ORANGE)
    send(466, "D", "P", f"{m.Fetch.__name__}: the remote ones, a layer ahead", ORANGE)
    send(488, "P", "D", "one-sided: their rows, into D's arena", BLUE)
    send(510, "P", "D", f"{m.FetchDone.__name__}", ORANGE)
    send(540, "D", "P", f"{m.Grant.__name__}: credit, a range of D's fill arena", GREEN)
    send(562, "P", "D", "one-sided, between fetches: the next blocks", BLUE)
    send(584, "P", "D", f"{m.Filled.__name__}: D places them and marks them local", GREEN)
    send(606, "D", "P", f"{m.Alive.__name__} (every 2 s: P's lease)", GREY)
    note(630, "D", ["nothing is left on P: fully local"])
    send(690, "D", "P", f"{m.Release.__name__}")
    send(712, "P", "D", f"{m.Released.__name__}: no write can land any more")
    note(724, "P", ["the store entry is dropped"])
    note(724, "D", ["stock speed: no more messages"])
    send(784, "D", "router", "tokens")
    send(784, "router", "client", "tokens")
    note(796, "D", ["end: slots are free; with an early end", "only after Released (quarantine)"])
    return picture.svg()


def overlap() -> str:
    """Prefill and transfer in time, of stock, mode full and mode smartgen, from the K_r formula."""
    layers, blocks, compute, send = 8, 100, 1.0, 1.8  # seconds a layer
    k_r = proactive_blocks(
        prefill_s=layers * compute,
        bandwidth=1.0,
        metadata_bytes=0.4,
        block_bytes=send / blocks,
        layers=layers,
        blocks=blocks,
    )
    share = k_r / (layers * blocks)
    picture = Picture(900, 330, "What hides behind what")
    left, scale = 130, 30.0
    for row, (name, wait, part) in enumerate(
        [("stock", True, 1.0), ("full", False, 1.0), ("smartgen", False, share)]
    ):
        top = 50 + 88 * row
        picture.text(20, top + 26, name, anchor="start", bold=True, size=14)
        end = layers * compute if wait else compute
        for layer in range(layers):
            x = left + scale * compute * layer
            picture.box(x, top, scale * compute, 20, fill=PALE[GREY], edge=GREY)
            picture.text(x + scale / 2, top + 14, str(layer), size=10)
        for layer in range(layers):
            whole = 1.0 if layer < 2 else (share * layers - 2) / (layers - 2) if part < 1 else 1.0
            start = max(end, (layer + 1) * compute)
            end = start + send * whole
            x = left + scale * start
            picture.box(x, top + 24, scale * send * whole, 20, fill=PALE[BLUE], edge=BLUE)
            picture.text(x + scale * send * whole / 2, top + 38, str(layer), size=10)
        x = left + scale * end
        picture.line([(x, top - 8), (x, top + 56)], color=RED, arrow=False, width=2)
        picture.text(x + 6, top + 58, "decode starts", anchor="start", color=RED)
        if part < 1:
            picture.box(x + 4, top + 24, 190, 20, fill=PALE[GREEN], edge=GREEN)
            picture.text(x + 98, top + 38, "the rest, while it decodes", size=10)
    picture.text(left, 30, "grey: prefill of each layer; blue: its transfer", anchor="start")
    picture.text(
        left,
        318,
        f"8 layers, a transfer that takes {send:g} times as long as the prefill: K_r is "
        f"{share:.0%} of all blocks",
        anchor="start",
        color=GREY,
    )
    return picture.svg()


def states(title: str, edges: Edges, places: dict[str, tuple[int, int]]) -> str:
    """Phases as boxes, transitions as numbered arrows; the numbers are those of the table."""
    picture = Picture(740, 340, title)
    width, height = 130, 44
    picture.text(20, 28, title, anchor="start", bold=True, size=14)
    assert {phase for edge in edges for phase in edge} == set(places), "a phase has no place"
    for number, ((start, end), _) in enumerate(numbered(edges), 1):
        (x1, y1), (x2, y2) = places[start], places[end]
        bend: list[tuple[float, float]] = []
        if y1 == y2 and abs(x2 - x1) > 2 * width + height:  # over the box between them
            a, b = (x1 + width / 2, y1), (x2 + width / 2, y2)
            bend = [(a[0], y1 - 34), (b[0], y1 - 34)]
        elif y1 == y2:
            sign = 1 if x2 > x1 else -1
            a = (x1 + (width if sign > 0 else 0), y1 + height / 2)
            b = (x2 + (0 if sign > 0 else width), y2 + height / 2)
        else:
            shift = 22 if x2 > x1 else -22
            a = (x1 + width / 2 + shift, y1 + height)
            b = (x2 + width / 2 + (x1 - x2) * 0.12, y2)
        picture.line([a, *bend, b])
        middle = (a[0] + 0.42 * (b[0] - a[0]), a[1] + 0.42 * (b[1] - a[1]) - (34 if bend else 0))
        picture.box(middle[0] - 10, middle[1] - 9, 20, 17, fill=PAPER, edge=PAPER)
        picture.text(middle[0], middle[1] + 4, str(number), bold=True, color=BLUE)
    for phase, (x, y) in places.items():
        picture.box(x, y, width, height, fill=PALE[GREY])
        picture.text(x + width / 2, y + 27, phase, size=14)
    return picture.svg()


def numbered(edges: Edges) -> list[tuple[tuple[str, str], list[str]]]:
    """Transitions in the order of their numbers."""
    order = ["announced", "pushing", "serving", "opened", "partial", "local", "ending"]
    order += ["releasing", "gone"]
    return sorted(edges.items(), key=lambda item: tuple(map(order.index, item[0])))


FOLDERS = {
    "triton_kernels": (340, 330),
    "core": (340, 250),
    "select": (200, 170),
    "transfer": (480, 170),
    "calibrate": (60, 70),
    "engine": (340, 70),
    "report": (620, 70),
    "patching": (620, 330),
}


def modules() -> str:
    """The folders and who imports whom, read from the import statements."""
    picture = Picture(820, 400, "Who imports whom")
    width, height = 150, 40
    used = reduced(imports())
    for name, others in used.items():
        x1, y1 = FOLDERS[name]
        for other in sorted(others):
            x2, y2 = FOLDERS[other]
            if y1 == y2 and abs(x2 - x1) > 2 * width:  # over the box between them
                a, b = (x1 + width / 2, y1), (x2 + width / 2, y2)
                top = y1 - 34
                picture.line([a, (a[0], top), (b[0], top), b], color=GREY)
                continue
            if y1 == y2:
                side = width if x2 > x1 else 0
                a = (x1 + side, y1 + height / 2)
                b = (x2 + width - side, y2 + height / 2)
            else:
                lean = (x2 - x1) * 0.12
                a, b = (x1 + width / 2 + lean, y1 + height), (x2 + width / 2 - lean, y2)
            picture.line([a, b], color=GREY)
    for name, (x, y) in FOLDERS.items():
        color = RED if name == "engine" else BLUE
        picture.box(x, y, width, height, fill=PALE[color], edge=color)
        picture.text(x + width / 2, y + 25, name, size=14)
    picture.text(415, 60, "the only folder that imports sglang.srt", color=RED, size=11)
    text = "An arrow: imports (those that follow from others are left out)"
    picture.text(30, 390, text, anchor="start", color=GREY)
    return picture.svg()


def reduced(used: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without the arrows that a longer way implies."""

    def reach(name: str) -> set[str]:
        return used[name].union(*map(reach, used[name]))

    return {
        name: {other for other in others if not any(other in reach(o) for o in others)}
        for name, others in used.items()
    }


def imports() -> dict[str, set[str]]:
    """Folder -> folders of ours that its files import."""
    found: dict[str, set[str]] = {name: set() for name in FOLDERS}
    for name in FOLDERS:
        folder = ROOT / name if name == "triton_kernels" else ROOT / "sglang_smartgen" / name
        for file in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and node.level == 0:
                    parts = (node.module or "").split(".")
                    if parts[0] == "sglang_smartgen":
                        names = parts[1:2] or [alias.name for alias in node.names]
                        found[name] |= {n for n in names if n in FOLDERS and n != name}
    return found
