"""Continue prompts with a trained model.

dape-generate --workdir=runs/mine --prompt="def main("
dape-generate --workdir=runs/mine --prompt="class " --prompt_file=long.txt --temperature=0
"""

import dataclasses
import os

from dape_jax import command_line
from dape_jax.command_line import flag, unescape, use_compilation_cache
from dape_jax.errors import require
from dape_jax.evaluation.options import STEP_HELP
from dape_jax.storage import read_errors, to_path


@dataclasses.dataclass(frozen=True)
class Flags:
    """Flags of the command line."""

    workdir: str = flag(dataclasses.MISSING, "Run directory.")
    prompt: tuple[str, ...] = flag((), "Text to continue; repeat for a batch.", repeated=True)
    prompt_file: tuple[str, ...] = flag(
        (), "File whose whole content, including a final newline, is another prompt; repeat for several.", repeated=True
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


def main(given: Flags) -> None:
    """Complete the prompts."""
    prompts = [os.fsencode(prompt) for prompt in given.prompt]
    for file in given.prompt_file:
        with read_errors("--prompt_file", file):
            prompts.append(to_path(file, "--prompt_file").read_bytes())

    use_compilation_cache()
    from dape_jax.tools.completion import Sampling, complete  # after the flags are checked: JAX takes seconds to import

    complete(
        to_path(given.workdir, "--workdir"),
        prompts,
        max_new_tokens=given.max_new_tokens,
        sampling=Sampling(given.temperature, given.top_k or None, given.top_p),
        seed=given.seed,
        step=given.step,
        stop=tuple(map(unescape, given.stop)),
        bos=given.bos,
        control_tokens=given.control_tokens,
        chat=given.chat,
    )


def command() -> None:
    """Run the command line `dape-generate`."""
    command_line.run(main, Flags)


if __name__ == "__main__":
    command()
