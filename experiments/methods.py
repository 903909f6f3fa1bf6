"""Methods and presets of the experiments. Next: `claims.py`. To add a method, add a line to `METHODS`."""

import dataclasses
from typing import Any

from dape_jax.tasks import CHE

KERNELS = (1, 2, 3, 5, 7, 9, 11)
ADDITIVE = ("alibi", "kerple", "fire")
DAPE1X1, DAPE1X3 = "dape1x1-kerple", "dape1x3-kerple"
KERPLE, DAPE = "bias=kerple", "processor=dape,kernel="

# Config argument of each method, by its name in the paper's tables.
METHODS = {
    **{bias: f"bias={bias}" for bias in ("nope", "t5", "alibi", "kerple", "fire", "cope")},
    "rope": "rotary=rope",
    "transformer-xl": "bias=transformer_xl",
    **{f"dape1x{kernel}-rope": f"rotary=rope,{DAPE}{kernel}" for kernel in (1, 3)},
    **{f"dape1x{n}-{bias}": f"bias={bias},{DAPE}{n}" for bias in ("nope", "alibi", "fire") for n in (1, 3)},
    **{f"dape1x{kernel}-kerple": f"{KERPLE},{DAPE}{kernel}" for kernel in KERNELS},
    "dape1x1-kerple-c64": f"{KERPLE},{DAPE}1,channels=64",
    "dape1x3-kerple-c21": f"{KERPLE},{DAPE}3,channels=21",
    "dape1x3-kerple-c10": f"{KERPLE},{DAPE}3,channels=10",
    "fire-as-with-dape": "bias=fire,fire=dape",
    "dape1x3-fire-as-without": f"bias=fire,fire=plain,{DAPE}3",
}
RATED = ("rope", "t5", "alibi", "kerple", "fire", DAPE1X1, DAPE1X3)
RATES = {"": 1.0, "-rate0.5": 0.5, "-rate2": 2.0}  # factors of the learning rate, by suffix of the method

Fields = dict[str, Any]  # config fields that a recipe's argument cannot set
CHANGES: dict[str, tuple[str, Fields]] = {
    "dape1x3-kerple-causal": ("with a causal kernel", {"model.processor.alignment": "causal"}),
    "dape1x3-kerple-scores": ("that reads the scores alone", {"model.processor.inputs": "scores"}),
    "dape1x3-kerple-bias": ("that reads the bias alone", {"model.processor.inputs": "bias"}),
    "dape1x3-kerple-no-residual": ("without residual connection", {"model.processor.residual": False}),
}
# Kerple at about the cost of DAPE1x3-Kerple or more, at the size xs and T = 128. DAPE1x3-Kerple takes 1.40 times the
# FLOPs of Kerple and, on a CPU, 1.5 times its time.
COSTLIER: dict[str, Fields] = {
    **{f"kerple-{steps}-steps": {"train.num_steps": steps} for steps in (840, 900, 1200)},
    "kerple-width-116": {"model.width": 116, "model.head_dim": 29, "model.mlp_width": 464},
    "kerple-5-layers": {"model.num_layers": 5},
}
# Kerple for longer than DAPE1x3-Kerple's 5,000 steps take on a CPU, at the size xs and T = 64: the preset `converged`.
LONGER: dict[str, Fields] = {"kerple-8500-steps": {"train.num_steps": 8500}}
# Kerple for as long as DAPE1x3-Kerple's 1,000 steps take on an H100: the preset `25m`.
LONGER_25M: dict[str, Fields] = {"kerple-1500-steps": {"train.num_steps": 1500}}
PARTS: dict[str, Fields] = {"window": {"model.window": 64}, "grouped": {"model.num_kv_heads": 2}}

OVERRIDES: dict[str, Fields] = {
    **{method: fields for method, (_, fields) in CHANGES.items()},
    **{f"{method}-{part}": fields for part, fields in PARTS.items() for method in ("kerple", DAPE1X3)},
    **COSTLIER,
    **LONGER,
    **LONGER_25M,
}
METHODS |= {method: METHODS[DAPE1X3 if method.startswith(DAPE1X3) else "kerple"] for method in OVERRIDES}
METHODS |= {f"{method}{suffix}": METHODS[method] for method in RATED for suffix in RATES}
OVERRIDES["dape1x2-kerple"] = {"model.processor.alignment": "causal"}  # a centered kernel has an odd width


@dataclasses.dataclass(frozen=True)
class TaskPreset:
    """Settings for experiments on the algorithmic tasks, which have the recipe `che.py`."""

    tasks: tuple[str, ...]  # tasks to run if --tasks is empty
    methods: tuple[str, ...]  # methods to run, if the experiment has them
    lengths: tuple[int, ...]  # evaluation lengths, in symbols
    overrides: Fields  # config fields that differ from the recipe's


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
    step_tokens: int | None = None  # tokens per step, if `batch` is None; None for the recipe's default
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)  # config fields that differ from the recipe's


# Methods of the paper's table 6, in its order.
TABLE6_BASELINES = ("rope", "transformer-xl", *ADDITIVE)
TABLE6_DAPE = tuple(f"{processor}-{bias}" for processor in ("dape1x1", "dape1x3") for bias in ADDITIVE)

SMALL = Preset(
    recipe="small.py",
    sizes={"125m": "xs", "350m": "s", "2.7b": "m", "6.7b": "l"},
    length_divisor=4,
    batch=None,
    seeds=(0, 1, 2),
    data="stdlib",
    on_tasks=TaskPreset(
        tasks=(
            *("even_pairs", "missing_duplicate_string", "stack_manipulation"),  # claims name these
            *("cycle_navigation", "reverse_string", "duplicate_string"),
        ),
        methods=("rope", "kerple", "dape1x1-kerple", "dape1x3-kerple"),
        # Evenly spaced over 1..40 and over 41..500, alternately odd and even.
        lengths=(*range(1, 41, 13), *range(41, 501, 51)),
        overrides={"train.num_steps": 6000, "train.batch_size": 32, "evaluation.num_sequences": 64},
    ),
)

PRESETS = {
    "small": SMALL,
    # 20 million tokens, 50 for each parameter, so that models are not compared by how fast they learn.
    "converged": dataclasses.replace(
        SMALL,
        seeds=(0, 1),
        data="",
        step_tokens=4096,
        # float32 on every device, so that models of different devices can be compared
        overrides={"train.num_steps": 5000, "evaluation.max_windows": 256, "model.dtype": "float32"},
    ),
    # 25 million parameters and 131 million tokens: minutes on one GPU.
    "25m": dataclasses.replace(
        SMALL,
        recipe="paper.py",
        sizes={"125m": "25m"},
        length_divisor=1,
        batch=512,
        seeds=(0,),
        data="",
        overrides={"model.vocab_size": 257, "train.num_steps": 1000}
        | {"train.accumulation_steps": 4}  # parts of a step fit into 40 GiB
        | {"model.remat": "none", "model.dtype": "bfloat16", "train.eval_interval": 200},
    ),
    "paper": Preset(
        recipe="paper.py",
        sizes={size: size for size in ("125m", "350m", "2.7b", "6.7b")},
        length_divisor=1,
        batch=256,
        seeds=(0,),
        data="",
        on_tasks=TaskPreset(
            tasks=tuple(CHE),
            methods=TABLE6_BASELINES + TABLE6_DAPE,
            lengths=tuple(range(1, 501)),
            overrides={"train.num_steps": 200_000, "train.batch_size": 128, "evaluation.num_sequences": 512},
        ),
    ),
}
