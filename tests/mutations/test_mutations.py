"""The list of mutations fits the code. (What they do to the tests: `python -m tests.mutations`.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations.mutation import ROOT, Mutation, copy_tree, judge
from tests.mutations.mutations import MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_what_is_removed_is_there(mutation: Mutation) -> None:
    text = (ROOT / "lightning_dear" / mutation.file).read_text()
    assert text.count(mutation.old) == 1
    compile(text.replace(mutation.old, mutation.new), mutation.file, "exec")
    for test in mutation.tests:
        assert test.startswith("-") or " " in test or (ROOT / test.split("::")[0]).exists(), test


def test_a_mutation_that_changes_nothing_is_not_noticed(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    text = (tmp_path / "lightning_dear" / "paths.py").read_text()
    idle = Mutation("nothing", "paths.py", text, text + "\n", ("tests/test_paths.py",))
    assert judge(idle, tmp_path).failed is None
    broken = Mutation(
        "broken", "paths.py", "if installed.is_dir()", "if True", ("tests/test_paths.py",)
    )
    assert judge(broken, tmp_path).failed is not None
    assert (tmp_path / "lightning_dear" / "paths.py").read_text() == text
