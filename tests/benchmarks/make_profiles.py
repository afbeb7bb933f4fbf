"""Makes the profiles of `workloads/replay` from models' definitions and counted operations.

    python -m tests.benchmarks.make_profiles [NAME ...]

Needs the extras `[vision,text]`. Nothing is computed: models and inputs have shapes only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightning_dear.names import need
from lightning_dear.workloads.replay.profile import FOLDER, LayerProfile, ModelProfile
from lightning_dear.workloads.replay.recording import owned_parameters, run_order

BERT_VOCABULARY = 30528
"""The 30522 words of bert-base-uncased, padded to a multiple of 8."""


FLOPS_PER_S = 7e12
BYTES_PER_S = 5e11
BACKWARD_OVER_FORWARD = 2.0
NOTE = (
    "{what} An operation takes the longer of its floating-point operations at 7 TFLOP/s and the"
    " bytes it reads and writes at 500 GB/s (about half of the fp32 peak and most of the memory"
    " rate of an RTX 2080 Ti class GPU: a model of the time, not a measurement); backward is twice"
    " the forward, layer by layer. Sizes from {source}."
)


@dataclass(frozen=True)
class Definition:
    """A model to profile: where its sizes come from, and which batch it is timed with.

    Attributes:
        build: Makes the model; called with the meta device as the default.
        run: Runs one training forward of it.
        what: Batch and whatever else the time depends on, in words.
        source: The library that defines the sizes.
    """

    build: Callable[[], Any]
    run: Callable[[Any], object]
    what: str
    source: str


class OperationTimer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the modelled seconds of every operation under the layer that runs.

    Args:
        model: Whose modules are called.
        names: Modules that are layers, in the order of forward; operations between two of them
            count for the earlier one, those before the first for the first.

    Attributes:
        seconds: Layer -> seconds.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = dict.fromkeys(names, 0.0)
        self._running = next(iter(self.seconds))
        for name in self.seconds:
            model.get_submodule(name).register_forward_pre_hook(self._enter(name))

    def _enter(self, name: str) -> Callable[[nn.Module, Any], None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._running = name

        return enter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seconds[self._running] += _operation_s(func, args, kwargs or {}, result)
        return result


def _operation_s(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Seconds of one operation; views and making an input cost nothing."""
    infos = [value.alias_info for value in func._schema.returns]
    read = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    if not read or any(info is not None and not info.is_write for info in infos):
        return 0.0
    written = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
    nbytes = sum(value.numel() * value.element_size() for value in read + written)
    count = flop_registry.get(func._overloadpacket)
    flops = count(*args, **kwargs, out_val=result) if count is not None else 0
    return max(flops / FLOPS_PER_S, nbytes / BYTES_PER_S)


def profile_of(name: str, definition: Definition) -> ModelProfile:
    """Build and run the model on the meta device and profile its trainable parameters."""
    with torch.device("meta"):
        model = definition.build()
        model.train()
        owned = owned_parameters(model, run_order(model, lambda: definition.run(model)))
        timer = OperationTimer(model, owned)
        with timer:
            definition.run(model)
    layers = (
        LayerProfile(
            layer,
            tuple(tuple(parameter.shape) for parameter in owned[layer]),
            forward_s,
            BACKWARD_OVER_FORWARD * forward_s,
        )
        for layer, forward_s in timer.seconds.items()
    )
    note = NOTE.format(what=definition.what, source=definition.source)
    return ModelProfile(name, "flops", note, tuple(layers))


def _required(module: str, extra: str) -> Any:
    need(module, module.partition(".")[0], extra=extra)
    return import_module(module)


def _images(name: str, batch_size: int, image_size: int = 224) -> Definition:
    library = "timm" if name == "inception_v4" else "torchvision"

    def build() -> Any:
        if library == "timm":
            return _required("timm", "vision").create_model(name, num_classes=1000)
        return _required("torchvision.models", "vision").get_model(name, weights=None)

    return Definition(
        build,
        lambda model: model(torch.empty(batch_size, 3, image_size, image_size)),
        f"Batch of {batch_size} images of {image_size} x {image_size} pixels.",
        f"{library}'s {name}",
    )


