"""Models and data for the command line: small ones, and images, which need the extra `vision`."""
