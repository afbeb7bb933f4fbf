"""Profiles: what a model's layers own and how long they compute, read from and written to JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path

from lightning_dear.names import is_meant
from lightning_dear.planning import ModelTimes, TensorSpec

MIN_NUMEL = 64
"""Elements below which no tensor is scaled: a tensor is an entry of the plan however small."""

_BYTES_PER_ELEMENT = 4
FOLDER = Path(__file__).parent / "profiles"
"""Where the profiles that come with the package lie, one JSON file for each."""

PROFILES = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))
"""Names of the profiles that come with the package."""


@dataclass(frozen=True)
class LayerProfile:
    """A module that owns parameters, and the computation up to the next one.

    Attributes:
        name: The module's name in its model.
        shapes: Shapes of its parameters, in the order in which they are registered. A parameter
            that several modules share belongs to the one that reads it first.
        forward_s: Seconds of its forward, without communication.
        backward_s: Seconds of its backward; at their end its gradients are ready.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    forward_s: float
    backward_s: float

    def __post_init__(self) -> None:
        if not self.shapes or min(map(math.prod, self.shapes)) < 1:
            raise ValueError(f"Layer {self.name!r} needs parameters, each with an element or more.")
        if not 0 <= self.forward_s < math.inf or not 0 <= self.backward_s < math.inf:
            raise ValueError(
                f"Layer {self.name!r} takes {self.forward_s} s forward and {self.backward_s} s"
                " backward; both must be finite and not negative."
            )


