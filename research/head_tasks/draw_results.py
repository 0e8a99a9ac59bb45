"""Draws head_tasks.svg from the recorded runs of seeds.yaml: `python -m research.head_tasks.draw_results`."""

import json
import math
from pathlib import Path

from dcformer.head_tasks import REFERENCES


RESULTS = Path(__file__).parent / "results"
RECORDED = json.loads((RESULTS / "seeds.json").read_text(encoding="utf-8"))
FILE = RESULTS / "head_tasks.svg"
COLOURS = {"dcformer": "#0969da", "transformer": "#bc4c00"}
LEFT, RIGHT, TOP, BOTTOM = 84, 690, 62, 372  # of the panel, in a picture of 960 x 452
EXPONENT = 12  # the axis counts 10^12 operations


def curves() -> dict[str, list[list[tuple[float, float]]]]:
    """Model -> seed -> (10^12 operations of training, accuracy in per cent) of every evaluation."""
    found: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in COLOURS}
    for run in RECORDED["runs"]:
        curve = run["curve"]
        points = zip(curve["flops"], curve["accuracy"])
        found[run["variant"]].append([(flops / 10**EXPONENT, 100 * accuracy) for flops, accuracy in points])
    return found


def references() -> dict[str, float]:
    """What is reached without reading the question -> accuracy in per cent, the best first."""
    found = RECORDED["references"]["evaluation"]
    named = {label: 100 * found[rule]["accuracy"] for rule, label in REFERENCES.items()}
    return dict(sorted(named.items(), key=lambda item: -item[1]))


def text(x: float, y: float, words: str, **attributes: str) -> str:
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'  <text x="{x}" y="{y}"{extra}>{words}</text>'


def draw() -> str:
    """The picture as SVG: a thin line per training seed, a thick one at their mean."""
    found = curves()
    highest = math.ceil(max(flops for seeds in found.values() for points in seeds for flops, _ in points))

    def place(flops: float, accuracy: float) -> str:
        x = LEFT + (RIGHT - LEFT) * flops / highest
        return f"{x:.1f} {BOTTOM - (BOTTOM - TOP) * accuracy / 100:.1f}"

    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 452" role="img" '
        'font-family="Helvetica, Arial, sans-serif" font-size="14" fill="#1f2328">',
        "  <title>Held-out questions that both models answer, while they are trained</title>",
        '  <rect x="0.5" y="0.5" width="959" height="451" rx="10" fill="#ffffff" stroke="#d0d7de"/>',
        text(LEFT, 36, "Right answers to held-out questions, without an example before", font_weight="bold"),
    ]
    for percent in range(0, 101, 25):
        lines.append(f'  <path d="M{place(0, percent)}H{RIGHT}" stroke="#d8dee4"/>')
        y = float(place(0, percent).split()[1])
        lines.append(text(LEFT - 8, round(y + 5, 1), f"{percent} %", text_anchor="end", fill="#57606a"))
    for flops in range(0, highest + 1, 2):
        x = float(place(flops, 0).split()[0])
        lines.append(text(x, BOTTOM + 22, str(flops), text_anchor="middle", fill="#57606a"))
    unit = f'10<tspan dy="-6" font-size="10">{EXPONENT}</tspan>'
    title = f'{unit}<tspan dy="6"> floating-point operations of training</tspan>'
    lines.append(text((LEFT + RIGHT) / 2, BOTTOM + 50, title, text_anchor="middle", fill="#57606a"))
    for name, accuracy in references().items():
        lines.append(f'  <path d="M{place(0, accuracy)}H{RIGHT}" stroke="#57606a" stroke-dasharray="5 4"/>')
        y = float(place(0, accuracy).split()[1])
        lines.append(text(RIGHT + 10, round(y + 5, 1), f"{name}, {accuracy:.1f} %", fill="#57606a"))
    for number, (name, colour) in enumerate(COLOURS.items()):
        for points in found[name]:
            path = "L".join(place(*point) for point in points)
            lines.append(f'  <path d="M{path}" fill="none" stroke="{colour}" stroke-opacity="0.35"/>')
        # All seeds are evaluated after the same steps, and so after the same number of operations.
        rows = zip(*found[name])
        means = [(row[0][0], math.fsum(accuracy for _, accuracy in row) / len(row)) for row in rows]
        path = "L".join(place(*point) for point in means)
        lines.append(f'  <path d="M{path}" fill="none" stroke="{colour}" stroke-width="3"/>')
        y = TOP + 6 + 22 * number
        lines.append(text(RIGHT + 10, y, f"{name}, {means[-1][1]:.1f} % at the end", fill=colour, font_weight="bold"))
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    FILE.write_text(draw(), encoding="utf-8")
