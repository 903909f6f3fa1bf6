"""Figures and tables of the paper as data: their models and its claims. Next: `catalogue.py`.

Lengths and sizes are the paper's.
"""

import json
from pathlib import Path
from typing import Any

from dape_jax.tasks import CHE
from experiments.claims import Claim, Experiment, Less, better, beyond, cell, easier_at, outscores, score, up_to, within
from experiments.methods import ADDITIVE, DAPE1X1, DAPE1X3, TABLE6_BASELINES, TABLE6_DAPE

BASELINES = ("nope", "rope", "t5", "alibi", "kerple", "fire", "cope")
TABLE2_BASELINES = ("nope", "rope", "t5", "alibi", "kerple", "fire", DAPE1X1)
TABLE3_BASELINES = ("rope", "t5", "kerple", DAPE1X1)
WITH_DAPE = tuple(f"dape1x{kernel}-kerple" for kernel in (1, 3, 5, 7))
LEAKING = tuple(f"dape1x3-{bias}" for bias in ADDITIVE)
PRINTED_TASKS = tuple(task for task in CHE if task != "binary_multiplication")  # table 6 does not contain it
ORDERED_TASKS = tuple(task for task in PRINTED_TASKS if not CHE[task].permutation_invariant)
SAME_TOKENS = (128, 256, 512, 1024, 2048, 4096)
FIRE_NOTE = (
    "FIRE's official settings depend on DAPE (threshold 256 and LeakyReLU with it, 64 and ReLU without; a preset "
    "scales the thresholds with its lengths), so the two sides differ not only in DAPE. See `choose_method` in "
    "`configs/common.py`."
)
LEAK_NOTE = (
    "A model must learn to read the next token through the convolution, and a preset with few training steps stops "
    "before its perplexity is 1. Compare with the same methods in figure 5, which have no leak."
)
SHORTER_IS_BETTER = (
    "RoPE trained at 4096 is worse at 128 than DAPE1x3-Kerple trained at 128, and than RoPE trained there"
)
NEARER_TIMES = "the larger the model, the nearer Kerple's time is to DAPE1x3-Kerple's (ratio above 0.75, 0.82, 0.89)"
WIDER_IS_BETTER = {"DAPE1x3-Kerple is better than DAPE-Kerple (1x1) at every length": better(DAPE1X3, DAPE1X1)}


def paper_tables() -> dict[str, Any]:
    """Return the numbers printed in the paper; `curves` has one entry per method and train length."""
    return json.loads(Path(__file__).with_name("paper_tables.json").read_text(encoding="utf-8"))


def dape_improves(method: str, name: str, note: str = "") -> dict[str, Claim]:
    """Return the claim that DAPE1x3 improves a method at every length, by its text."""
    return {
        f"DAPE1x3 improves {name} within and beyond the train length": better(f"dape1x3-{method}", method, note=note)
    }


def larger_kernels(number: int, train_length: int) -> Experiment:
    """Return table 4 or table 5."""
    at, more = (train_length,), ("dape1x5-kerple", "dape1x7-kerple")
    return Experiment(
        title=f"kernel sizes, trained at {train_length}",
        source=f"table {number}, appendix F, section 4.7",
        methods=("kerple", *WITH_DAPE),
        train_lengths=at,
        claims={
            "DAPE with any kernel size is better than Kerple, within and beyond the train length": better(
                WITH_DAPE, "kerple", at
            ),
            "DAPE1x3 is better than DAPE (1x1) at every length": better(DAPE1X3, DAPE1X1, at),
            "kernels of 5 and 7 are no worse than 3 (to 1 %) at every length": better(more, DAPE1X3, at, factor=1.01),
            "with DAPE, perplexity at the longest length is below that at the train length": easier_at(
                8192, WITH_DAPE, at
            ),
        },
    )


