"""Moves bytes between ranks. In training, only this folder calls torch.distributed."""
