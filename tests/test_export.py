"""Export: transformers gives the run's logits, tokens and log-likelihoods; importing it again is bit-exact."""

import dataclasses
import functools
import json
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest
import safetensors.torch
import tiny
import torch
import transformers
from accelerate.utils import send_to_device
from helpers import logits, write_run
from processes import ROOT, run_python
from test_import import ours
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.cache_utils import DynamicCache

from dape_jax.data.conventions import Conventions
from dape_jax.data.tokenizers import Bytes, HfTokenizer, train_bpe
from dape_jax.errors import InputError
from dape_jax.evaluation.trained import read_trained, restore
from dape_jax.kernels.cuda import compiler
from dape_jax.model.transformer import ENCODER
from dape_jax.pretrained import export, load
from dape_jax.pretrained.files import INDEX_FILE
from dape_jax.pretrained.modeling_dape import CACHE
from dape_jax.pretrained.options import ExportFlags, ImportFlags
from dape_jax.tools.completion import Sampling, generate

pytestmark = [pytest.mark.hf, pytest.mark.extra]
torch.set_num_threads(1)


DAPE = {"processor": {"name": "dape", "kernel_width": 3, "channels": 4}}
MODELS: dict[str, dict[str, Any]] = {
    **{name: options | DAPE for name, options in tiny.ARCHITECTURES.items()},
    "t5": {"bias": {"name": "t5"}} | DAPE,
    "fire": {"bias": {"name": "fire", "threshold": 6}} | DAPE,
    "alibi": {"bias": {"name": "alibi"}, "processor": {"name": "none"}, "window": 6},
    "post-norm": ENCODER | {"causal": True, "dropout": 0.0},
    # With a width of 16 this one repeats a single token.
    "causal": {"width": 24, "processor": {"name": "dape", "kernel_width": 4, "channels": 3, "alignment": "causal"}},
}
EXPORT, IMPORT = ("-m", "dape_jax.pretrained.export_command"), ("-m", "dape_jax.pretrained.import_command")
FAST = {"pythia", "llama", "t5"}
EVERY_MODEL = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MODELS]


@pytest.fixture(autouse=True)
def modules(tmp_path_factory, monkeypatch) -> None:
    """Keep copies of the model's code, which transformers makes, out of the home directory."""
    directory = str(tmp_path_factory.getbasetemp() / "modules")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", directory)
    monkeypatch.syspath_prepend(directory)


def make_run(workdir: Path, tokenizer: Any = None, **model: Any) -> Path:
    """Write a run with random parameters at step 0."""
    spec = tiny.changed(tiny.SPEC, data__path="text", data__cache_dir="cache")
    return write_run(workdir, spec | {"model": spec["model"] | {"num_heads": 4} | model}, tokenizer)


@pytest.fixture(scope="session")
def exported(tmp_path_factory) -> Callable[[str], tuple[Path, Path]]:
    """Return a function from a model's name to its run and the directory that it was exported to. Read only."""
    root = tmp_path_factory.mktemp("exported")

    @functools.cache
    def make(name: str) -> tuple[Path, Path]:
        workdir = make_run(root / "runs" / name, **MODELS[name])
        export.export_run(ExportFlags(str(workdir), str(root / name)))
        return workdir, root / name

    return make


def load_model(directory: Path, **options: Any) -> Any:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, trust_remote_code=True, output_loading_info=True, **options
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def tokens(batch: int = 2, length: int = 20) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 257, (batch, length))


