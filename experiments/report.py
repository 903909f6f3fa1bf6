"""Compare finished runs with the paper's claims. In: `runs.py`. Out, under the directory of the results:

    README.md                 verdicts, tables and figures of all experiments
    EXPERIMENT/report.json    verdicts and results of one experiment, by group
    EXPERIMENT/figure.png     its curves, and the paper's

Lengths in claims and groups are the paper's; tables and figures divide them by the preset's divisor.
"""

import functools
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dape_jax.errors import require
from dape_jax.evaluation.report import FIXED_BELOW, json_values, markdown_table
from dape_jax.files import write_json
from dape_jax.tasks import TASKS
from experiments.catalogue import EXPERIMENTS
from experiments.claims import NOT_IN_PAPER, Claim, Result
from experiments.plots import UNITS, experiment_figure, write_png
from experiments.runs import Group, Series, lookup_in, mean_of, paper_groups, read_groups
from experiments.verdicts import MIN_SEEDS, VERDICTS, Judgement, describe, difference, format_difference, judge

Content = dict[str, Any]  # of a claim, or of a group, in report.json


def write(results: Path) -> Path:
    """Write the report on all finished runs and return the path of its README.md.

    Raises:
        InputError: there is nothing to report.
    """
    groups = read_groups(results)
    require(bool(groups), "--results", str(results), "must have finished runs: python -m experiments run")
    contents = [(group, _content(group)) for group in groups]
    for name in dict.fromkeys(group.experiment for group in groups):
        ours = [(group, content) for group, content in contents if group.experiment == name]
        write_json(results / name / "report.json", json_values({group.name: content for group, content in ours}))
        write_png(results / name / "figure.png", experiment_figure([group for group, _ in ours]))
    claims = [(group, claim) for group, content in contents for claim in content["claims"]]
    (results / "README.md").write_text("\n".join(_readme(groups, claims)) + "\n", encoding="utf-8")
    return results / "README.md"


def _content(group: Group) -> Content:
    experiment, lookup = EXPERIMENTS[group.experiment], lookup_in(group)
    claims = [
        _claim(group, text, claim, judge(claim, lookup, experiment.metric)) for text, claim in experiment.claims.items()
    ]
    return {"claims": claims, "series": [_described(each) for each in group.series], "about": group.about}


def _described(series: Series) -> Content:
    """Return the fields of a series, without its samples, which are in the runs; of a task with the means."""
    fields = series.model._asdict() | {name: value for name, value in vars(series).items() if name != "model"}
    fields |= {"samples": {}}
    if series.model.task:
        fields |= {"within": series.means(beyond=False), "beyond": series.means(beyond=True)}
    return {name: value for name, value in fields.items() if value not in ("", {})}


def _claim(group: Group, text: str, claim: Claim, item: Judgement) -> Content:
    """Return the verdict on a claim with its pairs, and the paper's difference of the deciding comparison, by text."""
    content: Content = {"claim": text, "verdict": item.verdict} | ({"note": claim.note} if claim.note else {})
    if item.deciding is None:
        return content
    metric = EXPERIMENTS[group.experiment].metric
    describe_in = functools.partial(describe, metric=metric, preset=group.preset)

    less, unit = item.deciding.less, item.deciding.unit
    content |= {"holding": item.num_pairs("holds"), "contradicted": item.num_pairs("contradicted"), "unit": unit}
    content |= {"deciding": describe_in(less)} | item.deciding.numbers()
    content["pairs"] = [
        {"pair": describe_in(weakest.less, with_length=False), "verdict": verdict}
        | {"weakest": describe_in(weakest.less), **weakest.numbers()}
        for weakest, verdict in item.pairs
    ]
    papers = {paper.data: difference(less, lookup_in(paper), metric) for paper in paper_groups(group.experiment)}
    content["paper"] = {text: str(each) for text, each in papers.items() if each is not None}
    sides = (side for less in claim.comparisons for side in (less.low, less.high))
    compared = {model for side in sides if isinstance(side, Result) for model in side.models}
    # The time that the compared runs took, over all seeds.
    return content | {"minutes": sum(series.seconds / 60 for series in group.series if series.model in compared)}


INTRODUCTION = """# The paper's experiments, reproduced

`python -m experiments report` writes this page from the runs in this directory (`EXPERIMENT/runs.jsonl.zst`); each
`report.json` has the same numbers. The preset `small` is `configs/small.py`: every length of the paper divided by four,
models of 0.4 M parameters and more, 1.6 tokens per parameter, bytes of the standard library's source. For the tasks of
table 6 it is `configs/che.py` with fewer and smaller steps. The preset `converged` is `configs/small.py` with 50 tokens
per parameter, on a corpus of `experiments/corpora.py`; the preset `25m` is `configs/paper.py` with 25 M parameters.
Sizes xs, s, m and l replace the paper's 125m, 350m, 2.7b and 6.7b. The presets test whether a claim holds at that
scale; they do not reproduce the paper's numbers."""

