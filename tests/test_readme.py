"""What the README and the pages show runs, and what they name exists."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from lightning_dear import DearStrategy

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
OPTIONS = (ROOT / "docs/options.md").read_text()
OTHERS = [one for one in (ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md") if one.exists()]
DOCS = [ROOT / "README.md", *OTHERS, *sorted((ROOT / "docs").glob("*.md"))]
# What Lightning passes in, and the catch-all that refuses the rest.
HOST_ARGUMENTS = {
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "ddp_options",
}


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_snippet_trains(tmp_path: Path) -> None:
    (snippet,) = blocks("python")
    script = tmp_path / "snippet.py"
    # What a reader would add to see something, and the proof that "dear" and two ranks took part;
    # as one text, since both print.
    shown = "{type(trainer.strategy).__name__} {trainer.world_size}"
    script.write_text(snippet + f"    print(f'{shown}', flush=True)\n")
    result = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "DearStrategy 2" in result.stdout
    assert list(tmp_path.rglob("*.ckpt"))


def targets_named_in(file: Path) -> set[str]:
    shell = "\n".join(blocks("sh", file.read_text()))
    return set(re.findall(r"^make (?:[A-Z]+=\S+ )*([a-z-]+)", shell, re.MULTILINE))


@pytest.mark.parametrize("file", DOCS, ids=lambda file: file.name)
def test_make_targets_exist(file: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets_named_in(file) <= targets


def test_users_and_developers_are_told_of_their_targets() -> None:
    assert "train" in targets_named_in(ROOT / "README.md")
    assert {"test", "test-all", "lint"} <= set.union(*map(targets_named_in, DOCS))


@pytest.mark.parametrize("file", DOCS, ids=lambda file: file.name)
def test_console_scripts_exist(file: Path) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    named = set(re.findall(r"(?<![\w/-])dear-[a-z]+", file.read_text()))
    assert named <= set(scripts)
    for target in scripts.values():
        module, _, function = target.partition(":")
        source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
        assert f"def {function}(" in source


@pytest.mark.parametrize("file", DOCS, ids=lambda file: file.name)
def test_groups_named_on_command_lines_exist(file: Path) -> None:
    shell = "\n".join(blocks("sh", file.read_text()))
    choices = re.findall(r"(?<![\w.])\+?([a-z_]+)=([a-z0-9_,]+)(?![\w/.])", shell)
    groups = {folder.name for folder in (ROOT / "conf").iterdir() if folder.is_dir()}
    for group, members in choices:
        if group in groups:
            for member in members.split(","):
                assert (ROOT / "conf" / group / f"{member}.yaml").is_file(), f"{group}={member}"


@pytest.mark.parametrize("file", DOCS, ids=lambda file: file.name)
def test_relative_links_lead_somewhere(file: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", file.read_text())
    assert [link for link in links if "://" not in link and not (file.parent / link).exists()] == []


def test_file_tree_is_the_real_one() -> None:
    (tree,) = blocks("text", (ROOT / "docs/layout.md").read_text())
    assert tree.startswith("lightning_dear/\n")
    listed: set[Path] = set()
    for line in tree.splitlines():
        folder = ROOT / "lightning_dear" if line.startswith("  ") else ROOT
        for name in re.split(r"\s{2,}", line.strip())[0].replace(",", " ").split():
            found = set(folder.glob(name.rstrip("/")))
            assert found, name
            assert all(path.is_dir() == name.endswith("/") for path in found), name
            listed |= found
    modules = {p for p in (ROOT / "lightning_dear").glob("[a-z]*") if p.suffix in ("", ".py")}
    assert modules - listed == set()


def test_option_tables_are_the_constructor() -> None:
    tables = re.findall(r"^\| option \|.*\n\|[-|]+\n((?:\|.*\n)+)", OPTIONS, re.MULTILINE)
    rows = [row.split("|")[1:3] for table in tables for row in table.splitlines()]
    documented = {name.strip(" `"): default.strip(" `") for name, default in rows}
    assert len(documented) == len(rows)
    parameters = dict(inspect.signature(DearStrategy).parameters)
    assert parameters.keys() - documented.keys() == HOST_ARGUMENTS
    assert documented.pop("timeout") == "10 minutes"
    assert parameters["timeout"].default == timedelta(minutes=10)
    for name, default in documented.items():
        assert repr(parameters[name].default).replace("'", '"') == default, name


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs/index.md"
    listed = "".join(blocks(r"\{toctree\}", index.read_text()))
    pages = [line for line in listed.splitlines() if line and not line.startswith(":")]
    assert len(pages) == len({*pages})
    assert {one.stem for one in index.parent.glob("*.md")} - {"index"} <= {*pages}
    files = {(index.parent / f"{page}.md").resolve() for page in pages if page != "api"}
    assert [file for file in files if not file.exists()] == []


def test_short_enough_to_be_read() -> None:
    assert len(README.splitlines()) <= 100
