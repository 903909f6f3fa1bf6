"""Import of Hugging Face checkpoints: equal to transformers, and safe with damaged or hostile ones."""

import dataclasses
import functools
import importlib
import json
import math
import os
import re
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny
import tokenizers
import torch
import transformers
from etils import epath
from flax import nnx
from helpers import read_runs
from huggingface_hub.errors import StrictDataclassFieldValidationError
from huggingface_hub.utils import filter_repo_objects

from dape_jax.config import read_model
from dape_jax.data.conventions import Conventions, conventions_of, saved_conventions
from dape_jax.data.tokenizers import Bytes, HfTokenizer, byte_tokenizer_json, train_bpe
from dape_jax.errors import InputError
from dape_jax.evaluation.options import Options
from dape_jax.evaluation.perplexity import evaluate
from dape_jax.evaluation.trained import read_trained, restore
from dape_jax.model.transformer import TransformerConfig, flat_params, model_structure
from dape_jax.pretrained import load
from dape_jax.pretrained.export import export_run
from dape_jax.pretrained.families import FAMILIES, family_of
from dape_jax.pretrained.files import INDEX_FILE, find_source, open_source
from dape_jax.pretrained.load import import_run, run_spec, source_tokenizer
from dape_jax.pretrained.options import ExportFlags, ImportFlags
from dape_jax.sharding import MeshConfig, make_mesh
from dape_jax.tools.completion import complete
from dape_jax.tools.maps import attention_maps, read_tokens
from dape_jax.tools.options import GenerateFlags, MapsFlags
from dape_jax.training import checkpoint, loop

torch.set_num_threads(1)

NAME, WEIGHTS = "model.layers.1.mlp.up_proj.weight", "model.safetensors"
SIZES = {"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 24, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"rope_theta": 1000.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
LONG = {"rope_type": "longrope", "rope_theta": 100.0}
LONG |= {"short_factor": [1.0, 1.1, 1.5, 2.0], "long_factor": [1.0, 3.0, 5.0, 9.0]}
ALL_LAYERS = {"use_sliding_window": True, "max_window_layers": 0}
LATER_LAYERS = ALL_LAYERS | {"max_window_layers": 1}
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWS = [SLIDING, FULL, SLIDING]
TYPES = {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 30.0, "factor": 1.0}}
GEMMA = {"num_key_value_heads": 2, "head_dim": 10, "query_pre_attn_scalar": 7, "pad_token_id": None}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.5, "residual_multiplier": 0.4, "logits_scaling": 0.6}
GRANITE |= {"attention_bias": True, "mlp_bias": True, "pad_token_id": None}
GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 64}
# "models": fields of published configs, as they are saved there, with small sizes and windows, and without a token of
# padding, whose embedding PyTorch does not train. "harmless": fields of such configs that change no logits. "harmful":
# fields of other families and of their own code that change logits.
PUBLISHED = json.loads((Path(__file__).parent / "fixtures" / "published_configs.json").read_text())
UNTIED = {"tie_word_embeddings": False}
TIED = {"tie_word_embeddings": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "pythia": ("gpt_neox", {}),
    "neox": (
        "gpt_neox",
        {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 0.5, "hidden_act": "gelu_new", **TIED},
    ),
    "llama": ("llama", {}),
    "llama3": ("llama", {"num_key_value_heads": 2, "rope_parameters": LLAMA3}),
    "llama-narrow": ("llama", {"head_dim": 6, "num_key_value_heads": 1, "rms_norm_eps": 1e-3, **TIED}),
    "llama-biases": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN | {"attention_factor": 1.0}},
    ),
    "llama-yarn": ("llama", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}}),
    "llama-dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 12}),
    "llama-not-yet-dynamic": (
        "llama",
        {"rope_parameters": DYNAMIC | {"original_max_position_embeddings": 12}, "max_position_embeddings": 32},
    ),
    "mistral": ("mistral", {"num_key_value_heads": 2, "sliding_window": 5}),
    "ministral": ("ministral", {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5, "layer_types": WINDOWS}),
    "qwen2": ("qwen2", {"num_key_value_heads": 2, **TIED}),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 10, **LATER_LAYERS, "sliding_window": 5, **TIED}),
    "qwen3-biases": (
        "qwen3",
        {"num_key_value_heads": 4, "attention_bias": True, "sliding_window": 5, "head_dim": 8, **ALL_LAYERS},
    ),
    "phi": ("phi", {"num_key_value_heads": 2, "partial_rotary_factor": 0.75}),
    "phi3": ("phi3", {"num_key_value_heads": 2, "sliding_window": 5, "pad_token_id": None}),
    "phi3-long": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 10, "pad_token_id": None}),
    "phi3-short": (
        "phi3",
        {
            "rope_parameters": LONG | {"original_max_position_embeddings": 10},
            "original_max_position_embeddings": 32,
            "pad_token_id": None,
        },
    ),
    "stablelm": ("stablelm", {"num_key_value_heads": 2, "use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "stablelm-parallel": (
        "stablelm",
        {"use_parallel_residual": True, "num_key_value_heads": 4, "rope_pct": 0.25, "norm_eps": 1e-5, "num_heads": 4},
    ),
    "starcoder2": (
        "starcoder2",
        {"sliding_window": 5, "mlp_type": "default", "activation_function": "gelu", "layer_norm_epsilon": 1e-3},
    ),
    "starcoder2-no-bias": ("starcoder2", {"use_bias": False, **UNTIED}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "num_key_value_heads": 2, "pad_token_id": None}),
    "smollm3-windows": (
        "smollm3",
        {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 5, "pad_token_id": None},
    ),
    "olmo": ("olmo", {"num_key_value_heads": 2}),
    "olmo2": ("olmo2", {"num_key_value_heads": 2, "attention_bias": True, "pad_token_id": None}),
    "olmo3": ("olmo3", {"num_hidden_layers": 5, "sliding_window": 5, "rope_parameters": TYPES, "pad_token_id": None}),
    "olmo3-full": ("olmo3", {"layer_types": [FULL] * 3, "rope_parameters": TYPES, "pad_token_id": None}),
    "gemma": ("gemma", {"num_key_value_heads": 1, "head_dim": 10, "pad_token_id": None}),
    "gemma2": ("gemma2", GEMMA | {"sliding_window": 5} | UNTIED),
    "gemma2-biases": (
        "gemma2",
        GEMMA | {"attention_bias": True, "layer_types": [FULL] * 3, "attn_logit_softcapping": None},
    ),
    "gemma3": ("gemma3_text", GEMMA | {"layer_types": WINDOWS, "sliding_window": 5, "rope_parameters": TYPES} | UNTIED),
    "gemma3-windows": (
        "gemma3_text",
        GEMMA | {"layer_types": [SLIDING] * 3, "sliding_window": 5, "final_logit_softcapping": 3.0},
    ),
    "granite": ("granite", GRANITE | {"num_key_value_heads": 2}),
    "granite-tied": ("granite", GRANITE | TIED),
    "gpt2": ("gpt2", GPT2 | {"n_inner": 24}),
    "gpt2-untied": ("gpt2", GPT2 | {"activation_function": "relu"} | UNTIED),
    **{f"published-{name}": (name, config) for name, config in PUBLISHED["models"].items()},
}
FAST = {"pythia", "llama3", "qwen3", "phi", "published-olmo3", "gemma2", "granite-tied", "gpt2"}  # every kind of layer
EVERY_MODEL = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MODELS]


