"""What a Hugging Face checkpoint says about generation beyond `tokenizer.json`: first token, end tokens, chat template.

In: the files of a checkpoint. Out: `Conventions`, which a run keeps beside its tokenizer. Next: generation, `lm_eval`,
and export, which writes them back.
"""

import dataclasses
import functools
import logging
import re
from pathlib import Path
from typing import Any

import tokenizers
from etils import epath

from dape_jax.data.tokenizers import Tokenizer
from dape_jax.errors import InputError, require_package
from dape_jax.files import read_json, write_json

logger = logging.getLogger(__name__)

CONVENTIONS_FILE, TEMPLATE_FILE = "conventions.json", "chat_template.jinja"
# Fields of generation_config.json that an export gives its own values, or that choose how, not what, to generate.
_OWN_GENERATION = re.compile(r"_.*|transformers_version|.*cache.*|(bos|eos|pad)_token_id")


@dataclasses.dataclass(frozen=True)
class Conventions:
    """Conventions of a model's tokens; the defaults are those of a model that was trained here."""

    bos_token: str | None = None  # special token
    eos_token: str | None = None  # special token
    adds_bos: bool = False  # a text begins with `bos_token`
    end_tokens: tuple[int, ...] = ()  # ids that end a completion, in addition to the tokenizer's end of document
    chat_template: str | None = None  # Jinja template of a conversation
    other_tokens: dict[str, str] = dataclasses.field(default_factory=dict)  # special tokens by name, such as pad_token
    padding_side: str = "right"  # of texts of different lengths in transformers' tokenizer, for exports
    generation: dict[str, Any] = dataclasses.field(default_factory=dict)  # of transformers' `generate`, for exports

    def bos_id(self, tokenizer: Tokenizer) -> int | None:
        """Return the id that begins a text, or None."""
        return tokenizer.id_of(self.bos_token) if self.adds_bos and self.bos_token else None

    def ends(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return all ids that end a completion."""
        return (tokenizer.end_of_document, *(end for end in self.end_tokens if end != tokenizer.end_of_document))

    def render(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a conversation, whose control tokens `Tokenizer.encode` takes as text.

        Args:
            messages: dicts with "role" and "content".
            add_generation_prompt: end with the beginning of an answer.

        Raises:
            InputError: there is no chat template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise InputError("chat_template = None: the model has none; give prompts as text")
        require_package("transformers", "hf", "chat_template", self.chat_template[:40])
        import transformers  # large, and needed only here

        tokens: dict[str, Any] = {"bos_token": self.bos_token, "eos_token": self.eos_token, **self.other_tokens}
        empty = tokenizers.Tokenizer(tokenizers.models.BPE())  # only its special tokens are rendered
        renderer = transformers.PreTrainedTokenizerFast(tokenizer_object=empty, **tokens)
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        rendered = functools.partial(renderer.apply_chat_template, chat_template=self.chat_template, **options)
        try:
            if "any text" in str(rendered([each | {"content": "any text"} for each in messages])):
                return str(rendered(messages))
            # Templates of multimodal models render the parts of a message, and nothing of a text.
            parts = [each | {"content": [{"type": "text", "text": each["content"]}]} for each in messages]
            return str(rendered(parts))
        except Exception as error:  # of jinja2, or of an operation in the template
            raise InputError(f"chat_template: {' '.join(str(error).split())}") from error


def _content(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def special_tokens(directory: Path) -> dict[str, str]:
    """Return the special tokens of a Hugging Face checkpoint by name, such as eos_token."""
    tokens = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):  # the second takes precedence
        for name, token in _content(directory / file).items():
            token = token["content"] if isinstance(token, dict) and "content" in token else token
            if name.endswith("_token") and isinstance(token, str):
                tokens[name] = token
    return tokens


def conventions_of(directory: Path, config: dict[str, Any], tokenizer: Tokenizer) -> Conventions:
    """Return the conventions of a Hugging Face checkpoint, from whichever of its files there are."""
    settings, named = _content(directory / "tokenizer_config.json"), special_tokens(directory)
    tokens = {name: token for name, token in named.items() if tokenizer.id_of(token) is not None}
    found = [tokenizer.id_of(tokens["eos_token"])] if "eos_token" in tokens else []
    generation = _content(directory / "generation_config.json")
    for ids in (config.get("eos_token_id"), generation.get("eos_token_id")):
        found += ids if isinstance(ids, list) else [ids]
    ends = {end for end in found if type(end) is int}
    names = {name: tokens.pop(name, None) for name in ("bos_token", "eos_token")}
    first, adds_bos, template = tokenizer.first_token, settings.get("add_bos_token"), settings.get("chat_template")
    if adds_bos is None:
        adds_bos = first is not None
        names["bos_token"] = first or names["bos_token"]
    left_out = [file.stem for file in (directory / "additional_chat_templates").glob("*.jinja")]
    if isinstance(template, list):  # several, by name
        templates = {each["name"]: each["template"] for each in template}
        template = templates.pop("default", None)
        left_out += templates
    if left_out:
        logger.warning("%s: chat templates other than default are left out: %s", directory, ", ".join(sorted(left_out)))
    if (directory / TEMPLATE_FILE).exists():
        try:
            template = (directory / TEMPLATE_FILE).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{directory / TEMPLATE_FILE}: must be UTF-8: {error}") from error
    adds_bos = bool(adds_bos) and names["bos_token"] is not None
    generation = {name: value for name, value in generation.items() if not _OWN_GENERATION.fullmatch(name)}
    others: dict[str, Any] = {"other_tokens": tokens, "generation": generation}
    others["padding_side"] = settings.get("padding_side", "right")
    return Conventions(**names, adds_bos=adds_bos, end_tokens=tuple(sorted(ends)), chat_template=template, **others)


def saved_conventions(workdir: epath.PathLike) -> Conventions:
    """Return the conventions of a run; the defaults if it has none."""
    file = epath.Path(workdir) / CONVENTIONS_FILE
    if not file.exists():
        return Conventions()
    fields = read_json(file)
    fields["end_tokens"] = tuple(fields["end_tokens"])
    return Conventions(**fields)


def save_conventions(conventions: Conventions, workdir: epath.PathLike) -> None:
    """Write conventions for `saved_conventions`, unless they are the defaults."""
    if conventions != Conventions():
        write_json(epath.Path(workdir) / CONVENTIONS_FILE, dataclasses.asdict(conventions))
