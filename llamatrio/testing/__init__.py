"""A kit for tests of programs that use this library: models that cost nothing to have."""
