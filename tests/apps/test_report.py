from lightning.pytorch import Callback, Trainer

from lightning_dear.apps import report
from lightning_dear.callbacks import DearMonitor


def test_figures_get_titles_and_units():
    summary = {"step_s": 0.04567, "wire_bytes": 2795431.0, "exposed_s": 0.00125}
    assert report.rows({"test_acc": 0.98333}, summary) == [
        ("test accuracy", "0.9833"),
        ("step time (median)", "45.67 ms"),
        ("bytes on the wire per step and rank", "2,795,431"),
        ("exposed communication per step (median)", "1.25 ms"),
    ]


def test_what_was_not_measured_is_said():
    table = dict(report.rows({"test_other": 1.0}, {}))
    assert table.pop("test_other") == "1.0000"
    assert set(table.values()) == {"not measured"}


def test_columns_are_aligned():
    text = report.format_table("title", [("a", "1"), ("long name", "2.5")])
    assert text.splitlines() == [
        "--------------",
        "title",
        "--------------",
        "a            1",
        "long name  2.5",
        "--------------",
    ]


def test_the_monitor_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(DearMonitor, "summary", lambda self: {"step_s": 1.0})
    options = {"default_root_dir": tmp_path, "logger": False, "accelerator": "cpu", "devices": 1}
    assert report.summary_of(Trainer(callbacks=[Callback(), DearMonitor()], **options)) == {
        "step_s": 1.0
    }
    assert report.summary_of(Trainer(callbacks=[Callback()], **options)) == {}
