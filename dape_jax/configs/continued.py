r"""Start a run from the weights of another run: for more steps, other data or another method.

    python train.py --config=configs/paper.py:125m,rotary=rope --config.data.path=data/books3 --workdir=runs/rope
    python train.py --config=configs/continued.py:source=runs/rope,rotary=none,bias=kerple,processor=dape,kernel=3 \
        --config.train.num_steps=5000 --workdir=runs/rope-to-dape
    python eval.py --workdir=runs/rope,runs/rope-to-dape

Argument: source=WORKDIR or source=WORKDIR@STEP (STEP is a number, newest or best), then a method (`configs/common.py`).

All fields have the values of the source's config, except the method given here and the mesh, which has all devices.
The parameters are the checkpoint's. The schedule starts from the beginning, and so does the optimizer, unless
--config.init.optimizer=True, and the order of the data, unless --config.init.data=continue. seed=N gives another order
and dropout, and --config.init.train_only=bias,processor freezes all other parameters. A new DAPE starts as the
identity. FIRE's threshold is scaled by train_length / 512.

The recipe reads the source's config.json at each start, also to resume. The checkpoint is read only by a new run.

Hardware: as for the source. A frozen parameter has neither gradient nor optimizer state, so it takes 4 bytes instead of
16. Expect the source's validation loss before the first step if the method is unchanged, and also (up to rounding) with
processor=dape if the source has no processor. Removing or replacing the rotary embedding or the bias raises the loss at
first. This project has not run this recipe at the paper's scale.
"""

import dataclasses

from ml_collections import ConfigDict

from dape_jax.config import InitConfig, read_run, resolved
from dape_jax.configs import common
from dape_jax.errors import require
from dape_jax.sharding import MeshConfig
from dape_jax.storage import to_path
from dape_jax.training.checkpoint import read_config


def get_config(argument: str | None = None) -> ConfigDict:
    """Return the recipe's config for an argument; see the module's docstring."""
    method = ("rotary", "bias", "processor")
    choice = common.parse_argument(argument, source="", **common.METHOD | dict.fromkeys(method, "") | {"seed": -1})
    source, given = choice["source"], [field for field in method if choice[field]]
    require(bool(source), "config argument", argument, "must contain source=WORKDIR")
    saved = read_config(to_path(InitConfig(source).source_and_step[0], "source"))
    allowed = "must be a directory written by dape-train or dape-import"
    require(saved is not None, "config argument", f"source={source}", allowed)
    run = read_run((saved or {})["config"])

    spec = resolved(run)
    if run.train.checkpoint_interval == run.train.eval_interval:  # so that it follows a flag for the other
        spec["train"]["checkpoint_interval"] = None
    for key in ("kernel", "channels"):
        is_allowed = "processor" in given or choice[key] == common.METHOD[key]
        require(is_allowed, "config argument", f"{key}={choice[key]}", "needs processor=dape")
    names = {field: choice[field] or spec["model"][field]["name"] for field in method}
    length = run.train.train_length
    chosen = common.choose_method(choice | names, length, length_scale=length / 512)
    if choice["processor"] == "dape":
        chosen["processor"] |= {"init": "identity"}
    spec["model"] |= {field: chosen[field] for field in given}
    if choice["seed"] != -1:  # else that of the source
        spec["train"]["seed"] = spec["data"]["seed"] = choice["seed"]
    if "rotary" in given:  # of all layers, or in place of learned positions
        spec["model"] |= {"alternate_rotary": None, "learned_positions": None}
    return ConfigDict(spec | {"mesh": dataclasses.asdict(MeshConfig()), "init": dataclasses.asdict(InitConfig(source))})
