"""The parity matrix: every feature of Lightning as one row of data, and one test over all rows."""
