"""Colours, fonts and the finish of every chart.

A chart is drawn once, in the light palette. The dark file and the picture inside the HTML come from the same drawing:
each colour of the palette occurs under one name, so that it can be exchanged for another or for a CSS variable.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

Role: TypeAlias = int | Literal["base"]

# Okabe and Ito's colour-blind-safe hues, darkened (light theme) or lightened (dark theme) to 3:1 against the ground.
LIGHT = {
    "ink": "#1b232c",
    "muted": "#56616d",
    "grid": "#dfe4ea",
    "base": "#8b95a1",
    "base-line": "#5c6773",
    "c0": "#0072b2",
    "c1": "#c75000",
    "c2": "#00805c",
    "c3": "#a2518a",
    "c4": "#8f6500",
    "c5": "#5a6bc0",
    "c6": "#b0305c",
    "c7": "#4b7a1e",
    "paper": "#fffffe",
}
DARK = {
    "ink": "#e7ecf1",
    "muted": "#a7b2bd",
    "grid": "#303943",
    "base": "#77838f",
    "base-line": "#a3aeb9",
    "c0": "#56b4e9",
    "c1": "#ff9a5c",
    "c2": "#2fc79a",
    "c3": "#e097c6",
    "c4": "#e3b341",
    "c5": "#a3aef5",
    "c6": "#ff8fae",
    "c7": "#a3d46b",
    "paper": "#12171c",
}
SERIES = ("c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7")
MARKERS = ("o", "s", "^", "D", "v", "X", "<", "P")
DASHES = ("-", "--", "-.", (0, (1, 1.2)), (0, (5, 1, 1, 1)), (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)), (0, (2, 2)))
HATCHES = ("", "\\\\\\\\", "....", "xxxx", "----", "++++", "oo", "**")

FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif"


BASELINES = ("standard", "driven", "ark-1.0", "ark-1.1", "off", "contiguous", "whole")


def roles(variants: Sequence[str]) -> dict[str, Role]:
    """Who is drawn how: the variant that the others are compared with in grey, the others in colours in order."""
    names = list(dict.fromkeys(variants))
    known = [name for name in names if name.lower() in BASELINES]
    base = known[:1] or (names[:1] if "ark-2.1" in names and names[0] == "ark-2.0" else [])
    others = [name for name in names if name not in base]
    return {**dict.fromkeys(base, "base"), **{name: index for index, name in enumerate(others)}}


def rc(key: str) -> dict[str, Any]:
    """matplotlib settings for one chart; `key` salts the ids, so that the same data gives the same bytes."""
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": key,
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "axes.titlesize": 9.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 9,
        "axes.titlecolor": LIGHT["ink"],
        "axes.labelsize": 8.5,
        "axes.labelcolor": LIGHT["muted"],
        "axes.edgecolor": LIGHT["base-line"],
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "savefig.facecolor": "none",
        "text.color": LIGHT["ink"],
        "xtick.color": LIGHT["base-line"],
        "ytick.color": LIGHT["base-line"],
        "xtick.labelcolor": LIGHT["ink"],
        "ytick.labelcolor": LIGHT["ink"],
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "xtick.major.size": 3,
        "ytick.major.size": 0,
        "grid.color": LIGHT["grid"],
        "grid.linewidth": 0.8,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "hatch.linewidth": 0.7,
        "lines.linewidth": 1.9,
        "lines.markersize": 5.5,
    }


def recolour(svg: str, palette: dict[str, str]) -> str:
    """The drawing in another palette (a name -> a colour or a CSS value)."""
    names = {colour: name for name, colour in LIGHT.items()}
    return re.sub("|".join(names), lambda match: palette[names[match.group(0)]], svg)


def inline(svg: str, prefix: str, alt: str) -> str:
    """The drawing as an element of a page: colours by CSS variable, ids of its own, an accessible name."""
    body = recolour(svg[svg.index("<svg") :], {name: f"var(--{name})" for name in LIGHT})
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'href="#', f'href="#{prefix}-', body)
    body = re.sub(r"url\(#", f"url(#{prefix}-", body)
    body = body.replace("xlink:href", "href")
    head = body[: body.index(">")]
    width = re.search(r'width="([\d.]+)pt"', head)
    view = re.search(r'viewBox="([^"]+)"', head)
    if width is None or view is None:
        raise ValueError(f"chart {prefix}: the drawing has no size")
    label = alt.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    opening = (
        f'<svg viewBox="{view.group(1)}" role="img" aria-label="{label}" '
        f'style="max-width:{float(width.group(1)) * 1.5:.0f}px"'
    )
    return opening + body[body.index(">") :]


def finish(svg: str) -> str:
    """What matplotlib leaves to do: no metadata, no document type, fonts that every reader has."""
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.S)
    svg = re.sub(r"<!DOCTYPE.*?>\s*", "", svg, flags=re.S)
    svg = svg.replace("'DejaVu Sans'", FONTS).replace("DejaVu Sans", FONTS)
    return re.sub(r"[ \t]+$", "", svg, flags=re.M)
