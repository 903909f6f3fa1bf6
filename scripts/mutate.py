"""Check that the fast tests catch faults: apply one mutation at a time to a copy of the project, and run its tests.

    python scripts/mutate.py                 # all; about 20 minutes on two cores
    python scripts/mutate.py 'mask' 'ALiBi'  # those whose name contains one of these texts
    python scripts/mutate.py --list

A mutation of `mutations.toml` replaces one text, which occurs exactly once in its file (`tests/test_project.py` checks
this), and names the tests that must fail. Prints the survivors; exits with status 1 if there are any. A mutation whose
text is gone needs a new text for the same fault, not deletion.
"""

import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COPIED = (
    *("dape_jax", "experiments", "benchmarks", "tests", "configs", "docs"),
    *("pyproject.toml", "train.py", "eval.py", "README.md"),
)


class Mutation(NamedTuple):
    """One fault: the replaced text of a file of the package, and the tests that catch it."""

    name: str
    file: str
    old: str
    new: str
    tests: str


def read_mutations() -> list[Mutation]:
    """Read the list."""
    return [
        Mutation(**each) for each in tomllib.loads(Path(__file__).with_name("mutations.toml").read_text())["mutation"]
    ]


def survives(mutation: Mutation) -> str | None:
    """Return why a mutation survives, or None if a test caught it."""
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            source, target = ROOT / name, Path(folder, name)
            if source.is_dir() and not source.is_symlink():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target, follow_symlinks=False)
        file = Path(folder, "dape_jax", mutation.file)
        text = file.read_text()
        if text.count(mutation.old) != 1:
            return f"its text occurs {text.count(mutation.old)} times in {mutation.file}"
        file.write_text(text.replace(mutation.old, mutation.new))
        tests = [str(Path(folder, "tests", name)) for name in mutation.tests.split()]
        cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax"))
        environment = os.environ | {"PYTHONPATH": folder, "JAX_COMPILATION_CACHE_DIR": cache}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        return None if done.returncode == 1 else f"pytest exits with {done.returncode}: {done.stdout[-200:]}"


def main(arguments: list[str]) -> None:
    """Run the chosen mutations, two at a time."""
    mutations = read_mutations()
    if "--list" in arguments:
        print("\n".join(mutation.name for mutation in mutations))
        return
    chosen = [each for each in mutations if not arguments or any(text in each.name for text in arguments)]
    survivors = 0
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        for mutation, reason in zip(chosen, pool.map(survives, chosen), strict=True):
            survivors += reason is not None
            verdict = "caught" if reason is None else f"SURVIVED ({reason})"
            print(f"{mutation.name}: {verdict}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutations caught")
    sys.exit(survivors > 0)


if __name__ == "__main__":
    main(sys.argv[1:])
