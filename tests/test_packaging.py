"""What a wheel holds, and that it works outside the repository."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import lightning_dear
from tests.doctor.test_variable import SCRIPT

ROOT = Path(__file__).resolve().parents[1]

LEFT_OUT = ("raw.csv", "blocks.csv", "model.json", ".png")
"""Ends of names: what recipes measured, block by block and tensor by tensor, and pictures."""

MAX_BYTES = 1_100_000

pytestmark = pytest.mark.slow


def is_study(path: str) -> bool:
    """Whether the file has figures of a study that no program reads."""
    return path.endswith(".csv") and any(
        f"recipes/{study}/" in path for study in ("compression", "simulator")
    )


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ["pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps", "-w", folder]
    run(sys.executable, "-m", *build, ROOT, cwd=folder)
    (built,) = folder.glob("lightning_dear-*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of executables of a new environment: the wheel, over the dependencies of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    # A path inside a .pth file adds packages without that folder's own .pth files, so that an
    # editable install of the repository in this environment stays out.
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = ["pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    run(folder / "bin/python", "-m", *pip, wheel, cwd=folder)
    return folder / "bin"


def test_wheel_holds_what_it_must_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for group in ("conf", "recipes"):
        files = {f for f in (ROOT / group).rglob("*") if f.is_file() and f.suffix != ".pyc"}
        paths = {file.relative_to(ROOT).as_posix() for file in files}
        kept = {path for path in paths if not path.endswith(LEFT_OUT) and not is_study(path)}
        assert {f"lightning_dear/{file}" for file in kept} <= names
    assert not [name for name in names if name.endswith(LEFT_OUT) or is_study(name)]
    assert {
        "lightning_dear/py.typed",
        "lightning_dear/conf/train.yaml",
        "lightning_dear/recipes/README.md",
        "hydra_plugins/lightning_dear_plugin.py",
    } <= names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "lightning_dear",
        "hydra_plugins",
        "lightning_dear_doctor.py",
    }
    assert not [name for name in names if "_plugins/hydra" in name or "__pycache__" in name]


def test_command_line_works_outside_the_repository(environment: Path, tmp_path: Path) -> None:
    shown = run(environment / "dear-train", "--help", cwd=tmp_path).stdout
    assert re.search("strategy=dear +ddp, ddp_bf16, ddp_tuned, ddp_zero, dear", shown)
    config = run(environment / "dear-train", "--cfg", "job", "experiment=lm", cwd=tmp_path).stdout
    assert "_target_: lightning_dear.DearStrategy" in config


def test_plugin_and_configs_come_from_the_wheel(environment: Path, tmp_path: Path) -> None:
    code = (
        "import hydra_plugins.lightning_dear_plugin as plugin;"
        "import lightning_dear.paths as paths;"
        "print(plugin.__file__); print(paths.conf_dir())"
    )
    shown = run(environment / "python", "-c", code, cwd=tmp_path).stdout.splitlines()
    assert all(line.startswith(str(environment.parent)) for line in shown), shown


def test_the_doctor_s_variable_is_enough_in_an_empty_folder(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a script that never imports this package."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("LIGHTNING_DEAR_DOCTOR", "1")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(package="lightning.pytorch", strategy="ddp"))
    said = run(environment / "python", script, cwd=tmp_path).stdout
    assert said.count("NetworkDoctor: a step takes") == 1
    assert (tmp_path / "network_doctor.json").exists()


def test_editable_install_copies_nothing(tmp_path: Path) -> None:
    """A copy would hide later edits of the plugin and the configs."""
    venv.create(tmp_path, with_pip=True)
    pip = ["pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "-e", ROOT]
    run(tmp_path / "bin/python", "-m", *pip, cwd=tmp_path)
    (site_packages,) = tmp_path.glob("lib/python*/site-packages")
    assert not (site_packages / "hydra_plugins").exists()
    assert not (site_packages / "lightning_dear").exists()
    paths = (site_packages / "_lightning_dear.pth").read_text().split()
    assert paths == [str(ROOT), str(ROOT / "lightning_dear/_plugins")]


def test_wheel_is_small_and_names_no_address(wheel: Path) -> None:
    assert wheel.stat().st_size <= MAX_BYTES
    archive = zipfile.ZipFile(wheel)
    (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Version"] == lightning_dear.__version__
    assert metadata["Project-URL"] is None
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text().strip()
