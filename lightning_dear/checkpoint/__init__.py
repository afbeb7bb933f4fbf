"""What a checkpoint holds: whole in a file, or in pieces in a folder."""
