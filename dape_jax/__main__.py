"""List the commands of the package: `python -m dape_jax`."""

import ast
from pathlib import Path

from dape_jax import command_line

# Modules of the commands, each with a function `command`; those of `pyproject.toml`.
COMMANDS = {
    "dape-train": "training.command",
    "dape-eval": "evaluation.command",
    "dape-generate": "tools.generate",
    "dape-attention-maps": "tools.attention_maps",
    "dape-lm-eval": "tools.lm_eval",
    "dape-prepare": "data.prepare.command",
    "dape-plan": "planning.__main__",
    "dape-import": "pretrained.import_command",
    "dape-export": "pretrained.export_command",
}


def main() -> None:
    """Print each command with the first line of its module's docstring."""
    for name, module in COMMANDS.items():
        file = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
        doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        print(f"{name:<20} {doc.partition(chr(10))[0]}")
    print("\nEach has --help and --version.")


if __name__ == "__main__":
    command_line.run(main)