@pytest.mark.parametrize("name", EVERY_MODEL)
def test_the_exported_model_is_that_of_the_run(name, exported, tmp_path):
    """Compare logits, generation from prompts padded to the left, and the parameters after importing it again."""
    workdir, directory = exported(name)
    trained, model = read_trained(workdir, "newest", {}), load_model(directory)
    config, (mesh, params) = trained.run.model, restore(trained)
    with torch.no_grad():
        found = model(torch.tensor(tokens()), use_cache=False).logits.numpy()
    expected = logits(config, params, tokens())
    assert expected.std() > 0.1
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)

    prompts = [tokens()[0, :9], tokens()[1, :4]]
    options = {"max_new_tokens": 12, "do_sample": False}
    steps = generate(config, params, mesh, prompts, max_new_tokens=12, sampling=Sampling(0.0, None, 1.0))
    expected = np.stack(list(steps), axis=1)
    assert len(set(expected.flat)) > 2
    model.generation_config.eos_token_id = None
    padded = torch.tensor(np.stack([prompts[0], np.pad(prompts[1], (5, 0))]))
    found = model.generate(padded, attention_mask=torch.tensor([[1] * 9, [0] * 5 + [1] * 4]), **options)
    np.testing.assert_array_equal(found[:, 9:], expected)
    alone = model.generate(padded[:1], use_cache=False, **options)
    np.testing.assert_array_equal(alone[:, 9:], expected[:1])

    load.import_run(ImportFlags(str(directory), str(tmp_path / "back")))
    back, found_params = ours(tmp_path / "back")
    chex.assert_trees_all_equal(found_params, params)
    computed = {"attention": config.attention, "initializer": config.initializer}
    assert dataclasses.replace(back, **computed) == config


def test_the_code_is_loaded_from_a_directory_the_hub_and_a_saved_model(exported, tmp_path):
    """Each has the kernels' sources. The hub is its cache, as after a download. A saved model can also be imported."""
    workdir, directory = exported("llama")
    commit, hub = "0123456789abcdef" * 2 + "01234567", tmp_path / "models--someone--model"
    shutil.copytree(directory, hub / "snapshots" / commit)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text(commit)
    model, of_hub = load_model(directory), load_model("someone/model", cache_dir=tmp_path, local_files_only=True)
    assert torch.equal(model(torch.tensor(tokens())).logits, of_hub(torch.tensor(tokens())).logits)
    with torch.no_grad():
        model.layers[1].mlp.up_DF += 1
    model.save_pretrained(tmp_path / "saved")
    found = model, of_hub, load_model(tmp_path / "saved")
    for model in found:
        code = sys.modules[type(model).__module__]
        assert code.__name__.startswith("transformers_modules.")
        assert code.why_not_cuda(*torch.zeros(3, 1, 20, 4, 8)) == "the tensors are on cpu"
        launcher = sys.modules[code.why_not_in_cuda.__module__]
        assert launcher.__name__ == code.__name__.replace("modeling_dape", "cuda_dape")
        assert launcher.SOURCES == compiler.SOURCES
    changed, _, saved = (model.state_dict() for model in found)
    assert all(torch.equal(value, saved[key]) for key, value in changed.items())
    transformers.AutoTokenizer.from_pretrained(directory).save_pretrained(tmp_path / "saved")
    load.import_run(ImportFlags(str(tmp_path / "saved"), str(tmp_path / "back")))
    (config, params), (expected_config, expected) = ours(tmp_path / "back"), ours(workdir)
    expected["layers"]["mlp"]["up_DF"] = expected["layers"]["mlp"]["up_DF"] + np.array([0, 1], "f4")[:, None, None]
    chex.assert_trees_all_equal(params, expected)
    assert config.bias == expected_config.bias


def test_sixteen_bits_in_several_files(exported, tmp_path, monkeypatch):
    """Norms, biases of positions and processors stay in float32, in the files and in the model."""
    workdir, directory = exported("llama")
    monkeypatch.setattr(export, "_FILE_BYTES", 4000)
    export.export_run(ExportFlags(str(workdir), str(tmp_path / "small"), dtype="bfloat16"))
    weight_map = json.loads((tmp_path / "small" / INDEX_FILE).read_text())["weight_map"]
    files = {file: safetensors.torch.load_file(tmp_path / "small" / file) for file in sorted(set(weight_map.values()))}
    assert len(files) > 2
    assert {name: file for file, tensors in files.items() for name in tensors} == weight_map
    assert all(sum(x.nbytes for x in tensors.values()) <= 4000 for tensors in files.values() if len(tensors) > 1)
    model, converted = load_model(tmp_path / "small"), load_model(directory, dtype=torch.bfloat16).state_dict()
    exact = load_model(directory).state_dict()
    for name, tensor in model.state_dict().items():
        is_small = any(part in name for part in ("norm", ".bias.", "processor"))
        assert tensor.dtype == (torch.float32 if is_small else torch.bfloat16)
        for other in (exact[name].to(tensor.dtype), files[weight_map[name]][name], converted[name]):
            assert torch.equal(tensor, other)
    expected = logits(*ours(workdir), tokens())
    with torch.no_grad():
        found = model(torch.tensor(tokens())).logits.numpy()
    np.testing.assert_allclose(found, expected, atol=0.2)
    assert np.abs(found - expected).max() > 1e-4


