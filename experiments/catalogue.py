"""Figures and tables of the paper as data: their models and the paper's claims. Next: `run.py`, `report.py`.

An experiment trains methods x sizes x train lengths on a text, or methods x algorithmic tasks, and evaluates one
metric. Its claims are inequalities between results. Lengths and sizes here are the paper's; a preset maps them to those
of a recipe. To add an experiment, add an entry to `EXPERIMENTS`; to add a method, a line to `METHODS`.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from dape_jax.errors import require
from dape_jax.tasks import CHE

# Config argument of each method, by its name in the paper's tables.
METHODS = {
    "nope": "bias=nope",
    "rope": "rotary=rope",
    "t5": "bias=t5",
    "alibi": "bias=alibi",
    "kerple": "bias=kerple",
    "fire": "bias=fire",
    "cope": "bias=cope",
    "transformer-xl": "bias=transformer_xl",
    "dape1x1-rope": "rotary=rope,processor=dape,kernel=1",
    "dape1x3-rope": "rotary=rope,processor=dape,kernel=3",
    **{
        f"dape1x{kernel}-{bias}": f"bias={bias},processor=dape,kernel={kernel}"
        for bias in ("nope", "alibi", "fire")
        for kernel in (1, 3)
    },
    **{f"dape1x{kernel}-kerple": f"bias=kerple,processor=dape,kernel={kernel}" for kernel in (1, 2, 3, 5, 7, 9, 11)},
    "dape1x1-kerple-c64": "bias=kerple,processor=dape,kernel=1,channels=64",
    "dape1x3-kerple-c21": "bias=kerple,processor=dape,kernel=3,channels=21",
    "dape1x3-kerple-c10": "bias=kerple,processor=dape,kernel=3,channels=10",
    "fire-as-with-dape": "bias=fire,fire=dape",
    "dape1x3-fire-as-without": "bias=fire,fire=plain,processor=dape,kernel=3",
}

# Methods of experiments that are not in the paper. Config fields that a recipe's argument cannot set are in OVERRIDES.
_CHANGES = {
    "dape1x3-kerple-causal": "with a causal kernel",
    "dape1x3-kerple-scores": "that reads the scores alone",
    "dape1x3-kerple-bias": "that reads the bias alone",
    "dape1x3-kerple-no-residual": "without residual connection",
}
_RATED = ("rope", "t5", "alibi", "kerple", "fire", "dape1x1-kerple", "dape1x3-kerple")
_RATES = {"": "", "-rate0.5": ",rate=0.5", "-rate2": ",rate=2"}
METHODS |= {f"kerple-{change}": METHODS["kerple"] for change in ("window", "grouped")}
METHODS |= {
    method: METHODS["dape1x3-kerple"] for method in (*_CHANGES, "dape1x3-kerple-window", "dape1x3-kerple-grouped")
}
METHODS |= {f"{method}{suffix}": METHODS[method] + rate for method in _RATED for suffix, rate in _RATES.items()}
# Kerple at about the cost of DAPE1x3-Kerple or more, at the size xs and T = 128. DAPE1x3-Kerple takes 1.40 times the
# FLOPs of Kerple and, on a CPU, 1.5 times its time.
_COSTLIER: dict[str, dict[str, Any]] = {
    "kerple-840-steps": {"train.num_steps": 840},
    "kerple-900-steps": {"train.num_steps": 900},
    "kerple-1200-steps": {"train.num_steps": 1200},
    "kerple-width-116": {"model.width": 116, "model.head_dim": 29, "model.mlp_width": 464},
    "kerple-5-layers": {"model.num_layers": 5},
}
# Kerple for longer than DAPE1x3-Kerple's 5,000 steps take on a CPU, at the size xs and T = 64: the preset `converged`.
_LONGER: dict[str, dict[str, Any]] = {"kerple-8500-steps": {"train.num_steps": 8500}}
# Kerple for as long as DAPE1x3-Kerple's 1,000 steps take on an H100: the preset `25m`.
_LONGER_25M: dict[str, dict[str, Any]] = {"kerple-1500-steps": {"train.num_steps": 1500}}
METHODS |= {method: METHODS["kerple"] for method in (*_COSTLIER, *_LONGER, *_LONGER_25M)}

# Config fields of methods that a recipe's argument cannot set.
OVERRIDES: dict[str, dict[str, Any]] = {
    "dape1x2-kerple": {"model.processor.alignment": "causal"},  # a centered kernel has an odd width
    "dape1x3-kerple-causal": {"model.processor.alignment": "causal"},
    "dape1x3-kerple-scores": {"model.processor.inputs": "scores"},
    "dape1x3-kerple-bias": {"model.processor.inputs": "bias"},
    "dape1x3-kerple-no-residual": {"model.processor.residual": False},
    **_COSTLIER,
    **_LONGER,
    **_LONGER_25M,
    **{name: {"model.window": 64} for name in ("kerple-window", "dape1x3-kerple-window")},
    **{name: {"model.num_kv_heads": 2} for name in ("kerple-grouped", "dape1x3-kerple-grouped")},
}


@dataclasses.dataclass(frozen=True)
class TaskPreset:
    """Settings for experiments on the algorithmic tasks."""

    recipe: str  # file under configs/
    tasks: tuple[str, ...]  # tasks to run if --tasks is empty
    methods: tuple[str, ...]  # methods to run, if the experiment has them
    num_steps: int  # training steps
    batch: int  # sequences per step
    lengths: tuple[int, ...]  # evaluation lengths, in symbols
    num_sequences: int  # sequences per evaluation length


@dataclasses.dataclass(frozen=True)
class Preset:
    """Settings for all experiments."""

    recipe: str  # file under configs/ for models on a text
    sizes: dict[str, str]  # from the paper's sizes to the recipe's
    length_divisor: int  # divisor of the paper's lengths
    batch: int | None  # sequences per step; None for the recipe's default, which keeps the tokens per step constant
    seeds: tuple[int, ...]  # seeds to run if --seeds is empty
    data: str  # text if --data is empty; "" if --data is required
    on_tasks: TaskPreset
    argument: str = ""  # appended to the recipe's
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)  # config fields that differ from the recipe's


_ADDITIVE = ("alibi", "kerple", "fire")
# Methods of the paper's table 6, in its order.
_TABLE6_BASELINES = ("rope", "transformer-xl", *_ADDITIVE)
_TABLE6_DAPE = tuple(f"{processor}-{bias}" for processor in ("dape1x1", "dape1x3") for bias in _ADDITIVE)

_SMALL = Preset(
    recipe="small.py",
    sizes={"125m": "xs", "350m": "s", "2.7b": "m", "6.7b": "l"},
    length_divisor=4,
    batch=None,
    seeds=(0, 1, 2),
    data="stdlib",
    on_tasks=TaskPreset(
        recipe="che.py",
        tasks=(
            *("even_pairs", "missing_duplicate_string", "stack_manipulation"),  # claims name these
            *("cycle_navigation", "reverse_string", "duplicate_string"),
        ),
        methods=("rope", "kerple", "dape1x1-kerple", "dape1x3-kerple"),
        num_steps=6000,
        batch=32,
        # Evenly spaced over 1..40 and over 41..500, alternately odd and even.
        lengths=(*range(1, 41, 13), *range(41, 501, 51)),
        num_sequences=64,
    ),
)

PRESETS = {
    "small": _SMALL,
    # 20 million tokens, 50 for each parameter, so that models are not compared by how fast they learn.
    "converged": dataclasses.replace(
        _SMALL,
        seeds=(0, 1),
        data="",
        argument="step_tokens=4096,num_steps=5000",
        # float32 on every device, so that models of different devices can be compared
        overrides={"evaluation.max_windows": 256, "model.dtype": "float32"},
    ),
    # 25 million parameters and 131 million tokens: minutes on one GPU.
    "25m": dataclasses.replace(
        _SMALL,
        recipe="paper.py",
        sizes={"125m": "25m"},
        length_divisor=1,
        batch=512,
        seeds=(0,),
        data="",
        argument="vocab=257,num_steps=1000,accumulation=4",  # parts of a step fit into 40 GiB
        overrides={"model.remat": "none", "model.dtype": "bfloat16", "train.eval_interval": 200},
    ),
    "paper": Preset(
        recipe="paper.py",
        sizes={size: size for size in ("125m", "350m", "2.7b", "6.7b")},
        length_divisor=1,
        batch=256,
        seeds=(0,),
        data="",
        on_tasks=TaskPreset(
            recipe="che.py",
            tasks=tuple(CHE),
            methods=_TABLE6_BASELINES + _TABLE6_DAPE,
            num_steps=200_000,
            batch=128,
            lengths=tuple(range(1, 501)),
            num_sequences=512,
        ),
    ),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """Result at `length` of a method trained at `train_length`. Lengths are the paper's."""

    method: str
    train_length: int
    length: int
    size: str = "125m"


