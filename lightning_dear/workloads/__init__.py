"""Models and data for the command line: small ones that run anywhere, images behind an extra."""