def test_padding_of_the_vocabulary_is_not_exported(tmp_path):
    workdir = make_run(tmp_path / "run", num_layers=1, vocab_multiple=8, output_bias=True)
    export.export_run(ExportFlags(str(workdir), str(tmp_path / "exported")))
    found = safetensors.torch.load_file(tmp_path / "exported" / "model.safetensors")
    _, params = restore(read_trained(workdir, "newest", {}))
    for name, shape in {"embedding_VD": (257, 16), "unembedding_DV": (16, 257), "output_bias_V": (257,)}.items():
        assert 264 in params[name].shape
        np.testing.assert_array_equal(found[name], np.asarray(params[name])[tuple(map(slice, shape))])
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert (config["vocab_size"], "vocab_multiple" in config) == (257, False)


def test_a_value_beyond_float16_is_refused(tmp_path):
    params = {"embedding_VD": np.array([[1e5, 1.0]], np.float32), "norm": {"scale": np.array([1e5], np.float32)}}
    with pytest.raises(InputError, match=r"^dtype = 'float16': embedding_VD has values beyond"):
        export.write_tensors(params, tmp_path, "float16")
    export.write_tensors(params, tmp_path, "bfloat16")


def test_parameters_that_a_checkpoint_lacks_are_those_of_a_new_model(exported, tmp_path):
    """Add a head, and DAPE as the identity; transformers gives them memory without values."""
    directory, x = exported("alibi")[1], torch.tensor(tokens())
    transformers.AutoModel.from_pretrained(directory, trust_remote_code=True).save_pretrained(tmp_path / "headless")
    processor = {"processor": DAPE["processor"] | {"init": "identity"}}
    for place, changes, new in ((tmp_path / "headless", {}, "unembedding_DV"), (directory, processor, "processor")):
        with pytest.raises(AssertionError, match=new):
            load_model(place, **changes)
        load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, place, trust_remote_code=True)
        model, same = load(**changes), load_model(directory).state_dict()
        for name, parameter in model.state_dict().items():
            is_right = parameter.abs().max() < 2 if new in name else torch.equal(parameter, same[name])
            assert is_right, name
    assert torch.equal(model(x).logits, load_model(directory)(x).logits)


