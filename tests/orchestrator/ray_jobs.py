"""A head node of its own for test_job_submit: started by ``ray start --head``, ended by process id."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
PACKAGES = ("checkpointing", "orchestrator", "pipelines", "workers")
_RAY = "import sys; from ray.scripts.scripts import main; sys.exit(main())"
# As docs/operating.md recommends.
_FIND_DEAD_NODES_SOON = json.dumps(
    {
        "health_check_initial_delay_ms": 1000,
        "health_check_period_ms": 500,
        "health_check_timeout_ms": 1000,
        "health_check_failure_threshold": 4,
    }
)
_CONSOLE_SCRIPT = "import sys; from orchestrator.cli import main; sys.exit(main())"


def copy_packages(into: Path) -> None:
    for name in PACKAGES:
        shutil.copytree(ROOT / name, into / name, ignore=shutil.ignore_patterns("__pycache__"))


def make_environment(folder: Path) -> Path:
    """A virtual environment with Planaria installed, and the dependencies of this one; returns its site-packages."""
    venv.create(folder, symlinks=True)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    (site / "dependencies.pth").write_text(
        "\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n"
    )
    copy_packages(site)
    script = folder / "bin" / "planaria"
    script.write_text(f"#!{folder / 'bin' / 'python'}\n{_CONSOLE_SCRIPT}\n")
    script.chmod(0o755)
    return site


@dataclass(frozen=True)
class Head:
    """A running head node. ``environment``: what its processes, and with it every job, were started with."""

    address: str
    python: Path
    home: Path
    environment: dict[str, str]

    def ray(self, *arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run ``ray ...`` as a user of the cluster; a variable that is '' is left out."""
        process = self.start_ray(*arguments, cwd=cwd, **variables)
        out, _ = process.communicate(timeout=240)
        return subprocess.CompletedProcess(arguments, process.returncode, out)

    def start_ray(self, *arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.Popen[str]:
        mixed = {**self.environment, "RAY_ADDRESS": self.address, **variables}
        return subprocess.Popen(
            [str(self.python), "-c", _RAY, *arguments],
            cwd=cwd,
            env={name: value for name, value in mixed.items() if value},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@contextlib.contextmanager
def head_node(environment: Path, num_cpus: int) -> Iterator[Head]:
    """``ray start --head`` with ports and a folder of its own; nothing of it is left afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="planaria-head-", dir="/tmp"))  # short: socket paths live below it
    home, python = folder / "home", environment / "bin" / "python"
    home.mkdir()
    variables = {
        **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")},
        "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(home),
    }
    port, dashboard_port, client_port = _free_port(), _free_port(), _free_port()
    where = ["--node-ip-address=127.0.0.1", f"--port={port}", f"--temp-dir={folder / 'ray'}"]
    dashboard = ["--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard_port}"]
    dashboard.append(f"--dashboard-agent-listen-port={_free_port()}")  # jobs start there; its default may be taken
    size = [f"--num-cpus={num_cpus}", "--object-store-memory=150000000"]
    where.append(f"--ray-client-server-port={client_port}")
    where.append(f"--system-config={_FIND_DEAD_NODES_SOON}")
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [str(python), "-c", _RAY, "start", "--head", "--block", *where, *dashboard, *size],
            env=variables,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        address = f"http://127.0.0.1:{dashboard_port}"
        _wait_for(address, process, folder / "log")
        yield Head(address, python, home, variables)
    finally:
        _end(process.pid, folder)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    request = urllib.request.Request(
        f"{address}/api/version", headers={"Authorization": f"Bearer {os.environ['RAY_AUTH_TOKEN']}"}
    )
    deadline = time.monotonic() + 120
    while True:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(request, timeout=10).close()
            return
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Processes that were started with something of ``folder`` on their command line."""
    return [p for p in psutil.process_iter(["cmdline"]) if any(str(folder) in part for part in p.info["cmdline"] or ())]


def _end(pid: int, folder: Path) -> None:
    """SIGTERM ends a blocking ``ray start`` and its children; what is left of them after a while gets SIGKILL."""
    with contextlib.suppress(psutil.NoSuchProcess):
        main = psutil.Process(pid)
        started = [*main.children(recursive=True), *processes_of(folder)]
        main.terminate()
        _, left = psutil.wait_procs([main, *started], timeout=20)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=10)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
