"""Crashes, damaged disks and concurrent runs: no checkpoint is lost, and no damage is restored unnoticed."""

import errno
import gc
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from processes import run_python
from tiny import flip

from dape_jax import files
from dape_jax.errors import InputError
from dape_jax.sharding import MeshConfig, make_mesh
from dape_jax.training import checkpoint
from dape_jax.training.step import TrainState

# When one read of a damaged step fails, Orbax never awaits the others, which fail too.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module", autouse=True)
def collect_futures():
    """Collect the futures of Orbax's failed reads here, because they warn when they are collected."""
    yield
    gc.collect()


def small_state(seed: int) -> TrainState:
    """Return a state of a few arrays, some of them sharded over eight devices."""
    draw = np.random.default_rng(seed)
    mesh = make_mesh(MeshConfig(1, 8, 1, 1))

    def place(array, *spec):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    up, moments = (draw.standard_normal(shape).astype(np.float32) for shape in ((1600, 64), (8, 16)))
    params = {"up_DF": place(up), "scale": place(np.ones(8, np.float32))}
    moments = {"up_DF": place(moments, "fsdp"), "scale": jnp.zeros(8, jnp.bfloat16)}
    return TrainState(params, (moments, place(np.int32(seed))), {"applied": place(np.int32(seed))})


def abstract(state: TrainState, mesh: jax.sharding.Mesh | None = None) -> TrainState:
    """Return the shapes of a state, replicated over a mesh."""
    placed = NamedSharding(mesh or make_mesh(MeshConfig(1, 8, 1, 1)), PartitionSpec())
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed), state)


def save_steps(workdir: Path, *steps: int) -> None:
    workdir.mkdir(exist_ok=True)
    with checkpoint.Checkpoints(workdir, max_to_keep=3) as manager:
        for step in steps:
            jsons = {"data": {"next": step}, "config": {"config": {}, "step": step}}
            checkpoint.save(manager, step, small_state(step)._asdict(), jsons, 10.0 - step)


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(f.relative_to(directory)): f.read_bytes() for f in sorted(directory.rglob("*")) if f.is_file()}