def test_training_in_pytorch(exported):
    """Check that the loss is the mean over next tokens, and that checkpointing changes no gradient."""
    _, directory = exported("pythia")
    x = torch.tensor(tokens())
    gradients = []
    for is_checkpointed in (False, True):
        model = load_model(directory).train()
        if is_checkpointed:
            is_new = hasattr(model, "activation_checkpointing_enable")
            (model.activation_checkpointing_enable if is_new else model.gradient_checkpointing_enable)()
        out = model(x, labels=x, use_cache=True)
        assert (CACHE in out) != is_checkpointed  # a layer that is computed again would append its keys twice
        expected = -torch.log_softmax(out.logits[:, :-1], -1).gather(-1, x[:, 1:, None]).mean()
        torch.testing.assert_close(out.loss, expected)
        out.loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)
        assert gradient.ndim < 2 or gradient.abs().max() > 0
    labels = x.masked_fill(torch.arange(40).reshape(2, 20) < 13, -100)
    num_items = (labels[:, 1:] != -100).sum()  # `Trainer` divides by it, not by the number of accumulated batches
    parts = [model(x[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=num_items).loss for i in range(2)]
    torch.testing.assert_close(sum(parts), model(x, labels=labels).loss)


def test_generation_with_beams_samples_and_hidden_states(exported):
    model = load_model(exported("pythia")[1])
    model.generation_config.eos_token_id = None
    x = torch.tensor(tokens())
    mask = torch.ones_like(x)
    mask[0, :5] = 0
    for options in ({"num_beams": 3}, {"do_sample": True, "top_k": 5}):
        found = []
        for cache in ({"use_cache": False}, {}, {"cache_implementation": "static"}):
            torch.manual_seed(0)
            found.append(model.generate(x, attention_mask=mask, max_new_tokens=6, **cache, **options))
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
    outputs = {"output_hidden_states": True, "return_dict_in_generate": True, "output_logits": True}
    out = model.generate(x, max_new_tokens=2, **outputs)
    last = out.hidden_states[0][-1]
    assert (len(out.hidden_states[0]), last.shape) == (3, (2, 20, 16))
    torch.testing.assert_close(out.logits[0], last[:, -1] @ model.unembedding_DV)


def test_arguments_that_would_be_ignored_are_refused(exported):
    model, x = load_model(exported("llama")[1]), torch.tensor(tokens())
    with pytest.raises(ValueError, match="quantization_config = 'dict': must be None"):
        type(model)(type(model.config)(quantization_config={"quant_method": "torchao"}))
    hole = torch.tensor([[1] * 5 + [0] * 5 + [1] * 10] * 2)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"position_ids": torch.arange(20)[None] + 1}, "position_ids: must count the tokens"),
        ({"position_ids": torch.arange(20)[None] % 15, "cache": DynamicCache()}, "cache = 'DynamicCache': must be"),
        ({"position_ids": torch.arange(21)[None]}, r"shape of position_ids = \(1, 21\): must be \(2, 20\)"),
        ({"inputs_embeds": torch.zeros(2, 20, 16)}, "input_ids: must be given, or inputs_embeds, and not both"),
        ({"cu_seq_lens_q": torch.arange(2)}, "cu_seq_lens_q: must be None"),
        ({"output_attentions": True}, "output_attentions: must be None"),
        ({"attention_mask": torch.ones(2, 19)}, r"shape of attention_mask = \(2, 19\): must be \(2, 20\)"),
        ({"attention_mask": hole}, "attention_mask: must have no zeros between ones"),
        ({"cache": DynamicCache(), "past_key_values": DynamicCache()}, "past_key_values = 'DynamicCache': must be"),
    ]
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            model(x, **options)
    with pytest.raises(ValueError, match="output_attentions: must be None"):
        load_model(exported("llama")[1], output_attentions=True)(x)
    for wrong in (x[0], x[:, :0]):
        with pytest.raises(ValueError, match=r"shape of input_ids = .*: must be \[B, T\], with a token or more"):
            model(wrong)
    with pytest.raises(ValueError, match="length: must be at most learned_positions = 64"):
        load_model(exported("mixed")[1])(torch.zeros(1, 65, dtype=torch.long))
    for size in ({"new_num_tokens": 258}, {"new_num_tokens": 257, "pad_to_multiple_of": 64}):
        with pytest.raises(NotImplementedError, match=r"new_num_tokens = .* must be vocab_size = 257"):
            model.resize_token_embeddings(**size)


def test_padding(exported, monkeypatch):
    """Pad to the left and to the right; tokens after padding on the right are rejected, also after a cache."""
    model, x = load_model(exported("pythia")[1]), torch.tensor(tokens())
    monkeypatch.setattr(sys.modules[type(model).__module__], "BLOCK_BYTES", 2000)  # a few rows
    mask = torch.ones_like(x)
    mask[0, :4], mask[1, 15:] = 0, 0
    with torch.no_grad():
        found = model(x, attention_mask=mask)
        for row, part in ((0, slice(4, 20)), (1, slice(0, 15))):
            expected = model(x[row : row + 1, part]).logits[0]
            torch.testing.assert_close(found.logits[row, part], expected, rtol=1e-5, atol=1e-5)
        counted = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)  # as transformers counts
        assert torch.equal(model(x, attention_mask=mask, position_ids=counted).logits, found.logits)
        more = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        with pytest.raises(ValueError, match="attention_mask: must have no zeros between ones; pad to the left"):
            model(x[:, :1], attention_mask=more, **{CACHE: found[CACHE]})