def options_of(name: str) -> tuple[str, dict[str, Any]]:
    """Return the family of a model and the fields of its config."""
    kind, options = MODELS[name]
    fields = ("vocab_size", "bos_token_id", "eos_token_id") if kind == "gpt2" else SIZES
    return kind, {field: SIZES[field] for field in fields} | options


@functools.cache
def theirs(name: str) -> Any:
    """Return a random model of transformers, none of whose parameters is 0, in evaluation mode."""
    kind, options = options_of(name)
    if kind == "olmo3" and int(transformers.__version__.split(".")[1]) < 13:
        pytest.skip("this release of transformers has the same rotary embedding in all layers of OLMo 3")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for key, parameter in model.named_parameters():
        is_norm = ("norm" in key or ".ln_" in key) and key.endswith("weight") and not kind.startswith("gemma")
        torch.nn.init.normal_(parameter, float(is_norm), 0.2)
    return model.eval()


@pytest.fixture(scope="session")
def directories(tmp_path_factory) -> Callable[[str], Path]:
    """Return a function from a model's name to its directory. Read only."""
    root = tmp_path_factory.mktemp("pretrained")

    @functools.cache
    def saved(name: str) -> Path:
        theirs(name).save_pretrained(root / name)
        if name.startswith("published"):
            kind, options = options_of(name)
            (root / name / "config.json").write_text(json.dumps({"model_type": kind} | options))
        return root / name

    return saved


@pytest.fixture(scope="session")
def runs(tmp_path_factory, directories) -> Callable[[str], Path]:
    """Return a function from a model's name to the run that it was imported as. Read only."""
    root = tmp_path_factory.mktemp("imported")

    @functools.cache
    def imported(name: str) -> Path:
        import_run(ImportFlags(str(directories(name)), str(root / name), tokenizer="bytes"))
        return root / name

    return imported


def ours(workdir: Path) -> tuple[TransformerConfig, Any]:
    """Return an imported model, and its parameters on the host."""
    trained = read_trained(workdir, "newest", {})
    _, params = restore(trained)
    return trained.run.model, jax.device_get(params)


def tokens(batch: int = 2, length: int = 20) -> np.ndarray:
    return np.random.default_rng(0).integers(0, SIZES["vocab_size"], (batch, length))


def nll_of_windows(name: str, windows: torch.Tensor) -> torch.Tensor:
    """Return the nll of every token but the first of each window, by a model of transformers."""
    with torch.no_grad():
        log_probs = theirs(name)(windows[:, :-1]).logits.log_softmax(-1)
    return -log_probs.gather(2, windows[:, 1:, None])[..., 0]


# ---- the same model


@pytest.mark.hf
@pytest.mark.parametrize("name", EVERY_MODEL)
def test_the_model_is_that_of_transformers(name, runs, directories):
    """Compare logits, loss, and the gradients of all parameters; a tensor's gradient is converted like the tensor.

    Two of our norms may have the values of one of theirs, whose gradient is then the sum of both.
    """
    model, (config, params), x = theirs(name), ours(runs(name)), tokens()
    model.zero_grad()
    expected = model(torch.tensor(x), labels=torch.tensor(x))
    expected.loss.backward()
    gradients = {key: parameter.grad.numpy() for key, parameter in model.named_parameters()}
    if MODELS[name][0] == "gpt_neox" and "lm_head.weight" in gradients:  # files have the name of older versions
        gradients["embed_out.weight"] = gradients.pop("lm_head.weight")
    graphdef, _ = model_structure(config)

    def loss(params):
        logits = nnx.merge(graphdef, params)(jnp.asarray(x, jnp.int32))
        log_probs = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.take_along_axis(log_probs, x[:, 1:, None], axis=-1).mean(), logits

    (found_loss, logits), found = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    expected_logits = expected.logits.detach().numpy()
    assert expected_logits.std() > (0.05 if name == "published-granite" else 0.5)  # it divides them by 16
    np.testing.assert_allclose(logits, expected_logits, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found_loss, expected.loss.item(), rtol=1e-5)
    tensors = family_of(open_source(directories(name)).config).tensors
    flat = {"/".join(path): np.asarray(leaf) for path, leaf in flat_params(found).items()}
    assert flat.keys() == tensors.keys()
    for path, tensor in tensors.items():
        if tensor.name is None:
            continue
        layers = range(config.num_layers) if path.startswith("layers/") else (0,)
        offset, factor = (tensor.convert(np.full(tensor.shape, value, np.float32)) for value in (0, 1))
        factor -= offset
        gradient = [(tensor.convert(gradients[tensor.name_in(layer)]) - offset) / factor**2 for layer in layers]
        gradient = np.stack(gradient) if path.startswith("layers/") else gradient[0]
        same = [other for other, each in tensors.items() if each.name == tensor.name and "norm" in other]
        total = sum(flat[other] for other in same) if len(same) > 1 else flat[path]
        np.testing.assert_allclose(total, gradient, rtol=1e-4, atol=1e-4, err_msg=path)
    assert max(np.abs(leaf).max() for leaf in flat.values()) > 0.05


# ---- tokens around the text

CONTROLS = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|user|>"]
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.content }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}# {% endif %}"
)


def chat_model(directory: Path) -> Any:
    """Save a model with a tokenizer of bytes, a BOS token, a chat template and an end token; return the tokenizer."""
    library = tokenizers.Tokenizer.from_str(byte_tokenizer_json().replace("<|endoftext|>", CONTROLS[0]))
    library.add_special_tokens(CONTROLS)
    single = tokenizers.processors.TemplateProcessing(f"{CONTROLS[0]} $A", special_tokens=[(CONTROLS[0], 256)])
    library.post_processor = single
    names = {"bos_token": CONTROLS[0], "eos_token": CONTROLS[1], "pad_token": CONTROLS[3]}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=library, padding_side="left", **names)
    tokenizer.chat_template = TEMPLATE
    theirs("llama").save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": [257]}')
    return tokenizer