VERDICTS_TEXT = f"""## Verdicts

Claims are judged by paired differences on the same windows and seeds, with a bootstrap over documents and Student's t
over seeds (`experiments/verdicts.py`). All lengths of two models are one pair. A claim **holds** if all its
pairs hold, or the required number of them, after Holm's correction at 5 %. It is **contradicted** if too many pairs are
reversed, **undecided** otherwise, and not tested unless every run that it compares has {MIN_SEEDS} seeds or more.
The deciding comparison is the weakest of the required ones. *Ours* is its difference with the 95 % interval, *seeds*
the number of seeds that both sides have, *paper* the same difference in the paper's numbers, *minutes* the time that
training and evaluation took. In all other tables, values are the mean over seeds ± half their range. Figures cut curves
far above most others."""

VERDICT_HEADER = [
    "| experiment | claim, with the paper's lengths | verdict, pairs "
    "| deciding comparison, with our lengths and sizes: ours | seeds | paper | minutes |",
    "| --- | --- | --- | --- | ---: | --- | ---: |",
]


def _readme(groups: Sequence[Group], claims: Sequence[tuple[Group, Content]]) -> list[str]:
    """Return the lines of README.md."""
    sections, notes = [], defaultdict(list)
    for name, experiment in EXPERIMENTS.items():
        for text, claim in experiment.claims.items():
            notes[claim.note].append(f"{name}, {text}")
        if ours := [group for group in groups if group.experiment == name]:
            title = experiment.title[0].upper() + experiment.title[1:]
            sections += ["", f"## {name}", "", f"{title} ({experiment.source})."]
            sections += [part for group in ours for part in ("", _section(group))]
            sections += ["", f"![{name}]({name}/figure.png)"]
            for paper in paper_groups(name):
                sections += ["", _tables(paper, ", ".join(filter(None, ("**Paper**", paper.data))))]
    noted = [f"- {note} Claims: {'; '.join(claims)}." for note, claims in notes.items() if note]
    return [
        *(INTRODUCTION, "", VERDICTS_TEXT, "", "### Claims of the paper", "", *_verdicts(claims, in_paper=True)),
        *("", "### Questions that the paper leaves open", "", *_verdicts(claims, in_paper=False)),
        *("", "### Claims with pairs of different verdicts", "", *_parts(claims)),
        *("", "### Notes on claims", "", *noted, *sections),
    ]


def _verdicts(claims: Sequence[tuple[Group, Content]], *, in_paper: bool) -> list[str]:
    """Return lines on the claims of the paper's experiments, or of the others: counts, tested claims, untested ones."""
    names = [name for name, each in EXPERIMENTS.items() if (each.source != NOT_IN_PAPER) == in_paper]
    tested = [(group, claim) for group, claim in claims if group.experiment in names and "deciding" in claim]
    counts, untested = Counter(claim["verdict"] for _, claim in tested), []
    for name in names:
        texts = {claim["claim"] for group, claim in tested if group.experiment == name}
        if missing := [text for text in EXPERIMENTS[name].claims if text not in texts]:
            untested.append(f"- {name}: {'; '.join(missing)}.")
            counts["not tested"] += len(missing)
    words = {verdict: "hold" if verdict == "holds" and counts[verdict] > 1 else verdict for verdict in VERDICTS}
    lines = [", ".join(f"{counts[verdict]} {word}" for verdict, word in words.items() if counts[verdict]) + "."]
    lines += ["", *VERDICT_HEADER, *(_verdict_row(*each) for each in tested)] if tested else []
    return [*lines, "", "Not tested:", "", *untested] if untested else lines


def _parts(claims: Sequence[tuple[Group, Content]]) -> list[str]:
    """Return a line for each claim whose pairs have different verdicts, with the pairs of each verdict."""
    lines = []
    for group, claim in claims:
        names = defaultdict(list)
        for pair in claim.get("pairs", ()):
            names[pair["verdict"]].append(pair["pair"])
        if len(names) > 1:
            text = "; ".join(f"{verdict}: {', '.join(names[verdict])}" for verdict in VERDICTS if verdict in names)
            lines.append(f"- {group.experiment} {group.title}, {claim['claim']}. {text[0].upper()}{text[1:]}.")
    return lines or ["None."]


def _verdict_row(group: Group, claim: Content) -> str:
    reversed_ = f", {claim['contradicted']} reversed" if claim["contradicted"] else ""
    shown = format_difference(*(claim[field] for field in ("difference", "low", "high", "unit")))
    cells = [
        f"[{group.experiment}](#{group.experiment.lower()}) {group.title}",  # anchors are lower case
        claim["claim"],
        f"**{claim['verdict']}**, {claim['holding']} of {len(claim['pairs'])} hold{reversed_}",
        f"{claim['deciding']}: {shown}",
        str(claim["seeds"]),
        "; ".join(" ".join(filter(None, each)) for each in claim["paper"].items()),
        f"{claim['minutes']:.0f}",
    ]
    return f"| {' | '.join(map(unbroken, cells))} |"


