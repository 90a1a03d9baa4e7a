"""Benchmarks of cupyattn: ``python -m bench --help``."""
