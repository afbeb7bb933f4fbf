"""The benchmark of codecs: what it takes, and what it calls too slow, of figures made up here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_dear.compression import CODECS, Codec
from tests.benchmarks import codecs as benchmark
from tests.benchmarks.codecs import Buffers, Repeat, codecs, main, too_slow

GB = 10**9


def _repeats(codec: str, encode: float, decode: float) -> list[Repeat]:
    """Three of each, of which the medians have these shares of a copy's speed."""
    shares = {"encode": encode, "decode": decode}
    return [
        Repeat(codec, num_rows, direction, GB, factor * copy_s / share, copy_s)
        for num_rows in benchmark.SHAPES
        for factor, copy_s in ((1.0, 0.5), (0.1, 0.2), (9.0, 3.0))
        for direction, share in shares.items()
    ]


@pytest.fixture(autouse=True)
def _same_threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[float, float]]:
    """Name -> shares of a copy that `main` then finds; others have 1."""
    figures: dict[str, tuple[float, float]] = {}

    def measure(self: Buffers, label: str, codec: Codec, repeats: int) -> Iterator[Repeat]:
        yield from _repeats(label, *figures.get(label, (1.0, 1.0)))

    monkeypatch.setattr(Buffers, "measure", measure)
    return figures


@pytest.mark.parametrize(
    ("codec", "encode", "decode", "slow"),
    [
        ("fp16", 0.81, 0.81, []),
        ("fp16", 0.79, 0.81, ["encode"]),
        ("bf16", 0.81, 0.79, ["decode"]),
        ("int8", 0.26, 0.26, []),
        ("int8", 0.24, 0.24, ["encode", "decode"]),
        ("int8:block_size=64", 0.26, 0.24, ["decode"]),
        ("topk", 0.01, 0.01, []),
    ],
)
def test_what_is_too_slow(codec: str, encode: float, decode: float, slow: list[str]) -> None:
    said = too_slow(_repeats(codec, encode, decode))
    expected = [f"{codec}: {way} of {num_rows} row(s)" for num_rows in (1, 4) for way in slow]
    assert [sentence.partition(" runs at")[0] for sentence in said] == expected


def test_the_check_fails_and_names_the_codec(
    made_up: dict[str, tuple[float, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up["bf16"] = (0.5, 1.0)
    arguments = ["bf16", "fp16", "--mib", "1", "--raw", str(tmp_path / "raw.csv")]
    main(arguments)
    table = capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"bf16: encode of 1 row.* 50.0% of a.* less than 80%"):
        main([*arguments, "--check"])
    # What was measured is told and kept all the same.
    assert capsys.readouterr().out == table
    assert "bf16" in table
    assert len((tmp_path / "raw.csv").read_text().splitlines()) == 1 + 2 * 12


def test_all_are_measured_and_checked_where_none_is_named(
    made_up: dict[str, tuple[float, float]], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--mib", "1", "--check"])
    lines = capsys.readouterr().out.splitlines()
    assert set(CODECS) <= {line.split()[0] for line in lines}
    made_up["int8"] = (0.2, 0.2)
    with pytest.raises(SystemExit, match="int8: encode"):
        main(["--mib", "1", "--check"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["topk", "--check"], "--check has limits for fp16, bf16, int8 only"),
        (["--device", "cuda"], "--device cuda: torch finds no CUDA device here"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_arguments_that_cannot_be(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_an_unknown_codec_ends_before_anything_is_measured() -> None:
    with pytest.raises(SystemExit, match="Unknown codec 'int9'; valid names: bf16, dgc"):
        main(["bf16", "int9"])


def test_help_names_the_limits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "fp16 80%, bf16 80%, int8 25%" in " ".join(capsys.readouterr().out.split())


def test_a_real_measurement_is_of_both_directions() -> None:
    repeats = list(Buffers(1 << 12).measure("int8", codecs()["int8"](), 1))
    assert [each.direction for each in repeats] == ["encode", "decode"] * 2
    assert all(each.seconds > 0 and each.copy_s > 0 for each in repeats)
