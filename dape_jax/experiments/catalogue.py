"""What the paper's figures and tables compare, as data. Next: `run.py`, which runs them, and `report.py`, which judges.

An experiment is methods x sizes x train lengths on a text, or methods x algorithmic tasks; the quantity that is
measured; and the claims that the paper makes of it. Lengths and sizes are the paper's here; a preset says what stands
for them. To add an experiment, add an entry to `EXPERIMENTS`; to add a method, a line to `METHODS`.
"""

import dataclasses
import json
from importlib import resources
from typing import Any

from dape_jax.errors import require
from dape_jax.tasks import CHE

# The argument of a config file that makes the method; names as in the paper's tables.
METHODS = {
    "nope": "bias=nope",
    "rope": "rotary=rope",
    "t5": "bias=t5",
    "alibi": "bias=alibi",
    "kerple": "bias=kerple",
    "fire": "bias=fire",
    "cope": "bias=cope",
    "transformer-xl": "bias=transformer_xl",
    "dape1x1-nope": "bias=nope,processor=dape,kernel=1",
    "dape1x3-nope": "bias=nope,processor=dape,kernel=3",
    "dape1x1-rope": "rotary=rope,processor=dape,kernel=1",
    "dape1x3-rope": "rotary=rope,processor=dape,kernel=3",
    "dape1x1-alibi": "bias=alibi,processor=dape,kernel=1",
    "dape1x3-alibi": "bias=alibi,processor=dape,kernel=3",
    "dape1x1-fire": "bias=fire,processor=dape,kernel=1",
    "dape1x3-fire": "bias=fire,processor=dape,kernel=3",
    "dape1x1-kerple": "bias=kerple,processor=dape,kernel=1",
    "dape1x3-kerple": "bias=kerple,processor=dape,kernel=3",
    "dape1x5-kerple": "bias=kerple,processor=dape,kernel=5",
    "dape1x7-kerple": "bias=kerple,processor=dape,kernel=7",
    "dape1x1-kerple-c64": "bias=kerple,processor=dape,kernel=1,channels=64",
    "dape1x3-kerple-c21": "bias=kerple,processor=dape,kernel=3,channels=21",
    "dape1x3-kerple-c10": "bias=kerple,processor=dape,kernel=3,channels=10",
}


@dataclasses.dataclass(frozen=True)
class TaskPreset:
    """What stands for the paper's settings on the algorithmic tasks.

    Args:
        recipe: file under `configs/`.
        tasks: those that are run unless others are asked for.
        methods: of the experiment's.
        num_steps: of the training.
        lengths: of the evaluation, in symbols.
        num_sequences: of each length.
    """

    recipe: str
    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    num_steps: int
    lengths: tuple[int, ...]
    num_sequences: int


@dataclasses.dataclass(frozen=True)
class Preset:
    """What stands for the paper's settings.

    Args:
        recipe: file under `configs/`, of models on a text.
        sizes: from the paper's sizes to the recipe's.
        length_divisor: the paper's lengths are divided by it.
        batch: sequences of a step; None for the recipe's own, which keeps the tokens of a step.
        seeds: of the runs, unless others are asked for.
        data: default of `--data`; "" for none.
        on_tasks: what stands for the settings on the algorithmic tasks.
    """

    recipe: str
    sizes: dict[str, str]
    length_divisor: int
    batch: int | None
    seeds: tuple[int, ...]
    data: str
    on_tasks: TaskPreset


# The paper's table 6, in its order.
_TABLE6 = (
    *("rope", "transformer-xl", "alibi", "kerple", "fire"),
    *(f"{processor}-{bias}" for processor in ("dape1x1", "dape1x3") for bias in ("alibi", "kerple", "fire")),
)

