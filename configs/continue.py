r"""Start from the weights of another run: more steps, other data or another method.

    python train.py --config=configs/paper.py:125m,rotary=rope --config.data.path=data/books3 --workdir=runs/rope
    python train.py --config=configs/continue.py:source=runs/rope,rotary=none,bias=kerple,processor=dape,kernel=3 \
        --config.train.num_steps=5000 --workdir=runs/rope-to-dape
    python eval.py --workdir=runs/rope,runs/rope-to-dape

Argument: source=WORKDIR or source=WORKDIR@STEP (a step's number, newest or best), or the same with the flag
--config.init.source; one of the two is required. Then any of

    rotary=none|rope|pi|ntk|yarn  bias=nope|alibi|kerple|kerple_power|sandwich|t5|fire|cope|transformer_xl
    processor=none|dape  kernel=W  channels=C
    train_only=bias|processor  parameters to train, all others are frozen; both: --config.init.train_only=bias,processor

All fields have the values of the source's config, except the method given here and the mesh, which has all devices.
Parameters are those of the checkpoint; optimizer, schedule and data order start from the beginning. For another order
of the data set --config.data.seed. A new DAPE starts as the identity. FIRE's threshold is scaled by train_length / 512.

The recipe reads the source's config.json each time, also on resume; the checkpoint is read only once, at the start.

Hardware: that of the source. A frozen parameter has neither gradient nor optimizer state: 4 instead of 16 bytes.
Expect the source's validation loss before the first step if the method is unchanged, and also (up to rounding) with
processor=dape if the source has no processor. Removing or replacing the rotary embedding or the bias raises the loss at
first. This project has not run this recipe at the paper's scale.
"""

import sys
from pathlib import Path

from ml_collections import ConfigDict

from dape_jax.config import InitConfig, config_file_dict, read_module, read_run
from dape_jax.errors import os_errors, require
from dape_jax.storage import to_path
from dape_jax.training.checkpoint import read_config_file

common = read_module(Path(__file__).with_name("common.py"))

METHOD = ("rotary", "bias", "processor")
SOURCE_FLAG = "--config.init.source="


def source_of_flag() -> str:
    """Return the source given by the flag, or "". Flags are applied after `get_config`, so they are read here."""
    given = [flag.removeprefix(SOURCE_FLAG) for flag in sys.argv if flag.startswith(SOURCE_FLAG)]
    return given[-1] if given else ""


def get_config(argument: str | None = None) -> ConfigDict:
    """Return the recipe's config for an argument; see above."""
    more = dict.fromkeys(METHOD, "")  # "": the source's
    choice = common.parse_argument(argument, source="", train_only="", **common.METHOD_ARGUMENTS | more)
    choice["source"] = choice["source"] or source_of_flag()
    allowed = "must have source=WORKDIR; or give --config.init.source=WORKDIR"
    require(bool(choice["source"]), "config argument", argument, allowed)
    directory, _ = InitConfig(choice["source"], None).source_and_step
    with os_errors("config argument", f"source={choice['source']}", "must be a directory written by train.py"):
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
