"""Steps the user's optimizer, on shards or on whole tensors, and tells which of both it allows."""
