"""What moves bytes between ranks: the only callers of torch.distributed in training."""