@dataclasses.dataclass(frozen=True)
class Score:
    """Best result of several methods on a task: mean accuracy over lengths beyond training."""

    methods: tuple[str, ...]
    task: str


@dataclasses.dataclass(frozen=True)
class Less:
    """Inequality low < factor * high."""

    low: Cell | Score | float
    high: Cell | Score | float
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Claim:
    """Claim of the paper: all of its pairs hold, or `at_least` of them; `verdicts.py` defines a pair."""

    text: str
    comparisons: tuple[Less, ...]
    at_least: int | None = None
    note: str = ""  # other explanations of the verdict


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One figure or table. Sizes and lengths are the paper's."""

    title: str
    source: str  # section, figure or table of the paper
    methods: tuple[str, ...]  # keys of METHODS
    train_lengths: tuple[int, ...]  # in tokens; for tasks a single length, in symbols
    claims: tuple[Claim, ...]
    sizes: tuple[str, ...] = ("125m",)  # unused for tasks, where the recipe has one size
    tasks: tuple[str, ...] = ()  # keys of TASKS, each with its own models; empty for models on a text
    skipped: tuple[tuple[str, int], ...] = ()  # pairs (method, train length) that the paper does not have
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)  # config fields that differ from the recipe's
    # "perplexity"; "delta" (appendix A); "step_ms", milliseconds per training step; or "accuracy", for tasks
    metric: str = "perplexity"
    step_tokens: int | None = None  # tokens per step, if the paper uses the same number at all train lengths
    longest: int = 8192  # longest evaluation length
    step_batch: int | None = None  # sequences per step, for a measurement of time
    presets: tuple[str, ...] = ("small", "converged", "paper")  # keys of PRESETS for which it is defined