@pytest.fixture(scope="session")
def chat(tmp_path_factory) -> tuple[Any, Path]:
    """Return the tokenizer and the imported run of a `chat_model`. Read only."""
    root = tmp_path_factory.mktemp("chat")
    tokenizer = chat_model(root / "source")
    import_run(ImportFlags(str(root / "source"), str(root / "run")))
    return tokenizer, root / "run"


def evaluated(run: Path, output: Path, **options: Any) -> dict[str, Any]:
    """Return the results of an evaluation."""
    evaluate([run], Options(**options), output=output)
    (found,) = read_runs(output)
    return found


@pytest.mark.hf
def test_chat_templates_have_what_transformers_gives_them_or_are_refused(tmp_path, caplog):
    conventions = Conventions(bos_token="<s>", other_tokens={"pad_token": "<p>"})

    def rendered(template: str | None) -> str:
        return dataclasses.replace(conventions, chat_template=template).render([{"role": "user", "content": "<b>"}])

    text = "{{ bos_token }}{{ pad_token }}{{ messages | tojson }}"
    assert rendered(text) == '<s><p>[{"role": "user", "content": "<b>"}]'
    assert rendered("{% generation %}{{ strftime_now('%%') }}{% endgeneration %}") == "%"
    parts = "{% for part in messages[0]['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    assert rendered(parts + "{% endfor %}") == "<b>"  # as of SmolVLM
    for template, words in (
        (None, "None: the model has none"),
        ("{{ raise_exception('no\n system') }}", ": no system$"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% if %}", "Expected an expression"),
        ("{% for tool in tools %}{% endfor %}", "'NoneType' object is not iterable"),
    ):
        with pytest.raises(InputError, match=rf"^chat_template.*{words}"):
            rendered(template)
    for name, expected in (("default", "x"), ("tool_use", None)):  # of several templates, which have names
        assert "left out" not in caplog.text
        settings = {"chat_template": [{"name": name, "template": "x"}]}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        assert conventions_of(tmp_path, {}, Bytes()).chat_template == expected
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("x")
    conventions_of(tmp_path, {}, Bytes())
    assert re.findall("left out: (.*)", caplog.text) == ["tool_use", "rag, tool_use"]
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"chat_template\.jinja: must be UTF-8"):
        conventions_of(tmp_path, {}, Bytes())


def test_the_end_token_of_the_source_ends_documents_or_only_completions(tmp_path):
    """It ends documents if the tokenizer has no usual token for it."""
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<EOS>"}, "bos_token": "<EOS>"}')
    library = tokenizers.Tokenizer.from_str(byte_tokenizer_json())
    library.add_special_tokens(["<EOS>"])
    library.post_processor = tokenizers.processors.TemplateProcessing("$A <EOS>", special_tokens=[("<EOS>", 257)])
    for usual, expected in (("<|endoftext|>", (256, 257)), ("<other>", (257, 256))):
        (tmp_path / "tokenizer.json").write_text(library.to_str().replace("<|endoftext|>", usual))
        tokenizer = source_tokenizer(tmp_path, 258)
        found = conventions_of(tmp_path, {"eos_token_id": 256}, HfTokenizer(tokenizer.content))
        assert (found.bos_token, found.adds_bos, found.eos_token) == ("<EOS>", False, "<EOS>")
        assert found.ends(tokenizer) == expected
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<EOS>", "bos_token": null}')


def test_added_tokens_without_an_embedding_are_left_out(tmp_path, caplog):
    """Llama 2, Code Llama 34B and Gemma 3 1B were published with such tokens."""
    library = tokenizers.Tokenizer.from_str(byte_tokenizer_json())
    library.add_special_tokens(["<pad>"])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"pad_token": "<pad>"}')
    for num_ids, size, others in ((258, 258, {"pad_token": "<pad>"}), (257, 257, {})):
        assert "left out" not in caplog.text
        tokenizer = source_tokenizer(tmp_path, num_ids)
        assert (tokenizer.vocab_size, conventions_of(tmp_path, {}, tokenizer).other_tokens) == (size, others)
        assert tokenizer.encode_controls(b"<pad>").max() == (257 if others else ord("p"))
    assert "tokens without an embedding are left out: <pad>" in caplog.text


@pytest.mark.hf
@pytest.mark.parametrize("file", ["tokenizer_config.json", "added_tokens.json"])
def test_added_tokens_beside_the_tokenizer_are_read_as_transformers_reads_them(tmp_path, file):
    """Also their flags, which may differ from those of tokenizer.json."""
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer_json())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": names[2], "pad_token": names[0]}))
    decoder = {
        256 + at: {"content": name, "special": at != 1, "lstrip": False, "rstrip": at == 0}
        for at, name in enumerate(names)
    }
    legacy = {name: 256 + at for at, name in enumerate(names)}
    settings = {"added_tokens_decoder": decoder} if file == "tokenizer_config.json" else legacy
    (tmp_path / file).write_text(json.dumps(settings))
    text = "a<|im_start|>user\nhi<|im_end|>\n<|endoftext|> b"
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path).encode(text, add_special_tokens=False)
    assert {257, 258} < set(theirs)
    assert source_tokenizer(tmp_path, 259).encode_controls(text.encode()).tolist() == theirs


