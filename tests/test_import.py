"""Import of Hugging Face checkpoints: equal to transformers, and safe with damaged or hostile ones."""

import dataclasses
import functools
import json
import math
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny
import torch
import transformers
from flax import nnx

from dape_jax.config import choose, read_run
from dape_jax.errors import InputError, printable
from dape_jax.evaluation.options import PerplexityOptions
from dape_jax.evaluation.perplexity import evaluate
from dape_jax.evaluation.trained import read_trained, restore
from dape_jax.model.transformer import TransformerConfig, flat_params, model_structure
from dape_jax.pretrained import load
from dape_jax.pretrained.families import FAMILIES, family_of
from dape_jax.pretrained.files import INDEX_FILE, open_source
from dape_jax.pretrained.load import import_run
from dape_jax.sharding import MeshConfig, make_mesh
from dape_jax.tools.completion import Sampling, complete, generate
from dape_jax.training import checkpoint, loop

torch.set_num_threads(1)

SIZES = {
    "vocab_size": 260,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"rope_theta": 1000.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0, "original_max_position_embeddings": 64}
ALL_LAYERS = {"use_sliding_window": True, "max_window_layers": 0}
TIED = {"tie_word_embeddings": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "pythia": ("gpt_neox", {}),
    "neox-sequential": ("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 1.0, **TIED}),
    "neox-no-bias": ("gpt_neox", {"attention_bias": False, "rotary_pct": 0.5, "hidden_act": "gelu_new"}),
    "llama": ("llama", {}),
    "llama3": ("llama", {"num_key_value_heads": 2, "rope_parameters": LLAMA3}),
    "llama-narrow": ("llama", {"head_dim": 6, "num_key_value_heads": 1, "rms_norm_eps": 1e-3, **TIED}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 50.0}}),
    "mistral": ("mistral", {"num_key_value_heads": 2, "sliding_window": 5}),
    "mistral-no-window": ("mistral", {"num_key_value_heads": 4, "sliding_window": None, "head_dim": 10}),
    "qwen2": ("qwen2", {"num_key_value_heads": 2, **TIED}),
    "qwen2-window": ("qwen2", {"num_key_value_heads": 4, "sliding_window": 7, **ALL_LAYERS}),
}
FAST = {"pythia", "llama3", "mistral", "qwen2"}  # one of each family
EVERY_MODEL = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MODELS]


@functools.cache
def theirs(name: str) -> Any:
    """Return a random model of transformers, none of whose parameters is 0, in evaluation mode."""
    kind, options = MODELS[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES | options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for key, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, float(key.endswith("norm.weight")), 0.2)
    return model.eval()


@pytest.fixture(scope="session")
def directories(tmp_path_factory) -> Callable[[str], Path]:
    """Return a function from a model's name to its directory. Read only."""
    root = tmp_path_factory.mktemp("pretrained")

    @functools.cache
    def saved(name: str) -> Path:
        theirs(name).save_pretrained(root / name)
        return root / name

    return saved


@pytest.fixture(scope="session")
def runs(tmp_path_factory, directories) -> Callable[[str], Path]:
    """Return a function from a model's name to the run that it was imported as. Read only."""
    root = tmp_path_factory.mktemp("imported")

    @functools.cache
    def imported(name: str) -> Path:
        import_run(directories(name), root / name, tokenizer="bytes")
        return root / name

    return imported


def ours(workdir: Path, **changes: Any) -> tuple[TransformerConfig, Any]:
    """Return an imported model, and its parameters on the host."""
    trained = read_trained(workdir, "newest", {})
    _, params = restore(trained)
    return dataclasses.replace(trained.run.model, **changes), jax.device_get(params)


def logits(config: TransformerConfig, params: Any, tokens: np.ndarray) -> np.ndarray:
    graphdef, _ = model_structure(config)
    return np.asarray(jax.jit(lambda params, x: nnx.merge(graphdef, params)(x))(params, tokens.astype(np.int32)))


def tokens(batch: int = 2, length: int = 20) -> np.ndarray:
    return np.random.default_rng(0).integers(0, SIZES["vocab_size"], (batch, length))


# ---- the same model


