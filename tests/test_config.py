"""Configs: extreme and strange values are rejected in one line, before a device is used."""

import copy
import dataclasses
import math
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

from dape_jax.config import (
    CHOICES,
    RunConfig,
    TaskRunConfig,
    choose,
    read_module,
    read_run,
    resolved,
    upgraded,
    without_added,
)
from dape_jax.errors import InputError

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import fuzz_config  # noqa: E402

RECIPES = {
    name: read_module(ROOT / "configs" / f"{name}.py").get_config(argument).to_dict()
    for name, argument in (("quickstart", None), ("che", "task=even_pairs"))
}


def fields_of(kind: type) -> list[tuple[str, str, str, str | None]]:
    """Return every integer and float of a run's config: recipe, section, field, and the choice that has it."""
    recipe = "che" if kind is TaskRunConfig else "quickstart"
    found = []
    for section, cls in typing.get_type_hints(kind).items():
        for name, hint in typing.get_type_hints(cls).items():
            if {int, float} & {hint, *typing.get_args(hint)}:
                found.append((recipe, section, name, None))
    return found


FIELDS = [*fields_of(RunConfig), *fields_of(TaskRunConfig)]
FIELDS += [
    ("quickstart", f"model.{choice}", option.name, name)
    for choice, table in CHOICES.items()
    for name, cls in table.items()
    for option in dataclasses.fields(cls)
    if {int, float} & {(hint := typing.get_type_hints(cls)[option.name]), *typing.get_args(hint)}
]


def changed(recipe: str, section: str, field: str, choice: str | None, value: Any) -> dict[str, Any]:
    spec = copy.deepcopy(RECIPES[recipe])
    parent = spec
    *path, last = section.split(".")
    for name in path:
        parent = parent[name]
    if choice is not None:
        parent[last] = choose(last, choice)
    is_list = isinstance(parent[last][field], list | tuple)
    parent[last][field] = (value,) if is_list else value
    return spec


@pytest.mark.parametrize(("recipe", "section", "field", "choice"), FIELDS, ids=lambda x: str(x))
def test_extreme_numbers_are_refused_in_one_line(recipe, section, field, choice):
    for spec in RECIPES.values():
        read_run(copy.deepcopy(spec))
    for value in (2**63, 10**20, -(2**63), math.inf, -math.inf, math.nan):
        with pytest.raises(InputError) as error:
            read_run(changed(recipe, section, field, choice, value))
        said = str(error.value)
        assert len(said.splitlines()) == 1
        assert said.startswith(f"{section}.{field} = "), said


def test_the_discovery_finds_what_is_known():
    names = {f"{section}.{field}" for _, section, field, _ in FIELDS}
    assert {"model.num_layers", "train.seed", "evaluation.lengths", "mesh.fsdp", "optimizer.beta1"} <= names
    assert {"model.bias.num_buckets", "model.rotary.base", "model.processor.channels", "data.max_position"} <= names


def test_random_configs_are_accepted_or_refused_in_one_line():
    result = fuzz_config.fuzz(fuzz_config.Settings(count=60, seed=2))
    assert set(result["outcomes"]) == {"accepted", "one line"}
    assert result["wrong"] == []


ADDED_TO_MODEL = (
    *("head_dim", "mlp_width", "parallel_residual", "norm", "norm_epsilon", "gated_mlp", "attention_output_bias"),
    *("mlp_bias", "tied_embeddings"),
)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_config_of_an_older_version_means_the_same(recipe):
    """Results of older versions still belong to the same recipes: both configs have the same identity."""
    now = resolved(read_run(copy.deepcopy(RECIPES[recipe]) | {"init": {"source": None, "train_only": None}}))
    now["model"]["rotary"] = choose("rotary", "rope")
    old = copy.deepcopy(now)
    del old["init"]
    del old["model"]["rotary"]["fraction"]
    for field in ADDED_TO_MODEL:
        del old["model"][field]
    assert upgraded(old) == now
    assert without_added(now) == without_added(old) == old
    changed = now | {"model": now["model"] | {"mlp_width": 5, "norm": "rms_norm"}}
    assert upgraded(changed) == changed
    assert without_added(changed)["model"] == old["model"] | {"mlp_width": 5, "norm": "rms_norm"}


@pytest.mark.parametrize("saved", [{}, {"model": 3}, {"model": {"width": "a", "num_heads": 2}}, {"data": []}])
def test_a_config_of_no_version_is_left_as_it_is(saved):
    assert upgraded(saved) == saved


@pytest.mark.parametrize("spec", [{"data": 3}, {"data": None}, {"model": []}])
def test_a_section_that_is_none_is_refused(spec):
    with pytest.raises(InputError):
        read_run(RECIPES["quickstart"] | spec)
