"""Steps the user's optimizer, on shards or on whole tensors; says which one allows that."""