def _section(group: Group) -> str:
    minutes = sum(group.about["wall_seconds"]) / 60
    commits, devices, cpus = (
        ", ".join(str(json.loads(value)) for value in group.about[field]) for field in ("commit", "device", "num_cpus")
    )
    versions = "; ".join(
        ", ".join(f"{package} {number}" for package, number in json.loads(item).items())
        for item in group.about["versions"]
    )
    whose = " on ".join(filter(None, (f"**Ours**, {group.preset}", group.data)))
    return (
        f"{_tables(group, whose)}\n\n"
        f"`python -m experiments run {group.experiment} --preset={group.preset}`; commit {commits}; "
        f"{devices}, {cpus} CPUs; {versions}; {minutes:.0f} minutes in total."
    )


def _tables(group: Group, whose: str) -> str:
    """Return a group's table; for tasks, one for lengths beyond training, as in the paper, and one for those within."""
    experiment = EXPERIMENTS[group.experiment]
    caption = f"{whose}: {UNITS[experiment.metric]}"
    seeds = sorted({seed for series in group.series for seed in series.values})
    with_seeds = f", seeds {', '.join(map(str, seeds))}" if group.about else ""
    if not experiment.tasks:
        return markdown_table(caption + with_seeds, _text_rows(group))
    if not group.about:
        return markdown_table(f"{caption}, mean over lengths 41 to 500", _task_rows(group, beyond=True))
    (train_length,) = experiment.train_lengths
    steps, sequences = (" or ".join(f"{n:,}" for n in group.about[field]) for field in ("num_steps", "num_sequences"))
    trained = f"{steps} steps on lengths 1 to {train_length}, {sequences} sequences of each length{with_seeds}"
    tables = []
    for beyond in (True, False):
        if shown := [length for length in group.lengths if (length > train_length) == beyond]:
            over = f"mean over {len(shown)} lengths, {shown[0]} to {shown[-1]}"
            tables.append(markdown_table(f"{caption}, {over}; {trained}", _task_rows(group, beyond=beyond)))
    return "\n\n".join(tables)


def _text_rows(group: Group) -> list[list[str]]:
    """Return header and rows: one row per model, one column per length; sizes and numbers of seeds if they differ."""
    lengths = group.lengths
    has_sizes = len({series.model.size for series in group.series}) > 1
    has_seeds = len({len(series.values) for series in group.series}) > 1
    lengths_here = [str(length // group.divisor) for length in lengths]
    rows = [["method", *["size"] * has_sizes, "trained at", *["seeds"] * has_seeds, *lengths_here]]
    for series in group.series:
        method, size, _, train_length = series.model
        names = [method, *[group.sizes[size]] * has_sizes, str(train_length // group.divisor)]
        names += [str(len(series.values))] * has_seeds
        rows.append(names + [format_spread(series.over_seeds(length)) for length in lengths])
    return rows


def _task_rows(group: Group, *, beyond: bool) -> list[list[str]]:
    """Return header and rows: one row per task, one column for chance and one per method."""
    means = {(series.model.method, series.model.task): series.means(beyond=beyond) for series in group.series}
    methods = [m for m in EXPERIMENTS[group.experiment].methods if any(m == found for found, _ in means)]
    rows = [["task", "level", "chance", *methods]]
    for task in dict.fromkeys(task for _, task in means):
        cells = [format_spread(list(means.get((method, task), {}).values())) or "not run" for method in methods]
        rows.append([task, TASKS[task].level, f"{100 * TASKS[task].random_accuracy:.0f}", *cells])
    return rows


def format_spread(values: Sequence[float]) -> str:
    """Return the mean and half the range over seeds, or "" without values."""
    if not values:
        return ""
    mean, half = mean_of(values), (max(values) - min(values)) / 2
    form = ".2f" if abs(mean) < 1000 else ".0f" if abs(mean) < FIXED_BELOW else ".2g"
    spread = f" ±\N{NO-BREAK SPACE}{half:{form}}" if len(values) > 1 and math.isfinite(mean) else ""
    return f"{mean:{form}}{spread}"


# Spaces at which no line is broken: inside an interval, beside a unit, between two numbers.
UNBROKEN = re.compile(
    r"(?<=,) (?=[^][]*\])|(?<=\d) (?=(?:ms|s|[KMG]i?B|GFLOP|%|x|to|\+)(?:\W|$))|(?<=\d [x+]) |(?<=\d to) "
)


def unbroken(text: str) -> str:
    """Return a cell of a table whose numbers stay on one line with their units and intervals."""
    return UNBROKEN.sub("\N{NO-BREAK SPACE}", text)
