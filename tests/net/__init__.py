"""What is compared before and after files move: bits, bytes, checkpoints, plans and times."""
