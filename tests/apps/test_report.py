import time
from types import SimpleNamespace

from lightning.pytorch import Callback, Trainer

from lightning_dear.apps.train import report
from lightning_dear.callbacks import DearMonitor
from lightning_dear.emulation.launch import RIG_VARIABLE


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


def test_columns_are_aligned_under_the_rig_if_there_is_one(monkeypatch):
    monkeypatch.setenv(RIG_VARIABLE, "2 emulated hosts")
    assert report.format_table("title", [("a", "1")]).splitlines()[0] == "2 emulated hosts"
    monkeypatch.delenv(RIG_VARIABLE)
    text = report.format_table("title", [("a", "1"), ("long name", "2.5")])
    assert text.splitlines() == [
        "--------------",
        "title",
        "--------------",
        "a            1",
        "long name  2.5",
        "--------------",
    ]


def test_a_step_lasts_until_the_next_one_begins_with_all_its_batches(monkeypatch):
    """Whatever is waited for between batches belongs to it; a validation does not."""
    clock, trainer, monitor = [0.0], SimpleNamespace(global_step=0, strategy=None), DearMonitor()
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monitor.on_fit_start(trainer, None)
    monitor.on_train_epoch_start(trainer, None)
    for batch in range(12):
        if batch == 8:
            clock[0] += 1000
            monitor.on_validation_start(trainer, None)
        clock[0] += 5
        monitor.on_train_batch_start(trainer, None, None, batch)
        clock[0] += 1
        # Two batches a step.
        trainer.global_step += batch % 2
        monitor.on_train_batch_end(trainer, None, None, None, batch)
    assert monitor._steps == {"step_s": [12.0] * 4}


def test_figures_of_a_step_count_once_however_many_batches_it_has():
    names = ("exposed_s", "exposed_reduce_scatter_s", "exposed_all_gather_s", "wire_bytes")
    figures = SimpleNamespace(**dict.fromkeys(names, 0.25))
    strategy = SimpleNamespace(statistics=figures, plan=SimpleNamespace(fill=1.0, name="plan"))
    trainer = SimpleNamespace(global_step=0, strategy=strategy, loggers=[])
    module, monitor = SimpleNamespace(log_dict=lambda figures: None), DearMonitor()
    monitor.on_fit_start(trainer, module)
    for batch in range(8):
        monitor.on_train_batch_start(trainer, module, None, batch)
        trainer.global_step += batch % 2
        monitor.on_train_batch_end(trainer, module, None, None, batch)
    # Each is of the step before.
    assert monitor._steps["exposed_reduce_scatter_s"] == [0.25] * 3


def test_the_monitor_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(DearMonitor, "summary", lambda self: {"step_s": 1.0})
    options = {"default_root_dir": tmp_path, "logger": False, "accelerator": "cpu", "devices": 1}
    assert report.summary_of(Trainer(callbacks=[Callback(), DearMonitor()], **options)) == {
        "step_s": 1.0
    }
    assert report.summary_of(Trainer(callbacks=[Callback()], **options)) == {}