def length_divisor(experiment: Experiment, preset: str) -> int:
    """Return the divisor of the paper's lengths in runs with a preset; 1 on tasks, which have the paper's lengths."""
    return 1 if experiment.tasks else PRESETS[preset].length_divisor


def lengths_from(train_length: int, longest: int = 8192) -> tuple[int, ...]:
    """Return the paper's evaluation lengths: the train length and its doublings up to `longest`."""
    return tuple(train_length * 2**n for n in range(20) if train_length * 2**n <= longest)


def _to_16384(train_length: int) -> tuple[int, ...]:
    return lengths_from(train_length, 16384)


def format_lengths(lengths: tuple[int, ...]) -> str:
    """Format increasing lengths: "1 to 40" if there are no gaps, "1, 14, 27" otherwise."""
    first, last = lengths[0], lengths[-1]
    return f"{first} to {last}" if len(lengths) == last - first + 1 > 2 else ", ".join(map(str, lengths))


# ---- claims


def _methods(methods: str | tuple[str, ...]) -> tuple[str, ...]:
    return (methods,) if isinstance(methods, str) else methods


def better(
    low: str | tuple[str, ...],
    others: str | tuple[str, ...],
    train_lengths: tuple[int, ...] = (128, 512),
    lengths: Callable[[int], tuple[int, ...]] = lengths_from,
    *,
    factor: float = 1.0,
    size: str = "125m",
) -> tuple[Less, ...]:
    """Return the comparisons of "each method of `low` is better than each of `others`, trained at the same length".

    `lengths` maps a train length to the evaluation lengths of the comparison. Results of `others` are multiplied by
    `factor`.
    """
    return tuple(
        Less(Cell(method, train_length, length, size), Cell(other, train_length, length, size), factor)
        for method in _methods(low)
        for other in _methods(others)
        for train_length in train_lengths
        for length in lengths(train_length)
    )


def easier_at(
    longest: int, methods: str | tuple[str, ...], train_lengths: tuple[int, ...] = (128, 512)
) -> tuple[Less, ...]:
    """Return the comparisons of "each method is better at `longest` than at its train length"."""
    return tuple(
        Less(Cell(method, t, longest), Cell(method, t, t)) for t in train_lengths for method in _methods(methods)
    )


def outscores(high: str | tuple[str, ...], low: str | tuple[str, ...], tasks: tuple[str, ...]) -> tuple[Less, ...]:
    """Return the comparisons of "the best of methods `high` is better than the best of `low`", one for each task."""
    return tuple(Less(Score(_methods(low), task), Score(_methods(high), task)) for task in tasks)


_BASELINES = ("nope", "rope", "t5", "alibi", "kerple", "fire", "cope")
_TABLE2_BASELINES = ("nope", "rope", "t5", "alibi", "kerple", "fire", "dape1x1-kerple")
_KERNELS = tuple(f"dape1x{kernel}-kerple" for kernel in (1, 3, 5, 7))
_PRINTED_TASKS = tuple(task for task in CHE if task != "binary_multiplication")  # table 6 does not contain it
_ORDERED_TASKS = tuple(task for task in _PRINTED_TASKS if not CHE[task].permutation_invariant)
NOT_IN_PAPER = "not in the paper"
_WIDTHS = tuple(f"dape1x{kernel}-kerple" for kernel in (1, 2, 3, 5, 7, 9, 11))
_CONVERGED = ("rope", "alibi", "kerple", "dape1x1-kerple", "dape1x3-kerple", "dape1x3-rope")
_SAME_TOKENS = (128, 256, 512, 1024, 2048, 4096)
_FIRE_NOTE = (
    "FIRE's official settings depend on DAPE (threshold 256 and LeakyReLU with it, 64 and ReLU without; a preset "
    "scales the thresholds with its lengths), so the two sides differ not only in DAPE. See `choose_method` in "
    "`configs/common.py`."
)
_LEAK_NOTE = (
    "A model must learn to read the next token through the convolution, and a preset with few training steps stops "
    "before its perplexity is 1. Compare with the same methods in figure 5, which have no leak."
)


