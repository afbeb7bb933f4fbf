"""The user's optimizer step, on shards or on whole tensors, and which optimizers allow it."""
