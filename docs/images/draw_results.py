"""Draws head_tasks.svg from the recorded runs of the bundled models: `python docs/images/draw_results.py`."""

import math
from pathlib import Path

from dcformer.pretrained import seed_results


FILE = Path(__file__).with_name("head_tasks.svg")
MODELS = {"transformer-tiny": ("#8c959f", "#57606a"), "dcformer-tiny": ("#54aeff", "#0969da")}  # fill, line
PATTERNS = {
    "same-": "“< Ruth has a violin. Carol has … >. Ruth has a kind of”",
    "the-other-": "“< … >. Robert does not possess the thing that can”",
    "different-": "“There are Paris, Paris, Mumbai. Which is different?”",
}
LEFT, WIDTH, TOP, ROW = 420, 500, 78, 62
LOWEST, HIGHEST = 20, 90  # per cent


def rows() -> list[tuple[str, str, dict[str, list[float]]]]:
    """(heading, explanation, model -> accuracy in per cent of every training seed)."""
    found = {"held_out": {}, "authors": {}, **{prefix: {} for prefix in PATTERNS}}
    for run in seed_results()["runs"]:
        name, evaluation = run["variant"], run["evaluation"]
        for key in ("held_out", "authors"):
            found[key].setdefault(name, []).append(100 * evaluation[key]["accuracy"])
        for prefix in PATTERNS:
            groups = [group for key, group in evaluation["held_out"]["by_pattern"].items() if key.startswith(prefix)]
            right = math.fsum(group["accuracy"] * group["answers"] for group in groups)
            found[prefix].setdefault(name, []).append(100 * right / sum(group["answers"] for group in groups))
    headings = {"held_out": ("All generated questions", "8,000 questions that were kept from training")}
    headings["authors"] = ("The authors' 888 texts", "5,328 questions of the paper's own data")
    headings |= {prefix: (f"Generated, patterns {prefix}*", example) for prefix, example in PATTERNS.items()}
    return [(*headings[key], models) for key, models in found.items()]


def place(accuracy: float) -> float:
    """Horizontal position of an accuracy in per cent."""
    return round(LEFT + WIDTH * (accuracy - LOWEST) / (HIGHEST - LOWEST), 1)


def text(x: float, y: float, words: str, **attributes: str) -> str:
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'  <text x="{x}" y="{y}"{extra}>{words.replace("<", "&lt;").replace(">", "&gt;")}</text>'


def draw() -> str:
    """The picture as SVG: one circle per training seed, a bar at their mean."""
    found = rows()
    bottom = TOP + ROW * len(found)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {bottom + 62}" role="img" '
        'font-family="Helvetica, Arial, sans-serif" font-size="14" fill="#1f2328">',
        "  <title>Accuracy of dcformer-tiny and transformer-tiny on the head tasks, four training seeds each</title>",
        f'  <rect x="0.5" y="0.5" width="959" height="{bottom + 61}" rx="10" fill="#ffffff" stroke="#d0d7de"/>',
    ]
    for number, (name, (fill, line)) in enumerate(MODELS.items()):
        x, what = LEFT + 240 * number, "with composition" if name == "dcformer-tiny" else "without"
        lines.append(f'  <circle cx="{x + 6}" cy="29" r="6" fill="{fill}" stroke="{line}"/>')
        lines.append(text(x + 20, 34, f"{name} ({what})", fill=line))
    for percent in range(LOWEST, HIGHEST + 1, 10):
        x = place(percent)
        lines.append(f'  <path d="M{x} {TOP - 22}V{bottom}" stroke="#d8dee4"/>')
        lines.append(text(x, bottom + 20, f"{percent} %", text_anchor="middle", fill="#57606a"))
    guess = place(100 / 3)
    lines.append(f'  <path d="M{guess} {TOP - 22}V{bottom}" stroke="#1f2328" stroke-dasharray="5 4"/>')
    lines.append(
        text(guess, bottom + 44, "random guessing among the three facts", text_anchor="middle", fill="#1f2328")
    )
    lines.append(text(LEFT + WIDTH, bottom + 44, "right answers", text_anchor="end", fill="#57606a"))
    for number, (heading, explanation, models) in enumerate(found):
        y = TOP + ROW * number
        lines.append(text(24, y + 4, heading, font_weight="bold"))
        lines.append(text(24, y + 23, explanation, font_size="13", fill="#57606a"))
        for offset, (name, (fill, line)) in zip((-3, 17), MODELS.items()):
            mean = place(math.fsum(models[name]) / len(models[name]))
            for accuracy in models[name]:
                lines.append(
                    f'  <circle cx="{place(accuracy)}" cy="{y + offset}" r="6" fill="{fill}" fill-opacity="0.75" '
                    f'stroke="{line}"/>'
                )
            lines.append(f'  <path d="M{mean} {y + offset - 9}v18" stroke="{line}" stroke-width="3"/>')
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    FILE.write_text(draw(), encoding="utf-8")
