"""How trainings end: differences, choices, verdicts, files, and the bugs that must show."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_dear.compression.error_feedback import Encoded
from lightning_dear.paths import recipes_dir
from lightning_dear.studies.convergence import (
    WORDS,
    Asked,
    Difference,
    Metric,
    add_trial,
    best_of,
    curve_of,
    draw,
    paired_difference,
    read_trials,
    summarize,
    text_of,
)
from lightning_dear.studies.files import Line, read_lines, write_lines
from lightning_dear.studies.report import show
from lightning_dear.studies.training import DoubledResidual, DoubledTopK, Recorder, run_training

CPU = torch.device("cpu")
ACCURACY = Metric("test_acc", "points", 100, True, margin=1.0, loss_margin=0.02)
LOSS = Metric("test_loss", "nats", 1, False, margin=0.02, loss_margin=0.02)
DENSE, INT8 = Asked(name="dense"), Asked(name="int8", reference="dense")
NAN = math.nan


def trial(entry: str = "dense", seed: int = 1, metric: float = 98.0, loss: float = 0.5) -> Line:
    return {
        **{"key": f"{entry}{seed}", "entry": entry, "buckets": "scheduled", "phase": "final"},
        **{"seed": seed, "lr_factor": 1.0, "lr": 0.05, "dense_share": 0.0, "metric": metric},
        **{"train_loss": loss, "num_steps": 180, "weights": "w", "batches": "b", "train_s": 7.0},
    }


def point(step: int, train_loss: float, time_s: float, sent_mb: float) -> Line:
    own = {"step": step, "train_loss": train_loss, "time_s": time_s, "sent_mb": sent_mb}
    return {"entry": "dense", "buckets": "scheduled", "seed": 1, **own}


def row(asked: Asked, *ends: tuple[float, float], metric: Metric = ACCURACY) -> Line:
    """The last row where dense training ends at 98.0 and 0.5 on every seed."""
    own = [trial(asked.name, seed, *end) for seed, end in enumerate(ends)]
    dense = [trial("dense", seed) for seed in range(len(ends))]
    return summarize([DENSE, asked], [*dense, *own], metric, len(ends))[-1]


def verdict(asked: Asked, *ends: tuple[float, float]) -> str:
    return str(row(asked, *ends)["verdict"])


# --- statistics ---------------------------------------------------------------------------------


def test_the_interval_is_students() -> None:
    # t(0.95, 4) = 2.1318; the deviation of 1 ... 5 is sqrt(2.5), so that half of it is 1.5075.
    found = paired_difference([1, 2, 3, 4, 5])
    assert found.mean == 3
    assert (found.lower, found.upper) == pytest.approx((1.49256, 4.50744), abs=1e-5)
    # t(0.95, 1) = 6.3138
    assert paired_difference([0.0, 2.0]).upper == pytest.approx(1 + 6.3138, abs=1e-4)
    assert paired_difference([0.25, 0.25, 0.25]) == Difference(0.25, 0.25, 0.25)


def test_what_broke_off_is_infinitely_worse_and_one_seed_is_none() -> None:
    assert paired_difference([0.1, NAN, 0.2]) == Difference(math.inf, math.inf, math.inf)
    assert paired_difference([0.1]) == Difference(None, None, None)


def test_worse_is_lower_accuracy_and_higher_loss() -> None:
    assert ACCURACY.how_much_worse(97, 98) == 1
    assert LOSS.how_much_worse(1.5, 1.25) == 0.25
    assert ACCURACY.value_in({"test_acc": 0.5}) == 50
    assert math.isnan(ACCURACY.value_in(None))
    with pytest.raises(ValueError, match=r"no 'test_acc'. Set metric.name to one of .*: test_l"):
        ACCURACY.value_in({"test_loss": 1.0})


# --- choices ------------------------------------------------------------------------------------


def test_the_best_options_are_those_of_the_best_mean() -> None:
    tried = [[trial(metric=97), trial(metric=99)], [trial(metric=98.5), trial(metric=98.5)]]
    assert best_of(tried, ACCURACY) == 1
    assert best_of(tried, LOSS) == 0


def test_equal_metrics_leave_the_choice_to_the_training_loss() -> None:
    tried = [[trial(loss=0.6)], [trial(loss=0.5)], [trial(loss=0.7)]]
    assert best_of(tried, ACCURACY) == 1


def test_what_broke_off_is_chosen_last() -> None:
    tried = [[trial(metric=NAN, loss=NAN)], [trial(metric=10, loss=9)]]
    assert best_of(tried, ACCURACY) == 1
    assert best_of(tried[:1], ACCURACY) == 0


# --- verdicts -----------------------------------------------------------------------------------


def test_an_entry_is_non_inferior_up_to_its_margin() -> None:
    assert verdict(INT8, (97.0, 0.5), (97.0, 0.5)) == "non-inferior"
    assert verdict(INT8, (96.9, 0.5), (96.9, 0.5)) == "NOT non-inferior"
    # Equal on average, and still unknown.
    assert verdict(INT8, (97.0, 0.5), (99.0, 0.5)) == "NOT non-inferior"
    assert verdict(INT8, (98.0, 0.5), (NAN, NAN)) == "NOT non-inferior"
    three = [trial("int8", seed) for seed in range(3)]
    dense = [trial("dense", seed) for seed in range(3)]
    rows = summarize([DENSE, INT8], [*dense, *three], ACCURACY, 5)
    assert rows[-1]["verdict"] == "3 of 5 seeds"


def test_pairs_share_a_seed() -> None:
    dense = [trial("dense", seed, 90.0 + seed) for seed in range(3)]
    own = [trial("int8", seed, 90.0 + seed) for seed in (2, 0, 1)]
    other = [{**one, "buckets": "layer-wise", "metric": 0.0} for one in dense]
    tuning = [{**one, "phase": "tuning", "metric": 0.0} for one in own]
    rows = summarize([DENSE, INT8], [*dense, *other, *own, *tuning], ACCURACY, 3)
    assert [(one["entry"], one["buckets"]) for one in rows] == [
        ("dense", "scheduled"),
        ("dense", "layer-wise"),
        ("int8", "scheduled"),
    ]
    assert [rows[-1][f"worse_{end}"] for end in ("mean", "lower", "upper")] == [0, 0, 0]


def test_the_median_leaves_out_a_seed_apart() -> None:
    ends = [trial("dense", seed, end) for seed, end in enumerate((90.0, 60.0, 93.0))]
    (row,) = summarize([DENSE], ends, ACCURACY, 3)
    assert (row["mean"], row["median"]) == (81, 90)


def test_a_control_must_be_found_out() -> None:
    control = Asked(name="bad", reference="dense", is_control=True)
    assert verdict(control, (90.0, 0.5), (90.0, 0.5)) == "fails, as it must"
    by_loss = verdict(control, (98.0, 0.53), (98.0, 0.53))
    assert by_loss == "fails by training loss, as it must"
    assert verdict(control, (98.0, 0.51), (98.0, 0.51)) == "NOT NOTICED"
    assert verdict(control, (NAN, NAN), (98.0, 0.5)) == "fails, as it must"
    # Scattered, and not worse.
    assert verdict(control, (95.0, 0.4), (101.0, 0.6)) == "NOT NOTICED"


def test_others_must_end_below_a_loss_on_every_seed() -> None:
    asked = Asked(name="signsgd", reference="dense", below=1.0)
    assert verdict(asked, (50.0, 0.9), (50.0, 0.99)) == "below 1"
    assert verdict(asked, (50.0, 0.9), (50.0, 1.0)) == "NOT below 1"
    assert verdict(asked, (50.0, 0.9), (NAN, NAN)) == "NOT below 1"


# --- files --------------------------------------------------------------------------------------


def test_trainings_are_found_again(tmp_path: Path) -> None:
    assert read_trials(tmp_path) == {}
    whole, broken_off = trial(), {**trial("int8", 2), "train_s": 1 / 3}
    curve = [point(10, 2.0, 0.5, 1.25), point(20, 1.0, 1.0, NAN)]
    add_trial(tmp_path, whole, curve)
    add_trial(tmp_path, broken_off, [])
    assert read_trials(tmp_path) == {"dense1": whole, "int82": broken_off}
    add_trial(tmp_path, {**trial(seed=3), "phase": "tuning"}, curve)
    found = read_lines(tmp_path / "loss_over_time.csv", ("entry", "buckets"))
    assert found[0] == curve[0]
    assert len(found) == 2
    assert math.isnan(found[1]["sent_mb"])


def test_a_key_of_digits_is_no_number(tmp_path: Path) -> None:
    add_trial(tmp_path, {**trial(), "key": "123456789012", "batches": "0012e456"}, [])
    (known,) = read_trials(tmp_path).values()
    assert (known["key"], known["batches"]) == ("123456789012", "0012e456")


def test_nan_is_found_again(tmp_path: Path) -> None:
    add_trial(tmp_path, trial(metric=NAN), [])
    assert math.isnan(read_trials(tmp_path)["dense1"]["metric"])


def test_another_programs_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "raw.csv").write_text("point,step_s\n,0.5\n")
    with pytest.raises(ValueError, match=r"raw\.csv is of another program.*hydra\.run\.dir"):
        read_trials(tmp_path)


def test_curves_of_another_version_are_not_added_to(tmp_path: Path) -> None:
    (tmp_path / "loss_over_time.csv").write_text("entry,step,train_loss\ndense,10,2.0\n")
    with pytest.raises(ValueError, match=r"loss_over_time\.csv has columns of another version"):
        add_trial(tmp_path, trial(), [point(10, 2.0, 0.5, 1.25)])
    assert read_trials(tmp_path) == {}


def test_a_curve_has_a_point_for_so_many_steps() -> None:
    losses = [4.0, 2.0, 1.0, 3.0, 9.0]
    steps = [(loss, 0.1 * number, 1e6 * number) for number, loss in enumerate(losses, 1)]
    points = [point(2, 3.0, 0.2, 2.0), point(4, 2.0, 0.4, 4.0)]
    assert curve_of(trial(), steps, 2) == points
    assert curve_of(trial(), [(1 / 3, 0.5, 1.25e6)], 1) == [point(1, 0.333333, 0.5, 1.25)]


# --- training -----------------------------------------------------------------------------------


class Squares(LightningModule):
    """Learns one number; the loss of batch (n, 1) is (weight - n)^2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.weight - batch).square().mean()

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("weight", self.weight.detach()[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Numbers(LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader([torch.tensor([number]) for number in (1.0, 2.0, 3.0)])

    test_dataloader = train_dataloader


def new_trainer() -> Trainer:
    options = {"enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(accelerator="cpu", max_steps=3, logger=False, **options)


def test_a_training_notes_losses_times_and_bytes_of_each_step() -> None:
    sent, stepped = iter(range(0, 1000, 100)), []
    module = Squares()
    ending = run_training(new_trainer, module, Numbers(), lambda: stepped.append(1), sent.__next__)
    # After each step the weight is what its batch was.
    assert ending.steps[:, 0].tolist() == [1.0, 1.0, 1.0]
    times_s = [0.0, *ending.steps[:, 1].tolist()]
    assert times_s == sorted(times_s)
    assert times_s[-1] < ending.train_s
    assert ending.steps[:, 2].tolist() == [100.0, 200.0, 300.0]
    assert len(stepped) == 3
    assert ending.metrics == {"weight": 3.0}
    # Nothing is left in the module, whose step other trainers may call.
    assert "training_step" not in vars(module)
    again = run_training(new_trainer, Squares(), Numbers())
    assert again.batches == ending.batches
    assert again.steps[:, 2].isnan().all()


def test_seconds_of_a_training_are_counted_from_its_first_step_on() -> None:
    class SlowToBegin(Squares):
        def on_train_start(self) -> None:
            time.sleep(0.5)

    began_s = time.perf_counter()
    ending = run_training(new_trainer, SlowToBegin(), Numbers())
    assert ending.train_s < time.perf_counter() - began_s - 0.5


def test_a_training_without_steps_has_none() -> None:
    recorder = Recorder(lambda: None, lambda: NAN)
    assert recorder.steps.shape == (0, 3)
    assert math.isnan(recorder.train_s)


def test_the_table_says_what_was_chosen_and_found(tmp_path: Path) -> None:
    dense = [trial("dense", seed) for seed in range(3)]
    bad = [trial("bad", seed, NAN, NAN) for seed in range(3)]
    options = {"lr_factor": 0.333, "dense_share": 0.1}
    chosen = [{**trial("int8", seed, 97.9), **options} for seed in range(3)]
    asked = [DENSE, INT8, Asked(name="bad", reference="dense", is_control=True)]
    rows = summarize(asked, [*dense, *chosen, *bad], ACCURACY, 3)
    text = text_of(rows)
    (line,) = (line for line in text.splitlines() if line.startswith("int8"))
    assert line.split()[2:7] == ["0.05", "0.333", "10%", "97.900", "(0.000)"]
    assert "+0.100 [+0.100, +0.100]" in line
    assert line.endswith("non-inferior")
    assert "fails, as it" in text
    assert [one["verdict"] for one in rows] == ["reference", "non-inferior", "fails, as it must"]
    assert rows[1]["worse_upper"] == pytest.approx(0.1)
    draw(tmp_path / "plot.png", rows)
    assert (tmp_path / "plot.png").stat().st_size > 5000
    draw(tmp_path / "none.png", rows[:1])
    assert not (tmp_path / "none.png").exists()


def test_a_study_is_shown_again_from_its_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = Asked(name="bad", reference="dense", is_control=True)
    rows = [row(DENSE, (98.0, 0.5)), row(INT8, (98.0, 0.5), (97.9, 0.5)), row(bad, (NAN, NAN))]
    write_lines(tmp_path / "summary.csv", rows)
    show(tmp_path, WORDS, text_of, draw)
    assert capsys.readouterr().out.startswith(text_of(rows))
    # What earlier versions have recorded, too.
    recorded = recipes_dir() / "compression" / "converge_digits" / "summary.csv"
    (tmp_path / "summary.csv").write_bytes(recorded.read_bytes())
    show(tmp_path, WORDS, text_of, draw)
    assert capsys.readouterr().out.count("non-inferior") >= 18


# --- bugs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["worker_memory", "owner_memory"])
def test_a_doubled_residual_keeps_twice_what_was_lost(whose: str) -> None:
    codec = DoubledTopK(density=0.25, selector="exact")
    memory = getattr(codec, whose)(4, CPU)
    assert type(memory) is DoubledResidual
    rows = torch.tensor([[1.0, -8.0, 2.0, 0.5]])
    wire = torch.empty(1, codec.wire_bytes(4), dtype=torch.uint8)
    for expected in ([2.0, 0.0, 4.0, 1.0], [6.0, 0.0, 12.0, 3.0]):
        gradients = rows.clone()
        memory.compensate(gradients, None)
        codec.encode(gradients, wire)
        memory.note_sent(gradients, wire, Encoded(codec), None)
        memory.commit()
        assert memory.kept["residual"].tolist() == expected