@pytest.mark.hf
@pytest.mark.extra
def test_a_completion_is_that_of_transformers(tmp_path):
    """With the BOS token, all end tokens, control tokens and the chat template of the source, also after an export."""
    tokenizer, model = chat_model(tmp_path / "source"), theirs("llama")
    greedy = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 257}
    x = tokenizer("abc", return_tensors="pt")
    assert x.input_ids[0].tolist() == [256, 97, 98, 99]
    free = model.generate(**x, **greedy, eos_token_id=257)[0, 4:].tolist()
    end = next(token for i, token in enumerate(free) if i > 2 and token < 256 and token not in free[:i])
    settings = {"do_sample": True, "top_p": 0.6, "suppress_tokens": [7]}
    others = {"eos_token_id": [257, end], "_from_model_config": True, "cache_implementation": "hybrid"}
    (tmp_path / "source" / "generation_config.json").write_text(json.dumps(settings | others))
    import_run(ImportFlags(str(tmp_path / "source"), str(tmp_path / "run")))
    options = {"workdir": str(tmp_path / "run"), "max_new_tokens": 8, "temperature": 0.0}
    found = complete(GenerateFlags(**options), [b"abc"])
    assert found == [tokenizer.decode(free[: free.index(end)])]
    assert complete(GenerateFlags(**options, stop=(found[0][1:],)), [b"abc"]) == [found[0][:1]]
    assert complete(GenerateFlags(**options, bos=False), [b"abc"]) != found
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "abc"}], tokenize=False, add_generation_prompt=True
    )
    assert "<|user|>abc<|eot_id|># " in chat
    of_chat = complete(GenerateFlags(**options, chat=True), [b"abc"])
    assert of_chat == complete(GenerateFlags(**options, bos=False, control_tokens=True), [chat.encode()])
    assert of_chat != complete(GenerateFlags(**options, bos=False), [chat.encode()])
    x = tokenizer(chat, add_special_tokens=False, return_tensors="pt")
    ids = model.generate(**x, **greedy, eos_token_id=[257, end])[0, x.input_ids.shape[1] :].tolist()
    assert of_chat == [tokenizer.decode(ids[: ids.index(end)] if end in ids else ids)]

    export_run(ExportFlags(str(tmp_path / "run"), str(tmp_path / "exported")))
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert exported("abc").input_ids == tokenizer("abc").input_ids
    names = [(each.special_tokens_map, each.chat_template, each.padding_side) for each in (exported, tokenizer)]
    assert names[0] == names[1]
    generation = json.loads((tmp_path / "exported" / "generation_config.json").read_text())
    ids = {"bos_token_id": 256, "eos_token_id": [257, end], "pad_token_id": tokenizer.pad_token_id}
    assert generation == settings | ids | {"use_cache": True}


@pytest.mark.hf
@pytest.mark.extra
@pytest.mark.parametrize("bos", [True, False])
def test_strided_perplexity_is_that_of_the_guide_of_transformers(chat, tmp_path, text, bos):
    """Every token but a document's first is scored once, given up to 16 - 1 before it."""
    (tokenizer, workdir), windows, scored = chat, [], []
    for file in sorted(text.iterdir()):
        ids, end = tokenizer(file.read_text(), add_special_tokens=bos).input_ids, 0
        for begin in range(0, len(ids), 5):
            previous, end = end, min(begin + 16, len(ids))
            windows.append(ids[begin:end] + [0] * (begin + 16 - end))
            scored.append([previous <= place < end for place in range(begin + 1, begin + 16)])
            if end == len(ids):
                break
    nll = nll_of_windows("llama", torch.tensor(windows))[torch.tensor(scored)]
    run = evaluated(workdir, tmp_path, lengths=(16,), stride=5, bos=bos, data=str(text))
    (found,) = run["lengths"]
    size = sum(len(file.read_bytes()) - (not bos) for file in text.iterdir())
    assert (found["num_tokens"], found["num_documents"], run["bos"]) == (size, 12, CONTROLS[0] if bos else None)
    np.testing.assert_allclose(found["perplexity"], nll.mean().exp(), rtol=1e-4)


@pytest.mark.hf
@pytest.mark.extra
@pytest.mark.parametrize("bos", [True, False])
def test_windows_begin_with_the_token_of_the_source(chat, tmp_path, text, bos):
    """The first of a window's inputs is replaced, what is scored stays; models with other conventions are refused."""
    tokenizer, workdir = chat
    options = {"lengths": (6, 12), "last_tokens": 4, "max_windows": 1000, "bos": bos, "data": str(text)}
    run = evaluated(workdir, tmp_path, **options)
    assert ("bos" in run) == bos
    for found in run["lengths"]:
        windows, length = [], found["length"]
        for file in text.iterdir():
            ids = [*tokenizer(file.read_text(), add_special_tokens=False).input_ids, 257]
            windows += [ids[end - length - 1 : end] for end in range(len(ids), 12, -12)]
        windows = torch.tensor(windows)
        windows[:, 0] = 256 if bos else windows[:, 0]
        nll = nll_of_windows("llama", windows)[:, -4:]
        assert found["num_tokens"] == nll.numel()
        np.testing.assert_allclose(found["perplexity"], nll.mean().exp(), rtol=1e-4)
    if bos:
        (found, _) = read_tokens(read_trained(workdir, "newest", {}), 5, epath.Path(file))
        assert found.tolist() == tokenizer(file.read_text()).input_ids[:5] == [256, *file.read_bytes()[:4]]
        other = Path(shutil.copytree(workdir, tmp_path / "other"))
        (other / "conventions.json").unlink()
        with pytest.raises(InputError, match="bos = True: must be False to compare"):
            evaluate([workdir, other], Options(**options), output=tmp_path)