@dataclass(frozen=True)
class ModelProfile:
    """The layers of a model in the order of its forward.

    Attributes:
        name: What to call the model.
        source: Where seconds come from: "flops", counted operations and a stated rate, or
            "measured", a clock.
        note: In words: batch, device or rate, and whatever else the seconds depend on.
        layers: In the order of forward; backward is assumed to run in the reverse order.
    """

    name: str
    source: str
    note: str
    layers: tuple[LayerProfile, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError(f"The profile {self.name!r} has no layer.")

    @property
    def num_tensors(self) -> int:
        """Number of parameters as tensors."""
        return len(self._numels())

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(self._numels())

    def _numels(self) -> list[int]:
        return [math.prod(shape) for layer in self.layers for shape in layer.shapes]

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters in fp32."""
        return _BYTES_PER_ELEMENT * self.num_parameters

    @property
    def forward_s(self) -> float:
        """Seconds of one forward."""
        return math.fsum(layer.forward_s for layer in self.layers)

    @property
    def backward_s(self) -> float:
        """Seconds of one backward."""
        return math.fsum(layer.backward_s for layer in self.layers)

    def scaled(self, scale: float) -> ModelProfile:
        """The same layers and seconds with 1/`scale` of the elements.

        Tensors become 1-D. None gets fewer than `MIN_NUMEL` elements, unless it has fewer already;
        the others give these elements back, so that the total is right where there is room.

        Args:
            scale: At least 1; a link must be slowed down by the same factor.

        Raises:
            ValueError: If `scale` is below 1 or not finite.
        """
        if not 1 <= scale < math.inf:
            raise ValueError(f"scale must be a finite number of at least 1, got {scale}.")
        if scale == 1:
            return self
        divisor = _divisor(self._numels(), scale)

        def scaled(shape: tuple[int, ...]) -> tuple[int]:
            numel = math.prod(shape)
            return (min(numel, max(MIN_NUMEL, round(numel / divisor))),)

        layers = (replace(one, shapes=tuple(map(scaled, one.shapes))) for one in self.layers)
        return replace(self, layers=tuple(layers))

    def with_compute(self, compute_s: float) -> ModelProfile:
        """The same layers, sped up or slowed down alike to take `compute_s` in all.

        Args:
            compute_s: Seconds of forward and backward together.

        Raises:
            ValueError: If it is not positive and finite, or the profile has no times that could be
                rescaled so.
        """
        if not 0 < compute_s < math.inf:
            raise ValueError(f"compute_s must be positive and finite; got {compute_s}.")
        own_s = self.forward_s + self.backward_s
        if not own_s:
            raise ValueError(f"The profile {self.name!r} takes no time, so none can be rescaled.")
        factor = compute_s / own_s
        layers = (
            replace(layer, forward_s=layer.forward_s * factor, backward_s=layer.backward_s * factor)
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, a line for each layer; `load_profile` reads it."""
        head = {"name": self.name, "source": self.source, "note": self.note}
        lines = ",\n".join(json.dumps(_rounded(layer)) for layer in self.layers)
        Path(path).write_text(f'{json.dumps(head, indent=1)[:-2]},\n "layers": [\n{lines}\n]}}\n')


def load_profile(name_or_path: str | Path) -> ModelProfile:
    """Read a profile.

    Args:
        name_or_path: One of `PROFILES`, or a file that ends in `.json`.

    Raises:
        ValueError: If it is neither, or the file is not a profile.
        FileNotFoundError: If there is no such file.
    """
    path = Path(name_or_path)
    if str(name_or_path) in PROFILES:
        path = FOLDER / f"{name_or_path}.json"
    elif path.suffix != ".json":
        raise ValueError(
            f"Unknown profile {str(name_or_path)!r}; valid names: {', '.join(PROFILES)}; or give a"
            f" .json file.{is_meant(str(name_or_path), PROFILES)}"
        )
    try:
        content = json.loads(path.read_text())
        layers = tuple(_layer(**entry) for entry in content.pop("layers"))
        return ModelProfile(**content, layers=layers)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a profile: {error}.") from error


def planned(profile: ModelProfile) -> tuple[list[TensorSpec], ModelTimes]:
    """A profile as planners see a model: its tensors, and when each is due.

    What a recorded and a measured step of a replay would give them.

    Forward reads a layer's tensors when it begins; backward has its gradients when it ends. The
    optimizer's step takes no time. Tensors are numbered and named as the replay's parameters.
    """
    begins_s = accumulate((layer.forward_s for layer in profile.layers), initial=0.0)
    ends_s = list(accumulate(layer.backward_s for layer in reversed(profile.layers)))[::-1]
    tensors: list[TensorSpec] = []
    first_use_s: dict[int, float] = {}
    ready_s: dict[int, float] = {}
    due = zip(profile.layers, begins_s, ends_s, strict=False)
    for number, (layer, begin_s, end_s) in enumerate(due):
        for place, shape in enumerate(layer.shapes):
            index = len(tensors)
            first_use_s[index], ready_s[index] = begin_s, end_s
            tensor = TensorSpec(
                index=index,
                name=f"layers.{number}.{place}",
                numel=math.prod(shape),
                itemsize=_BYTES_PER_ELEMENT,
                family="float32",
                first_use=index,
                ready=profile.num_tensors - 1 - index,
            )
            tensors.append(tensor)
    return tensors, ModelTimes(profile.forward_s, profile.backward_s, first_use_s, ready_s)


def _layer(shapes: Sequence[Sequence[int]], **fields: object) -> LayerProfile:
    return LayerProfile(shapes=tuple(map(tuple, shapes)), **fields)  # type: ignore[arg-type]


def _rounded(layer: LayerProfile) -> dict[str, object]:
    """The layer's fields with times to the nearest 10 nanoseconds, so that files stay small."""
    times = {"forward_s": round(layer.forward_s, 8), "backward_s": round(layer.backward_s, 8)}
    return asdict(layer) | times


def _divisor(numels: Sequence[int], scale: float) -> float:
    """What to divide large tensors by, so that the sum is 1/`scale` in spite of small ones."""
    target = sum(numels) / scale
    divisor = scale
    while True:
        large = sum(numel for numel in numels if numel > MIN_NUMEL * divisor)
        left = target - sum(min(n, MIN_NUMEL) for n in numels if n <= MIN_NUMEL * divisor)
        if left <= 0 or not large:
            return scale
        if large / left <= divisor * (1 + 1e-9):
            return divisor
        divisor = large / left
