"""Run on emulated hosts by test_wireguard.py.

wireguard.py train             a rank that sends markers through gloo and the store
wireguard.py listen INTERFACE  counts raw packets with each marker until it is told to end
"""

from __future__ import annotations

import signal
import socket
import sys
from datetime import timedelta

MARKERS = {"gloo": b"DEARgloo", "store": b"DEARstor"}


def train() -> None:
    import torch
    import torch.distributed as dist
    from lightning.pytorch import LightningModule, Trainer

    from lightning_dear import DearStrategy

    class Marked(LightningModule):
        """Its weights have the marker's bytes, and stay as they are."""

        def __init__(self) -> None:
            super().__init__()
            bytes_ = torch.frombuffer(bytearray(MARKERS["gloo"] * 4096), dtype=torch.float32)
            self.weight = torch.nn.Parameter(bytes_.clone())

        def training_step(self, batch: torch.Tensor, *_: int) -> torch.Tensor:
            if self.trainer.global_step == 0:
                store = dist.distributed_c10d._get_default_store()
                store.set(f"mark{dist.get_rank()}", MARKERS["store"] * 4)
                store.wait([f"mark{1 - dist.get_rank()}"], timedelta(seconds=30))
                store.get(f"mark{1 - dist.get_rank()}")
            return (0.0 * self.weight.sum() * batch.sum()).nan_to_num()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    trainer = Trainer(
        strategy=DearStrategy(),
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Marked(), torch.utils.data.DataLoader(torch.ones(64, 1)))


def listen(interface: str) -> None:
    found = dict.fromkeys(MARKERS, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(print(*found.values())))
    # 3: all protocols.
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as raw:
        raw.bind((interface, 0))
        print("ready", flush=True)
        while True:
            packet = raw.recv(1 << 17)
            for name, marker in MARKERS.items():
                found[name] += marker in packet


if __name__ == "__main__":
    train() if sys.argv[1] == "train" else listen(sys.argv[2])