PRESETS = {
    "small": Preset(
        recipe="small.py",
        sizes={"125m": "xs", "350m": "s", "2.7b": "m", "6.7b": "l"},
        length_divisor=4,
        batch=None,
        seeds=(0, 1),
        data="stdlib",
        on_tasks=TaskPreset(
            recipe="che.py",
            tasks=("even_pairs", "missing_duplicate_string"),
            methods=("rope", "kerple", "dape1x1-kerple", "dape1x3-kerple"),
            num_steps=1500,
            # Evenly spread over 1..40 and over 41..500, odd and even in turn.
            lengths=(*range(1, 41, 13), *range(41, 501, 51)),
            num_sequences=64,
        ),
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
            methods=_TABLE6,
            num_steps=200_000,
            lengths=tuple(range(1, 501)),
            num_sequences=512,
        ),
    ),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One figure: what a method trained at a length reaches at a length. Lengths are the paper's."""

    method: str
    train_length: int
    length: int
    size: str = "125m"


@dataclasses.dataclass(frozen=True)
class Score:
    """One figure: what the best of some methods reaches on a task, the mean accuracy over lengths beyond training."""

    methods: tuple[str, ...]
    task: str


@dataclasses.dataclass(frozen=True)
class Less:
    """low < factor * high, as a claim about two figures, or about one and a constant."""

    low: Cell | Score | float
    high: Cell | Score | float
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and the comparisons that have to hold if it does: all, or at least so many."""

    text: str
    comparisons: tuple[Less, ...]
    at_least: int | None = None


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One figure or table.

    Args:
        title: what it compares.
        source: where the paper has it.
        methods: keys of `METHODS`.
        train_lengths: the paper's, in tokens; one, in symbols, on tasks.
        claims: what the paper says of it.
        sizes: the paper's; that of the models on tasks is their recipe's.
        tasks: keys of `TASKS`, for each of which every method has a model of its own; none for models on a text.
        skipped: (method, train length) that the paper does not have.
        overrides: fields of the config that differ from the recipe's.
        measure: "perplexity"; "delta", appendix A's; "step_ms", milliseconds of a training step; or "accuracy", on
            tasks.
        step_tokens: tokens of a step at every train length, where the paper keeps them equal.
        step_batch: sequences of a step, for a measurement of time.
    """

    title: str
    source: str
    methods: tuple[str, ...]
    train_lengths: tuple[int, ...]
    claims: tuple[Claim, ...]
    sizes: tuple[str, ...] = ("125m",)
    tasks: tuple[str, ...] = ()
    skipped: tuple[tuple[str, int], ...] = ()
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    measure: str = "perplexity"
    step_tokens: int | None = None
    step_batch: int | None = None


def lengths_from(train_length: int, longest: int = 8192) -> tuple[int, ...]:
    """Evaluation lengths of the paper: the train length and its doublings."""
    return tuple(train_length * 2**n for n in range(20) if train_length * 2**n <= longest)


def spelt(lengths: tuple[int, ...]) -> str:
    """Increasing lengths for a reader: the first and the last if there are no gaps between, or all of them."""
    first, last = lengths[0], lengths[-1]
    return f"{first} to {last}" if len(lengths) == last - first + 1 > 2 else ", ".join(map(str, lengths))


def _at(length: int | None, train_length: int) -> tuple[int, ...]:
    return lengths_from(train_length) if length is None else (length,)


def better(
    low: str,
    high: str,
    train_lengths: tuple[int, ...],
    *,
    at: int | None = None,
    factor: float = 1.0,
    size: str = "125m",
    beyond: bool = False,
) -> tuple[Less, ...]:
    """Of one method against another: at one length, or at every evaluated one, or only at those beyond training."""
    return tuple(
        Less(Cell(low, train, length, size), Cell(high, train, length, size), factor)
        for train in train_lengths
        for length in _at(at, train)
        if not (beyond and length == train)
    )


def within(low: str, others: tuple[str, ...], train_lengths: tuple[int, ...], size: str = "125m") -> tuple[Less, ...]:
    """One method is better than each of others at the length that both were trained at."""
    return tuple(
        Less(Cell(low, train, train, size), Cell(other, train, train, size))
        for train in train_lengths
        for other in others
    )


