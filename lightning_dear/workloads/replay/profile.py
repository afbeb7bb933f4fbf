"""Profiles, stored as JSON: shapes of a model's parameters, and seconds of its layers."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path

from lightning_dear.names import is_meant
from lightning_dear.planning import ModelTimes, TensorSpec

MIN_NUMEL = 64
"""Scaling makes no tensor smaller than this many elements: every tensor remains in the plan."""

_BYTES_PER_ELEMENT = 4
FOLDER = Path(__file__).parent / "profiles"
"""Folder of the profiles that come with the package, one JSON file for each."""

PROFILES = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))
"""Names of the profiles that come with the package."""


@dataclass(frozen=True)
class LayerProfile:
    """A module that owns parameters, and the computation up to the next one.

    Attributes:
        name: Name of the module in its model.
        shapes: Shapes of its parameters, in the order in which they are registered. A parameter
            that several modules share belongs to the module that reads it first.
        forward_s: Seconds of the module's forward, without communication.
        backward_s: Seconds of its backward; its gradients are ready at the end.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    forward_s: float
    backward_s: float

    def __post_init__(self) -> None:
        if not self.shapes or min(map(math.prod, self.shapes)) < 1:
            raise ValueError(f"Layer {self.name!r} has no or an empty parameter. Remove the layer.")
        if not 0 <= self.forward_s < math.inf or not 0 <= self.backward_s < math.inf:
            raise ValueError(
                f"Layer {self.name!r} takes {self.forward_s} s forward and {self.backward_s} s"
                " backward. Correct forward_s and backward_s: both must be finite and not negative."
            )


@dataclass(frozen=True)
class ModelProfile:
    """The layers of a model in the order of its forward.

    Attributes:
        name: Name of the model.
        source: Origin of the seconds: "flops" means counted operations over a stated rate,
            "measured" means a clock.
        note: Batch, device or rate, and other conditions of the seconds, in words.
        layers: Layers in the order of forward; backward is assumed to run in the reverse order.
    """

    name: str
    source: str
    note: str
    layers: tuple[LayerProfile, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError(f"The profile {self.name!r} has no layer. Add one to its layers.")

    @property
    def num_tensors(self) -> int:
        """Number of parameter tensors."""
        return len(self._numels())

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters."""
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

    def scaled(self, scale: float) -> "ModelProfile":
        """Return a profile with the same layers and seconds, and 1/`scale` of the elements.

        Tensors become 1-D. No tensor shrinks below `MIN_NUMEL` elements. Larger tensors shrink more
        to make up for that, so that the total is 1/`scale` if possible.

        Args:
            scale: At least 1. The links must be slowed down by the same factor.

        Raises:
            ValueError: If `scale` is below 1 or not finite.
        """
        if not 1 <= scale < math.inf:
            raise ValueError(f"scale={scale} is not valid. Choose a finite number of at least 1.")
        if scale == 1:
            return self
        divisor = _divisor(self._numels(), scale)

        def scaled(shape: tuple[int, ...]) -> tuple[int]:
            numel = math.prod(shape)
            return (min(numel, max(MIN_NUMEL, round(numel / divisor))),)

        layers = (replace(one, shapes=tuple(map(scaled, one.shapes))) for one in self.layers)
        return replace(self, layers=tuple(layers))

    def with_compute(self, compute_s: float) -> "ModelProfile":
        """Return a profile with the same layers, whose times are scaled by one factor.

        Args:
            compute_s: Seconds of forward and backward together in the new profile.

        Raises:
            ValueError: If `compute_s` is not positive and finite, or all times of the profile are
                0.
        """
        if not 0 < compute_s < math.inf:
            raise ValueError(f"compute_s={compute_s} is not valid. Choose a finite one above 0.")
        if not (own_s := self.forward_s + self.backward_s):
            raise ValueError(f"The profile {self.name!r} takes no time to rescale. Omit compute_s.")
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
        ValueError: If the name is unknown, or the file is not a profile.
        FileNotFoundError: If there is no such file.
    """
    path = Path(name_or_path)
    if str(name_or_path) in PROFILES:
        path = FOLDER / f"{name_or_path}.json"
    elif path.suffix != ".json":
        raise ValueError(
            f"Unknown profile {str(name_or_path)!r}; valid names: {', '.join(PROFILES)}. Give one"
            f" of these, or a .json file.{is_meant(str(name_or_path), PROFILES)}"
        )
    try:
        content = json.loads(path.read_text())
        layers = tuple(_layer(**entry) for entry in content.pop("layers"))
        return ModelProfile(**content, layers=layers)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no profile: {error}. Make it with record_profile.") from error


def planned(profile: ModelProfile, step_s: float = 0.0) -> tuple[list[TensorSpec], ModelTimes]:
    """Return a profile's tensors and times, as a recorded and timed step of its replay has them.

    Forward reads a layer's tensors when the layer begins. Their gradients are ready when its
    backward ends. The optimizer's step takes `step_s`. Indices of tensors are those of the replay's
    parameters.
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
            name, numel = f"layers.{number}.{place}", math.prod(shape)
            ready = profile.num_tensors - 1 - index
            spec = TensorSpec(index, name, numel, _BYTES_PER_ELEMENT, "float32", index, ready)
            tensors.append(spec)
    forward_s, backward_s = profile.forward_s, profile.backward_s
    return tensors, ModelTimes(forward_s, backward_s, first_use_s, ready_s, step_s)


def _layer(shapes: Sequence[Sequence[int]], **fields: object) -> LayerProfile:
    return LayerProfile(shapes=tuple(map(tuple, shapes)), **fields)  # type: ignore[arg-type]


def _rounded(layer: LayerProfile) -> dict[str, object]:
    """Return the layer's fields, with times rounded to 10 nanoseconds to keep files small."""
    times = {"forward_s": round(layer.forward_s, 8), "backward_s": round(layer.backward_s, 8)}
    return asdict(layer) | times


def _divisor(numels: Sequence[int], scale: float) -> float:
    """Return the divisor for large tensors with which the total is 1/`scale`.

    It is larger than `scale`, because small tensors keep `MIN_NUMEL` elements.
    """
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