def _dape_improves(method: str, name: str, note: str = "") -> Claim:
    text = f"DAPE1x3 improves {name} within and beyond the train length"
    return Claim(text, better(f"dape1x3-{method}", method), note=note)


_WIDER_IS_BETTER = Claim(
    "DAPE1x3-Kerple is better than DAPE-Kerple (1x1) at every length", better("dape1x3-kerple", "dape1x1-kerple")
)


def _dape_is_better(methods: Iterable[str], train_length: int, lengths: tuple[int, ...]) -> tuple[Claim, ...]:
    """Return two claims on DAPE1x3-Kerple and each method: at the train length, the first of `lengths`, and beyond."""
    return tuple(
        Claim(
            f"trained at {train_length}, DAPE1x3-Kerple is better than {method} {where}",
            better("dape1x3-kerple", method, (train_length,), lambda _, compared=compared: compared),
        )
        for method in methods
        for where, compared in (("at the train length", lengths[:1]), ("at every length beyond", lengths[1:]))
    )


def _after_fifty_tokens(train_length: int) -> tuple[Claim, ...]:
    """Return the claims of `converged` on models trained at one length."""
    at, where = (train_length,), f"trained at {train_length}, "
    return (
        *_dape_is_better(("kerple", "dape1x1-kerple", "alibi"), train_length, _to_16384(train_length)),
        Claim(
            f"{where}DAPE1x3-Kerple is better than RoPE at the train length",
            better("dape1x3-kerple", "rope", at, lambda t: (t,)),
        ),
        Claim(f"{where}DAPE1x3 improves RoPE at every length", better("dape1x3-rope", "rope", at, _to_16384)),
        Claim(
            f"{where}DAPE1x3-Kerple is better at 16384 than at {train_length}",
            easier_at(16384, "dape1x3-kerple", at),
        ),
    )


def _gains_from_context(train_length: int) -> tuple[Claim, ...]:
    """Return the claims of `context` on models trained at one length."""
    at, where, lengths = (train_length,), f"trained at {train_length}, ", _to_16384(train_length)[1:]
    return (
        *(
            Claim(
                f"{where}more context helps {method} at every length (delta above 0)",
                tuple(Less(0.0, Cell(method, train_length, length)) for length in lengths),
            )
            for method in ("dape1x3-kerple", "dape1x1-kerple", "kerple")
        ),
        Claim(
            f"{where}it helps DAPE1x3-Kerple more than Kerple",
            better("kerple", "dape1x3-kerple", at, lambda _: lengths),
        ),
    )


def _larger_kernels(number: int, train_length: int) -> Experiment:
    """Return table 4 or table 5."""
    at = (train_length,)
    return Experiment(
        title=f"kernel sizes, trained at {train_length}",
        source=f"table {number}, appendix F, section 4.7",
        methods=("kerple", *_KERNELS),
        train_lengths=at,
        claims=(
            Claim(
                "DAPE with any kernel size is better than Kerple, within and beyond the train length",
                better(_KERNELS, "kerple", at),
            ),
            Claim("DAPE1x3 is better than DAPE (1x1) at every length", better("dape1x3-kerple", "dape1x1-kerple", at)),
            Claim(
                "kernels of 5 and 7 are no worse than 3 (to 1 %) at every length",
                better(("dape1x5-kerple", "dape1x7-kerple"), "dape1x3-kerple", at, factor=1.01),
            ),
            Claim(
                "with DAPE, perplexity at the longest length is below that at the train length",
                easier_at(8192, _KERNELS, at),
            ),
        ),
    )


