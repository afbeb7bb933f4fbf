import pytest
import torch

from lightning_dear.workloads.data import (
    SourceCorpusDataModule,
    source_files,
    split_of,
    windows_of,
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
    trained = bytes(module.train_set[:, 1:].flatten().tolist()).decode()
    for path in source_files(corpus):
        is_trained = path.read_text()[:20] in trained
        assert is_trained is (split_of(path.relative_to(corpus).as_posix()) == "train")


def written(folder, num_bytes):
    path = folder / "bytes"
    path.write_bytes(bytes(number % 256 for number in range(num_bytes)))
    return [path]


def test_windows_cover_the_text_once_as_targets(tmp_path):
    windows = windows_of(written(tmp_path, 41), context_length=8)
    targets = torch.cat([window[1:] for window in windows])
    assert targets.tolist() == list(range(1, 41))


def test_fewer_windows_are_spread_over_the_files(corpus):
    options = {"root": str(corpus), "context_length": 2}
    every, few = (SourceCorpusDataModule(num_eval_windows=count, **options) for count in (10**6, 4))
    every.setup("fit")
    few.setup("fit")
    count = len(every.val_set)
    assert count > 100
    assert torch.equal(few.val_set, every.val_set[[index * count // 4 for index in range(4)]])


def test_a_folder_without_source_names_the_option(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data\.root="):
        SourceCorpusDataModule(root=str(tmp_path)).setup("fit")


def test_a_text_shorter_than_a_window_is_refused(tmp_path):
    with pytest.raises(ValueError, match="less than one window"):
        windows_of(written(tmp_path, 8), context_length=8)
