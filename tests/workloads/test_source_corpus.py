import pytest
import torch

from lightning_dear.workloads.source_corpus import (
    ByteWindows,
    SourceCorpusDataModule,
    source_files,
    split_of,
)


@pytest.fixture
def corpus(tmp_path):
    for index in range(100):
        (tmp_path / f"module_{index}.py").write_text(f"VALUE_{index} = {index}\n" * 20)
    for folder in ("site-packages", "test", "package/tests"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "excluded.py").write_text("raise SystemExit")
    (tmp_path / "package/kept.py").write_text("x = 1\n" * 40)
    return tmp_path


def test_files_are_sorted_and_tests_left_out(corpus):
    files = source_files(corpus)
    assert files == sorted(files)
    assert corpus / "package/kept.py" in files
    assert not [path for path in files if path.name == "excluded.py"]


def test_the_split_depends_on_the_name_alone():
    names = [f"module_{index}.py" for index in range(2000)]
    shares = {split: [split_of(name) for name in names].count(split) for split in ("val", "test")}
    assert shares["val"] == pytest.approx(100, abs=40)
    assert shares["test"] == pytest.approx(100, abs=40)
    # Fixed for ever: another hash would put training files of older runs into the test.
    assert [split_of(name) for name in ("abc.py", "ast.py", "os.py")] == ["train", "val", "train"]


def test_held_out_files_are_not_trained_on(corpus):
    module = SourceCorpusDataModule(root=str(corpus), context_length=16)
    module.setup("fit")
    trained = bytes(module.train_set.text.tolist()).decode()
    for path in source_files(corpus):
        is_trained = path.read_text() in trained
        assert is_trained is (split_of(path.relative_to(corpus).as_posix()) == "train")


def test_windows_cover_the_text_once_as_targets():
    text = torch.arange(41, dtype=torch.uint8)
    windows = ByteWindows(text, context_length=8)
    targets = torch.cat([window[1:] for window in windows])
    assert targets.tolist() == list(range(1, 41))


def test_fewer_windows_are_spread_over_the_text():
    windows = ByteWindows(torch.zeros(801, dtype=torch.uint8), context_length=8, max_windows=4)
    assert windows.starts == [0, 200, 400, 600]


def test_a_folder_without_source_names_the_option(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data\.root="):
        SourceCorpusDataModule(root=str(tmp_path)).setup("fit")


def test_a_text_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match="less than one window"):
        ByteWindows(torch.zeros(8, dtype=torch.uint8), context_length=8)