def test_a_compiled_model_is_one_graph(exported):
    """Nothing branches on values: a graph takes any mask and any positions, and asserts what a model refuses."""
    model, x = load_model(exported("fire")[1]), torch.tensor(tokens())
    left, right, hole = (torch.ones_like(x) for _ in range(3))
    left[0, :4], right[1, 15:], hole[0, 3] = 0, 0, 0
    pos = torch.arange(20)[None] % 13
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=False)
    options = {"attention_mask": left, "use_cache": False}
    program = torch.export.export(model, (x,), options).module()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x).logits, model(x).logits)
        for mask in (torch.ones_like(x), left, right):
            expected = model(x, attention_mask=mask).logits[mask > 0]
            for run in (compiled, program):
                found = run(x, **options | {"attention_mask": mask}).logits[mask > 0]
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        packed = {"position_ids": pos, "use_cache": False}
        torch.testing.assert_close(compiled(x, **packed).logits, model(x, **packed).logits)
        for wrong in ({"attention_mask": hole}, {"position_ids": pos + 1}):
            with pytest.raises(RuntimeError, match=r"must have no zeros between ones|must count the tokens"):
                compiled(x, **wrong, use_cache=False)


@pytest.mark.parametrize("name", ["t5", "fire"])  # of which t5's bias is shared by the layers
def test_layers_on_two_devices(exported, name):
    """As accelerate's device_map="auto" puts them: it moves the arguments of a module, of the model only the first."""
    model = load_model(exported(name)[1])
    device_of = {path: "cpu:1" if path.startswith(("layers.1", "norm")) else "cpu" for path, _ in model.named_modules()}
    for path, module in model.named_modules():
        module.register_forward_pre_hook(lambda _, args, device=device_of[path]: send_to_device(args, device))
    with FakeTensorMode():  # compares devices
        params = {
            key: torch.empty(parameter.shape, device=device_of[key.rpartition(".")[0]])
            for key, parameter in model.named_parameters()
        }
        x = torch.zeros(2, 20, dtype=torch.long)
        out = torch.func.functional_call(model, params, (x,), {"use_cache": False})
    assert out.logits.device == x.device


