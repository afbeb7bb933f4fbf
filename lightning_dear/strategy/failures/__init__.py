"""A rank that fails: who was first, who must end, and what can still be saved."""