@pytest.mark.hf
@pytest.mark.extra
@pytest.mark.filterwarnings("ignore:Deprecated in 0.9.0")  # of tokenizers 0.22
def test_a_tokenizer_of_two_files_is_converted(directories, tmp_path, text, monkeypatch):
    copy = Path(shutil.copytree(directories("llama"), tmp_path / "copy"))
    trained = train_bpe([file.read_text() for file in text.iterdir()], 300)
    library = tokenizers.Tokenizer.from_str(trained.content)
    library.model.save(str(copy))
    (copy / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}')
    converted = source_tokenizer(copy, 300)
    np.testing.assert_array_equal(converted.encode(b"a long text"), trained.encode(b"a long text"))
    assert converted.end_of_document == trained.end_of_document
    vocab = (copy / "vocab.json").read_text().replace("<|endoftext|>", "<EOS>")  # no usual end token
    (copy / "vocab.json").write_text(vocab)
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<EOS>")
    (copy / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"} | names))
    assert source_tokenizer(copy, 300).end_of_document == trained.end_of_document
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    (copy / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda _: "y")  # transformers asks whether to run the code
    with pytest.raises(InputError, match=r"vocab.json cannot be converted: .* custom code"):
        source_tokenizer(copy, 300)
    assert not (tmp_path / "ran").exists()
    (copy / "merges.txt").unlink()
    (copy / "vocab.json").write_text("[]")
    with pytest.raises(InputError, match=r"vocab.json cannot be converted: "):
        source_tokenizer(copy, 300)
    (copy / "tokenizer.model").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(InputError, match=r"tokenizer.model cannot be converted: .*git lfs pull"):
        source_tokenizer(copy, 300)


@pytest.mark.hf
@pytest.mark.extra
@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model"])
def test_a_sentencepiece_model_is_converted_by_its_own_kind(name, tmp_path, monkeypatch):
    """`LlamaTokenizer` would merge Unigram's "a" and "b". The package sentencepiece need not be installed."""
    convert = importlib.import_module("transformers.convert_slow_tokenizer")
    monkeypatch.setattr(convert, "requires_backends", lambda *_: None)
    proto = convert.import_protobuf().ModelProto()
    proto.trainer_spec.model_type = 1  # Unigram
    pieces = {"<unk>": (0, 2), "</s>": (0, 3), "▁": (-1, 1), "a": (-1, 1), "b": (-1, 1), "ab": (-9, 1)}
    for piece, (score, kind) in pieces.items():
        proto.pieces.add(piece=piece, score=score, type=kind)
    (tmp_path / name).write_bytes(proto.SerializeToString())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    other = SimpleNamespace(SentencePieceProcessor=lambda model_file: SimpleNamespace(encode=lambda text: [5]))
    monkeypatch.setitem(sys.modules, "sentencepiece", other)
    with pytest.raises(InputError, match=f"{name} cannot be converted: update transformers"):
        source_tokenizer(tmp_path, 6)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    assert source_tokenizer(tmp_path, 6).encode(b"ab")[-2:].tolist() == [3, 4]


DOWNLOADED = ["config.json", "a.safetensors", "spiece.model", "vocab.txt", "merges.txt"]


@pytest.mark.hf
def test_a_model_of_the_hub_is_downloaded_or_the_line_says_how(tmp_path, monkeypatch):
    asked = []

    def download(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        files = [*DOWNLOADED, "consolidated.safetensors", "original/params.json", "a.bin"]
        patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        asked.append((name, list(filter_repo_objects(files, **patterns))))
        if name.startswith("offline"):
            raise ConnectionError("no\nnetwork")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert find_source("Qwen/Qwen3-0.6B") == tmp_path
    with pytest.raises(InputError, match=r"hf download offline/a --local-dir=DIRECTORY. ConnectionError: no network"):
        find_source("offline/a")
    assert asked == [(name, DOWNLOADED) for name in ("Qwen/Qwen3-0.6B", "offline/a")]
    with pytest.raises(InputError, match=r"^source = 'https://hub/a/b': must be .* a model of the hub: ORG/NAME$"):
        find_source("https://hub/a/b")
    for local in (str(tmp_path), "a", "a/b/c", "../a"):
        assert find_source(local) == Path(local)


# ---- a run like any other


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


def test_an_import_that_was_killed_can_be_repeated(runs, directories, tmp_path, monkeypatch):
    """What was written before is replaced; a complete run is not."""
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_params", None)
        with pytest.raises(TypeError):
            import_run(ImportFlags(str(directories("pythia")), str(tmp_path / "run"), tokenizer="bytes"))
    assert (tmp_path / "run").exists()
    assert checkpoint.read_config(tmp_path / "run") is None
    import_run(ImportFlags(str(directories("pythia")), str(tmp_path / "run"), tokenizer="bytes"))
    with pytest.raises(InputError, match=r"workdir = .*: must not contain a run"):
        import_run(ImportFlags(str(directories("llama3")), str(tmp_path / "run"), tokenizer="bytes"))
    chex.assert_trees_all_equal(ours(tmp_path / "run"), ours(runs("pythia")))


@pytest.mark.extra
def test_a_model_with_a_sentencepiece_tokenizer_is_used_like_any_other(text, tmp_path, caplog):
    """Import it, continue it with another method on text that its tokens change, and generate."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"vocab_size": 448, **TIED}))
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.5)
    torch.nn.init.zeros_(model.model.embed_tokens.weight[420:])  # ids of no token, which the tools never draw
    source, original, continued = (tmp_path / name for name in ("llama", "original", "continued"))
    model.eval().save_pretrained(source)
    content = tiny.sentencepiece_bpe([file.read_text() for file in sorted(text.iterdir())])
    (source / "tokenizer.json").write_text(json.dumps(content))
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 447]}')
    import_run(ImportFlags(str(source), str(original)))

    words = Path(shutil.copytree(text, tmp_path / "text"))
    (words / "lossy.txt").write_text("one ▁ of twelve and a few words more " * 8)
    spec = checkpoint.read_config(original)["config"]
    assert spec["data"]["tokenizer"] == str(original / "tokenizer.json")
    spec["model"] |= {"rotary": {"name": "none"}, "bias": {"name": "kerple"}}
    spec["data"] |= {"path": str(words), "cache_dir": str(tmp_path / "cache"), "validation_fraction": 0.3}
    spec["train"] |= {"train_length": 16, "batch_size": 8, "num_steps": 2, "eval_interval": 2, "checkpoint_interval": 2}
    spec["train"] |= {"validation_batches": 1}
    spec["init"] = {"source": str(original), "train_only": "bias"}
    loop.train(spec, continued)
    assert "1 documents cannot be decoded exactly" in caplog.text
    assert saved_conventions(continued) == saved_conventions(original)
    assert saved_conventions(original).end_tokens == (2, 447)
    before, after = (flat_params(ours(workdir)[1]) for workdir in (original, continued))
    assert all(np.array_equal(leaf, after[path]) for path, leaf in before.items())

    upstream, prompt = transformers.PreTrainedTokenizerFast(tokenizer_file=f"{source}/tokenizer.json"), "number 3 is a"
    (completion,) = complete(GenerateFlags(str(original), max_new_tokens=12, temperature=0.0), [prompt.encode()])
    x = torch.tensor([upstream.encode(prompt, add_special_tokens=False)])
    greedy = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(x)}
    with torch.no_grad():
        assert prompt + completion == upstream.decode(model.generate(x, **greedy)[0], skip_special_tokens=False)


def test_parameters_are_put_where_the_mesh_says(directories, runs):
    """Shards on eight devices are bitwise equal to one device."""
    source = open_source(directories("llama3"))
    config = read_trained(runs("llama3"), "newest", {}).run.model
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, context=1, tensor=2))
    params = flat_params(load.read_params(source, family_of(source.config).tensors, config, mesh))
    up = params["layers", "mlp", "up_DF"]
    assert up.sharding.shard_shape(up.shape) == (3, 16, 12)
    expected = flat_params(ours(runs("llama3"))[1])
    chex.assert_trees_all_equal({path: np.asarray(leaf) for path, leaf in params.items()}, expected)


@pytest.mark.hf
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_and_shards_are_read_exactly(dtype, tmp_path):
    """The scale of a norm is added to 1 in float32: in 16 bits the sum would lose a weight of this size."""
    model = type(theirs("gemma"))(theirs("gemma").config).to(dtype)
    torch.nn.init.constant_(model.model.norm.weight, 1e-4)
    model.save_pretrained(tmp_path / "model", max_shard_size="8KB")
    content = json.loads((file := tmp_path / "model" / INDEX_FILE).read_text())
    content["weight_map"]["lm_head.weight"] = content["weight_map"].pop(NAME)  # transformers, too, reads whole files
    file.write_text(json.dumps(content))
    import_run(ImportFlags(str(tmp_path / "model"), str(tmp_path / "run"), tokenizer="bytes"))
    _, params = ours(tmp_path / "run")
    up, norm = (x.detach().float().numpy() for x in (model.model.layers[1].mlp.up_proj.weight, model.model.norm.weight))
    np.testing.assert_array_equal(params["layers"]["mlp"]["up_DF"][1], up.T)
    assert np.all(1 + norm != 1)
    np.testing.assert_array_equal(params["norm"]["scale"], 1 + norm)


def stored(directory: Path, tensors: dict[str, np.ndarray], **changes: Any) -> Path:
    """Replace the tensors, and fields of the config."""
    safetensors.numpy.save_file(tensors, directory / WEIGHTS, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    return directory


# Names of PyTorch's wrappers, AutoModel, `safetensors.torch.save_model`, multimodal models and the published GPT-2.
NAMES = {
    "wrapped": (
        "qwen2",
        lambda name: "module." + name.replace("layers.", "layers._orig_mod.").replace(".mlp", "._orig_module.mlp"),
    ),
    "without its head": ("qwen2", lambda name: name.removeprefix("model.")),
    "embedding stored as the head": ("qwen2", lambda name: name.replace("model.embed_tokens", "lm_head")),
    "multimodal": ("qwen2", lambda name: name.replace("model.", "language_model.model.", 1)),
    "head of GPT-NeoX since transformers 5.14": ("pythia", lambda name: name.replace("embed_out", "lm_head")),
    "gpt2": ("published-gpt2", lambda name: name.removeprefix("transformer.")),
}


@pytest.mark.parametrize("kind", [*[*NAMES][:5], pytest.param("gpt2", marks=pytest.mark.hf)])
def test_other_names_and_float64_give_the_same_model(kind, directories, runs, tmp_path):
    """There is also an index beside the file, which transformers ignores."""
    name, rename = NAMES[kind]
    directory = copied(directories(name), tmp_path)
    given, changes = safetensors.numpy.load_file(directory / WEIGHTS), {}
    tensors = {rename(name): value.astype(np.float64) for name, value in given.items()}
    index({NAME: "b.safetensors"})(directory)
    if kind == "multimodal":
        head = tensors["language_model.model.embed_tokens.weight"]
        tensors |= {"vision_tower.weight": np.ones(3, "f4"), "lm_head.weight": head}
        for buffer in ("inv_freq", "cos_cached"):  # of older versions
            tensors[f"language_model.model.layers.0.self_attn.rotary_emb.{buffer}"] = np.ones(2, "f4")
        config = json.loads((directory / "config.json").read_text())
        tied = config.pop("tie_word_embeddings")
        changes = {"model_type": "llava", "text_config": config, "tie_word_embeddings": tied, "vision_config": {"a": 1}}
    if kind == "gpt2":  # masks are stored with the parameters
        tensors |= {f"h.{layer}.attn.bias": np.ones((1, 1, 4, 4), "f4") for layer in range(3)}
    import_run(ImportFlags(str(stored(directory, tensors, **changes)), str(tmp_path / "run"), tokenizer="bytes"))
    chex.assert_trees_all_equal(ours(tmp_path / "run"), ours(runs(name)))
    if kind == "gpt2":
        assert read_trained(tmp_path / "run", "newest", {}).run.evaluation.lengths == (64,)  # its positions are learned
        with pytest.raises(InputError, match=r"length = 65: must be at most .*learned_positions = 64"):
            attention_maps(MapsFlags(str(tmp_path / "run"), 65, text=str(directory / WEIGHTS)))
    if kind == "embedding stored as the head":
        tensors["model.embed_tokens.weight"] = 2 * tensors["lm_head.weight"]
        message = "lm_head.weight = 'tensor': must be a copy of the embedding"
        refused(stored(directory, tensors), tmp_path / "other", message)
    if kind == "wrapped":
        refused(stored(directory, tensors | given), tmp_path / "other", "must be stored once")


@pytest.mark.hf
@pytest.mark.extra
def test_the_check_compares_with_transformers(directories, tmp_path, caplog):
    """Check a model, and multimodal ones, whose text model is read. Without a tolerance, rounding is a difference."""
    caplog.set_level("INFO", "dape_jax")
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision |= {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4}
    text = MODELS["llama3"][1] | SIZES | {"model_type": "llama"}
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=259)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(tmp_path / "llava")
    audio = {"d_model": 8, "encoder_layers": 1, "encoder_attention_heads": 1, "encoder_ffn_dim": 8, "num_mel_bins": 8}
    text = SIZES | {"model_type": "qwen2", "num_key_value_heads": 2}
    config = transformers.Qwen2AudioConfig(audio_config=audio, text_config=text)
    transformers.Qwen2AudioForConditionalGeneration(config).save_pretrained(tmp_path / "audio")
    for number, directory in enumerate((directories("llama3"), tmp_path / "llava", tmp_path / "audio")):
        import_run(ImportFlags(str(directory), str(tmp_path / f"run{number}"), tokenizer="bytes", check=True))
        found = re.findall(r"difference from transformers \S+ is (\S+) in logits of up to (\S+)", caplog.text)
        assert len(found) == number + 1
        assert 0 < float(found[-1][0]) < 1e-4 * float(found[-1][1])
    assert re.search(r"llava: \d+ tensors that are not of the text model are ignored", caplog.text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "_CHECK_TOLERANCE", 0.0)
        refused(directories("llama3"), tmp_path, "check = True: the largest difference", check=True)
        patch.setattr("importlib.util.find_spec", lambda name: None)
        refused(directories("llama3"), tmp_path, "check = True: needs the package torch", check=True)


@pytest.mark.hf
def test_old_names_of_options_mean_the_same(directories):
    """Read configs of transformers 4, such as published ones."""
    new = json.loads((directories("llama3") / "config.json").read_text())
    old = new | {"rope_theta": LLAMA3["rope_theta"], "rope_scaling": LLAMA3}
    both = old | {"partial_rotary_factor": 1.0}  # as levanter writes them
    assert family_of(both).model == family_of(new).model
    floats = LLAMA3 | {"original_max_position_embeddings": 16.0}  # LLaMA-Factory multiplies lengths by floats
    found = family_of(new | {"max_position_embeddings": 64.0, "rope_parameters": floats})
    assert (found.model, found.max_length) == (family_of(new).model, 64)
    other = family_of(new | {"rope_parameters": {"original_max_position_embeddings": 9}})  # only of other kinds
    assert other.model["rotary"] == {"name": "rope", "base": 10_000.0, "fraction": 1.0}
    del old["rope_parameters"]
    assert family_of(old).model == family_of(new).model
    new = json.loads((directories("pythia") / "config.json").read_text())
    old = {name: value for name, value in new.items() if name != "rope_parameters"}
    assert family_of(old | {"rotary_pct": 0.25, "rotary_emb_base": 10_000}).model == family_of(new).model
    rotary = family_of(old | {"rotary_pct": 0.5, "rotary_emb_base": 500}).model["rotary"]
    assert rotary == {"name": "rope", "base": 500.0, "fraction": 0.5}
    kind, options = options_of("phi")  # transformers 5 saves the fraction in rope_parameters
    assert family_of({"model_type": kind} | options).model["rotary"]["fraction"] == 0.75
    both = {"rotary_pct": 0.25, "partial_rotary_factor": 0.25, "rotary_emb_base": 10_000, "rope_theta": 1e4}
    assert family_of(old | both).model == family_of(new).model  # as transformers 4.46 to 4.57 save it
    for name in ("rotary_pct", "rotary_emb_base"):
        with pytest.raises(InputError, match=f"{name} = 0.75: must be .* = .*, or missing"):
            family_of(old | both | {name: 0.75})
    for kind in ("llama", "mistral"):  # LLaVA 1.5 and 1.6 and Idefics 2 leave out sizes
        short = family_of({"model_type": "llava", "text_config": {"model_type": kind, "vocab_size": 260}})
        assert short.model == family_of(transformers.AutoConfig.for_model(kind, vocab_size=260).to_dict()).model


@pytest.mark.hf
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "smollm3-windows"])
def test_layers_without_types_are_those_of_transformers(name):
    """Configs of transformers 4 have the fields from which the types of layers follow."""
    kind, options = options_of(name)
    config = transformers.AutoConfig.for_model(kind, **options).to_dict()
    assert len(set(config["layer_types"])) == 2
    without = {field: value for field, value in config.items() if field != "layer_types"}
    assert family_of(without).model == family_of(config).model


@pytest.mark.hf
@pytest.mark.parametrize(
    "kind", ["gpt_neox", "llama", "mistral", "ministral", "qwen2", *sorted({*PUBLISHED["models"]} - {"gpt2"})]
)
def test_fields_that_a_config_lacks_have_the_values_of_transformers(kind):
    """Check, for example, Mistral's window and number of key/value heads. Null and disabled options are accepted."""
    sizes = {"vocab_size": 260, "hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 32}
    sizes |= {"intermediate_size": 24}
    try:
        whole = transformers.AutoConfig.for_model(kind, **sizes).to_dict()
    except StrictDataclassFieldValidationError:
        pytest.skip("this release of transformers refuses its own defaults of this family")
    short = {"model_type": kind, **sizes}
    assert set(whole) - set(short)
    harmless = {"quantization_config": None, "rope_scaling": None, "use_mrope": False, "rope_interleaved": False}
    harmless |= {"pruned_heads": {}, "task_specific_params": {}, "suppress_tokens": [], "finetuning_task": ""}
    expected = family_of(whole)
    if expected.model["window"] is None and "alternate_layers" not in expected.model:
        harmless["layer_types"] = [FULL] * 3
    for found in (family_of(short), family_of(short | harmless), family_of(short | PUBLISHED["harmless"])):
        assert (found.model, found.max_length) == (expected.model, expected.max_length)
        assert found.tensors.keys() == expected.tensors.keys()


def test_every_family_is_tested():
    assert {kind for kind, _ in MODELS.values()} == set(FAMILIES) - {"dape"}  # in test_export.py


def test_the_memory_of_an_import_is_that_of_one_tensor(tmp_path):
    """Measure memory of the host: one tensor, in the dtype of the file and in float32."""
    config = {"model_type": "gpt_neox", "hidden_size": 256, "num_hidden_layers": 32, "num_attention_heads": 8}
    config |= {"intermediate_size": 1024, "vocab_size": 4096}
    family, mesh = family_of(config), make_mesh(MeshConfig(1, 8, 1, 1))
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {each.name_in(layer): each.shape for each in family.tensors.values() for layer in range(32)}
    safetensors.numpy.save_file({name: np.zeros(shape, "f2") for name, shape in shapes.items()}, tmp_path / WEIGHTS)
    model = read_model(run_spec(family.model | {"dtype": "float32"}, 64, "bytes")["model"])
    source, sizes = open_source(tmp_path), [4 * math.prod(shape) for shape in shapes.values()]
    tracemalloc.start()
    load.read_params(source, family.tensors, model, mesh)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(sizes) < peak < 4 * max(sizes) < sum(sizes) / 4


# ---- damaged and hostile input


def copied(directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(directory, tmp_path / "copy"))


CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("llama3", {"model_type": "bert"}, "model_type = 'bert': must be one of"),
    ("llama3", {"model_type": None}, "model_type = None: must be of type str"),
    ("llama3", {"hidden_size": "16"}, "hidden_size = '16': must be of type int"),
    ("llama3", {"num_hidden_layers": -1}, "num_hidden_layers = -1: must be positive"),
    ("llama3", {"num_key_value_heads": 3}, "num_key_value_heads = 3: must divide num_attention_heads = 4"),
    ("llama3", {"intermediate_size": 25}, r"gate_proj.weight: shape = \[24, 32\]: must be \[25, 32\]"),
    ("llama3", {"hidden_act": "mish"}, "hidden_act = 'mish': must be one of"),
    ("llama3", {"rope_parameters": {"rope_type": "proportional"}}, "rope_type = 'proportional': must be one of"),
    (
        "llama3",
        {"rope_parameters": LONG | {"original_max_position_embeddings": 9, "long_factor": [1.0]}},
        r"model.rotary.long_factors = \(1.0,\): must be 4 positive numbers",
    ),
    ("llama3", {"rope_parameters": {"rope_type": "linear"}}, "factor = None: must be of type float"),
    ("llama3", {"rope_parameters": YARN | {"attention_factor": -1.0}}, "attention_factor = -1.0: must be positive"),
    ("llama3", {"num_hidden_layers": 4}, r"model.layers.3.self_attn.q_proj.weight: is missing"),
    ("llama3", {"num_hidden_layers": 2}, r"model.layers.2.\S+ = 'tensor': is not supported"),
    ("llama3", {"vocab_size": 100}, "vocab_size = 100: must be at least the tokenizer's 257"),
    ("llama3", {"a" * 10_000: "b" * 10_000}, r"a\.\. = 'b+\.\.: is not supported"),
    ("llama3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling = .*: must be"),
    ("llama3", {"rope_parameters": LLAMA3 | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5: "),
    ("llama3", {"is_causal": False}, "is_causal = False: is not supported"),
    ("llama3", {"logit_scale": 0}, "logit_scale = 0: is not supported"),
    ("llama3", {"quantization_config": {"bits": 4}}, "quantization_config = .*: must be missing"),
    ("llama3", {"num_local_experts": 8}, "num_local_experts = 8: mixtures of experts are not supported"),
    ("llama3", {"model_type": "qwen3_moe", "num_experts": 8}, "num_experts = 8: mixtures of experts"),
    ("llama3", {"text_config": {"model_type": "mllama"}}, "text_config: model_type = 'mllama': must be one of"),
    ("llama3", {"text_config": {"model_type": "gemma"}, "model_type": "paligemma"}, "model_type = 'paligemma': "),
    *(("llama3", {name: value}, f"{name} = .*: is not supported") for name, value in PUBLISHED["harmful"].items()),
    ("published-gpt2", {"n_ctx": 65}, "n_ctx = 65: must be n_positions = 64"),
    ("llama3", {"layer_types": [FULL] * 2}, "layer_types = .*: must be full_attention for each of 3 layers"),
    ("qwen2", {"layer_types": [FULL] * 2}, "layer_types = .*: must be full_attention or sliding_attention for each"),
    ("qwen2", {"layer_types": [FULL, FULL, "linear_attention"]}, "layer_types = .*: must be full_attention or"),
    ("qwen2", {"layer_types": WINDOWS}, "use_sliding_window = False: must be true with sliding_attention in layer_ty"),
    ("qwen2", {"layer_types": WINDOWS} | ALL_LAYERS, " sliding_window = None: must be given with sliding_attention in"),
    ("smollm3-windows", {"no_rope_layers": [1, 0]}, "no_rope_layers = .*: must be 0 or 1 for each of 3 layers"),
    ("smollm3-windows", {"no_rope_layers": [0, 1, 2]}, "no_rope_layers = .*: must be 0 or 1 for each of 3 layers"),
    ("smollm3-windows", {"layer_types": [FULL, SLIDING, FULL]}, "layer_types = .*: must be sliding_attention in the"),
    ("olmo3", {"rope_parameters": YARN}, "rope_parameters = .*: must have full_attention and sliding_attention"),
]


@pytest.mark.parametrize(("name", "changes", "message"), CONFIGS)
def test_configs_that_are_refused(name, changes, message, directories, tmp_path):
    directory = copied(directories(name), tmp_path)
    refused(stored(directory, safetensors.numpy.load_file(directory / WEIGHTS), **changes), tmp_path, message)


def refused(directory: Path, tmp_path: Path, message: str, **options: Any) -> None:
    """Assert that an import ends with one short line, and without a run directory."""
    with pytest.raises(InputError, match=message) as error:
        import_run(ImportFlags(str(directory), str(tmp_path / "run"), **{"tokenizer": "bytes"} | options))
    assert len(str(error.value)) < 1000
    assert not (tmp_path / "run" / "config.json").exists()


Damage = Callable[[Path], object]


def change_tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Damage:
    """Return a damage that changes the tensors, in a valid file."""

    def damage(directory: Path) -> None:
        tensors = safetensors.numpy.load_file(directory / WEIGHTS)
        change(tensors)
        safetensors.numpy.save_file(tensors, directory / WEIGHTS)

    return damage


def index(weight_map: Any) -> Damage:
    """Return a damage that adds an index."""
    return lambda directory: (directory / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def index_only(weight_map: Any) -> Damage:
    """Return a damage that makes the file a shard, and adds an index."""
    return lambda directory: ((directory / WEIGHTS).rename(directory / "a.safetensors"), index(weight_map)(directory))


def pickled_only(directory: Path) -> None:
    torch.save({"x": torch.zeros(1)}, directory / "pytorch_model.bin")
    (directory / WEIGHTS).unlink()


DAMAGES: dict[str, tuple[Damage, str]] = {
    "empty file": (lambda directory: os.truncate(directory / WEIGHTS, 0), f"{WEIGHTS}: cannot be read.*git lfs pull"),
    "cut in a tensor": (lambda directory: os.truncate(directory / WEIGHTS, 20_000), f"{WEIGHTS}: cannot be read"),
    "no weights": (lambda directory: (directory / WEIGHTS).unlink(), "must have model.safetensors, or"),
    "pickled weights": (pickled_only, "may run code when they are read: convert pytorch_model.bin"),
    "index of nothing": (index_only({}), "weight_map: must be a JSON object"),
    "index to a parent": (index_only({NAME: "../x.safetensors"}), "must be the name of a .safetensors file"),
    "index to a missing shard": (index_only({NAME: "b.safetensors"}), "b.safetensors: cannot be read"),
    "pointer of git lfs": (
        lambda directory: (directory / "config.json").write_text("version https://git-lfs.github.com/spec/v1\n"),
        "config.json: cannot be read as JSON: .*; it is a pointer of git lfs, to download the file: git lfs pull",
    ),
    "config that is a list": (lambda directory: (directory / "config.json").write_text("[1]"), "must be a JSON object"),
    "no config": (lambda directory: (directory / "config.json").unlink(), "must have config.json; in the hub"),
    "adapter": (lambda directory: (directory / "adapter_config.json").touch(), "adapter_config.json': must be missing"),
    "other shape": (change_tensors(lambda x: x.update({NAME: x[NAME].T})), r"shape = \[32, 24\]: must be"),
    "integers": (
        change_tensors(lambda x: x.update({NAME: np.ones((24, 32), "i1")})),
        "up_proj.weight: dtype = 'I8': must",
    ),
    "NaN": (change_tensors(lambda x: x[NAME].put(7, np.nan)), "up_proj.weight = 'NaN or infinity': must be finite"),
    "missing": (change_tensors(lambda x: x.pop(NAME)), r"up_proj.weight: is missing; .* are lm_head.weight, m"),
    "additional": (change_tensors(lambda x: x.update(more=np.zeros(1, "f4"))), "more = 'tensor': is not supported"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_checkpoints_are_refused_in_one_line(case, directories, tmp_path):
    damage, message = DAMAGES[case]
    directory = copied(directories("llama3"), tmp_path)
    damage(directory)
    refused(directory, tmp_path, message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": None}, "source = .*: has no tokenizer.json; give --tokenizer"),
        ({"train_length": 65}, "train_length = 65: must be 1 to 64"),
        ({"dtype": "int8"}, "model.dtype = 'int8': must be one of"),
        ({"directory": Path("nowhere")}, "source = 'nowhere': must be a directory"),
    ],
)
def test_bad_options_are_named(options, message, directories, tmp_path):
    options = {"directory": directories("llama3")} | options
    refused(options.pop("directory"), tmp_path, message, **options)