def array_data(step: Path) -> Path:
    """Return the file with most of a step's parameters; of two copies, the one that Orbax reads."""
    files = (step / "params").rglob("*")
    return max(files, key=lambda file: (file.stat().st_size, file.parent == step / "params" / "d"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Return a run with steps 1, 2 and 3. Copy it before damaging it."""
    workdir = tmp_path_factory.mktemp("survival") / "saved"
    save_steps(workdir, 1, 2, 3)
    return workdir


@pytest.fixture
def workdir(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


# ---- digests


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "int32", "uint8", "bool"]),
    place=st.integers(0, 6 * 8 - 1),
    bit=st.integers(0, 31),
)
def test_a_digest_depends_on_every_bit_and_not_on_the_mesh(dtype, place, bit):
    values = np.asarray(jnp.asarray(np.arange(48).reshape(6, 8) % 3).astype(dtype))
    changed = values.copy()
    if dtype == "bool":
        changed.flat[place] ^= True
    else:
        words = changed.reshape(-1).view(f"u{values.dtype.itemsize}")
        words[place] ^= words.dtype.type(1 << bit % (8 * values.dtype.itemsize))
    whole = checkpoint.leaf_digests({"a": jnp.asarray(values)})
    assert whole.keys() == {"a"}
    assert checkpoint.leaf_digests({"a": jnp.asarray(changed)}) != whole
    mesh = make_mesh(MeshConfig(1, 2, 2, 2))
    for spec in [("fsdp",), ("fsdp", ("context", "tensor")), (None, "context")]:
        placed = jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))
        assert checkpoint.leaf_digests({"a": placed}) == whole


def test_a_digest_depends_on_the_order_of_the_values():
    """Swap rows and rotate values, which would not change a plain sum."""
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    others = [values[::-1], values.T, np.roll(values, 1), values.reshape(4, 16).repeat(2, 0)[:, ::2], -values]
    digests = [checkpoint.leaf_digests({"a": jnp.asarray(a)})["a"] for a in [values, *others]]
    assert len(set(digests)) == len(digests)


# ---- restoring what was saved, or naming the damage


@pytest.mark.parametrize("mesh", [(1, 1, 1, 1), (1, 8, 1, 1), (1, 1, 4, 2)])
def test_a_step_is_restored_on_any_mesh(saved, mesh):
    devices = jax.devices()[: int(np.prod(mesh))]
    found = checkpoint.restore_newest(saved, abstract(small_state(3), make_mesh(MeshConfig(*mesh), devices)))
    assert found is not None
    step, state, data = found
    assert (step, data) == (3, {"next": 3})
    chex.assert_trees_all_equal(jax.device_get(state), jax.device_get(small_state(3)))
    assert checkpoint.leaf_digests(state._asdict()) == checkpoint.leaf_digests(small_state(3)._asdict())


@pytest.mark.extra
def test_a_flipped_bit_in_any_file_is_an_error_or_has_no_effect(workdir):
    """Flips in JSON items are always detected; in other files some bytes are not used to restore any array."""
    for step in (1, 2):
        shutil.rmtree(workdir / "checkpoints" / str(step))
    target, expected = abstract(small_state(3)), jax.device_get(small_state(3))
    step = workdir / "checkpoints" / "3"
    names = list(files_of(step))
    assert {name.split("/")[0] for name in names} >= {"params", "opt_state", "health", "data", "config", "metrics"}
    draw = np.random.default_rng(0)
    detected: dict[str, list[bool]] = {name: [] for name in names}
    for name in names:
        content = (step / name).read_bytes()
        for place in {0, len(content) - 1, int(draw.integers(len(content)))}:
            flip(step / name, place, int(draw.integers(8)))
            try:
                found = checkpoint.restore_newest(workdir, target)
            except InputError:
                detected[name].append(True)
            else:
                assert found is not None
                assert found[2] == {"next": 3}
                chex.assert_trees_all_equal(jax.device_get(found[1]), expected)
                with checkpoint.Checkpoints(workdir, 3) as manager:
                    assert manager.all_steps() == [3]
                detected[name].append(False)
            (step / name).write_bytes(content)
    for name in ("data/metadata", "config/metadata", "metrics/metrics", "digests/metadata"):
        assert all(detected[name]), name
    assert any(detected[str(array_data(step).relative_to(step))])
    assert not all(map(any, detected.values()))  # otherwise the branch above never ran


# ---- resuming from an older step


def damage_data(step: Path) -> str:
    flip(array_data(step), 1000)
    return "params/up_DF: differs from what was saved"


def truncate(step: Path) -> str:
    file = array_data(step)
    os.truncate(file, file.stat().st_size // 2)
    return "up_DF"


def replace_by_another(step: Path) -> str:
    """Replace a step by that of a run with other shapes."""
    shutil.rmtree(step)
    other = step.parent.parent / "other"
    with checkpoint.Checkpoints(other, 1) as manager:
        arrays = {name: {"w": jnp.ones(3)} for name in TrainState._fields}
        checkpoint.save(manager, 3, arrays, {"data": {"next": 3}, "config": {"config": {}}}, 1.0)
    (other / "checkpoints" / "3").rename(step)
    return "cannot be read"


def rename_another(step: Path) -> str:
    shutil.rmtree(step)
    shutil.copytree(step.with_name("2"), step)
    return "was saved as another step"


def lose(item: str) -> Callable[[Path], str]:
    """Return a damage that removes an item of a step."""

    def damage(step: Path) -> str:
        shutil.rmtree(step / item)
        return item

    return damage


DAMAGES = {
    "data": damage_data,
    "truncated": truncate,
    "no health": lose("health"),
    "no metrics": lose("metrics"),
    "another": replace_by_another,
    "renamed": rename_another,
}


def resumed_step(workdir: Path) -> int | None:
    """Return the step from which training resumes."""
    found = checkpoint.restore_newest(workdir, abstract(small_state(0)))
    return found and found[0]


def read_as_an_evaluator(workdir: Path, which: str) -> tuple[int, dict]:
    step, _ = checkpoint.restore_config(workdir, which)
    return step, checkpoint.restore_params(workdir, step, abstract(small_state(step)).params)


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_step_is_skipped_moved_aside_and_kept(workdir, caplog, kind):
    caplog.set_level(logging.WARNING, logger="dape_jax")
    step = workdir / "checkpoints" / "3"
    message = DAMAGES[kind](step)
    damaged = files_of(step)

    # An evaluator reads the config first: it skips a step where that is damaged. It moves nothing.
    before = files_of(workdir)
    assert checkpoint.restore_config(workdir)[0] == (2 if kind in ("no metrics", "renamed") else 3)
    assert checkpoint.restore_config(workdir, "1")[0] == 1
    if kind == "no health":  # which an evaluator does not read
        read_as_an_evaluator(workdir, "3")
    else:
        with pytest.raises(InputError) as error:
            read_as_an_evaluator(workdir, "3")
        assert str(step) in str(error.value)
    assert files_of(workdir) == before

    # Training resumes from the previous step.
    caplog.clear()
    assert resumed_step(workdir) == 2
    (warning,) = [record.getMessage() for record in caplog.records if "damaged and moved" in record.getMessage()]
    assert all(words in warning for words in ("step 3", str(workdir / "damaged" / "3"), message)), warning
    assert files_of(workdir / "damaged" / "3") == damaged

    # The step can be saved again, and be damaged again.
    save_steps(workdir, 3)
    assert resumed_step(workdir) == 3
    DAMAGES[kind](step)
    assert resumed_step(workdir) == 2
    assert {entry.name for entry in (workdir / "damaged").iterdir()} == {"3", "3.txt", "3-2", "3-2.txt"}
    assert message in (workdir / "damaged" / "3-2.txt").read_text()


def test_a_step_that_training_deletes_before_it_is_read_is_named(workdir):
    step, _ = checkpoint.restore_config(workdir, "1")
    shutil.rmtree(workdir / "checkpoints" / "1")
    with pytest.raises(InputError, match=r"^step = '1': deleted .* train.max_to_keep .*; the steps are \['3', '2'\]$"):
        checkpoint.restore_params(workdir, step, abstract(small_state(step)).params)


def test_an_older_damaged_step_is_moved_too_and_is_never_the_best(workdir, caplog):
    (workdir / "checkpoints" / "2" / "metrics" / "metrics").write_text('{"validation_nats": 0.1}')
    assert checkpoint.restore_config(workdir, "best")[0] == 3
    assert "step 2 is damaged and skipped" in caplog.text
    assert resumed_step(workdir) == 3
    with checkpoint.Checkpoints(workdir, 3) as manager:
        assert list(manager.all_steps()) == [1, 3]


def test_if_all_steps_are_damaged_nothing_is_started_or_moved(workdir):
    for step in (1, 2, 3):
        shutil.rmtree(workdir / "checkpoints" / str(step) / "health")
    before = files_of(workdir)
    with pytest.raises(InputError, match="no checkpoint is intact") as error:
        checkpoint.restore_newest(workdir, abstract(small_state(3)))
    assert all(f"step {step}: " in str(error.value) for step in (1, 2, 3))
    assert checkpoint.restore_config(workdir)[0] == 3  # an evaluator does not read the optimizer's state
    assert files_of(workdir) == before
    for step in (1, 2, 3):
        (workdir / "checkpoints" / str(step) / "metrics" / "metrics").write_text("not JSON")
    with pytest.raises(InputError, match="no checkpoint is intact"):
        checkpoint.restore_config(workdir)


def test_what_a_killed_process_leaves_is_removed_by_the_next_save(workdir, tmp_path):
    (tmp_path / "new" / "checkpoints" / "2.orbax-checkpoint-tmp").mkdir(parents=True)
    assert resumed_step(tmp_path / "new") is None
    steps = workdir / "checkpoints"
    shutil.copytree(steps / "3", steps / "9.orbax-checkpoint-tmp")  # an unfinished save
    shutil.copytree(steps / "1", steps / "deleted" / "1")  # an unfinished deletion
    (steps / "deleted" / "1" / "params" / "_METADATA").unlink()
    assert resumed_step(workdir) == 3
    save_steps(workdir, 4, 5, 6)
    assert sorted(entry.name for entry in steps.iterdir()) == ["4", "5", "6"]


# ---- one run per directory


def test_a_directory_has_one_run(tmp_path):
    workdir = tmp_path / "run"
    for _ in range(2):
        with checkpoint.run_lock(workdir):
            with pytest.raises(InputError, match=rf"^workdir = '{workdir}': in use by another process"):
                checkpoint.run_lock(workdir).__enter__()
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(InputError, match=rf"^workdir = '{wrong}': .*cannot be written to"):
            checkpoint.run_lock(wrong).__enter__()


@pytest.mark.parametrize("name", ["lr[3e-4]", "a*", "b?", "lr[3]/run", "a\\b", "caf\udce9"])
def test_a_path_in_which_orbax_would_lose_checkpoints_is_refused(workdir, tmp_path, monkeypatch, name):
    """Refuse to write below such a directory, also if the given path is relative. Below patterns, a run can be read."""
    moved = tmp_path / name
    shutil.copytree(workdir, moved)
    monkeypatch.chdir(moved)
    for path in (moved, Path("new")):
        with pytest.raises(InputError, match=r"^workdir = '.*': the path must not contain \*, \? or \["):
            checkpoint.run_lock(path).__enter__()
    assert not Path("new").exists()
    assert name in ("a\\b", "caf\udce9") or read_as_an_evaluator(moved, "newest")[0] == 3


# ---- errors of the machine


@pytest.mark.parametrize(
    ("place", "function", "number"),
    [
        (ocp.StandardCheckpointHandler, "restore", errno.EIO),
        (ocp.JsonCheckpointHandler, "restore", errno.EACCES),
        (files, "parse_json", errno.EACCES),  # of the metrics
    ],
)
def test_a_step_that_may_not_be_read_now_is_not_damaged(workdir, monkeypatch, place, function, number):
    """Unreadable steps are not moved, and older steps are not used instead."""

    def restore(*_args, **_options):
        raise OSError(number, os.strerror(number), "a file")

    monkeypatch.setattr(place, function, restore)
    with pytest.raises(InputError, match=f"cannot be read now: .*{os.strerror(number)}"):
        checkpoint.restore_newest(workdir, abstract(small_state(0)))
    assert checkpoint.step_names(workdir) == ["3", "2", "1"]
    assert not (workdir / "damaged").exists()


DISK_FULL = """
import sys, resource
from collections.abc import Callable
from pathlib import Path
import jax.numpy as jnp, numpy as np
from dape_jax.training import checkpoint

def save(step, n):
    w = jnp.asarray(np.random.default_rng(0).standard_normal(n), jnp.float32)
    arrays = {"params": {"w": w}, "opt_state": {"m": jnp.ones(3)}, "health": {"h": jnp.ones(3)}}
    checkpoint.save(manager, step, arrays, {"data": {"next": 0}, "config": {"c": 1}}, 1.0)

with checkpoint.Checkpoints(Path(sys.argv[1]), 1) as manager:
    save(1, 10)
    manager.wait_until_finished()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    save(2, 100_000)
    print("started")
    save(3, 10)
"""


@pytest.mark.extra
def test_a_full_disk_is_one_line_and_loses_no_checkpoint(tmp_path):
    """Simulate a full disk by a limit on the size of files, which makes the same calls fail."""
    run = run_python("-c", DISK_FULL, tmp_path)
    assert run.returncode == 1
    assert run.stdout == "started\n"
    last = run.stderr.strip().splitlines()[-1]
    assert "InputError: workdir = " in last
    assert "the checkpoint of step 2 cannot be written: File too large" in last
    assert "absl" not in run.stderr
    three = jax.ShapeDtypeStruct((3,), jnp.float32)
    target = TrainState({"w": jax.ShapeDtypeStruct((10,), jnp.float32)}, {"m": three}, {"h": three})
    found = checkpoint.restore_newest(tmp_path, abstract(target))
    assert found is not None
    assert found[0] == 1
    assert not (tmp_path / "damaged").exists()
