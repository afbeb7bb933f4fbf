"""Models and data for the command line: small ones that run anywhere, real ones behind extras."""