EXPERIMENTS = {
    "fig1": Experiment(
        title="DAPE on models without additive bias: NoPE and RoPE",
        source="figure 1, section 4.4",
        methods=("nope", "dape1x1-nope", "dape1x3-nope", "rope", "dape1x1-rope", "dape1x3-rope"),
        train_lengths=(128, 512),
        claims=(
            _dape_improves("nope", "NoPE"),
            _dape_improves("rope", "RoPE"),
            Claim("DAPE (1x1) improves NoPE too, at every length", better("dape1x1-nope", "nope")),
            Claim(
                "naive DAPE (1x1) makes RoPE worse at the train length",
                better("rope", "dape1x1-rope", lengths=lambda t: (t,)),
            ),
        ),
    ),
    "fig2": Experiment(
        title="comparison with baselines, trained at 128 and 512",
        source="figure 2, section 4.1",
        methods=(*_BASELINES, "dape1x1-kerple", "dape1x3-kerple"),
        train_lengths=(128, 512),
        claims=(
            Claim(
                "DAPE1x3-Kerple is the best of all at the train length",
                better("dape1x3-kerple", (*_BASELINES, "dape1x1-kerple"), lengths=lambda t: (t,)),
            ),
            Claim(
                "DAPE1x3-Kerple is the best of all at every length beyond",
                better("dape1x3-kerple", (*_BASELINES, "dape1x1-kerple"), lengths=lambda t: lengths_from(t)[1:]),
            ),
            _WIDER_IS_BETTER,
            Claim(
                "RoPE fails at twice the train length: perplexity there is more than doubled",
                tuple(Less(Cell("rope", t, t), Cell("rope", t, 2 * t), 0.5) for t in (128, 512)),
            ),
            Claim(
                "the longest length is easier for DAPE1x3-Kerple than the train length",
                easier_at(8192, "dape1x3-kerple"),
            ),
        ),
    ),
    "fig3": Experiment(
        title="the same training tokens at different train lengths",
        source="figure 3, section 4.2",
        methods=("dape1x3-kerple", "rope"),
        train_lengths=_SAME_TOKENS,
        skipped=tuple(("rope", t) for t in (256, 512, 1024, 2048)),
        step_tokens=32_768,
        claims=(
            Claim(
                "DAPE1x3-Kerple trained at 128 is as good as RoPE trained at 4096 (to 2 %), both evaluated at 4096",
                (Less(Cell("dape1x3-kerple", 128, 4096), Cell("rope", 4096, 4096), 1.02),),
            ),
            Claim(
                "DAPE1x3-Kerple trained at 512 is better than RoPE trained at 4096, both evaluated at 4096",
                (Less(Cell("dape1x3-kerple", 512, 4096), Cell("rope", 4096, 4096)),),
            ),
            Claim(
                "RoPE trained at 4096 is worse at 128 than DAPE1x3-Kerple trained at 128, and than RoPE trained there",
                tuple(Less(Cell(method, 128, 128), Cell("rope", 4096, 128)) for method in ("dape1x3-kerple", "rope")),
            ),
            Claim(
                "at lengths of 128 to 2048, the best DAPE1x3-Kerple is the one trained at that length",
                tuple(
                    Less(Cell("dape1x3-kerple", at, at), Cell("dape1x3-kerple", t, at))
                    for at in _SAME_TOKENS[:-1]
                    for t in _SAME_TOKENS
                    if t != at
                ),
            ),
        ),
    ),
    "fig4": Experiment(
        title="350M parameters",
        source="figure 4, section 4.3",
        methods=("kerple", "dape1x1-kerple", "dape1x3-kerple"),
        train_lengths=(128, 512),
        sizes=("350m",),
        claims=(
            Claim(
                "DAPE1x3-Kerple is better than DAPE-Kerple (1x1) within the train length and at the longest",
                better("dape1x3-kerple", "dape1x1-kerple", lengths=lambda t: (t, 8192), size="350m"),
            ),
        ),
    ),
    "fig5": Experiment(
        title="DAPE1x3 on additive biases",
        source="figure 5, section 4.4",
        methods=tuple(f"{processor}{bias}" for bias in _ADDITIVE for processor in ("", "dape1x1-", "dape1x3-")),
        train_lengths=(128, 512),
        claims=(
            _dape_improves("alibi", "ALiBi"),
            _dape_improves("kerple", "Kerple"),
            _dape_improves("fire", "FIRE", _FIRE_NOTE),
            Claim(
                "DAPE1x3-ALiBi is better than DAPE-ALiBi (1x1) at every length, trained at 512",
                better("dape1x3-alibi", "dape1x1-alibi", (512,)),
            ),
            _WIDER_IS_BETTER,
            Claim(
                "DAPE1x3-FIRE is better than DAPE-FIRE (1x1) at every length", better("dape1x3-fire", "dape1x1-fire")
            ),
        ),
    ),
    "fig6": Experiment(
        title="information leakage: the convolution without the mask before it",
        source="figure 6, section 4.5",
        methods=("dape1x3-alibi", "dape1x3-kerple", "dape1x3-fire"),
        train_lengths=(128,),
        overrides={"model.processor.leak": True},
        claims=(
            Claim(
                "with the leak, perplexity is about 1 (below 1.1) up to 1024",
                tuple(
                    Less(Cell(f"dape1x3-{bias}", 128, at), 1.1) for bias in _ADDITIVE for at in lengths_from(128, 1024)
                ),
                note=_LEAK_NOTE,
            ),
            Claim(
                "with the leak and Kerple, perplexity is about 1 (below 1.1) up to 8192",
                tuple(Less(Cell("dape1x3-kerple", 128, at), 1.1) for at in lengths_from(128)),
                note=_LEAK_NOTE,
            ),
        ),
    ),
    "table1": Experiment(
        title="delta perplexity: the gain from the text before the last train length of tokens",
        source="table 1, appendix A, equation 6",
        methods=("rope", "alibi", "kerple", "dape1x1-kerple", "dape1x3-kerple"),
        train_lengths=(512,),
        metric="delta",
        claims=(
            Claim(
                "more context helps DAPE1x3-Kerple at every length (delta above 0)",
                tuple(Less(0.0, Cell("dape1x3-kerple", 512, length)) for length in lengths_from(512)[1:]),
            ),
            Claim(
                "it helps DAPE1x3-Kerple more than DAPE-Kerple (1x1)",
                # A lower delta is worse.
                better("dape1x1-kerple", "dape1x3-kerple", (512,), lambda t: lengths_from(t)[1:]),
            ),
            Claim(
                "more context harms RoPE at every length (delta below 0)",
                tuple(Less(Cell("rope", 512, length), 0.0) for length in lengths_from(512)[1:]),
            ),
            Claim(
                "more context harms Kerple at the longest length (delta below 0)",
                (Less(Cell("kerple", 512, 8192), 0.0),),
            ),
        ),
    ),
    "table2": Experiment(
        title="comparison with baselines, trained at 1024",
        source="table 2, appendix B",
        methods=(*_TABLE2_BASELINES, "dape1x3-kerple"),
        train_lengths=(1024,),
        claims=(
            Claim(
                "DAPE1x3-Kerple is the best of all at every length",
                better("dape1x3-kerple", _TABLE2_BASELINES, (1024,)),
            ),
        ),
    ),
    "table3": Experiment(
        title="2.7B parameters",
        source="table 3, appendix C",
        methods=("rope", "t5", "kerple", "dape1x1-kerple", "dape1x3-kerple"),
        train_lengths=(512,),
        sizes=("2.7b",),
        claims=(
            Claim(
                "DAPE1x3-Kerple is the best of all at every length up to 4096",
                better(
                    "dape1x3-kerple",
                    ("rope", "t5", "kerple", "dape1x1-kerple"),
                    (512,),
                    lambda t: lengths_from(t, 4096),
                    size="2.7b",
                ),
            ),
        ),
    ),
    "table4": _larger_kernels(4, 128),
    "table5": _larger_kernels(5, 512),
    "table6": Experiment(
        title="accuracy on the tasks of the Chomsky hierarchy, beyond the lengths of training",
        source="table 6, appendix G, section 4.8",
        methods=_TABLE6_BASELINES + _TABLE6_DAPE,
        train_lengths=(40,),
        tasks=tuple(CHE),
        metric="accuracy",
        claims=(
            Claim(
                "DAPE1x3-Kerple is better than Kerple on 8 of 11 permutation-variant tasks",
                outscores("dape1x3-kerple", "kerple", _ORDERED_TASKS),
                at_least=8,
            ),
            Claim(
                "DAPE1x3-Kerple is better than Kerple on even pairs and on missing duplicate, two of the eight",
                outscores("dape1x3-kerple", "kerple", ("even_pairs", "missing_duplicate_string")),
            ),
            Claim(
                "DAPE1x3-FIRE is better than FIRE on 6 of 11 permutation-variant tasks",
                outscores("dape1x3-fire", "fire", _ORDERED_TASKS),
                at_least=6,
                note=_FIRE_NOTE,
            ),
            Claim(
                "on missing duplicate, DAPE1x3-Kerple is better than DAPE-Kerple (1x1)",
                outscores("dape1x3-kerple", "dape1x1-kerple", ("missing_duplicate_string",)),
            ),
            Claim(
                "on stack manipulation, DAPE-Kerple (1x1) is better than DAPE1x3-Kerple",
                outscores("dape1x1-kerple", "dape1x3-kerple", ("stack_manipulation",)),
            ),
            Claim(
                "on most tasks, the best of all methods is one with DAPE (1x1 or 1x3)",
                outscores(_TABLE6_DAPE, _TABLE6_BASELINES, _PRINTED_TASKS),
                at_least=len(_PRINTED_TASKS) // 2 + 1,
                note=_FIRE_NOTE,
            ),
            Claim(
                "with most tasks and biases, DAPE with one of the kernel sizes 1 and 3 is better than without DAPE",
                tuple(
                    Less(Score((bias,), task), Score((f"dape1x1-{bias}", f"dape1x3-{bias}"), task))
                    for bias in _ADDITIVE
                    for task in _PRINTED_TASKS
                ),
                at_least=len(_ADDITIVE) * len(_PRINTED_TASKS) // 2 + 1,
                note=_FIRE_NOTE,
            ),
        ),
    ),
    "table7": Experiment(
        title="time of a training step",
        source="table 7, appendix H, section 4.9",
        methods=("rope", "t5", "alibi", "kerple", "fire", "dape1x1-kerple", "dape1x3-kerple"),
        train_lengths=(512,),
        sizes=("350m", "2.7b", "6.7b"),
        metric="step_ms",
        step_batch=1,
        claims=(
            Claim(
                "the larger the model, the nearer Kerple's time is to DAPE1x3-Kerple's (ratio above 0.75, 0.82, 0.89)",
                tuple(
                    Less(Cell("dape1x3-kerple", 512, 512, size), Cell("kerple", 512, 512, size), 1 / ratio)
                    for size, ratio in (("350m", 0.75), ("2.7b", 0.82), ("6.7b", 0.89))
                ),
            ),
        ),
    ),
    "table9": Experiment(
        title="against other methods whose positions depend on the data",
        source="table 9, appendix J",
        methods=("transformer-xl", "cope", "dape1x1-kerple", "dape1x3-kerple"),
        train_lengths=(128,),
        claims=(
            Claim(
                "DAPE1x3-Kerple is better than Transformer-XL at every length",
                better("dape1x3-kerple", "transformer-xl", (128,)),
            ),
            Claim("DAPE1x3-Kerple is better than CoPE at every length", better("dape1x3-kerple", "cope", (128,))),
        ),
    ),
    "widths": Experiment(
        title="kernels from 1 to 11 keys wide",
        source=NOT_IN_PAPER,
        methods=("kerple", *_WIDTHS),
        train_lengths=(128,),
        claims=(
            Claim(
                "DAPE with a kernel of any width is better than Kerple at every length",
                better(_WIDTHS, "kerple", (128,)),
            ),
            Claim(
                "a causal kernel of 2 is better than one of 1 at every length",
                better("dape1x2-kerple", "dape1x1-kerple", (128,)),
            ),
            Claim(
                "a centered kernel of 3 is better than a causal one of 2 at every length",
                better("dape1x3-kerple", "dape1x2-kerple", (128,)),
            ),
            Claim(
                "kernels wider than 3 are better than one of 3 at every length",
                better(_WIDTHS[3:], "dape1x3-kerple", (128,)),
            ),
        ),
    ),
    "variants": Experiment(
        title="variants of DAPE1x3: inputs, alignment, residual, window, grouped keys",
        source=NOT_IN_PAPER,
        methods=(
            *("kerple", "kerple-window", "kerple-grouped", "dape1x3-kerple", *_CHANGES),
            *("dape1x3-kerple-window", "dape1x3-kerple-grouped"),
        ),
        train_lengths=(512,),
        claims=(
            *(
                Claim(f"DAPE1x3 {change} is better than Kerple at every length", better(method, "kerple", (512,)))
                for method, change in _CHANGES.items()
            ),
            *(
                Claim(
                    f"DAPE1x3 is better than DAPE1x3 {change} at every length",
                    better("dape1x3-kerple", method, (512,)),
                )
                for method, change in _CHANGES.items()
            ),
            Claim(
                "DAPE1x3 improves Kerple with a window of 64 keys at every length",
                better("dape1x3-kerple-window", "kerple-window", (512,)),
            ),
            Claim(
                "DAPE1x3 improves Kerple with two heads of keys and values at every length",
                better("dape1x3-kerple-grouped", "kerple-grouped", (512,)),
            ),
        ),
    ),
    "fire": Experiment(
        title="FIRE with the same threshold and activation with DAPE and without",
        source=NOT_IN_PAPER,
        methods=("fire", "fire-as-with-dape", "dape1x3-fire", "dape1x3-fire-as-without"),
        train_lengths=(128, 512),
        claims=(
            Claim(
                "DAPE1x3 improves FIRE, both with the published settings of FIRE with DAPE",
                better("dape1x3-fire", "fire-as-with-dape"),
            ),
            Claim(
                "DAPE1x3 improves FIRE, both with the published settings of FIRE without DAPE",
                better("dape1x3-fire-as-without", "fire"),
            ),
            Claim(
                "FIRE without DAPE is better with its own settings than with those for DAPE",
                better("fire", "fire-as-with-dape"),
            ),
        ),
    ),
    "rates": Experiment(
        title="half and twice the learning rate",
        source=NOT_IN_PAPER,
        methods=tuple(f"{method}{rate}" for method in _RATED for rate in _RATES),
        train_lengths=(128,),
        claims=(
            Claim(
                "DAPE1x3-Kerple at the common learning rate is better than others at any of three, at every length",
                better(
                    "dape1x3-kerple",
                    tuple(f"{method}{rate}" for method in _RATED[:-1] for rate in _RATES),
                    (128,),
                ),
            ),
        ),
    ),
    "cost": Experiment(
        title="Kerple with the FLOPs of DAPE1x3-Kerple or more: more steps, wider, deeper",
        source=NOT_IN_PAPER,
        methods=("kerple", *_COSTLIER, "dape1x1-kerple", "dape1x3-kerple"),
        train_lengths=(512,),
        presets=("small",),
        claims=_dape_is_better(_COSTLIER, 512, lengths_from(512)),
    ),
    "times": Experiment(
        title="time of a training step of every method",
        source=NOT_IN_PAPER,
        methods=(
            *_BASELINES,
            "transformer-xl",
            "dape1x1-kerple",
            "dape1x3-kerple",
            "kerple-width-116",
            "kerple-5-layers",
        ),
        train_lengths=(128, 256, 512),
        metric="step_ms",
        presets=("small", "converged"),
        claims=(),
    ),
    "converged": Experiment(
        title="the same methods after fifty tokens per parameter",
        source=NOT_IN_PAPER,
        methods=_CONVERGED,
        train_lengths=(256, 512),
        longest=16384,
        claims=(*_after_fifty_tokens(256), *_after_fifty_tokens(512)),
    ),
    "equal_time": Experiment(
        title="Kerple trained for longer than DAPE1x3-Kerple, which has fifty tokens per parameter",
        source=NOT_IN_PAPER,
        methods=("kerple", *_LONGER, "dape1x3-kerple"),
        train_lengths=(256,),
        longest=16384,
        presets=("converged",),
        claims=_dape_is_better(_LONGER, 256, _to_16384(256)),
    ),
    "larger": Experiment(
        title="25 million parameters, trained on 131 million tokens",
        source=NOT_IN_PAPER,
        methods=("kerple", "dape1x3-kerple", "rope", *_LONGER_25M, "dape1x1-kerple"),
        train_lengths=(256,),
        longest=16384,
        presets=("25m",),
        claims=(
            *_dape_is_better(("kerple", "rope", *_LONGER_25M, "dape1x1-kerple"), 256, _to_16384(256)),
            Claim("DAPE1x3-Kerple is better at 16384 than at 256", easier_at(16384, "dape1x3-kerple", (256,))),
        ),
    ),
    "context": Experiment(
        title="the gain from context after fifty tokens per parameter",
        source=NOT_IN_PAPER,
        methods=_CONVERGED,
        train_lengths=(256, 512),
        longest=16384,
        metric="delta",
        claims=(*_gains_from_context(256), *_gains_from_context(512)),
    ),
    "appendixE": Experiment(
        title="a wider kernel against more channels, at about the same cost",
        source="appendix E, section 4.6",
        methods=("dape1x3-kerple-c10", "dape1x3-kerple-c21", "dape1x1-kerple-c64"),
        train_lengths=(128, 512),
        claims=(
            Claim(
                "trained at 128, DAPE1x3 with 10 channels is better than DAPE (1x1) with 64 at 128 and 8192",
                better("dape1x3-kerple-c10", "dape1x1-kerple-c64", (128,), lambda t: (t, 8192)),
            ),
            Claim(
                "trained at 512, DAPE1x3 with 10 channels is better than DAPE (1x1) with 64 up to 4096",
                better("dape1x3-kerple-c10", "dape1x1-kerple-c64", (512,), lambda t: lengths_from(t, 4096)),
            ),
            Claim(
                "DAPE1x3 with 21 channels is better than DAPE (1x1) with 64 at every length",
                better("dape1x3-kerple-c21", "dape1x1-kerple-c64"),
            ),
        ),
    ),
}


def find_experiment(name: str) -> Experiment:
    """Return an entry of `EXPERIMENTS`.

    Raises:
        InputError: the name is unknown.
    """
    require(name in EXPERIMENTS, "experiment", name, f"must be one of {list(EXPERIMENTS)}")
    return EXPERIMENTS[name]


# Method, size, train length and task of a model; the size is "" for a task, the task is "" for a text.
Model = tuple[str, str, int, str]


def models_of(experiment: Experiment) -> list[Model]:
    """Return the models of an experiment. Sizes and lengths are the paper's."""
    return [
        (method, size, train_length, task)
        for task in experiment.tasks or ("",)
        for size in (("",) if experiment.tasks else experiment.sizes)
        for train_length in experiment.train_lengths
        for method in experiment.methods
        if (method, train_length) not in experiment.skipped
    ]


def paper_tables() -> dict[str, Any]:
    """Return the numbers printed in the paper; `curves` has one entry per method and train length."""
    return json.loads(Path(__file__).with_name("paper_tables.json").read_text())