@pytest.mark.hf
@pytest.mark.parametrize("name", EVERY_MODEL)
def test_logits_are_those_of_transformers(name, runs):
    config, params = ours(runs(name))
    with torch.no_grad():
        expected = theirs(name)(torch.tensor(tokens())).logits.numpy()
    assert expected.std() > 0.5
    np.testing.assert_allclose(logits(config, params, tokens()), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_logits_in_float64(name, runs, monkeypatch):
    """Transformers computes norms, softmax and angles in float32, and is patched to compute them in float64.

    The angles are ours: those of transformers are float32, and are compared in the test above.
    """
    model, (config, params) = theirs(name), ours(runs(name))
    num_rotated = config.rotary.num_rotated(config.head_dim)
    frequencies = torch.tensor(config.rotary.frequencies(num_rotated))
    scale = config.rotary.scale

    def angles(self, x, position_ids, *args, **kwargs):
        half = position_ids[..., None].double() * frequencies
        both = torch.cat([half, half], dim=-1)
        return both.cos() * scale, both.sin() * scale

    def norm(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim=dim))
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            monkeypatch.setattr(type(module), "forward", angles)
        if type(module).__name__.endswith("RMSNorm"):
            monkeypatch.setattr(type(module), "forward", norm)
    try:
        with torch.no_grad():
            expected = model.double()(torch.tensor(tokens())).logits.numpy()
    finally:
        model.float()
    params = jax.tree.map(lambda leaf: leaf.astype(np.float64), params)
    with jax.enable_x64(True):
        found = logits(dataclasses.replace(config, dtype="float64"), params, tokens())
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.hf
@pytest.mark.parametrize("name", EVERY_MODEL)
def test_loss_and_gradients_are_those_of_transformers(name, runs, directories):
    """Compare the gradients of all parameters; a tensor's gradient is converted like the tensor."""
    model, (config, params) = theirs(name), ours(runs(name))
    x = tokens()
    model.zero_grad()
    expected_loss = model(torch.tensor(x), labels=torch.tensor(x)).loss
    expected_loss.backward()
    gradients = {key: parameter.grad.numpy() for key, parameter in model.named_parameters()}
    if MODELS[name][0] == "gpt_neox" and not config.tied_embeddings:  # files have the name of older versions
        gradients["embed_out.weight"] = gradients.pop("lm_head.weight")
    graphdef, _ = model_structure(config)

    def loss(params):
        log_probs = jax.nn.log_softmax(nnx.merge(graphdef, params)(jnp.asarray(x[:, :-1], jnp.int32)))
        return -jnp.take_along_axis(log_probs, x[:, 1:, None], axis=-1).mean()

    found_loss, found = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(found_loss, expected_loss.item(), rtol=1e-5)
    tensors = family_of(open_source(directories(name)).config).tensors
    flat = {"/".join(path): np.asarray(leaf) for path, leaf in flat_params(found).items()}
    assert flat.keys() == tensors.keys()
    for path, tensor in tensors.items():
        layers = range(config.num_layers) if path.startswith("layers/") else (0,)
        expected = [tensor.convert(gradients[tensor.name.format(layer=layer)]) for layer in layers]
        expected = np.stack(expected) if path.startswith("layers/") else expected[0]
        np.testing.assert_allclose(flat[path], expected, rtol=1e-4, atol=1e-4, err_msg=path)
    assert max(np.abs(leaf).max() for leaf in flat.values()) > 0.05


@pytest.mark.hf
@pytest.mark.parametrize("name", EVERY_MODEL)
def test_greedy_generation_is_that_of_transformers(name, runs):
    trained = read_trained(runs(name), "newest", {})
    mesh, params = restore(trained)
    prompts = tokens(4, 9)
    with torch.no_grad():
        x = torch.tensor(prompts)
        options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(x)}
        expected = theirs(name).generate(x, **options)
    greedy = Sampling(0.0, None, 1.0)
    steps = generate(trained.run.model, params, mesh, list(prompts), max_new_tokens=20, sampling=greedy)
    found = np.stack(list(steps), axis=1)
    np.testing.assert_array_equal(found, expected[:, 9:])
    assert len(set(found.flat)) > 3


def test_dape_from_the_identity_changes_no_bit(runs):
    config, params = ours(runs("llama3"))
    with_dape = read_run_with(runs("llama3"), processor=choose("processor", "dape", channels=4, init="identity"))
    _, abstract = model_structure(with_dape)
    flat = flat_params(params)

    def value(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        names = tuple(key.key for key in path)
        if names in flat:
            return flat[names]
        return np.zeros(leaf.shape, leaf.dtype) if "output" in names[-1] else np.full(leaf.shape, 0.3, leaf.dtype)

    extended = jax.tree_util.tree_map_with_path(value, abstract)
    assert len(flat_params(extended)) > len(flat)
    expected = logits(config, params, tokens())
    np.testing.assert_array_equal(logits(with_dape, extended, tokens()), expected)
    changed = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf + 0.3 if "output_WCH" in path[-1].key else leaf, extended
    )
    assert np.abs(logits(with_dape, changed, tokens()) - expected).max() > 1e-2


