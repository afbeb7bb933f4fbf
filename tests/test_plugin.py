"""The Hydra plugin: our names and groups in an application that never imports us."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lightning.test_registration import START_METHODS

ROOT = Path(__file__).resolve().parents[1]

APPLICATION = """
import sys
{before}
import hydra

@hydra.main(version_base="1.3", config_path=None)
def main(config):
    {inside}
    print("group:", config.get("strategy", {{}}).get("_target_"))
    for name in {names}:
        strategy = Trainer(strategy=name, accelerator="cpu", devices=1, logger=False).strategy
        print(f"{{name}}:", type(strategy).__module__, strategy._start_method)

main()
"""
IMPORT_TRAINER = "from lightning.pytorch import Trainer"


def run_application(folder: Path, source: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run `source` as a user's script in `folder`, with the package installed (two paths)."""
    script = folder / "application.py"
    script.write_text(source)
    installed = os.pathsep.join(map(str, [ROOT, ROOT / "lightning_dear/_plugins"]))
    return subprocess.run(
        [sys.executable, script, *overrides],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": installed},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def source_of(before: str = "", inside: str = "") -> str:
    return APPLICATION.format(before=before, inside=inside, names=[*START_METHODS])


@pytest.mark.parametrize("place", [pytest.param("before", marks=pytest.mark.slow), "inside"])
def test_strategy_and_groups_are_known_without_an_import(tmp_path: Path, place: str) -> None:
    source = source_of(**{place: IMPORT_TRAINER})
    result = run_application(tmp_path, source, "+strategy=dear")
    assert result.returncode == 0, result.stderr
    assert "group: lightning_dear.DearStrategy" in result.stdout
    for name, start_method in START_METHODS.items():
        assert f"{name}: lightning_dear.strategy.dear {start_method}" in result.stdout


def test_the_documented_import_still_works_beside_the_plugin(tmp_path: Path) -> None:
    source = source_of(before=IMPORT_TRAINER, inside="import lightning_dear")
    result = run_application(tmp_path, source)
    assert "dear: lightning_dear.strategy.dear popen" in result.stdout, result.stderr


def test_an_application_that_trains_nothing_pays_nothing(tmp_path: Path) -> None:
    source = """
import sys, hydra
@hydra.main(version_base="1.3", config_path=None)
def main(config):
    print("loaded:", sorted({"torch", "lightning"} & set(sys.modules)))
    print("plugin:", "hydra_plugins.lightning_dear_plugin" in sys.modules)
main()
"""
    result = run_application(tmp_path, source)
    assert "loaded: []\nplugin: True" in result.stdout, result.stderr
    assert result.stderr == ""


def test_a_broken_installation_warns_and_does_not_end_the_application(tmp_path: Path) -> None:
    """The plugin without its package, and a Lightning without registry."""
    before = """
import types
sys.modules["lightning_dear"] = None  # As if it were not installed.
sys.modules["lightning.pytorch.strategies"] = types.ModuleType("no_registry_in_here")
import hydra
@hydra.main(version_base="1.3", config_path=None)
def main(config):
    print("the application ran")
main()
sys.exit()
"""
    result = run_application(tmp_path, source_of(before=before))
    assert "the application ran" in result.stdout, result.stderr
    assert "its config groups are missing here" in result.stderr
    assert "needs `import lightning_dear` here" in result.stderr


def test_lightning_keeps_its_own_loader(tmp_path: Path) -> None:
    source = f"""
import sys, hydra
@hydra.main(version_base="1.3", config_path=None)
def main(config):
    {IMPORT_TRAINER}
    strategies = sys.modules["lightning.pytorch.strategies"]
    print(type(strategies.__loader__).__name__, type(strategies.__spec__.loader).__name__)
    print("dear" in strategies.StrategyRegistry, "lightning_dear.strategy.dear" in sys.modules)
main()
"""
    result = run_application(tmp_path, source)
    assert result.stdout.endswith("SourceFileLoader SourceFileLoader\nTrue False\n"), (
        result.stdout + result.stderr
    )
