"""Memory: what a compiled program needs on each device, and what is free there. Next: `programs.py`."""

import os
from pathlib import Path

from jax.sharding import Mesh
from jax.stages import Compiled


def predicted_bytes(compiled: Compiled) -> int:
    """Return the memory that a compiled program needs on each device: arguments, results and temporaries."""
    stats = compiled.memory_analysis()
    assert stats is not None
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        + stats.temp_size_in_bytes
        - stats.alias_size_in_bytes  # results that overwrite arguments
    )


def available_bytes(mesh: Mesh) -> int:
    """Return the free memory of the device of this process that has least; the devices of a CPU share the host's."""
    devices = mesh.local_devices
    if devices[0].platform == "cpu":
        return host_available_bytes() // len(devices)
    stats = [device.memory_stats() for device in devices]
    return min(each["bytes_limit"] - each["bytes_in_use"] for each in stats)


def host_available_bytes(root: Path = Path("/")) -> int:
    """Return the memory that this process can still allocate, by the host's figures and those of its control groups.

    Inactive file cache of a control group counts as free: the kernel drops it before it refuses memory.

    Args:
        root: root of the file system.
    """
    meminfo = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in _lines(root / "proc/meminfo")}
    if not meminfo:  # not Linux: total memory is all that is known
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = meminfo["MemAvailable"]
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, usage, cache = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, usage = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        # In a container the path may be that of the host, and only the top directory visible.
        group = Path(path.lstrip("/"))
        for directory in {root / top / group, *(root / top / parent for parent in group.parents), root / top}:
            limits, usages = _lines(directory / limit), _lines(directory / usage)
            if limits and usages and limits[0] != "max":
                stat = dict(line.split() for line in _lines(directory / "memory.stat"))
                used = int(usages[0]) - (int(stat[cache]) if cache in stat else 0)
                available = min(available, max(0, int(limits[0]) - used))
    return available


def _lines(file: Path) -> list[str]:
    """Return the lines of a kernel file, or none if it is missing or not readable."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