def read_run_with(workdir: Path, **model: Any) -> TransformerConfig:
    spec = checkpoint.read_config(workdir)["config"]
    spec["model"] |= {name: dict(value) for name, value in model.items()}
    return read_run(spec).model


# ---- a run like any other


def test_an_imported_run_is_continued_and_evaluated_with_its_continuation(runs, tmp_path, text):
    """Start a run with another method from its weights; evaluate both on that run's text, one also with YaRN."""
    spec = checkpoint.read_config(runs("pythia"))["config"]
    spec["model"] |= {"rotary": {"name": "none"}, "bias": {"name": "kerple"}}
    spec["data"] |= {"path": str(text), "cache_dir": str(tmp_path / "cache"), "validation_fraction": 0.3}
    spec["train"] |= {"train_length": 16, "batch_size": 8, "num_steps": 2, "eval_interval": 2, "checkpoint_interval": 2}
    spec["train"] |= {"validation_batches": 1}
    spec["init"] = {"source": str(runs("pythia")), "train_only": "bias"}
    loop.train(spec, tmp_path / "continued")
    options = PerplexityOptions(lengths=(16, 32), last_tokens=16, max_windows=4, rotary=("rope", "yarn"))
    evaluate([runs("pythia"), tmp_path / "continued"], options, output=tmp_path / "results")
    results = json.loads((tmp_path / "results" / "lengths.json").read_text())["runs"]
    assert [(run["name"], run["rotary"]) for run in results] == [
        ("pythia", "rope"),
        ("pythia+yarn", "yarn"),
        ("continued", "rope"),
    ]
    before, after = (flat_params(ours(workdir)[1]) for workdir in (runs("pythia"), tmp_path / "continued"))
    for path, leaf in before.items():
        np.testing.assert_array_equal(leaf, after[path])


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("import") / "text"
    directory.mkdir()
    for number in range(12):
        (directory / f"{number}.txt").write_text(f"number {number} is " + "a long text of a few words " * 8)
    return directory


def test_an_imported_run_has_no_text(runs, text, tmp_path):
    with pytest.raises(InputError, match=r"data.path = None: .*was imported, without a text; name one with --data"):
        evaluate([runs("pythia")])
    spec = checkpoint.read_config(runs("pythia"))["config"]
    spec["data"] |= {"path": str(text), "cache_dir": str(tmp_path)}
    with pytest.raises(InputError, match=r"workdir = .*: holds an imported model, which is not trained in place"):
        loop.train(spec, runs("pythia"))
    with pytest.raises(InputError, match=r"data.path = None: must be the path of text"):
        loop.train(spec | {"data": spec["data"] | {"path": None}}, tmp_path / "run")


KILLED_WHILE_SAVING = """
import os, sys
from pathlib import Path
from dape_jax.pretrained.load import import_run
from dape_jax.training import checkpoint

checkpoint._Manager.wait_until_finished = lambda manager: os._exit(9)
import_run(Path(sys.argv[1]), Path(sys.argv[2]), tokenizer="bytes")
"""


def test_an_import_that_was_killed_can_be_repeated(runs, directories, tmp_path):
    command = [sys.executable, "-c", KILLED_WHILE_SAVING, str(directories("pythia")), str(tmp_path / "run")]
    assert subprocess.run(command, check=False).returncode == 9
    assert (tmp_path / "run" / "checkpoints").exists()
    assert checkpoint.read_config(tmp_path / "run") is None
    import_run(directories("pythia"), tmp_path / "run", tokenizer="bytes")
    assert checkpoint.step_names(tmp_path / "run") == ["0"]
    (config, params), (expected_config, expected) = ours(tmp_path / "run"), ours(runs("pythia"))
    assert config == expected_config
    chex.assert_trees_all_equal(params, expected)


def test_a_run_is_not_overwritten(runs, directories):
    before = sorted(file for file in runs("pythia").rglob("*"))
    with pytest.raises(InputError, match=r"workdir = .*: must not contain a run"):
        import_run(directories("llama3"), runs("pythia"), tokenizer="bytes")
    assert sorted(file for file in runs("pythia").rglob("*")) == before


