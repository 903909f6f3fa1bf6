r"""Give a trained RoPE model length: replace RoPE by a distance bias with DAPE, and train on for a part of its steps.

    dape-import --source=/models/pythia-410m --workdir=runs/pythia
    python train.py --config=configs/retrofit.py:source=runs/pythia --config.data.path=data/books \
        --config.train.train_length=512 --workdir=runs/pythia-dape
    python eval.py --workdir=runs/pythia,runs/pythia-dape --lengths=512,2048,8192 --rotary=rope,yarn --data=data/books
    dape-export --workdir=runs/pythia-dape --output=exported

Argument: source=WORKDIR[@STEP], a run, imported or trained; then

    bias=alibi|kerple  the bias in place of RoPE
    percent=P          steps, in per cent of the source's

Everything else is the source's, except that the learning rate is constant after the warm-up, at half the source's peak.
Of an imported model neither steps nor rate are known: 1,000 steps at 5e-5; set --config.train.num_steps to a part of
its steps, and --config.optimizer.learning_rate to half its peak.

Expect (`results/retrofit`, 5.1 M parameters, trained at 128 bytes, 40 % of the steps, perplexity at 128 and 4096):
RoPE 7.10 and 54.50, YaRN 7.10 and 33.00; ALiBi with DAPE1x3 7.38 and 7.13, Kerple with DAPE1x3 7.40 and 7.27.
"""

from ml_collections import ConfigDict

from dape_jax.configs import common, continued
from dape_jax.errors import require


def get_config(argument: str | None = None) -> ConfigDict:
    """Return the recipe's config for an argument; see the module's docstring."""
    choice = common.parse_argument(argument, source="", bias="alibi", percent=40.0, seed=-1)
    allowed = "must be bias=alibi or bias=kerple; for other methods use configs/continued.py"
    require(choice["bias"] in ("alibi", "kerple"), "config argument", f"bias={choice['bias']}", allowed)
    require(0 < choice["percent"], "config argument", f"percent={choice['percent']}", "must be positive")
    method = f"rotary=none,bias={choice['bias']},processor=dape,kernel=3,seed={choice['seed']}"
    spec = continued.get_config(f"source={choice['source']},{method}").to_dict()
    allowed = "must be a run of a language model, not of a task"
    require("path" in spec["data"], "config argument", f"source={choice['source']}", allowed)
    rate, num_steps = spec["optimizer"]["learning_rate"], spec["train"]["num_steps"]
    constant = {"schedule": "cosine", "final_fraction": 1.0, "decay_steps": 0}
    spec["optimizer"] |= {"learning_rate": rate / 2} | constant
    if spec["data"]["path"] or spec["data"]["mixture"]:  # an imported model has neither
        spec["train"]["num_steps"] = max(1, round(num_steps * choice["percent"] / 100))
    return ConfigDict(spec)
