"""How much memory this process can still take: what the machine has, cut to what its control groups allow."""

from __future__ import annotations

from pathlib import Path, PurePosixPath


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can still be allocated. Reclaimable page cache counts as available."""
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files = (cgroups, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = (cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Every ancestor limits too. In a container the path may be the host's; then only the mounted root answers.
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):
            left = _left_in_group(files[0] / group.relative_to("/"), *files[1:])
            available = min(available, left if left is not None else available)
    return max(available, 0)


def _left_in_group(group: Path, limit_file: str, usage_file: str, reclaimable: str) -> int | None:
    """Bytes left under one control group's limit; None when it has none."""
    try:
        limit = (group / limit_file).read_text().strip()
        usage = int((group / usage_file).read_text())
        stat = (group / "memory.stat").read_text()
    except OSError:
        return None
    if limit == "max":
        return None
    cached = next((int(line.split()[1]) for line in stat.splitlines() if line.split()[0] == reclaimable), 0)
    return int(limit) - usage + cached
