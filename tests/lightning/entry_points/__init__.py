"""What users start: scripts that `test_entry_points.py` runs in processes of their own."""