def outscores(high: tuple[str, ...], low: tuple[str, ...], tasks: tuple[str, ...]) -> tuple[Less, ...]:
    """The best of some methods is better than the best of others, on each task."""
    return tuple(Less(Score(low, task), Score(high, task)) for task in tasks)


_BASELINES = ("nope", "rope", "t5", "alibi", "kerple", "fire", "cope")
_FIG2 = (*_BASELINES, "dape1x1-kerple", "dape1x3-kerple")
_TABLE2 = ("nope", "rope", "t5", "alibi", "kerple", "fire", "dape1x1-kerple", "dape1x3-kerple")
_KERNELS = ("kerple", "dape1x1-kerple", "dape1x3-kerple", "dape1x5-kerple", "dape1x7-kerple")
_ADDITIVE = ("alibi", "kerple", "fire")
_PRINTED_TASKS = tuple(task for task in CHE if task != "binary_multiplication")  # which table 6 is without
_ORDERED_TASKS = tuple(task for task in _PRINTED_TASKS if not CHE[task].permutation_invariant)
_SAME_TOKENS = (128, 256, 512, 1024, 2048, 4096)


def _larger_kernels(train_length: int) -> tuple[Claim, ...]:
    return (
        Claim(
            "DAPE with any kernel size is better than Kerple, within and beyond the train length",
            tuple(less for method in _KERNELS[1:] for less in better(method, "kerple", (train_length,))),
        ),
        Claim(
            "DAPE1x3 is better than DAPE (1x1) at every length",
            better("dape1x3-kerple", "dape1x1-kerple", (train_length,)),
        ),
        Claim(
            "kernels of 5 and 7 are no worse than 3 (to 1 %) at every length",
            tuple(
                less
                for method in ("dape1x5-kerple", "dape1x7-kerple")
                for less in better(method, "dape1x3-kerple", (train_length,), factor=1.01)
            ),
        ),
        Claim(
            "with DAPE, perplexity at the longest length is below that at the train length",
            tuple(
                Less(Cell(method, train_length, 8192), Cell(method, train_length, train_length))
                for method in _KERNELS[1:]
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
            Claim(
                "DAPE1x3 improves NoPE within and beyond the train length", better("dape1x3-nope", "nope", (128, 512))
            ),
            Claim(
                "DAPE1x3 improves RoPE within and beyond the train length", better("dape1x3-rope", "rope", (128, 512))
            ),
            Claim("DAPE (1x1) improves NoPE too, at every length", better("dape1x1-nope", "nope", (128, 512))),
            Claim(
                "naive DAPE (1x1) makes RoPE worse at the train length",
                tuple(Less(Cell("rope", t, t), Cell("dape1x1-rope", t, t)) for t in (128, 512)),
            ),
        ),
    ),
    "fig2": Experiment(
        title="comparison with baselines, trained at 128 and 512",
        source="figure 2, section 4.1",
        methods=_FIG2,
        train_lengths=(128, 512),
        claims=(
            Claim(
                "DAPE1x3-Kerple is the best of all at the train length",
                within("dape1x3-kerple", (*_BASELINES, "dape1x1-kerple"), (128, 512)),
            ),
            Claim(
                "DAPE1x3-Kerple is the best of all at every length beyond",
                tuple(
                    less
                    for other in (*_BASELINES, "dape1x1-kerple")
                    for less in better("dape1x3-kerple", other, (128, 512), beyond=True)
                ),
            ),
            Claim(
                "DAPE1x3-Kerple is better than DAPE-Kerple (1x1) at every length",
                better("dape1x3-kerple", "dape1x1-kerple", (128, 512)),
            ),
            Claim(
                "RoPE fails at twice the train length: perplexity there is more than doubled",
                tuple(Less(Cell("rope", t, t), Cell("rope", t, 2 * t), 0.5) for t in (128, 512)),
            ),
            Claim(
                "the longest length is easier for DAPE1x3-Kerple than the train length",
                tuple(Less(Cell("dape1x3-kerple", t, 8192), Cell("dape1x3-kerple", t, t)) for t in (128, 512)),
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
                tuple(
                    less
                    for t in (128, 512)
                    for at in (t, 8192)
                    for less in better("dape1x3-kerple", "dape1x1-kerple", (t,), at=at, size="350m")
                ),
            ),
        ),
    ),
    "fig5": Experiment(
        title="what DAPE1x3 adds to additive biases",
        source="figure 5, section 4.4",
        methods=tuple(f"{processor}{bias}" for bias in _ADDITIVE for processor in ("", "dape1x1-", "dape1x3-")),
        train_lengths=(128, 512),
        claims=(
            *(
                Claim(
                    f"DAPE1x3 improves {name} within and beyond the train length",
                    better(f"dape1x3-{bias}", bias, (128, 512)),
                )
                for bias, name in (("alibi", "ALiBi"), ("kerple", "Kerple"), ("fire", "FIRE"))
            ),
            *(
                Claim(
                    f"DAPE1x3-{name} is better than DAPE-{name} (1x1) at every length{condition}",
                    better(f"dape1x3-{bias}", f"dape1x1-{bias}", train_lengths),
                )
                for bias, name, train_lengths, condition in (
                    ("alibi", "ALiBi", (512,), ", trained at 512"),
                    ("kerple", "Kerple", (128, 512), ""),
                    ("fire", "FIRE", (128, 512), ""),
                )
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
                    Less(Cell(f"dape1x3-{bias}", 128, length), 1.1)
                    for bias in _ADDITIVE
                    for length in lengths_from(128, 1024)
                ),
            ),
            Claim(
                "with the leak and Kerple, perplexity is about 1 (below 1.1) up to 8192",
                tuple(Less(Cell("dape1x3-kerple", 128, length), 1.1) for length in lengths_from(128)),
            ),
        ),
    ),
    "table1": Experiment(
        title="delta perplexity: what the text before the last train length of tokens is worth",
        source="table 1, appendix A, equation 6",
        methods=("rope", "alibi", "kerple", "dape1x1-kerple", "dape1x3-kerple"),
        train_lengths=(512,),
        measure="delta",
        claims=(
            Claim(
                "more context helps DAPE1x3-Kerple at every length (delta above 0)",
                tuple(Less(0.0, Cell("dape1x3-kerple", 512, length)) for length in lengths_from(512)[1:]),
            ),
            Claim(
                "it helps DAPE1x3-Kerple more than DAPE-Kerple (1x1)",
                better("dape1x1-kerple", "dape1x3-kerple", (512,), beyond=True),
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
        methods=_TABLE2,
        train_lengths=(1024,),
        claims=(
            Claim(
                "DAPE1x3-Kerple is the best of all at every length",
                tuple(
                    less
                    for other in _TABLE2
                    if other != "dape1x3-kerple"
                    for less in better("dape1x3-kerple", other, (1024,))
                ),
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
                tuple(
                    Less(Cell("dape1x3-kerple", 512, length, "2.7b"), Cell(other, 512, length, "2.7b"))
                    for other in ("rope", "t5", "kerple", "dape1x1-kerple")
                    for length in lengths_from(512, 4096)
                ),
            ),
        ),
    ),
    "table4": Experiment(
        title="kernel sizes, trained at 128",
        source="table 4, appendix F, section 4.7",
        methods=_KERNELS,
        train_lengths=(128,),
        claims=_larger_kernels(128),
    ),
    "table5": Experiment(
        title="kernel sizes, trained at 512",
        source="table 5, appendix F, section 4.7",
        methods=_KERNELS,
        train_lengths=(512,),
        claims=_larger_kernels(512),
    ),
    "table6": Experiment(
        title="accuracy on the tasks of the Chomsky hierarchy, beyond the lengths of training",
        source="table 6, appendix G, section 4.8",
        methods=_TABLE6,
        train_lengths=(40,),
        tasks=tuple(CHE),
        measure="accuracy",
        claims=(
            Claim(
                "DAPE1x3-Kerple is better than Kerple on 8 of 11 permutation-variant tasks",
                outscores(("dape1x3-kerple",), ("kerple",), _ORDERED_TASKS),
                at_least=8,
            ),
            Claim(
                "DAPE1x3-Kerple is better than Kerple on even pairs and on missing duplicate, two of the eight",
                outscores(("dape1x3-kerple",), ("kerple",), ("even_pairs", "missing_duplicate_string")),
            ),
            Claim(
                "DAPE1x3-FIRE is better than FIRE on 6 of 11 permutation-variant tasks",
                outscores(("dape1x3-fire",), ("fire",), _ORDERED_TASKS),
                at_least=6,
            ),
            Claim(
                "on missing duplicate, DAPE1x3-Kerple is better than DAPE-Kerple (1x1)",
                outscores(("dape1x3-kerple",), ("dape1x1-kerple",), ("missing_duplicate_string",)),
            ),
            Claim(
                "on stack manipulation, DAPE-Kerple (1x1) is better than DAPE1x3-Kerple",
                outscores(("dape1x1-kerple",), ("dape1x3-kerple",), ("stack_manipulation",)),
            ),
            Claim(
                "on most tasks, the best of all methods is one with DAPE (1x1 or 1x3)",
                outscores(_TABLE6[5:], _TABLE6[:5], _PRINTED_TASKS),
                at_least=len(_PRINTED_TASKS) // 2 + 1,
            ),
            Claim(
                "with most tasks and biases, DAPE with one of the kernel sizes 1 and 3 is better than without DAPE",
                tuple(
                    less
                    for bias in _ADDITIVE
                    for less in outscores((f"dape1x1-{bias}", f"dape1x3-{bias}"), (bias,), _PRINTED_TASKS)
                ),
                at_least=len(_ADDITIVE) * len(_PRINTED_TASKS) // 2 + 1,
            ),
        ),
    ),
    "table7": Experiment(
        title="time of a training step",
        source="table 7, appendix H, section 4.9",
        methods=("rope", "t5", "alibi", "kerple", "fire", "dape1x1-kerple", "dape1x3-kerple"),
        train_lengths=(512,),
        sizes=("350m", "2.7b", "6.7b"),
        measure="step_ms",
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
            *(
                Claim(
                    f"DAPE1x3-Kerple is better than {name} at every length",
                    better("dape1x3-kerple", other, (128,)),
                )
                for other, name in (("transformer-xl", "Transformer-XL"), ("cope", "CoPE"))
            ),
        ),
    ),
    "appendixE": Experiment(
        title="a wider kernel against more channels, at about the same cost",
        source="appendix E, section 4.6",
        methods=("dape1x3-kerple-c10", "dape1x3-kerple-c21", "dape1x1-kerple-c64"),
        train_lengths=(128, 512),
        claims=(
            Claim(
                "trained at 128, DAPE1x3 with 10 channels is better than DAPE (1x1) with 64 at 128 and 8192",
                tuple(
                    less
                    for at in (128, 8192)
                    for less in better("dape1x3-kerple-c10", "dape1x1-kerple-c64", (128,), at=at)
                ),
            ),
            Claim(
                "trained at 512, DAPE1x3 with 10 channels is better than DAPE (1x1) with 64 up to 4096",
                tuple(
                    less
                    for at in lengths_from(512, 4096)
                    for less in better("dape1x3-kerple-c10", "dape1x1-kerple-c64", (512,), at=at)
                ),
            ),
            Claim(
                "DAPE1x3 with 21 channels is better than DAPE (1x1) with 64 at every length",
                better("dape1x3-kerple-c21", "dape1x1-kerple-c64", (128, 512)),
            ),
        ),
    ),
}


def find(name: str) -> Experiment:
    """An entry of `EXPERIMENTS`, or an `InputError` that names those there are."""
    require(name in EXPERIMENTS, "experiment", name, f"one of {list(EXPERIMENTS)}")
    return EXPERIMENTS[name]


def paper_tables() -> dict[str, Any]:
    """The paper's printed figures; `curves` has one entry for a method trained at a length."""
    return json.loads(resources.files("dape_jax.experiments").joinpath("paper_tables.json").read_text())
