"""Draws cache_bytes.svg, the cache of the 2.8B shape by length of the text: `python docs/images/draw_cache.py`."""

from pathlib import Path

import torch

from dcformer import DCFormerConfig, cache_bytes_per_token


FILE = Path(__file__).with_name("cache_bytes.svg")
PRESET, DTYPE = "dcformer-2.8b", torch.bfloat16
PLAIN = {"compose_pre": False, "compose_post": False}
LENGTHS = range(0, 8193, 256)  # tokens
LEFT, RIGHT, TOP, BOTTOM = 90, 590, 34, 330
HIGHEST = 2.75  # GB


def cache_bytes(config: DCFormerConfig, per_token: int, length: int) -> int:
    """Of one sequence in all layers; sliding ones keep their window."""
    kept = [
        min(length, config.sliding_window) if layer_type == "sliding_attention" else length
        for layer_type in config.layer_types
    ]
    return per_token * sum(kept)


def lines() -> list[tuple[str, str, str, list[float]]]:
    """(label, explanation, colour, GB at every length), from the largest to the smallest."""
    composed, plain = DCFormerConfig.from_preset(PRESET), DCFormerConfig.from_preset(PRESET, **PLAIN)
    full = DCFormerConfig.from_preset(PRESET, sliding_window=None, layer_types=None, **PLAIN)
    rows = cache_bytes_per_token(plain, DTYPE)
    maps = 2 * composed.num_attention_heads**2 * DTYPE.itemsize  # heads x heads, before and after the softmax
    found = (
        ("Transformer, no windows", "keys and values of every token", "#8c959f", full, rows),
        ("DCFormer, authors' layout", "two matrices of heads x heads for every key", "#bc4c00", composed, rows + maps),
        (
            "DCFormer, here",
            "2 rank + 1 numbers a head for every key",
            "#0969da",
            composed,
            cache_bytes_per_token(composed, DTYPE),
        ),
        ("Transformer, the same windows", "keys and values alone", "#1f2328", plain, rows),
    )
    return [
        (label, what, colour, [cache_bytes(config, per_token, length) / 1e9 for length in LENGTHS])
        for label, what, colour, config, per_token in found
    ]


def across(length: float) -> float:
    return round(LEFT + (RIGHT - LEFT) * length / LENGTHS[-1], 1)


def up(gigabytes: float) -> float:
    return round(BOTTOM - (BOTTOM - TOP) * gigabytes / HIGHEST, 1)


def text(x: float, y: float, words: str, **attributes: str) -> str:
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'  <text x="{x}" y="{y}"{extra}>{words}</text>'


def draw() -> str:
    """The picture as SVG: a line for each layout, named at its end."""
    svg = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 400" role="img" '
        'font-family="Helvetica, Arial, sans-serif" font-size="14" fill="#1f2328">',
        "  <title>Cache of one sequence by its length, 2.8B shape in bfloat16, four layouts</title>",
        '  <rect x="0.5" y="0.5" width="959" height="399" rx="10" fill="#ffffff" stroke="#d0d7de"/>',
    ]
    for gigabytes in (0, 0.5, 1, 1.5, 2, 2.5):
        svg.append(f'  <path d="M{LEFT} {up(gigabytes)}H{RIGHT}" stroke="#d8dee4"/>')
        svg.append(text(LEFT - 10, up(gigabytes) + 5, f"{gigabytes:g} GB", text_anchor="end", fill="#57606a"))
    for length in range(0, LENGTHS[-1] + 1, 2048):
        svg.append(text(across(length), BOTTOM + 22, f"{length:,}", text_anchor="middle", fill="#57606a"))
    svg.append(text((LEFT + RIGHT) / 2, BOTTOM + 48, "tokens of one sequence", text_anchor="middle", fill="#57606a"))
    labels = (44, 116, 162, 208)
    for (label, what, colour, values), y in zip(lines(), labels):
        points = " ".join(f"{across(length)},{up(value)}" for length, value in zip(LENGTHS, values))
        end = up(values[-1])
        svg.append(f'  <polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        svg.append(f'  <path d="M{RIGHT} {end}L{RIGHT + 24} {y + 8}" stroke="{colour}" stroke-dasharray="3 3"/>')
        svg.append(text(RIGHT + 30, y + 4, f"{label}: {values[-1]:.2f} GB", fill=colour, font_weight="bold"))
        svg.append(text(RIGHT + 30, y + 22, what, fill="#57606a", font_size="13"))
    return "\n".join([*svg, "</svg>"]) + "\n"


if __name__ == "__main__":
    FILE.write_text(draw(), encoding="utf-8")