@pytest.mark.parametrize("name", ["pythia", "t5", "fire", "alibi", "causal"])
def test_packed_sequences_are_those_alone(name, exported, monkeypatch):
    """Positions that start again: no query sees another sequence, and DAPE's kernels do not reach into it."""
    model, x = load_model(exported(name)[1]), torch.tensor(tokens())
    monkeypatch.setattr(sys.modules[type(model).__module__], "BLOCK_BYTES", 2000)  # a few rows
    starts = [(0, 0, 7), (0, 7, 14), (0, 14, 20), (1, 0, 1), (1, 1, 14), (1, 14, 20)]
    pos = torch.zeros_like(x)
    for row, begin, end in starts:
        pos[row, begin:end] = torch.arange(end - begin)
    found = model(x, position_ids=pos, cu_seq_lens_q=torch.tensor([0, 7, 14, 20])).logits
    assert (found - model(x).logits).abs().max() > 1e-2
    for row, begin, end in starts:
        alone = model(x[row : row + 1, begin:end]).logits[0]
        torch.testing.assert_close(found[row, begin:end], alone, rtol=1e-5, atol=1e-5)
    mask = torch.ones_like(x)
    mask[0, :7], mask[1, 14:] = 0, 0
    padded = model(x, position_ids=pos, attention_mask=mask).logits
    torch.testing.assert_close(padded[mask > 0], found[mask > 0], rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(found[0, 7:14].sum(), model.embedding_VD, retain_graph=True)
    others = set(x[0, :7].tolist()) - set(x[0, 7:14].tolist())
    assert others
    if not model.config.tied_embeddings:
        assert gradient[sorted(others)].abs().max() == 0 < gradient[x[0, 7]].abs().max()


@pytest.mark.parametrize("name", ["pythia", "llama"])  # of which llama's are tied
def test_embeddings_the_base_model_and_some_logits(exported, name):
    """As PEFT, TRL and NEFTune use them: the modules share the model's parameters, and their hooks are called."""
    directory, x = exported(name)[1], torch.tensor(tokens())
    model = load_model(directory)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert table.weight is model.embedding_VD is model.resize_token_embeddings(257).weight
    out = load_model(directory, output_hidden_states=True)(x)
    assert torch.equal(model(x, output_hidden_states=True).hidden_states[0], out.hidden_states[0])
    assert torch.equal(model(inputs_embeds=table(x)).logits, out.logits)
    torch.testing.assert_close(head(out.hidden_states[-1]), out.logits)
    torch.testing.assert_close(out.hidden_states[-1] @ head.weight.T, out.logits)
    rows = torch.tensor([3, 19])
    for kept, expected in ((2, out.logits[:, -2:]), (rows, out.logits[:, rows])):
        torch.testing.assert_close(model(x, logits_to_keep=kept).logits, expected, rtol=1e-5, atol=1e-5)
    base = transformers.AutoModel.from_pretrained(directory, trust_remote_code=True)
    torch.testing.assert_close(base(x).last_hidden_state, out.hidden_states[-1])
    assert {*base.state_dict()} == {*model.state_dict()} - {"unembedding_DV"}
    others = {key: 2 * parameter for key, parameter in model.named_parameters()}  # plain tensors, as for `vmap`
    assert not torch.equal(torch.func.functional_call(model, others, (x,)).logits, out.logits)
    assert torch.equal(model(x).logits, out.logits)
    handle = table.register_forward_hook(lambda module, args, output: 2 * output)
    assert not torch.equal(model(x).logits, out.logits)
    handle.remove()
    other = torch.nn.Embedding(257, 16)
    model.set_input_embeddings(other)
    assert model.get_input_embeddings() is other
    assert not torch.equal(model(x).logits, out.logits)
    inputs = ({"input_ids": x}, {"inputs_embeds": other(x)})
    assert torch.equal(*(model.generate(**given, max_new_tokens=3, do_sample=False)[:, -3:] for given in inputs))


def test_a_pipeline_and_the_trainer(exported, tmp_path):
    """Generate from a text, and train on packed sequences, as SFT does."""
    directory = exported("pythia")[1]
    model = load_model(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    with warnings.catch_warnings(action="ignore"):
        texts = [each[0]["generated_text"] for each in pipeline(["abc", "de"], max_new_tokens=3, batch_size=2)]
    assert [text[:2] for text in texts] == ["ab", "de"]
    rows = [{"input_ids": row[:size].tolist()} for row, size in zip(tokens(4), (5, 9, 9, 3), strict=True)]
    options = {"per_device_train_batch_size": 4, "max_steps": 1, "learning_rate": 0.1, "report_to": []}
    arguments = transformers.TrainingArguments(tmp_path, use_cpu=True, save_strategy="no", logging_steps=1, **options)
    collate = transformers.DataCollatorWithFlattening()
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, data_collator=collate)
    before = model.embedding_VD.detach().clone()
    with torch.no_grad():
        alone = [model(x, labels=x).loss * (x.shape[1] - 1) for x in (torch.tensor([row["input_ids"]]) for row in rows)]
    trainer.train()
    np.testing.assert_allclose(float(trainer.state.log_history[0]["loss"]), float(sum(alone)) / 22, rtol=1e-3)
    assert (model.embedding_VD - before).abs().max() > 1e-3
    arguments.label_smoothing_factor, x = 0.25, torch.tensor(tokens())
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    nll = -model(x).logits[:, :-1].log_softmax(-1)
    expected = 0.75 * nll.gather(-1, x[:, 1:, None]).mean() + 0.25 * nll.mean()
    torch.testing.assert_close(trainer.compute_loss(model, {"input_ids": x, "labels": x}), expected)


def test_tokenizers_give_the_same_ids(exported, tmp_path):
    """Check bytes and a BPE; transformers adds no token."""
    bpe = train_bpe(["a text of a few words " * 30, "some other words"], 300)
    workdir = make_run(tmp_path / "run", bpe, vocab_size=bpe.vocab_size, num_outputs=bpe.vocab_size)
    export.export_run(ExportFlags(str(workdir), str(tmp_path / "exported")))
    for tokenizer, directory in ((Bytes(), exported("llama")[1]), (bpe, tmp_path / "exported")):
        theirs = transformers.AutoTokenizer.from_pretrained(directory)
        for text in ("plain text, and more", "\x00\x7f ünïcödé 日本\n\n  x"):
            ids = theirs(text)["input_ids"]
            assert ids == tokenizer.encode(text.encode()).tolist()
            assert theirs.decode(ids) == text
        assert (theirs.eos_token_id, len(theirs)) == (tokenizer.end_of_document, tokenizer.vocab_size)
    for adds_bos in (True, False):  # whatever the file says
        export.write_tokenizer(bpe, Conventions(bos_token="t", adds_bos=adds_bos), tmp_path)
        bpe = HfTokenizer((tmp_path / "tokenizer.json").read_bytes())
        assert bpe.first_token == ("t" if adds_bos else None)


def test_the_example_loads_the_directory_without_a_question(exported, tmp_path, monkeypatch):
    """Check that of the documentation: transformers asks before it runs unknown code."""
    (tmp_path / "exported").symlink_to(exported("llama")[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda question="": pytest.fail(question))
    with pytest.raises(pytest.fail.Exception):
        transformers.AutoConfig.from_pretrained("exported")
    page = (ROOT / "docs" / "pretrained.md").read_text()
    (example,) = re.findall(r"```python\n(from transformers.*?)```", page, re.DOTALL)
    found: dict[str, Any] = {}
    exec(example, found)
    assert found["model"].config.model_type == "dape"
    assert found["tokenizer"].eos_token_id == 256


def test_harmless_arguments_and_both_names_of_the_cache(exported):
    model, x = load_model(exported("llama")[1]), torch.tensor(tokens())
    harmless = {"token_type_ids": torch.zeros_like(x), "tokenizer": object(), "head_mask": None}
    harmless |= {"output_attentions": False, "position_ids": torch.arange(20)[None]}
    with torch.no_grad():
        expected = model(x).logits
        assert torch.equal(model(x, **harmless).logits, expected)
        assert torch.equal(model(x, return_dict=False)[0], expected)
        for name in ("past_key_values", "cache"):
            last = model(x[:, -1:], **{name: model(x[:, :-1])[CACHE]}).logits
            torch.testing.assert_close(last, expected[:, -1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("message", "model"),
    [
        ("bias.name = 'cope': must be one of", {"bias": {"name": "cope"}}),
        ("processor.edge = 'listing': must be one of", {"processor": {"name": "dape", "edge": "listing"}}),
        ("processor.leak = True: must be one of", {"processor": {"name": "dape", "leak": True}}),
    ],
)
def test_a_model_that_pytorch_lacks_is_refused(tmp_path, message, model):
    with pytest.raises(InputError, match=f"model.{message}"):
        export.export_run(ExportFlags(str(make_run(tmp_path / "run", **model)), str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_an_output_is_complete_and_never_replaced(exported, tmp_path, monkeypatch):
    workdir, directory = exported("llama")
    with pytest.raises(InputError, match=r"output = .*: must not exist yet"):
        export.export_run(ExportFlags(str(workdir), str(directory)))
    monkeypatch.setattr(export, "write_tokenizer", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space left"):
        export.export_run(ExportFlags(str(workdir), str(tmp_path / "out")))
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_the_command_lines(exported, tmp_path):
    """Export, and import the result."""
    command = run_python(*EXPORT, f"--workdir={exported('llama')[0]}", f"--output={tmp_path}/out")
    assert (command.returncode, command.stdout) == (0, f"exported: {tmp_path}/out\n"), command.stderr
    command = run_python(*IMPORT, f"--source={tmp_path}/out", f"--workdir={tmp_path}/run")
    assert command.returncode == 0, command.stderr
    assert f"run: {tmp_path}/run\n" in command.stdout
