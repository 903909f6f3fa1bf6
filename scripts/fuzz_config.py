"""Read randomly changed configs, and check that each is accepted or rejected in one line.

    python scripts/fuzz_config.py --count=1000 --seed=0

Each config is a recipe of `configs/` with one to three changed fields: other types, extreme numbers, unknown or missing
fields, strings with control characters. It is read as in `train.py`. If it is accepted, the model is traced without
using a device. Any outcome except acceptance or an `InputError` of one line is reported, and the exit status is 1. The
counts are written to OUTPUT/fuzz_config.json.
"""

import collections
import copy
import dataclasses
import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from tqdm import tqdm

from dape_jax import command_line
from dape_jax.command_line import define_flags, flag, from_flags
from dape_jax.config import CHOICES, choose, read_module, read_run
from dape_jax.data.store import follow_corpus
from dape_jax.errors import InputError, printable, require
from dape_jax.files import write_json
from dape_jax.model.transformer import model_structure
from dape_jax.provenance import make_results_directory, provenance

ROOT = Path(__file__).resolve().parent.parent
RECIPES = (("quickstart", None), ("small", None), ("paper", None), ("che", "task=even_pairs"))
SLOW_S = 20  # more than reading and tracing take on a busy machine
TRACED_LAYERS = 64  # models with more layers are not traced, which would be slow
STRANGE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 64, 2**31 - 1, 2**31, 2**32, 2**63, 10**20, -(2**63), 0.0, -0.5, 0.5, 1.0,
    1e308, 1e-320, math.inf, -math.inf, math.nan, "", "auto", "none", "a" * 5000, "\x1b[2J", "\u202e", "\ud800", "1",
    (), (1,), (0,), (-1, 2), (2**63,), ("a",), [], [[1]], {}, {"name": "none"}, {"name": None}, {"name": []}, b"bytes",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked flags."""

    count: int = flag(1000, "Number of configs.")
    seed: int = flag(0, "Seed of the changes.")
    output: str = flag("results/survival", "Directory of the JSON.")

    def __post_init__(self):
        require(self.count > 0, "--count", self.count, "must be positive")


def paths_of(spec: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the paths of all sections and fields."""
    found = [path] if path else []
    if isinstance(spec, dict):
        for name, value in spec.items():
            found += paths_of(value, (*path, name))
    return found


def value_at(spec: Any, path: tuple[str, ...]) -> Any:
    """Return the value at a path, or None if the path does not exist."""
    for name in path:
        if not isinstance(spec, dict) or name not in spec:
            return None
        spec = spec[name]
    return copy.deepcopy(spec)


def change(spec: dict[str, Any], recipes: list[dict[str, Any]], draw: random.Random) -> str:
    """Change one field of a config, and return a description of the change."""
    path = draw.choice(paths_of(spec))
    parent = spec
    for name in path[:-1]:
        parent = parent[name]
    where, name = ".".join(path), path[-1]
    kind = draw.choice(("strange", "integer", "choice", "of a recipe", "of a recipe", "missing", "unknown"))
    if kind == "choice" and path[:1] == ("model",) and len(path) > 1 and path[1] in CHOICES:
        spec["model"][path[1]] = choose(path[1], draw.choice(sorted(CHOICES[path[1]])))
    elif kind == "of a recipe":
        parent[name] = value_at(draw.choice(recipes), path)
    elif kind == "missing":
        del parent[name]
    elif kind == "unknown" and isinstance(parent[name], dict):
        parent[name][draw.choice(["", "learning_rat", "name", "\n"])] = draw.choice(STRANGE)
    elif kind == "integer":
        parent[name] = draw.choice((-1, 1)) * draw.randrange(2 ** draw.randrange(1, 70))
    else:
        parent[name] = copy.deepcopy(draw.choice(STRANGE))
        return f"{where} = {str(parent[name])[:60]!r}"
    return f"{where}: {kind}"


def read(spec: dict[str, Any]) -> None:
    """Read a config, and trace its model."""
    run = read_run(spec)
    if run.model.num_layers > TRACED_LAYERS:
        return
    graphdef, abstract = model_structure(run.model)
    length = min(4, run.train.train_length)
    tokens = jnp.zeros((1, length), jnp.int32)
    jax.eval_shape(lambda params: nnx.merge(graphdef, params).features(tokens), abstract)


def fuzz(settings: Settings) -> dict[str, Any]:
    """Return the counts of outcomes, and the changes that led to any other outcome than acceptance or one line."""
    jax.config.update("jax_platforms", "cpu")
    recipes = []
    for name, argument in RECIPES:
        spec = follow_corpus(read_module(ROOT / "configs" / f"{name}.py").get_config(argument).to_dict())
        if "path" in spec["data"]:
            spec["data"]["path"] = spec["data"]["path"] or "text"  # the paper's recipe has no default
        read(spec)
        recipes.append(spec)
    draw = random.Random(settings.seed)
    outcomes, wrong = collections.Counter(), []
    for number in tqdm(range(settings.count), unit="config"):
        spec = copy.deepcopy(draw.choice(recipes))
        changes = [change(spec, recipes, draw) for _ in range(draw.randint(1, 3)) if spec]
        started = time.monotonic()
        try:
            read(spec)
            outcome, said = "accepted", ""
        except InputError as error:
            said = printable(str(error))
            outcome = "one line" if len(said.splitlines()) == 1 and len(said) < 8000 else "several lines"
        except Exception as error:  # any type: these are the errors that the test looks for
            said = f"{type(error).__name__}: {error}"[:500]
            outcome = type(error).__name__
        if time.monotonic() - started > SLOW_S:
            outcome = f"slow ({outcome})"
        outcomes[outcome] += 1
        if outcome not in ("accepted", "one line"):
            wrong.append({"number": number, "changes": changes, "outcome": outcome, "said": said})
            tqdm.write(f"{changes}: {said[:300]}")
    return {"settings": dataclasses.asdict(settings), "outcomes": dict(sorted(outcomes.items())), "wrong": wrong}


def main(_: list[str]) -> None:
    """Read the configs, and write the counts."""
    settings = from_flags(Settings)
    directory = make_results_directory(Path(settings.output))
    result = fuzz(settings)
    write_json(directory / "fuzz_config.json", result | {"provenance": provenance("flax", "ml-collections")})
    print(json.dumps(result["outcomes"], indent=1))
    if result["wrong"]:
        sys.exit(1)


if __name__ == "__main__":
    define_flags(Settings)
    command_line.run(main)