@pytest.mark.slow
def test_a_model_with_a_sentencepiece_tokenizer_is_used_like_any_other(text, tmp_path, capsys, caplog):
    """Import the model, continue it on raw text that its tokens change, evaluate it, and generate."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"vocab_size": 448, **TIED}))
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.5)
    torch.nn.init.zeros_(model.model.embed_tokens.weight[420:])  # ids of no token, which the tools never draw
    model.eval().save_pretrained(tmp_path / "llama")
    texts = [file.read_text() for file in sorted(text.iterdir())]
    content = tiny.sentencepiece_bpe(texts)
    (tmp_path / "llama" / "tokenizer.json").write_text(json.dumps(content))
    import_run(tmp_path / "llama", tmp_path / "run")
    words = Path(shutil.copytree(text, tmp_path / "text"))
    (words / "lossy.txt").write_text("one ▁ of twelve and a few words more " * 8)

    spec = checkpoint.read_config(tmp_path / "run")["config"]
    assert spec["data"]["tokenizer"] == str(tmp_path / "run" / "tokenizer.json")
    spec["data"] |= {"path": str(words), "cache_dir": str(tmp_path / "cache"), "validation_fraction": 0.3}
    spec["train"] |= {"train_length": 16, "batch_size": 8, "num_steps": 2, "eval_interval": 2, "checkpoint_interval": 2}
    spec["train"] |= {"validation_batches": 1}
    spec["init"] = {"source": str(tmp_path / "run"), "train_only": None}
    loop.train(spec, tmp_path / "continued")
    assert "1 of 13 documents cannot be decoded exactly" in caplog.text
    options = PerplexityOptions(lengths=(16,), last_tokens=16, max_windows=4, data=str(words))
    evaluate([tmp_path / "run", tmp_path / "continued"], options, output=tmp_path / "results")
    results = json.loads((tmp_path / "results" / "lengths.json").read_text())["runs"]
    assert [run["name"] for run in results] == ["run", "continued"]

    upstream = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "llama" / "tokenizer.json"))
    prompt = "number 3 is a long"
    capsys.readouterr()
    (completion,) = complete(tmp_path / "run", [prompt.encode()], max_new_tokens=12, sampling=Sampling(0.0))
    shown = capsys.readouterr().out
    x = torch.tensor([upstream.encode(prompt, add_special_tokens=False)])
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(x)}
    with torch.no_grad():
        expected = upstream.decode(model.generate(x, **options)[0], skip_special_tokens=False)
    assert prompt + completion == expected
    assert shown == printable(expected + "\n", keep="\n\t")


@pytest.mark.slow
def test_log_likelihoods_of_the_harness_are_those_of_transformers(runs):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from dape_jax.tools.lm_eval import DapeLM

    model = DapeLM(runs("llama3"), max_length=48)
    context, continuation = "a text of words", " and what comes after it"
    request = Instance("loglikelihood", {}, (context, continuation), 0)
    ((found, _),) = model.loglikelihood([request], disable_tqdm=True)
    ids = torch.tensor([list((context + continuation).encode())])
    with torch.no_grad():
        log_probs = theirs("llama3")(ids).logits.log_softmax(-1)[0, :-1]
    expected = log_probs[torch.arange(ids.shape[1] - 1), ids[0, 1:]][len(context) - 1 :].sum()
    assert found == pytest.approx(expected.item(), abs=1e-4)


@pytest.mark.parametrize("mesh", ["fsdp", pytest.param("mix", marks=pytest.mark.slow)])
def test_parameters_are_put_where_the_mesh_says(mesh, directories, tmp_path, runs):
    """Shards on eight devices are bitwise equal to one device."""
    sizes = {"fsdp": MeshConfig(1, 8, 1, 1), "mix": MeshConfig(2, 2, 1, 2)}[mesh]
    source = open_source(directories("llama3"))
    config = read_trained(runs("llama3"), "newest", {}).run.model
    devices = make_mesh(sizes)
    params = flat_params(load.read_params(source, family_of(source.config).tensors, config, devices))
    up = params["layers", "mlp", "up_DF"]
    assert up.sharding.shard_shape(up.shape) == (3, 32 // sizes.fsdp, 24 // sizes.tensor)
    expected = flat_params(ours(runs("llama3"))[1])
    chex.assert_trees_all_equal({path: np.asarray(leaf) for path, leaf in params.items()}, expected)


@pytest.mark.hf
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_and_shards_are_read_exactly(dtype, tmp_path):
    model = type(theirs("llama3"))(theirs("llama3").config).to(dtype)
    model.save_pretrained(tmp_path / "model", max_shard_size="8KB")
    assert (tmp_path / "model" / INDEX_FILE).exists()
    import_run(tmp_path / "model", tmp_path / "run", tokenizer="bytes")
    _, params = ours(tmp_path / "run")
    expected = model.model.layers[1].mlp.up_proj.weight.detach().float().numpy().T
    np.testing.assert_array_equal(params["layers"]["mlp"]["up_DF"][1], expected)


def test_a_copy_of_tied_embeddings_and_old_buffers_are_ignored(directories, tmp_path, runs):
    directory = copied(directories("qwen2"), tmp_path)
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    more = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    more |= {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, "f4")}
    safetensors.numpy.save_file(tensors | more, directory / "model.safetensors")
    import_run(directory, tmp_path / "run", tokenizer="bytes")
    chex.assert_trees_all_equal(ours(tmp_path / "run")[1], ours(runs("qwen2"))[1])


@pytest.mark.hf
def test_old_names_of_options_mean_the_same(directories):
    """Read configs of transformers 4, such as published ones."""
    new = json.loads((directories("llama3") / "config.json").read_text())
    scaling = dict(new["rope_parameters"])
    old = {name: value for name, value in new.items() if name != "rope_parameters"}
    old |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    assert family_of(old).model == family_of(new).model
    new = json.loads((directories("pythia") / "config.json").read_text())
    old = {name: value for name, value in new.items() if name != "rope_parameters"}
    assert family_of(old | {"rotary_pct": 0.25, "rotary_emb_base": 10_000}).model == family_of(new).model
    assert family_of(old | {"rotary_pct": 0.5, "rotary_emb_base": 500}).model["rotary"] == {
        "name": "rope",
        "base": 500.0,
        "fraction": 0.5,
    }


@pytest.mark.hf
@pytest.mark.parametrize("kind", ["gpt_neox", "llama", "mistral", "qwen2"])
def test_fields_that_a_config_lacks_have_the_values_of_transformers(kind):
    """Check, for example, Mistral's window and number of key/value heads. Null and disabled options are accepted."""
    sizes = {"vocab_size": 260, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 32}
    sizes |= {"intermediate_size": 24}
    whole = transformers.AutoConfig.for_model(kind, **sizes).to_dict()
    short = {"model_type": kind, **sizes}
    assert set(whole) - set(short)
    harmless = {"quantization_config": None, "rope_scaling": None, "use_mrope": False, "rope_interleaved": False}
    harmless |= {"pruned_heads": {}, "task_specific_params": {}, "suppress_tokens": [], "finetuning_task": ""}
    harmless |= {"is_causal": True}
    expected = family_of(whole)
    for found in (family_of(short), family_of(short | harmless)):
        assert (found.model, found.max_length) == (expected.model, expected.max_length)
        assert found.tensors.keys() == expected.tensors.keys()


