"""Configs: every mistake is one line with the field and its value, and what is accepted can be saved and read again."""

import copy
import dataclasses
import math
from typing import Any

import jax
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from dape_jax import config
from dape_jax.config import RESUMABLE_FIELDS, RunConfig, read_run, resolved
from dape_jax.data.store import follow_corpus
from dape_jax.errors import InputError
from dape_jax.model.biases import KerpleConfig
from dape_jax.model.processors import DapeConfig
from dape_jax.model.transformer import GPT_NEOX, LLAMA, TransformerConfig
from dape_jax.recipes import RECIPES, read_module

SPECS = {
    name: follow_corpus(read_module(RECIPES / f"{name}.py").get_config(argument).to_dict())
    for name, argument in (("quickstart", None), ("che", "task=even_pairs"))
}
STRANGE: tuple[Any, ...] = (
    None, True, 0, -1, 3, 2**31, 2**63, -(2**63), 0.5, 1e308, math.inf, math.nan, "", "auto", "none", "a" * 5000,
    "\x1b[2J", "\ud800", "1", (), (1,), (-1, 2), (2**63,), ("a",), [[1]], {}, {"name": "none"}, {"name": []}, b"bytes",
)  # fmt: skip


def messages_of(spec: Any) -> list[str]:
    with pytest.raises(InputError) as error:
        read_run(spec)
    return list(error.value.messages)


def with_value(spec: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return a copy of nested dicts with another value at a path."""
    return spec | {path[0]: with_value(spec[path[0]], path[1:], value) if path[1:] else value}


def test_all_mistakes_are_reported_at_once():
    spec = copy.deepcopy(SPECS["quickstart"]) | {"trian": {}, "mesh": 3}
    spec["model"] |= {"widht": 3, "bias": {"name": "kerpel"}, "processor": {"name": "dape", "kernal_width": 3}}
    spec["model"] |= {"num_layers": True, "norm_epsilon": "small", "window": 1.5, "rotary": "rope", "dropout": math.nan}
    spec["model"] |= {"attention": {"name": "blockwise", "block_size": 2**63}}
    spec["train"] |= {"num_steps": "x", "profile_steps": 3, "seed": -(2**63)}
    spec["evaluation"] |= {"lengths": [8, "a"], "last_tokens": 10**20}
    spec["optimizer"] = {"epsilon": math.inf}
    expected = {
        "trian = {}": "train?",
        "mesh = 3": "section",
        "model.widht = 3": "width?",
        "model.bias.name = 'kerpel'": "kerple?",
        "model.processor.kernal_width = 3": "kernel_width?",
        "model.num_layers = True": "int",
        "model.norm_epsilon = 'small'": "float",
        "model.window = 1.5": "int",
        "model.rotary = 'rope'": "name",
        "model.dropout = nan": "finite",
        "model.attention.block_size = 9223372036854775808": "2**32",
        "train.num_steps = 'x'": "int",
        "train.seed = -9223372036854775808": "2**32",
        "evaluation.last_tokens = 100000000000000000000": "2**32",
        "optimizer.epsilon = inf": "finite",
        "train.profile_steps = 3": "list",
        "evaluation.lengths = [8, 'a']": "int",
        "optimizer.learning_rate": "missing",
    }
    found = messages_of(spec)
    assert len(found) == len(expected), found
    for start, word in expected.items():
        assert any(message.startswith(start) and word in message for message in found), (start, found)
    for damaged in ({}, {"data": 3}, {"model": []}, SPECS["quickstart"] | {"data": None}):
        assert messages_of(damaged)
    with pytest.raises(InputError, match=r"data\.task = 'even_pairs'"):
        RunConfig.from_dict(SPECS["che"])


def paths_of(spec: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    inner = spec.items() if isinstance(spec, dict) else ()
    return [*([path] if path else []), *(found for name, value in inner for found in paths_of(value, (*path, name)))]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_config_is_accepted_or_refused_in_one_line_for_each_mistake(data):
    spec = SPECS[data.draw(st.sampled_from(sorted(SPECS)))]
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(paths_of(spec)))
        spec = with_value(spec, path, data.draw(st.sampled_from(STRANGE)))
    try:
        run = read_run(spec)
    except InputError as error:
        lines = error.messages
    else:
        lines = ("accepted",)
        assert read_run(resolved(run)) == run
    assert all(0 < len(line) < 8000 and "\n" not in line for line in lines)


def test_a_huge_number_is_checked_without_memory_for_it():
    sizes = {"width": 64, "num_heads": 4, "vocab_size": 257}
    assert TransformerConfig(num_layers=10**15, alternate_layers=(10**14,), alternate_window=8, **sizes).layer_kinds


def test_fields_that_may_change_on_resume_change_no_parameter():
    same = {"model.num_layers", "model.dtype", "data.seed", "optimizer.beta1", "train.seed", "train.batch_size"}
    assert not same & set(RESUMABLE_FIELDS)
    assert {"mesh", "evaluation", "model.attention", "data.path", "train.accumulation_steps"} <= set(RESUMABLE_FIELDS)
    saved = resolved(read_run(SPECS["quickstart"]))
    new = with_value(with_value(saved, ("mesh", "fsdp"), 1), ("train", "seed"), 7)
    assert config.differences(saved, new, ignored=RESUMABLE_FIELDS) == ["train.seed: saved 0, now 7"]


def test_automatic_fields_follow_the_devices_and_on_resume_the_saved_run(monkeypatch):
    spec = copy.deepcopy(SPECS["quickstart"])
    first = read_run(spec)
    saved = {"config": resolved(first)}
    assert (first.model.vocab_multiple, first.model.dtype) == (1, "float32")
    for tensor, on_accelerators in ((2, 128), (3, 384)):
        run = read_run(with_value(spec, ("mesh", "tensor"), tensor))
        assert run.model.vocab_multiple == tensor
        with monkeypatch.context() as patch:
            patch.setattr(jax, "default_backend", lambda: "gpu")
            run = read_run(with_value(spec, ("mesh", "tensor"), tensor))
            assert (run.model.vocab_multiple, run.model.dtype) == (on_accelerators, "bfloat16")
            followed = read_run(with_value(config.follow_saved(spec, saved), ("mesh", "tensor"), tensor))
            assert followed.model == first.model
            assert config.follow_saved(resolved(run), saved) == resolved(run)
    assert config.follow_saved(spec, None) == spec
    del saved["config"]["model"]["vocab_multiple"]  # as in a run of an older version
    assert read_run(saved["config"]) == first


def test_a_task_uses_no_kernel():
    """Positions of a tape may skip some; `auto` chooses no kernel then."""
    causal = with_value(SPECS["che"], ("model", "causal"), True)
    auto, fused = (with_value(causal, ("model", "attention"), {"name": name}) for name in ("auto", "fused"))
    assert read_run(auto).model.causal
    assert messages_of(fused)[0].startswith("model.attention = Fused(")


def test_the_defaults_of_a_model_are_the_papers():
    model = TransformerConfig(num_layers=2, width=64, num_heads=4, vocab_size=257)
    assert (model.num_kv_heads, model.head_dim, model.mlp_width, model.num_outputs) == (4, 16, 256, 257)
    assert (model.bias, model.processor, model.dtype) == (KerpleConfig(), DapeConfig(), "float32")
    assert model == dataclasses.replace(model, **GPT_NEOX) != dataclasses.replace(model, **LLAMA)
    given = {name: value for name, value in tiny.SPEC["model"].items() if name not in GPT_NEOX}
    assert config.read_model(given) == config.read_model(tiny.SPEC["model"])
