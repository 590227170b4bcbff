"""Plots as SVG text: lines whose x doubles from tick to tick, and groups of bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 50, 120, 40, 40  # margins; the names of the lines are on the right
COLORS = ("#888888", "#1f5fbf", "#2a9d4a", "#c05020")
MORE_COLORS = (*COLORS[1:], "#7a3fb0", "#b08a10", "#0e8a8a", COLORS[0])
TICKS = 5  # of y, besides zero


def lines_plot(title: str, lines: Mapping[str, Mapping[int, float]]) -> str:
    """Named lines of {x: y}, x at least 1."""
    xs = sorted({x for line in lines.values() for x in line})
    step = _nice(max(y for line in lines.values() for y in line.values()) / TICKS)
    first, octaves = math.log2(xs[0]), max(math.log2(xs[-1] / xs[0]), 1.0)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - first) / octaves * (WIDTH - LEFT - RIGHT)
        up = y / (step * TICKS) * (HEIGHT - TOP - BOTTOM)
        return round(LEFT + across, 1), round(HEIGHT - BOTTOM - up, 1)

    parts = [_text(LEFT, TOP / 2, title, "start")]
    for tick in range(TICKS + 1):
        _, y = at(xs[0], tick * step)
        parts.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{tick * step:g}", "end"))
    parts += [_text(at(x, 0)[0], HEIGHT - BOTTOM + 18, str(x), "middle") for x in xs]
    for color, (name, line) in zip(COLORS, lines.items(), strict=False):
        points = [at(x, line[x]) for x in sorted(line)]
        path = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        x, y = points[-1]
        parts.append(_text(x + 6, y + 4, name, "start", color))
    return _svg(HEIGHT, parts)


def curves_plot(title: str, curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Named curves of (x, y) over linear axes from zero; "" if no curve has a point."""
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return ""
    steps = [_nice(max(abs(point[axis]) for point in points) / TICKS or 1.0) for axis in (0, 1)]

    def at(x: float, y: float) -> tuple[float, float]:
        across = x / (steps[0] * TICKS) * (WIDTH - LEFT - RIGHT)
        up = y / (steps[1] * TICKS) * (HEIGHT - TOP - BOTTOM)
        return round(LEFT + across, 1), round(HEIGHT - BOTTOM - up, 1)

    parts = [_text(LEFT, TOP / 2, title, "start")]
    for tick in range(TICKS + 1):
        x, y = at(tick * steps[0], tick * steps[1])
        parts.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{tick * steps[1]:g}", "end"))
        parts.append(_text(x, HEIGHT - BOTTOM + 18, f"{tick * steps[0]:g}", "middle"))
    for number, (name, curve) in enumerate(curves.items()):
        color = MORE_COLORS[number % len(MORE_COLORS)]
        path = " ".join(f"{x},{y}" for x, y in (at(*point) for point in curve))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(_text(WIDTH - RIGHT + 8, TOP + 14 * (number + 1), name, "start", color))
    return _svg(HEIGHT, parts)


BAR, GAP = 15, 12  # heights of a bar, and between groups of bars
LABELS = 190  # the width of the names


def bars_plot(title: str, groups: Mapping[str, Mapping[str, float]]) -> str:
    """Groups of horizontal bars, {group: {name: value}}, each with its value."""
    most = max(value for bars in groups.values() for value in bars.values())
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    parts, y = [_text(10, 18, title, "start")], 30
    for group, bars in groups.items():
        parts.append(_text(10, y + 12, group, "start"))
        for name, value in bars.items():
            color = COLORS[(names.index(name) + 1) % len(COLORS)]
            width = value / most * (WIDTH - LABELS - 50)
            place = f'x="{LABELS}" y="{y}" width="{width:.1f}" height="{BAR - 2}"'
            parts.append(_text(LABELS - 6, y + 11, name, "end"))
            parts.append(f'<rect {place} fill="{color}"/>')
            parts.append(_text(LABELS + width + 6, y + 11, f"{value:g}", "start"))
            y += BAR
        y += GAP
    return _svg(y, parts)


def _svg(height: int, parts: list[str]) -> str:
    style = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {style}>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def _nice(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


def _text(x: float, y: float, text: str, anchor: str, color: str = "#222222") -> str:
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}"'
    return f"<text {place}>{escape(text)}</text>"
