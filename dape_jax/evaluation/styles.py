"""Colour, marker and line of each method, the same in the figures of evaluations, experiments and benchmarks."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from dape_jax.config import RunConfig, TaskRunConfig, resolved

# Plain methods have a colour and a marker each; methods with DAPE have a marker for the width of the kernel.
STYLES = {
    "nope": ("black", "h"),
    "rope": ("tab:cyan", "v"),
    "t5": ("tab:purple", "X"),
    "alibi": ("tab:red", "D"),
    "kerple": ("tab:blue", "o"),
    "fire": ("tab:brown", "P"),
    "cope": ("tab:pink", "<"),
    "transformer-xl": ("tab:olive", ">"),
    "sandwich": ("teal", "p"),
    "kerple-power": ("navy", "*"),
    **{
        f"dape{width}-{bias}": (colors[width], marker)
        for width, marker in {"1x1": "^", "1x3": "s"}.items()
        for bias, colors in {
            "nope": {"1x1": "darkgray", "1x3": "dimgray"},
            "rope": {"1x1": "#9edae5", "1x3": "#0b6b78"},
            "alibi": {"1x1": "#ff9896", "1x3": "#8b0000"},
            "kerple": {"1x1": "tab:green", "1x3": "tab:orange"},
            "fire": {"1x1": "#c49c94", "1x3": "#4b2a20"},
        }.items()
    },
    "dape1x2-kerple": ("#ffbb78", "v"),
    "dape1x5-kerple": ("#d4a106", "D"),
    "dape1x7-kerple": ("#a67c00", "P"),
    "dape1x9-kerple": ("#7a5c00", "X"),
    "dape1x11-kerple": ("#4d3a00", "*"),
}
SPARE = (("crimson", "d"), ("slateblue", "8"), ("darkgreen", "p"), ("goldenrod", "*"), ("orchid", "H"), ("gray", "o"))
LINES = ("-", "--", ":", "-.", (0, (6, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (9, 2, 3, 2)))


def method_name(run: RunConfig | TaskRunConfig) -> str:
    """Return the name of a run's method, as in the paper's tables: dape1x3-kerple."""
    model = resolved(run)["model"]
    parts = [model[part]["name"] for part in ("rotary", "bias") if model[part]["name"] not in ("none", "nope")]
    processor = model["processor"]
    name = "-".join(parts) or "nope"
    if processor["name"] == "none":
        return name
    width = f"1x{processor['kernel_width']}" if "kernel_width" in processor else ""
    return f"{processor['name']}{width}-{name}"


def styles_of(methods: Sequence[str]) -> list[dict[str, Any]]:
    """Return colour, marker and line style of each curve of a figure, as keywords for `plot`, from its method.

    A method with a suffix (kerple-840-steps, rope+yarn) has the colour and marker of the method and another line style,
    and so has the same method again. Methods that are not in `STYLES` have spare colours, in order.
    """
    found, lines, spare = [], Counter[str](), dict[str, tuple[str, str]]()
    for method in methods:
        name = re.sub(r"[ _]", "-", method.lower())
        known = [each for each in STYLES if name == each or re.match(rf"{re.escape(each)}[-+]", name)]
        base = max(known, key=len, default=name)
        if base not in STYLES:
            spare.setdefault(base, SPARE[len(spare) % len(SPARE)])
        color, marker = STYLES[base] if base in STYLES else spare[base]
        if name != base and not lines[base]:
            lines[base] += 1  # the solid line is the method's own
        style = {"color": color, "marker": marker, "linestyle": LINES[lines[base] % len(LINES)]}
        found.append(style | ({"markerfacecolor": "white"} if lines[base] else {}))
        lines[base] += 1
    return found