PART_WINDOW = {"layer_types": None, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "layer_types = .*: must be full_attention"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types = .*: must be full_attention for all layers, or sl"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types = "),
        ({"layer_types": [[[]]] * 3}, "layer_types = "),
        (PART_WINDOW, "max_window_layers = 1: must be 0"),
    ],
)
def test_windows_in_some_layers_are_refused(changes, message, directories):
    config = json.loads((directories("qwen2") / "config.json").read_text())
    with pytest.raises(InputError, match=message):
        family_of(config | changes)


def test_every_family_is_tested():
    others = {"dape"}  # in test_export.py
    assert {kind for kind, _ in MODELS.values()} == set(FAMILIES) - others
    assert {MODELS[name][0] for name in FAST} == set(FAMILIES) - others


MEASURE = """
import json, runpy, sys
from pathlib import Path
config, directory = json.loads(sys.argv[1]), Path(sys.argv[2])
print(json.dumps(runpy.run_path("scripts/import_memory.py")["measure"](config, "BF16", directory)))
"""


@pytest.mark.slow
def test_the_memory_of_an_import_is_that_of_one_tensor(tmp_path):
    """Measure memory beyond the parameters, on simulated devices, and 0.3 GB of compiler and allocator."""
    config = {"model_type": "gpt_neox", "hidden_size": 512, "num_hidden_layers": 64, "num_attention_heads": 8}
    config |= {"intermediate_size": 2048, "vocab_size": 50304}
    command = [sys.executable, "-c", MEASURE, json.dumps(config), str(tmp_path)]
    root = Path(__file__).parent.parent
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["parameter_bytes"] > 8 * found["largest_tensor_bytes"]  # so that a second copy would be too large
    allowed = found["largest_tensor_bytes"] + 300 * 2**20
    assert found["parameter_bytes"] > 2 * allowed
    assert 0 < found["peak_read_bytes"] - found["parameter_bytes"] < allowed


# ---- damaged and hostile input