def _bert(width: int, depth: int, num_heads: int, batch_size: int, length: int = 64) -> Definition:
    def build() -> Any:
        transformers = _required("transformers", "text")
        config = transformers.BertConfig(
            vocab_size=BERT_VOCABULARY,
            hidden_size=width,
            num_hidden_layers=depth,
            num_attention_heads=num_heads,
            intermediate_size=4 * width,
            attn_implementation="eager",
        )
        return transformers.BertForPreTraining(config)

    return Definition(
        build,
        lambda model: model(input_ids=torch.empty(batch_size, length, dtype=torch.long)),
        f"Batch of {batch_size} sequences of {length} tokens, both pretraining heads, tied.",
        f"transformers' BertForPreTraining, vocabulary {BERT_VOCABULARY}",
    )


def _lstm(batch_size: int = 20, length: int = 35) -> Definition:
    def build() -> nn.ModuleDict:
        return nn.ModuleDict(
            {
                "embedding": nn.Embedding(10_000, 1500),
                "lstm_0": nn.LSTM(1500, 1500),
                "lstm_1": nn.LSTM(1500, 1500),
                "decoder": nn.Linear(1500, 10_000),
            }
        )

    def run(model: Any) -> None:
        hidden = model["embedding"](torch.empty(length, batch_size, dtype=torch.long))
        hidden, _ = model["lstm_0"](hidden)
        hidden, _ = model["lstm_1"](hidden)
        model["decoder"](hidden)

    what = (
        f"Batch of {batch_size} sequences of {length} words; the large LSTM language model of Penn"
        " Treebank: 2 layers of 1500, 10,000 words, untied."
    )
    return Definition(build, run, what, "torch.nn.LSTM, after the published sizes")


def _mask_rcnn(batch_size: int = 2, height: int = 800, width: int = 1088) -> Definition:
    num_boxes, num_masks = 512, 128

    def build() -> Any:
        detection = _required("torchvision.models.detection", "vision")
        return detection.maskrcnn_resnet50_fpn(weights=None, weights_backbone=None)

    def run(model: Any) -> None:
        # Part by part: the regions between the parts depend on values, which do not exist here.
        features = model.backbone(torch.empty(batch_size, 3, height, width))
        model.rpn.head(list(features.values()))
        heads = model.roi_heads
        heads.box_predictor(heads.box_head(torch.empty(batch_size * num_boxes, 256, 7, 7)))
        heads.mask_predictor(heads.mask_head(torch.empty(batch_size * num_masks, 256, 14, 14)))

    what = (
        f"Batch of {batch_size} images of {height} x {width} pixels, {num_boxes} boxes and"
        f" {num_masks} masks for each; all layers trained; choosing regions takes no time."
    )
    return Definition(build, run, what, "torchvision's maskrcnn_resnet50_fpn")


DEFINITIONS = {
    "resnet50": _images("resnet50", 64),
    "densenet201": _images("densenet201", 32),
    "inception_v4": _images("inception_v4", 64, 299),
    "bert_base": _bert(768, 12, 12, 64),
    "bert_large": _bert(1024, 24, 16, 32),
    "resnet101": _images("resnet101", 64),
    "vgg16": _images("vgg16", 64),
    "lstm": _lstm(),
    "mask_rcnn": _mask_rcnn(),
}
"""By the profile's name."""


def main(names: list[str]) -> None:
    """Write the named profiles, or all."""
    for name in names or DEFINITIONS:
        profile = profile_of(name, DEFINITIONS[name])
        profile.save(FOLDER / f"{name}.json")
        print(
            f"{name}: {len(profile.layers)} layers, {profile.num_tensors} tensors,"
            f" {profile.num_parameters:,} parameters, forward {profile.forward_s * 1e3:.1f} ms,"
            f" backward {profile.backward_s * 1e3:.1f} ms"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
