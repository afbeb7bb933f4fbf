"""Moves bytes between ranks; only this room calls torch.distributed in training."""
