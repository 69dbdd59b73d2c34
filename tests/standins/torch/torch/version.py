"""Versions of torch and of what it was built with."""

__version__ = "@torch@"
cuda: str | None = None
hip: str | None = "@rocm@"
rocm: str | None = "@rocm@"
debug = False
git_version = "0" * 40
