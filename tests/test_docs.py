"""What the documentation shows is true: blocks run, commands exist, files are there, tables are current."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.cli import main
from orchestrator.config import JobConfig
from orchestrator.config_errors import known_keys

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WHOLE = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", WHOLE, flags=re.MULTILINE | re.DOTALL)


def test_yaml_blocks_are_jobs() -> None:
    assert blocks("yaml")
    for block in blocks("yaml"):
        JobConfig.from_text(block)


def test_training_commands_name_jobs_that_are_there() -> None:
    shown = re.findall(r"planaria train (\S+\.yaml)((?: --set \S+)*)", "\n".join(blocks("sh")))
    assert shown
    for path, options in shown:
        if path != "job.yaml":
            JobConfig.from_yaml(ROOT / path, re.findall(r"--set (\S+)", options))


def commands() -> list[str]:
    """Every ``planaria ...`` command that is mentioned, without its arguments."""
    mentioned = re.findall(r"planaria (checkpoint [a-z]+|[a-z]+)", WHOLE)
    return sorted(set(mentioned))


@pytest.mark.parametrize("command", commands())
def test_mentioned_commands_exist(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    assert "Example: planaria" in capsys.readouterr().out, f"planaria {command} is not there yet"


def test_mentioned_options_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0 and main(["status", "--help"]) == 0 and main(["demo", "--help"]) == 0
    known = capsys.readouterr().out
    for option in ("--set", "--text", "--resume", "--address", "--json"):
        assert option in WHOLE and option in known


def test_mentioned_keys_exist() -> None:
    keys = set(known_keys(JobConfig))
    sections = "|".join(key for key in keys if "." not in key)
    mentioned = set(re.findall(rf"`((?:{sections})\.(?!py`)[a-z_.]+)`", WHOLE))
    assert mentioned and mentioned <= keys | {"groups.scaling"}


def test_links_and_files_are_there() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", text):
            linked = (page.parent / target).resolve() if target else page
            assert linked.exists(), f"{page.name} links to {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), flags=re.MULTILINE)
                assert anchor[1:] in {re.sub(r"[^a-z0-9-]", "", h.lower().replace(" ", "-")) for h in headings}
    for file in re.findall(r"`(?:\.venv/bin/python )?((?:orchestrator|workers|examples)/[\w/]+\.\w+)`", WHOLE):
        assert (ROOT / file).exists(), file


def test_architecture_names_every_module() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        package = section.split("\n", 1)[0]
        if not (ROOT / package).is_dir():
            continue
        there = {path.relative_to(ROOT / package).as_posix() for path in (ROOT / package).rglob("*.py")}
        ordinary = {path for path in there if path.endswith(("__init__.py", "__main__.py"))} | {"config.py"}
        assert there - ordinary - set(re.findall(r"`([\w/]+\.py)`", section)) == set(), package


def test_configuration_page_is_current(tmp_path: Path) -> None:
    script = (ROOT / "docs" / "configuration.py").read_text(encoding="utf-8")
    (tmp_path / "configuration.py").write_text(script, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(tmp_path / "configuration.py")], env=environment, check=True, timeout=120)
    made, kept = (folder / "configuration.md" for folder in (tmp_path, ROOT / "docs"))
    assert made.read_text() == kept.read_text(), "run: python docs/configuration.py"


def test_the_readmes_python_runs(tmp_path: Path) -> None:
    """Pasted into a shell beside the examples, on a Ray of its own, and then the commands that read the run."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    program = "\n".join(blocks("python")).replace('"training.max_steps=5"', '"training.max_steps=2", "data.text=text"')
    (tmp_path / "text").symlink_to(ROOT / "pipelines")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "step-00000002 None 0" in run("-c", program)
    assert "run from-python" in run("-m", "orchestrator", "status", "from-python")
    assert "step-00000002: whole" in run("-m", "orchestrator", "checkpoint", "verify", "from-python")
