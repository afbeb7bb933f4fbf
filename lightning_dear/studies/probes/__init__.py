"""What other strategies take of a host and of a link, measured."""
