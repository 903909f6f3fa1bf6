"""Flags of `dape-generate` and `dape-attention-maps`. Imports no JAX, so that --help is quick."""

import dataclasses

from dape_jax.command_line import flag
from dape_jax.errors import require
from dape_jax.evaluation.options import STEP_HELP


@dataclasses.dataclass(frozen=True)
class GenerateFlags:
    """Flags of `dape-generate`."""

    workdir: str = flag(dataclasses.MISSING, "Run directory.")
    prompt: tuple[str, ...] = flag((), "Text to continue; repeat for a batch.", repeated=True)
    prompt_file: tuple[str, ...] = flag(
        (),
        "File, or /dev/stdin, whose content, including a final newline, is another prompt; repeat for several.",
        repeated=True,
    )
    max_new_tokens: int = flag(256, "Maximum number of tokens per completion; it ends earlier if its document ends.")
    temperature: float = flag(0.8, "Divisor of the logits; 0 is greedy, the most probable token.")
    top_k: int = flag(40, "Sample from this number of most probable tokens; 0 for all.")
    top_p: float = flag(0.95, "Sample from the most probable tokens that together reach this probability; 1 for all.")
    seed: int = flag(0, "Seed of the random draws.")
    stop: tuple[str, ...] = flag(
        (), r"Text before which a completion ends, with escapes such as \n; repeat for several.", repeated=True
    )
    bos: bool = flag(True, "Begin with the token that an imported model's tokenizer puts before a text, if it does.")
    control_tokens: bool = flag(
        False, "Take the text of control tokens in a prompt, such as <|eot_id|>, as these tokens."
    )
    chat: bool = flag(False, "Take each prompt as a message of a user, through the imported model's chat template.")
    step: str = flag("newest", STEP_HELP)

    def __post_init__(self):
        require(self.top_k >= 0, "--top_k", self.top_k, "must be positive, or 0 for all")
        require(all(self.stop), "--stop", self.stop, "must be text, or not given")


@dataclasses.dataclass(frozen=True)
class MapsFlags:
    """Flags of `dape-attention-maps`."""

    workdir: str = flag(dataclasses.MISSING, "Run directory.")
    length: int = flag(dataclasses.MISSING, "Number of tokens that the model reads.")
    text: str | None = flag(
        None, "File whose first tokens the model reads; the first validation document that is long enough if unset."
    )
    step: str = flag("newest", STEP_HELP)
    output: str | None = flag(None, "Result directory; WORKDIR/attention_maps/step-STEP-length-LENGTH if unset.")
