"""The timeline in `elasticity.md`: which timeout bounds which wait. Drawn as SVG, with the defaults of the code."""

from __future__ import annotations

import dataclasses
from html import escape

from spark_elastic.settings import ElasticSettings

WIDTH, LEFT, RIGHT = 980, 150, 960
LANES_TOP, LANE, BAR = 66, 34, 20

# Moments, as places on the axis. What happens at each is told by the figure itself.
START, ENOUGH, FULL, SILENT, LOST, AGAIN, BOOT, JOINED, KILLED, RETRY, BACK, END = (
    150, 236, 286, 410, 500, 524, 566, 648, 738, 776, 874, 960
)  # fmt: skip

INK, MUTED, LINE, PAPER = "#1f2328", "#59636e", "#d1d9e0", "#ffffff"
TRAINS, BOOTS, HANGS, WAITS, BLOCKED = "#2f81c7", "#c9d6e2", "#f3c6c0", "#e3b341", "#a8c8e6"

JOB = (
    (START, FULL, "starting", BOOTS),
    (FULL, LOST, "running: 3 workers", TRAINS),
    (LOST, AGAIN, "", HANGS),
    (AGAIN, JOINED, "running: 2 workers", TRAINS),
    (JOINED, KILLED, "running: 3", TRAINS),
    (KILLED, BACK, "waiting", WAITS),
    (BACK, END, "running: 2", TRAINS),
)
WORKERS = (
    ("worker A", ((START, 220, "boots", BOOTS), (FULL, SILENT, "", TRAINS),
                  (SILENT, LOST, "waits for C", BLOCKED), (AGAIN, KILLED, "", TRAINS),
                  (KILLED, BACK, "keeps the state", WAITS), (BACK, END, "", TRAINS)), None),
    ("worker B", ((START, ENOUGH, "boots", BOOTS), (FULL, SILENT, "", TRAINS),
                  (SILENT, LOST, "waits for C", BLOCKED), (AGAIN, KILLED, "", TRAINS)), KILLED),
    ("worker C", ((START, FULL, "boots", BOOTS), (FULL, SILENT, "", TRAINS), (SILENT, LOST, "silent", HANGS)), LOST),
    ("its successor", ((BOOT, JOINED, "boots", BOOTS), (JOINED, KILLED, "", TRAINS)), KILLED),
    ("one more", ((RETRY, BACK, "boots", BOOTS), (BACK, END, "", TRAINS)), None),
)  # fmt: skip


def bounds() -> list[tuple[str, int, int, str]]:
    """(name with its default, from, to, what it waits for)."""
    default = {field.name: field.default for field in dataclasses.fields(ElasticSettings)}

    def named(name: str) -> str:
        return f"{name} {default[f'{name}_s']:g} s"

    low, high = default["cooldown_range_s"]
    return [
        (named("start_timeout"), START, ENOUGH, "until min_num_proc workers are ready"),
        (f"a grace of {default['start_grace_s']:g} s", ENOUGH, FULL, "for num_proc, once there are enough"),
        (named("heartbeat_timeout"), SILENT, LOST, "since the last sign of life"),
        (named("stall_timeout"), LOST, AGAIN, "for survivors to come to the next world"),
        (f"cooldown_range {low:g} to {high:g} s", LOST, BOOT, "before the slot is used again"),
        (named("start_timeout"), BOOT, JOINED, "for one worker to boot and be ready"),
        (named("elastic_timeout"), KILLED, BACK, "until there are min_num_proc again"),
    ]


def svg() -> str:
    """Not to scale. Two workers are the minimum, three are wanted."""
    waits = bounds()
    lanes_end = LANES_TOP + LANE * (1 + len(WORKERS))
    height = lanes_end + 30 + 26 * len(waits) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        "<title>Timeline of a job: which timeout bounds which wait</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>',
        _text(16, 24, "A job with num_proc=3, min_num_proc=2 (not to scale)", INK, 14, weight="bold"),
    ]
    moments = (
        (START, "start"), (FULL, "round 1"), (SILENT, "C hangs"), (LOST, "lost"), (JOINED, "round 3"),
        (KILLED, "two are killed"), (BACK, "round 4"),
    )  # fmt: skip
    for x, what in moments:
        parts.append(f'<line x1="{x}" y1="{LANES_TOP - 8}" x2="{x}" y2="{lanes_end}" stroke="{LINE}"/>')
        parts.append(_text(x, LANES_TOP - 14, what, MUTED, 11, anchor="middle" if x > START else "start"))
    parts += _lane(0, "the job", JOB, None)
    for number, (name, bars, died) in enumerate(WORKERS, 1):
        parts += _lane(number, name, bars, died)
    for number, (name, since, until, what) in enumerate(waits):
        parts += _bound(lanes_end + 36 + 26 * number, name, since, until, what)
    return "\n".join([*parts, "</svg>", ""])


def _lane(number: int, name: str, bars: tuple[tuple[int, int, str, str], ...], died: int | None) -> list[str]:
    top = LANES_TOP + LANE * number
    parts = [_text(LEFT - 12, top + 15, name, INK, 12, anchor="end", weight="bold" if number == 0 else "normal")]
    for since, until, label, colour in bars:
        parts.append(f'<rect x="{since}" y="{top}" width="{until - since}" height="{BAR}" rx="2" fill="{colour}"/>')
        if label:
            ink = PAPER if colour == TRAINS else INK
            parts.append(_text((since + until) / 2, top + 14, label, ink, 11, anchor="middle"))
    if died is not None:
        parts.append(_text(died, top + 16, "✕", "#b3261e", 16, anchor="middle", weight="bold"))
    return parts


def _bound(y: int, name: str, since: int, until: int, what: str) -> list[str]:
    line = f'stroke="{INK}" stroke-width="1.5"'
    told = f'<tspan font-weight="bold">{escape(name)}</tspan> {escape(what)}'
    right = until + 430 < WIDTH
    x, anchor = (until + 8, "start") if right else (since - 8, "end")
    return [
        f'<line x1="{since}" y1="{y}" x2="{until}" y2="{y}" {line}/>',
        f'<line x1="{since}" y1="{y - 5}" x2="{since}" y2="{y + 5}" {line}/>',
        f'<line x1="{until}" y1="{y - 5}" x2="{until}" y2="{y + 5}" {line}/>',
        f'<text x="{x}" y="{y + 4}" fill="{INK}" text-anchor="{anchor}">{told}</text>',
    ]


def _text(x: float, y: int, words: str, fill: str, size: int, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:g}" y="{y}" fill="{fill}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(words)}</text>"
    )