PAPER = {
    "fig1": Experiment(
        title="DAPE on models without additive bias: NoPE and RoPE",
        source="figure 1, section 4.4",
        methods=("nope", "dape1x1-nope", "dape1x3-nope", "rope", "dape1x1-rope", "dape1x3-rope"),
        claims={
            **dape_improves("nope", "NoPE"),
            **dape_improves("rope", "RoPE"),
            "DAPE (1x1) improves NoPE too, at every length": better("dape1x1-nope", "nope"),
            "naive DAPE (1x1) makes RoPE worse at the train length": better("rope", "dape1x1-rope", lengths=within),
        },
    ),
    "fig2": Experiment(
        title="comparison with baselines, trained at 128 and 512",
        source="figure 2, section 4.1",
        methods=(*BASELINES, DAPE1X1, DAPE1X3),
        claims={
            "DAPE1x3-Kerple is the best of all at the train length": better(
                DAPE1X3, (*BASELINES, DAPE1X1), lengths=within
            ),
            "DAPE1x3-Kerple is the best of all at every length beyond": better(
                DAPE1X3, (*BASELINES, DAPE1X1), lengths=beyond
            ),
            **WIDER_IS_BETTER,
            "RoPE fails at twice the train length: perplexity there is more than doubled": Claim(
                [Less(cell("rope", t, t), cell("rope", t, 2 * t), 0.5) for t in (128, 512)]
            ),
            "the longest length is easier for DAPE1x3-Kerple than the train length": easier_at(8192, DAPE1X3),
        },
    ),
    "fig3": Experiment(
        title="the same training tokens at different train lengths",
        source="figure 3, section 4.2",
        methods=(DAPE1X3, "rope"),
        train_lengths=SAME_TOKENS,
        skipped=tuple(("rope", t) for t in (256, 512, 1024, 2048)),
        step_tokens=32_768,
        claims={
            "DAPE1x3-Kerple trained at 128 is as good as RoPE trained at 4096 (to 2 %), both evaluated at 4096": Claim(
                [Less(cell(DAPE1X3, 128, 4096), cell("rope", 4096, 4096), 1.02)]
            ),
            "DAPE1x3-Kerple trained at 512 is better than RoPE trained at 4096, both evaluated at 4096": Claim(
                [Less(cell(DAPE1X3, 512, 4096), cell("rope", 4096, 4096))]
            ),
            SHORTER_IS_BETTER: Claim(
                [Less(cell(method, 128, 128), cell("rope", 4096, 128)) for method in (DAPE1X3, "rope")]
            ),
            "at lengths of 128 to 2048, the best DAPE1x3-Kerple is the one trained at that length": Claim(
                [
                    Less(cell(DAPE1X3, at, at), cell(DAPE1X3, t, at))
                    for at in SAME_TOKENS[:-1]
                    for t in SAME_TOKENS
                    if t != at
                ]
            ),
        },
    ),
    "fig4": Experiment(
        title="350M parameters",
        source="figure 4, section 4.3",
        methods=("kerple", DAPE1X1, DAPE1X3),
        sizes=("350m",),
        claims={
            "DAPE1x3-Kerple is better than DAPE-Kerple (1x1) within the train length and at the longest": better(
                DAPE1X3, DAPE1X1, lengths=lambda t: (t, 8192), size="350m"
            )
        },
    ),
    "fig5": Experiment(
        title="DAPE1x3 on additive biases",
        source="figure 5, section 4.4",
        methods=tuple(f"{processor}{bias}" for bias in ADDITIVE for processor in ("", "dape1x1-", "dape1x3-")),
        claims={
            **dape_improves("alibi", "ALiBi"),
            **dape_improves("kerple", "Kerple"),
            **dape_improves("fire", "FIRE", FIRE_NOTE),
            "DAPE1x3-ALiBi is better than DAPE-ALiBi (1x1) at every length, trained at 512": better(
                "dape1x3-alibi", "dape1x1-alibi", (512,)
            ),
            **WIDER_IS_BETTER,
            "DAPE1x3-FIRE is better than DAPE-FIRE (1x1) at every length": better("dape1x3-fire", "dape1x1-fire"),
        },
    ),
    "fig6": Experiment(
        title="information leakage: the convolution without the mask before it",
        source="figure 6, section 4.5",
        methods=LEAKING,
        train_lengths=(128,),
        overrides={"model.processor.leak": True},
        claims={
            "with the leak, perplexity is about 1 (below 1.1) up to 1024": better(
                LEAKING, 1.1, (128,), up_to(1024), note=LEAK_NOTE
            ),
            "with the leak and Kerple, perplexity is about 1 (below 1.1) up to 8192": better(
                DAPE1X3, 1.1, (128,), note=LEAK_NOTE
            ),
        },
    ),
    "table1": Experiment(
        title="delta perplexity: the gain from the text before the last train length of tokens",
        source="table 1, appendix A, equation 6",
        methods=("rope", "alibi", "kerple", DAPE1X1, DAPE1X3),
        train_lengths=(512,),
        metric="delta",
        claims={
            "more context helps DAPE1x3-Kerple at every length (delta above 0)": better(0.0, DAPE1X3, (512,), beyond),
            "it helps DAPE1x3-Kerple more than DAPE-Kerple (1x1)": better(
                DAPE1X1, DAPE1X3, (512,), beyond
            ),  # a lower delta is worse
            "more context harms RoPE at every length (delta below 0)": better("rope", 0.0, (512,), beyond),
            "more context harms Kerple at the longest length (delta below 0)": better(
                "kerple", 0.0, (512,), lambda _: (8192,)
            ),
        },
    ),
    "table2": Experiment(
        title="comparison with baselines, trained at 1024",
        source="table 2, appendix B",
        methods=(*TABLE2_BASELINES, DAPE1X3),
        train_lengths=(1024,),
        claims={"DAPE1x3-Kerple is the best of all at every length": better(DAPE1X3, TABLE2_BASELINES, (1024,))},
    ),
    "table3": Experiment(
        title="2.7B parameters",
        source="table 3, appendix C",
        methods=(*TABLE3_BASELINES, DAPE1X3),
        train_lengths=(512,),
        sizes=("2.7b",),
        claims={
            "DAPE1x3-Kerple is the best of all at every length up to 4096": better(
                DAPE1X3, TABLE3_BASELINES, (512,), up_to(4096), size="2.7b"
            )
        },
    ),
    "table4": larger_kernels(4, 128),
    "table5": larger_kernels(5, 512),
    "table6": Experiment(
        title="accuracy on the tasks of the Chomsky hierarchy, beyond the lengths of training",
        source="table 6, appendix G, section 4.8",
        methods=TABLE6_BASELINES + TABLE6_DAPE,
        train_lengths=(40,),
        tasks=tuple(CHE),
        metric="accuracy",
        claims={
            "DAPE1x3-Kerple is better than Kerple on 8 of 11 permutation-variant tasks": outscores(
                DAPE1X3, "kerple", ORDERED_TASKS, at_least=8
            ),
            "DAPE1x3-Kerple is better than Kerple on even pairs and on missing duplicate, two of the eight": outscores(
                DAPE1X3, "kerple", ("even_pairs", "missing_duplicate_string")
            ),
            "DAPE1x3-FIRE is better than FIRE on 6 of 11 permutation-variant tasks": outscores(
                "dape1x3-fire", "fire", ORDERED_TASKS, at_least=6, note=FIRE_NOTE
            ),
            "on missing duplicate, DAPE1x3-Kerple is better than DAPE-Kerple (1x1)": outscores(
                DAPE1X3, DAPE1X1, ("missing_duplicate_string",)
            ),
            "on stack manipulation, DAPE-Kerple (1x1) is better than DAPE1x3-Kerple": outscores(
                DAPE1X1, DAPE1X3, ("stack_manipulation",)
            ),
            "on most tasks, the best of all methods is one with DAPE (1x1 or 1x3)": outscores(
                TABLE6_DAPE, TABLE6_BASELINES, PRINTED_TASKS, at_least=len(PRINTED_TASKS) // 2 + 1, note=FIRE_NOTE
            ),
            "with most tasks and biases, DAPE with one of the kernel sizes 1 and 3 is better than without DAPE": Claim(
                [
                    Less(score((bias,), task), score((f"dape1x1-{bias}", f"dape1x3-{bias}"), task))
                    for bias in ADDITIVE
                    for task in PRINTED_TASKS
                ],
                at_least=len(ADDITIVE) * len(PRINTED_TASKS) // 2 + 1,
                note=FIRE_NOTE,
            ),
        },
    ),
    "table7": Experiment(
        title="time of a training step",
        source="table 7, appendix H, section 4.9",
        methods=("rope", "t5", "alibi", "kerple", "fire", DAPE1X1, DAPE1X3),
        train_lengths=(512,),
        sizes=("350m", "2.7b", "6.7b"),
        metric="step_ms",
        step_batch=1,
        claims={
            NEARER_TIMES: Claim(
                [
                    Less(cell(DAPE1X3, 512, 512, size), cell("kerple", 512, 512, size), 1 / ratio)
                    for size, ratio in (("350m", 0.75), ("2.7b", 0.82), ("6.7b", 0.89))
                ]
            )
        },
    ),
    "table9": Experiment(
        title="against other methods whose positions depend on the data",
        source="table 9, appendix J",
        methods=("transformer-xl", "cope", DAPE1X1, DAPE1X3),
        train_lengths=(128,),
        claims={
            "DAPE1x3-Kerple is better than Transformer-XL at every length": better(DAPE1X3, "transformer-xl", (128,)),
            "DAPE1x3-Kerple is better than CoPE at every length": better(DAPE1X3, "cope", (128,)),
        },
    ),
    "appendixE": Experiment(
        title="a wider kernel against more channels, at about the same cost",
        source="appendix E, section 4.6",
        methods=("dape1x3-kerple-c10", "dape1x3-kerple-c21", "dape1x1-kerple-c64"),
        claims={
            "trained at 128, DAPE1x3 with 10 channels is better than DAPE (1x1) with 64 at 128 and 8192": better(
                "dape1x3-kerple-c10", "dape1x1-kerple-c64", (128,), lambda t: (t, 8192)
            ),
            "trained at 512, DAPE1x3 with 10 channels is better than DAPE (1x1) with 64 up to 4096": better(
                "dape1x3-kerple-c10", "dape1x1-kerple-c64", (512,), up_to(4096)
            ),
            "DAPE1x3 with 21 channels is better than DAPE (1x1) with 64 at every length": better(
                "dape1x3-kerple-c21", "dape1x1-kerple-c64"
            ),
        },
    ),
}
