"""Runs dear_notebook.ipynb from its first cell and keeps the outputs.

`python docs/run_notebook.py`, or `make notebook`. Needs the extra [notebook]. The kernel works in a
folder of its own that is deleted afterwards.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).with_name("dear_notebook.ipynb")
TIMEOUT_S = 300
_ABSOLUTE_PATH = re.compile(r"(?<![\w.:/])/(?:[\w.-]+/)+[\w.-]+")


def executed(path: Path, folder: str) -> nbformat.NotebookNode:
    """Run the notebook with `folder` as working directory; return it with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: If a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": folder}},
    )
    client.execute()
    # What the kernel says of itself differs from machine to machine.
    notebook.metadata = {"language_info": {"name": "python"}, "kernelspec": _KERNEL}
    return notebook


_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def paths_in_outputs(notebook: nbformat.NotebookNode) -> list[str]:
    """Return the absolute paths that the outputs show: they belong to one machine."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            texts = [output.get("text", ""), output.get("data", {}).get("text/plain", "")]
            found += [path for text in texts for path in _ABSOLUTE_PATH.findall(text)]
    return found


def main() -> None:
    """Replace the notebook's outputs by new ones."""
    with tempfile.TemporaryDirectory() as folder:
        notebook = executed(NOTEBOOK, folder)
    if paths := paths_in_outputs(notebook):
        raise SystemExit(f"Not kept: the outputs show paths of this machine: {paths}")
    nbformat.write(notebook, NOTEBOOK)
    print(f"{NOTEBOOK.name} has new outputs.")


if __name__ == "__main__":
    main()
