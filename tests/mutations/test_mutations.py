"""The list of mutations fits the code. (What they do to the tests: `python -m tests.mutations`.)"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutations.mutation import PACKAGE, ROOT, Mutation, copy_tree, judge
from tests.mutations.mutations import MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_what_is_removed_is_there(mutation: Mutation) -> None:
    path, text = mutation.changed(ROOT / PACKAGE)
    compile(text, path, "exec")
    for test in mutation.tests:
        if not test.startswith("-") and " " not in test:
            file, *names = test.split("::")
            text = (ROOT / file).read_text() if names else ""
            assert (ROOT / file).exists(), test
            assert all(f" {name.partition('[')[0]}(" in text for name in names), test


FIRST = """\
class Box:
    @property
    def size(self):
        return 1

    @size.setter
    def size(self, size):
        self.kept = size

def put(box):
    return 1

end = 1
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for room, text in {"first": FIRST, "second": "def put(box):\n    return 2\n"}.items():
        (tmp_path / room).mkdir()
        (tmp_path / room / "box.py").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("symbol", "old", "line"),
    [
        ("Box.size", "1", "        return 0"),
        ("Box.size", "= size", "        self.kept 0"),
        ("Box", "@property", "    0"),
        ("first:put", "1", "    return 0"),
        ("end", "1", "end = 0"),
        ("second.box:", "2", "    return 0"),
    ],
)
def test_text_is_replaced_in_its_symbol_alone(
    package: Path, symbol: str, old: str, line: str
) -> None:
    path, text = Mutation("m", symbol, old, "0", ()).changed(package)
    before, after = path.read_text().splitlines(), text.splitlines()
    assert [new for was, new in zip(before, after, strict=True) if was != new] == [line]


@pytest.mark.parametrize(
    ("symbol", "old", "error"),
    [
        ("Box.length", "1", "Box.length is in no file"),
        ("third:put", "1", "third:put is in no file"),
        ("put", "1", r"put is in \['first.box', 'second.box'\]"),
        ("Box.size", "2", "m: found 0 times in Box.size"),
        ("Box", "size", "m: found 5 times in Box"),
    ],
)
def test_a_wrong_symbol_or_text_is_an_error(
    package: Path, symbol: str, old: str, error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        Mutation("m", symbol, old, "0", ()).changed(package)


def test_a_mutation_that_changes_nothing_is_not_noticed(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    text = (tmp_path / PACKAGE / "paths.py").read_text()
    broken = Mutation(
        "broken", "paths:", "if installed.is_dir()", "if True", ("tests/test_paths.py",)
    )
    idle = replace(broken, new=broken.old + " ")
    assert judge(idle, tmp_path).failed is None
    assert judge(broken, tmp_path).failed is not None
    assert (tmp_path / PACKAGE / "paths.py").read_text() == text
