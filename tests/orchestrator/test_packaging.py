"""What leaves the checkout: the wheel that is installed, and the folder that ``ray job submit`` uploads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"checkpointing", "orchestrator", "pipelines", "workers"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree without what is made in it, so that builds leave no trace in the real one."""
    copy = tmp_path_factory.mktemp("checkout") / "planaria"
    made = shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.egg-info", "build", "dist", "runs", ".*_cache")
    shutil.copytree(ROOT, copy, ignore=made)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", *build, str(checkout)], check=True, timeout=120)
    (built,) = folder.glob("planaria-*.whl")
    return built


def test_the_wheel_holds_the_four_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert {name.split("/")[0] for name in files} == PACKAGES
    sources = {path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert set(files) == sources, "every source file, subpackages included"


def test_the_wheel_works_from_any_folder_of_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "env"
    venv.create(environment, symlinks=True)
    python, site = environment / "bin" / "python", next((environment / "lib").glob("python*")) / "site-packages"
    # The dependencies are this environment's; a path file found through another is not read, so our own install is not.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = ["--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True, timeout=120)
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "workers").mkdir(parents=True)  # a user's own folder is no package, and not in the way
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=elsewhere, env=variables, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "planaria train" in run(str(environment / "bin" / "planaria"), "--help")
    assert "planaria train" in run(str(python), "-m", "orchestrator", "--help")
    assert run(str(environment / "bin" / "planaria"), "--version") == "planaria, version 0.1.0\n"
    program = f"import {', '.join(sorted(PACKAGES))} as last; print(last.__file__, orchestrator.__file__)"
    assert run(str(python), "-c", program).count(str(site)) == 2


def test_what_ray_uploads_is_small(checkout: Path, tmp_path: Path) -> None:
    """Ray's own packing of ``--working-dir .``, on a checkout in which somebody has worked."""
    from ray._private.runtime_env import packaging

    for made in (
        ".venv/lib/big.py",
        "runs/x/metrics.jsonl",
        ".git/objects/aa",
        "build/lib/a.py",
        "planaria.egg-info/a",
    ):
        path = checkout / made
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(2**20))
    package = tmp_path / "package.zip"
    packaging.create_package(str(checkout), package, include_gitignore=True)
    with zipfile.ZipFile(package) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert tops >= {*PACKAGES, "examples", "pyproject.toml"}
    assert not tops & {".venv", "runs", ".git", "build", "planaria.egg-info", "tests", "benchmarks"}
    sources = [path for package in PACKAGES for path in (checkout / package).rglob("*") if path.is_file()]
    most = sum(path.stat().st_size for path in sources) + 150_000  # README, examples, settings, the archive's own index
    assert package.stat().st_size < most
