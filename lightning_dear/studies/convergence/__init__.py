"""How trainings end: what was measured, paired differences, tables; and deliberate bugs."""
