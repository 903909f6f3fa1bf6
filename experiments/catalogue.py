"""All experiments: the paper's, and questions that it leaves open. Next: `run.py`, `report.py`.

Lengths and sizes are the paper's. To add an experiment, add an entry to `EXPERIMENTS`.
"""

from collections.abc import Iterable

from experiments.claims import Claim, Experiment, better, easier_at, lengths_from, up_to, within
from experiments.methods import CHANGES, COSTLIER, DAPE1X1, DAPE1X3, KERNELS, LONGER, LONGER_25M, RATED, RATES
from experiments.paper import BASELINES, PAPER

WIDTHS = tuple(f"dape1x{kernel}-kerple" for kernel in KERNELS)
to_16384 = up_to(16384)
CONVERGED = ("rope", "alibi", "kerple", DAPE1X1, DAPE1X3, "dape1x3-rope")


def dape_is_better(methods: Iterable[str], train_length: int, lengths: tuple[int, ...]) -> dict[str, Claim]:
    """Return two claims on DAPE1x3-Kerple and each method: at the train length, the first of `lengths`, and beyond."""
    return {
        f"trained at {train_length}, DAPE1x3-Kerple is better than {method} {where}": better(
            DAPE1X3, method, (train_length,), lambda _, compared=compared: compared
        )
        for method in methods
        for where, compared in (("at the train length", lengths[:1]), ("at every length beyond", lengths[1:]))
    }


def after_fifty_tokens(train_length: int) -> dict[str, Claim]:
    """Return the claims of `converged` on models trained at one length."""
    at, where = (train_length,), f"trained at {train_length}, "
    return {
        **dape_is_better(("kerple", DAPE1X1, "alibi"), train_length, to_16384(train_length)),
        f"{where}DAPE1x3-Kerple is better than RoPE at the train length": better(DAPE1X3, "rope", at, within),
        f"{where}DAPE1x3 improves RoPE at every length": better("dape1x3-rope", "rope", at, to_16384),
        f"{where}DAPE1x3-Kerple is better at 16384 than at {train_length}": easier_at(16384, DAPE1X3, at),
    }


def gains_from_context(train_length: int) -> dict[str, Claim]:
    """Return the claims of `context` on models trained at one length."""
    where, at = f"trained at {train_length}, ", ((train_length,), lambda length: to_16384(length)[1:])
    helped = {
        f"{where}more context helps {method} at every length (delta above 0)": better(0.0, method, *at)
        for method in (DAPE1X3, DAPE1X1, "kerple")
    }
    return helped | {f"{where}it helps DAPE1x3-Kerple more than Kerple": better("kerple", DAPE1X3, *at)}


EXPERIMENTS = PAPER | {
    "widths": Experiment(
        title="kernels from 1 to 11 keys wide",
        methods=("kerple", *WIDTHS),
        train_lengths=(128,),
        claims={
            "DAPE with a kernel of any width is better than Kerple at every length": better(WIDTHS, "kerple", (128,)),
            "a causal kernel of 2 is better than one of 1 at every length": better("dape1x2-kerple", DAPE1X1, (128,)),
            "a centered kernel of 3 is better than a causal one of 2 at every length": better(
                DAPE1X3, "dape1x2-kerple", (128,)
            ),
            "kernels wider than 3 are better than one of 3 at every length": better(WIDTHS[3:], DAPE1X3, (128,)),
        },
    ),
    "variants": Experiment(
        title="variants of DAPE1x3: inputs, alignment, residual, window, grouped keys",
        methods=(
            *("kerple", "kerple-window", "kerple-grouped", DAPE1X3, *CHANGES),
            *("dape1x3-kerple-window", "dape1x3-kerple-grouped"),
        ),
        train_lengths=(512,),
        claims={
            **{
                f"DAPE1x3 {change} is better than Kerple at every length": better(method, "kerple", (512,))
                for method, (change, _) in CHANGES.items()
            },
            **{
                f"DAPE1x3 is better than DAPE1x3 {change} at every length": better(DAPE1X3, method, (512,))
                for method, (change, _) in CHANGES.items()
            },
            "DAPE1x3 improves Kerple with a window of 64 keys at every length": better(
                "dape1x3-kerple-window", "kerple-window", (512,)
            ),
            "DAPE1x3 improves Kerple with two heads of keys and values at every length": better(
                "dape1x3-kerple-grouped", "kerple-grouped", (512,)
            ),
        },
    ),
    "fire": Experiment(
        title="FIRE with the same threshold and activation with DAPE and without",
        methods=("fire", "fire-as-with-dape", "dape1x3-fire", "dape1x3-fire-as-without"),
        claims={
            "DAPE1x3 improves FIRE, both with the published settings of FIRE with DAPE": better(
                "dape1x3-fire", "fire-as-with-dape"
            ),
            "DAPE1x3 improves FIRE, both with the published settings of FIRE without DAPE": better(
                "dape1x3-fire-as-without", "fire"
            ),
            "FIRE without DAPE is better with its own settings than with those for DAPE": better(
                "fire", "fire-as-with-dape"
            ),
        },
    ),
    "rates": Experiment(
        title="half and twice the learning rate",
        methods=tuple(f"{method}{rate}" for method in RATED for rate in RATES),
        train_lengths=(128,),
        claims={
            "DAPE1x3-Kerple at the common learning rate is better than others at any of three, at every length": better(
                DAPE1X3, tuple(f"{method}{rate}" for method in RATED[:-1] for rate in RATES), (128,)
            )
        },
    ),
    "cost": Experiment(
        title="Kerple with the FLOPs of DAPE1x3-Kerple or more: more steps, wider, deeper",
        methods=("kerple", *COSTLIER, DAPE1X1, DAPE1X3),
        train_lengths=(512,),
        presets=("small",),
        claims=dape_is_better(COSTLIER, 512, lengths_from(512)),
    ),
    "times": Experiment(
        title="time of a training step of every method",
        methods=(*BASELINES, "transformer-xl", DAPE1X1, DAPE1X3, "kerple-width-116", "kerple-5-layers"),
        train_lengths=(128, 256, 512),
        metric="step_ms",
        presets=("small", "converged"),
    ),
    "converged": Experiment(
        title="the same methods after fifty tokens per parameter",
        methods=CONVERGED,
        train_lengths=(256, 512),
        longest=16384,
        claims={**after_fifty_tokens(256), **after_fifty_tokens(512)},
    ),
    "equal_time": Experiment(
        title="Kerple trained for longer than DAPE1x3-Kerple, which has fifty tokens per parameter",
        methods=("kerple", *LONGER, DAPE1X3),
        train_lengths=(256,),
        longest=16384,
        presets=("converged",),
        claims=dape_is_better(LONGER, 256, to_16384(256)),
    ),
    "larger": Experiment(
        title="25 million parameters, trained on 131 million tokens",
        methods=("kerple", DAPE1X3, "rope", *LONGER_25M, DAPE1X1),
        train_lengths=(256,),
        longest=16384,
        presets=("25m",),
        claims={
            **dape_is_better(("kerple", "rope", *LONGER_25M, DAPE1X1), 256, to_16384(256)),
            "DAPE1x3-Kerple is better at 16384 than at 256": easier_at(16384, DAPE1X3, (256,)),
        },
    ),
    "context": Experiment(
        title="the gain from context after fifty tokens per parameter",
        methods=CONVERGED,
        train_lengths=(256, 512),
        longest=16384,
        metric="delta",
        claims={**gains_from_context(256), **gains_from_context(512)},
    ),
}
