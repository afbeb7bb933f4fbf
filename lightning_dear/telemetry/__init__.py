"""Records what a step cost and what ran when: clocks, spans, statistics, timelines."""