def copied(directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(directory, tmp_path / "copy"))


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown family": ({"model_type": "bert"}, "model_type = 'bert': must be one of"),
    "no family": ({"model_type": None}, "model_type = None: must be of type str"),
    "unknown field": ({"qk_norm": True}, "qk_norm = True: is not supported"),
    "wrong type": ({"hidden_size": "16"}, "hidden_size = '16': must be of type int"),
    "boolean size": ({"hidden_size": True}, "hidden_size = True: must be of type int"),
    "missing size": ({"hidden_size": None}, "hidden_size = None: must be of type int"),
    "negative": ({"num_hidden_layers": -1}, "num_hidden_layers = -1: must be positive"),
    "huge": ({"num_hidden_layers": 10**12}, "model.num_layers = 1000000000000: must be at most"),
    "heads": ({"num_key_value_heads": 3}, "num_key_value_heads = 3: must divide num_attention_heads = 4"),
    "other size": ({"intermediate_size": 25}, r"gate_proj.weight: shape = \[24, 32\]: must be \[25, 32\]"),
    "activation": ({"hidden_act": "mish"}, "hidden_act = 'mish': must be one of"),
    "scaling": ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type = 'dynamic': must be one of"),
    "no factor": ({"rope_parameters": {"rope_type": "linear"}}, "factor = None: must be of type float"),
    "infinite": ({"rope_parameters": {"rope_type": "linear", "factor": float("inf")}}, "factor = inf"),
    "yarn": ({"rope_parameters": YARN | {"mscale": 2.0}}, "mscale = 2.0: is not supported"),
    "yarn's scale": ({"rope_parameters": YARN | {"attention_factor": 2.0}}, "attention_factor = 2.0: must be"),
    "yarn's slow angles": ({"rope_parameters": YARN | {"beta_slow": 1e-320}}, "model.rotary.beta_slow = 1e-320: must"),
    "yarn's fast angles": ({"rope_parameters": YARN | {"beta_fast": 1e299}}, r"model.rotary.beta_fast = 1e\+299: must"),
    "more layers": ({"num_hidden_layers": 4}, r"model.layers.3.self_attn.q_proj.weight: is missing"),
    "fewer layers": ({"num_hidden_layers": 2}, r"model.layers.2.\S+ = 'tensor': is not supported"),
    "vocabulary": ({"vocab_size": 100}, "vocab_size = 100: must be at least the tokenizer's 257"),
    "most layers": ({"num_hidden_layers": 10_000}, r"model.layers.3.\S+: is missing"),
    "much wider": ({"hidden_size": 2**20}, r"shape = \[260, 32\]: must be \[260, 1048576\]"),
    "huge float": ({"rms_norm_eps": 10**400}, r"rms_norm_eps = 10+\.\.: must be finite"),
    "NaN": ({"rms_norm_eps": math.nan}, "config.json: "),
    "field of two lines": ({"a\nb": 1}, r"a\\nb = 1: is not supported"),
    "long field": ({"a" * 10_000: "b" * 10_000}, r"a\.\. = 'b+\.\.: is not supported"),
    "nested field": (
        {"a": functools.reduce(lambda inner, _: [inner], range(400), [])},
        r"a = \[\[.*: is not",
    ),
    "both forms of scaling": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "must be missing if there is rope_"),
    "part of a head": (
        {"rope_parameters": LLAMA3 | {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor = 0.5: ",
    ),
    "rotation of pairs": ({"rope_interleaved": True}, "rope_interleaved = True: is not supported"),
    "not causal": ({"is_causal": False}, "is_causal = False: is not supported"),
    "a number": ({"logit_scale": 0}, "logit_scale = 0: is not supported"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config = .*: is not supported"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_that_are_refused(case, directories, tmp_path):
    changes, message = CONFIGS[case]
    directory = copied(directories("llama3"), tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    refused(directory, tmp_path, message)


def refused(directory: Path, tmp_path: Path, message: str, tokenizer: str | None = "bytes") -> None:
    """Assert that an import ends with one short line, and without a run directory."""
    with pytest.raises(InputError, match=message) as error:
        import_run(directory, tmp_path / "run", tokenizer=tokenizer)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000
    assert not (tmp_path / "run" / "config.json").exists()


def header(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def write(file: Path, head: Any, body: bytes) -> None:
    encoded = head if isinstance(head, bytes) else json.dumps(head).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + body)


def change_header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def damage(directory: Path) -> None:
        head, body = header(directory / "model.safetensors")
        change(head)
        write(directory / "model.safetensors", head, body)

    return damage


NAME = "model.layers.1.mlp.up_proj.weight"


def overlap(head: dict[str, Any]) -> None:
    names = [name for name in head if name != "__metadata__"]
    head[names[1]] = head[names[0]]


def with_nan(directory: Path) -> None:
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    tensors[NAME][3, 2] = np.nan
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")


def without(directory: Path) -> None:
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    del tensors[NAME]
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")


def in_another_dtype(directory: Path) -> None:
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    tensors[NAME] = tensors[NAME].astype(np.int8)
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")


def another_file(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Return a damage that replaces a file."""

    def replace(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        make(directory / name)

    return replace


def twice_in_the_header(directory: Path) -> None:
    head, body = header(directory / "model.safetensors")
    again = json.dumps({NAME: head[NAME] | {"data_offsets": [0, 24 * 32 * 4]}})
    write(directory / "model.safetensors", (json.dumps(head)[:-1] + "," + again[1:]).encode(), body)


def shard_linked_elsewhere(directory: Path) -> None:
    index(lambda names: dict.fromkeys(names, "model-1.safetensors"))(directory)
    (directory / "model.safetensors").rename(directory.parent / "outside.safetensors")
    (directory / "model-1.safetensors").symlink_to(directory.parent / "outside.safetensors")


def resized(size: int) -> Callable[[Path], object]:
    return lambda directory: os.truncate(directory / "model.safetensors", size)


def index(weight_map: Any) -> Callable[[Path], object]:
    def write_index(directory: Path) -> None:
        names = [name for name in header(directory / "model.safetensors")[0] if name != "__metadata__"]
        chosen = weight_map(names) if callable(weight_map) else weight_map
        (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": chosen}))

    return write_index


def linked_elsewhere(directory: Path) -> None:
    outside = directory.parent / "outside.safetensors"
    (directory / "model.safetensors").rename(outside)
    (directory / "model.safetensors").symlink_to(outside)


def pickled_only(directory: Path) -> None:
    torch.save({"x": torch.zeros(1)}, directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty file": (resized(0), "model.safetensors: cannot be read"),
    "cut in its header": (resized(100), "model.safetensors: cannot be read"),
    "cut in a tensor": (resized(20_000), "model.safetensors: cannot be read"),
    "overlapping tensors": (change_header(overlap), "model.safetensors: cannot be read"),
    "offsets beyond the end": (
        change_header(lambda head: head[NAME].update(data_offsets=[0, 10**15])),
        "model.safetensors: cannot be read",
    ),
    "negative shape": (change_header(lambda head: head[NAME].update(shape=[-24, -32])), "cannot be read"),
    "other shape": (
        change_header(lambda head: head[NAME].update(shape=[32, 24])),
        r"shape = \[32, 24\]: must be",
    ),
    "unknown dtype": (change_header(lambda head: head[NAME].update(dtype="Q7")), "model.safetensors: cannot be read"),
    "header that is too large": (
        lambda directory: (directory / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}"),
        "model.safetensors: cannot be read",
    ),
    "header that is nested": (
        lambda directory: write(directory / "model.safetensors", b'{"a":' * 50_000, b""),
        "model.safetensors: cannot be read",
    ),
    "integers": (in_another_dtype, "up_proj.weight: dtype = 'I8': must be one of"),
    "NaN": (with_nan, "up_proj.weight = 'NaN or infinity': must be finite"),
    "missing tensor": (without, "up_proj.weight: is missing"),
    "additional tensor": (
        lambda directory: safetensors.numpy.save_file(
            safetensors.numpy.load_file(directory / "model.safetensors") | {"more": np.zeros(1, "f4")},
            directory / "model.safetensors",
        ),
        "more = 'tensor': is not supported",
    ),
    "no weights": (lambda directory: (directory / "model.safetensors").unlink(), "must have model.safetensors, or"),
    "pickled weights": (pickled_only, "pytorch_model.bin may run code"),
    "a link to elsewhere": (linked_elsewhere, "must not be a link to a file outside"),
    "index of nothing": (index({}), "weight_map = 'dict': must be a JSON object"),
    "index that is a list": (index([1]), "weight_map = 'list': must be a JSON object"),
    "index to a parent": (
        index({NAME: "../x.safetensors"}),
        "must be the name of a .safetensors file",
    ),
    "index to a root": (index({NAME: "/etc/x.safetensors"}), "must be the name of a .safetensors file"),
    "index to no weights": (index({NAME: "config.json"}), "config.json': must be the name of a .safetensors file"),
    "index to a number": (index({NAME: 3}), "= 3: must be the name of a .safetensors file"),
    "index to a missing shard": (index({NAME: "b.safetensors"}), "b.safetensors: cannot be read"),
    "index that lacks a tensor": (
        index(lambda names: dict.fromkeys(names[1:], "model.safetensors")),
        "must be listed in model.safetensors.index.json",
    ),
    "index with another tensor": (
        index(lambda names: dict.fromkeys([*names, "more"], "model.safetensors")),
        "more = 'model.safetensors': has no such tensor",
    ),
    "config that is a list": (lambda directory: (directory / "config.json").write_text("[1]"), "must be a JSON object"),
    "config that is nested": (
        lambda directory: (directory / "config.json").write_text('{"a":' * 100_000),
        "config.json: cannot be read as JSON",
    ),
    "config that is large": (
        lambda directory: (directory / "config.json").write_text(json.dumps({"a": "b" * 2**20})),
        "config.json: size = 'more than 1048576 bytes': must be at most 1048576",
    ),
    "two shards with one tensor": (
        lambda directory: (
            shutil.copy(directory / "model.safetensors", directory / "b.safetensors"),
            index(lambda names: dict.fromkeys(names, "model.safetensors") | {names[0]: "b.safetensors"})(directory),
        ),
        "must be listed in model.safetensors.index.json with this file",
    ),
    "a tensor twice in the header": (twice_in_the_header, "model.safetensors: cannot be read"),
    "a shard linked to elsewhere": (shard_linked_elsewhere, "must not be a link to a file outside"),
    "links in a circle": (
        another_file("config.json", lambda file: file.symlink_to(file)),
        "config.json: cannot be read|must not be a link|Symlink loop",
    ),
    "a pipe for weights": (another_file("model.safetensors", os.mkfifo), "must be a regular file"),
    "a pipe for a config": (another_file("config.json", os.mkfifo), "must be a regular file"),
    "a pipe for a tokenizer": (another_file("tokenizer.json", os.mkfifo), "must be a regular file"),
    "a directory for weights": (another_file("model.safetensors", Path.mkdir), "must be a regular file"),
    "a tokenizer linked to elsewhere": (
        another_file("tokenizer.json", lambda file: file.symlink_to("/etc/hostname")),
        "tokenizer.json = '/etc/hostname': must not be a link to a file outside",
    ),
    "index with a NUL": (index({NAME: "a\0.safetensors"}), "cannot be read: embedded null"),
    "index with half a character": (index({NAME: "\ud800.safetensors"}), "cannot be read: "),
    "index with a long name": (index({NAME: "a" * 100_000 + ".safetensors"}), r"a\.\.: cannot be read: .*too long"),
    "index with a name of two lines": (index({"a\nb" * 1000: 3}), r"a\\nb.*\.\. = 3: must be the name"),
    "no config": (lambda directory: (directory / "config.json").unlink(), "config.json: cannot be read"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_checkpoints_are_refused_in_one_line(case, directories, tmp_path):
    damage, message = DAMAGES[case]
    directory = copied(directories("llama3"), tmp_path)
    damage(directory)
    refused(directory, tmp_path, message, None if "tokenizer" in case else "bytes")


def test_the_cache_of_the_hub_is_followed_but_no_further(directories, tmp_path, runs):
    """Files of the hub's cache are links from snapshots/COMMIT to blobs."""
    blobs, snapshot = tmp_path / "model" / "blobs", tmp_path / "model" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(directories("llama3").iterdir()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    import_run(snapshot, tmp_path / "run", tokenizer="bytes")
    chex.assert_trees_all_equal(ours(tmp_path / "run")[1], ours(runs("llama3"))[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": None}, "source = .*: has no tokenizer.json; give --tokenizer"),
        ({"tokenizer": "no.json"}, "tokenizer = 'no.json': must be"),
        ({"train_length": 0}, "train_length = 0: must be 1 to 64"),
        ({"train_length": 65}, "train_length = 65: must be 1 to 64"),
        ({"dtype": "int8"}, "model.dtype = 'int8': must be one of"),
        ({"mesh": MeshConfig(1, 1, 1, 8)}, "model.num_heads = 4: must be a multiple of mesh.tensor = 8"),
    ],
)
def test_bad_options_are_named(options, message, directories, tmp_path):
    with pytest.raises(InputError, match=message):
        import_run(directories("llama3"), tmp_path / "run", **{"tokenizer": "bytes"} | options)
    with pytest.raises(InputError, match=r"source = .*: must be a directory"):
        import_run(tmp_path / "nowhere", tmp_path / "run")
