r"""Start a run from the weights of another run: for more steps, other data or another method.

    python train.py --config=configs/paper.py:125m,rotary=rope --config.data.path=data/books3 --workdir=runs/rope
    python train.py --config=configs/continue.py:source=runs/rope,rotary=none,bias=kerple,processor=dape,kernel=3 \
        --config.train.num_steps=5000 --workdir=runs/rope-to-dape
    python eval.py --workdir=runs/rope,runs/rope-to-dape

Argument: source=WORKDIR or source=WORKDIR@STEP (STEP is a number, newest or best); required, unless the flag
--config.init.source=... gives it. Then any of

    rotary=none|rope|pi|ntk|yarn  bias=nope|alibi|kerple|kerple_power|sandwich|t5|fire|cope|transformer_xl
    processor=none|dape  kernel=W  channels=C  fire=auto|dape|plain (as in configs/small.py)
    train_only=bias|processor  parameters to train, all others are frozen; both: --config.init.train_only=bias,processor

All fields have the values of the source's config, except the method given here and the mesh, which has all devices.
The parameters are the checkpoint's. Optimizer, schedule and position in the data start from the beginning;
--config.data.seed gives another order of the data. A new DAPE starts as the identity. FIRE's threshold is scaled by
train_length / 512.

The recipe reads the source's config.json at each start, also to resume. The checkpoint is read only by a new run.

Hardware: as for the source. A frozen parameter has neither gradient nor optimizer state, so it takes 4 bytes instead of
16. Expect the source's validation loss before the first step if the method is unchanged, and also (up to rounding) with
processor=dape if the source has no processor. Removing or replacing the rotary embedding or the bias raises the loss at
first. This project has not run this recipe at the paper's scale.
"""

import itertools
import sys

from ml_collections import ConfigDict

from dape_jax.config import InitConfig, config_file_dict, read_run
from dape_jax.configs import common
from dape_jax.errors import os_errors, require
from dape_jax.storage import to_path
from dape_jax.training.checkpoint import read_config_file

METHOD = ("rotary", "bias", "processor")
SOURCE_FLAG = "config.init.source"


def source_of_flag() -> str:
    """Return the source given by the flag, as --config.init.source=RUN or --config.init.source RUN, or "".

    It is read from the command line, because flags are applied to the config only after `get_config`.
    """
    found = ""
    for argument, following in itertools.pairwise([*sys.argv[1:], ""]):
        name, equals, value = argument.partition("=")
        if name in (f"-{SOURCE_FLAG}", f"--{SOURCE_FLAG}"):
            found = value if equals else following
    return found


def get_config(argument: str | None = None) -> ConfigDict:
    """Return the recipe's config for an argument; see the module's docstring."""
    more = dict.fromkeys(METHOD, "")  # "": as in the source
    choice = common.parse_argument(argument, source="", train_only="", **common.METHOD_ARGUMENTS | more)
    choice["source"] = choice["source"] or source_of_flag()
    allowed = "must contain source=WORKDIR, unless --config.init.source=WORKDIR is given"
    require(bool(choice["source"]), "config argument", argument, allowed)
    directory, _ = InitConfig(choice["source"], None).source_and_step
    with os_errors("config argument", f"source={choice['source']}", "must be a directory written by dape-train"):
        run = read_run(read_config_file(to_path(directory, "source"))["config"])

    spec = config_file_dict(run)
    given = [field for field in METHOD if choice[field]]
    if "processor" not in given:
        for key in ("kernel", "channels"):
            is_unset = choice[key] == common.METHOD_ARGUMENTS[key]
            require(is_unset, "config argument", f"{key}={choice[key]}", "needs processor=dape")
    names = {field: choice[field] or spec["model"][field]["name"] for field in METHOD}
    method = common.choose_method(choice | names, run.train.train_length, length_scale=run.train.train_length / 512)
    if choice["processor"] == "dape":
        method["processor"]["init"] = "identity"
    spec["model"] |= {field: method[field] for field in given}
    config = ConfigDict(spec)
    config.mesh = common.mesh()
    train_only = {"train_only": choice["train_only"]} if choice["train_only"] else {}
    config.init = common.init() | {"source": choice["source"]} | train_only
    return config
